"""A model on a GPU as one CUDA graph, in which what need not wait for each other runs side by side.

A small network leaves most of a GPU idle. A bridge of one step needs nothing of the source but an early
feature: its convolutions run beside the rest of the source, as members of an ensemble run beside each other.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from ensbridge.deploy.fuse import prepare_for_inference
from ensbridge.models.fast_ensemble import FastEnsemble

BRANCHES = ("source", "bridges", "members")  # modules, or lists of them, that may run beside each other
WARM_UP = 3


def capture(model: nn.Module, images: Tensor) -> CUDAGraphModel:
    """A model for batches like `images`, compiled and captured in one CUDA graph; it is only run.

    For serving on a GPU: `run = capture(fast.cuda(), images)`, then `run(images)` for images of that shape
    and type as often as wanted, from any thread and on any stream. Weights are those of the moment.

    >>> capture(nn.Linear(4, 3), torch.rand(2, 4))
    Traceback (most recent call last):
    ValueError: images to capture are on the cpu; a CUDA graph needs them on a GPU
    """
    if not images.is_cuda:
        raise ValueError(f"images to capture are on the {images.device}; a CUDA graph needs them on a GPU")
    if isinstance(model, FastEnsemble):
        model = prepare_for_inference(model)
    split, branches = split_streams(model, images)
    for name in branches:
        compiled = torch.compile(split.get_submodule(name), dynamic=False, options={"freezing": True})
        setattr(split, name, compiled)
    images, owner = images.clone(), _BranchStreams(split, branches, images.device)
    first = torch.cuda.Stream(images.device, priority=-1)  # the source's; the bridges fill what it leaves
    with torch.inference_mode():
        first.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first):
            for _ in range(WARM_UP):
                owner.run(images)
        torch.cuda.current_stream().wait_stream(first)
        graph = torch.cuda.CUDAGraph()
        # Other threads may run models meanwhile, and allocate.
        with torch.cuda.graph(graph, stream=first, capture_error_mode="thread_local"):
            logits = owner.run(images)[0]
    return CUDAGraphModel(graph, images, logits, owner)


class CUDAGraphModel:
    """A captured model: images (B, …) of one shape in, logits (B, K) out. `capture` makes it.

    The graph reads and writes the same memory with each replay. So threads take turns, and so does their work
    on the GPU: a call's stream waits for the call before, until that has its logits in memory of its own.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, images: Tensor, logits: Tensor, owner: object) -> None:
        self.graph, self.images, self.logits = graph, images, logits
        self.owner = owner  # of the weights, which the graph knows by their place in memory alone
        self._turn, self._done = threading.Lock(), torch.cuda.Event()

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of images like those that it was captured with."""
        mine = self.images
        if images.shape != mine.shape or images.dtype != mine.dtype:
            raise ValueError(
                f"images are {images.dtype} of shape {tuple(images.shape)}; this was captured for "
                f"{mine.dtype} of shape {tuple(mine.shape)}"
            )
        with self._turn, torch.inference_mode():
            stream = torch.cuda.current_stream(mine.device)
            stream.wait_event(self._done)
            try:
                mine.copy_(images)
                self.graph.replay()
                return self.logits.clone()
            finally:
                self._done.record(stream)

    def __reduce__(self) -> str:
        raise ValueError(
            "a captured model cannot be copied or saved, since it is tied to memory of this process; copy or "
            "save the model that it was made of, and capture that again"
        )


def split_streams(model: nn.Module, images: Tensor) -> tuple[fx.GraphModule, dict[str, str]]:
    """A model as a graph of parts, and the branch of each; a part waits for what it uses alone.

    A branch is the source, a bridge, a member, or what joins them. It is cut where another branch needs
    a value of it, so that whoever waits for an early feature does not wait for the end.

    >>> from ensbridge.models.ensemble import Ensemble
    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)]
    >>> split, branches = split_streams(Ensemble(nets), torch.rand(5, 1, 2, 2))
    >>> sorted(branches.values()), split(torch.rand(5, 1, 2, 2))[0].shape
    (['', 'members.0', 'members.1'], torch.Size([5, 3]))
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the exporter's own
        program = torch.export.export(model.eval(), (images,), strict=False)
        graph = program.run_decompositions({}).module(check_guards=False)  # nothing in it works in place
    assert isinstance(graph, fx.GraphModule)
    for node in reversed(graph.graph.nodes):
        if "_assert" in str(node.target):  # what was seen while tracing needs no second look
            graph.graph.erase_node(node)
    stages = _stages(graph)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(stages.values()))}
    split = split_module(graph, graph, lambda node: numbers[stages[node]])  # type: ignore[arg-type]
    _own_weights(split)
    return split, {f"submod_{number}": branch for (branch, _), number in numbers.items()}


def _stages(graph: fx.GraphModule) -> dict[fx.Node, tuple[str, int]]:
    """The branch of each operation and its stage there.

    Along a branch the stage never falls, and from branch to branch it rises, so that no two parts wait for
    each other.
    """
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    branches = {node: _branch_of(node) for node in nodes}

    def leaves(node: fx.Node) -> bool:
        return any(branches.get(user, branch) != branch for user in node.users)

    due: dict[fx.Node, int] = {}  # before which of its branch's values that leave it a node must run
    for branch in dict.fromkeys(branches.values()):
        here = [node for node in nodes if branches[node] == branch]
        leaving = [node for node in here if leaves(node)]
        for node in reversed(here):
            users = [due[user] for user in node.users if branches.get(user) == branch]
            at = leaving.index(node) if node in leaving else len(leaving)
            due[node] = min([at, *users])
    stages: dict[fx.Node, tuple[str, int]] = {}
    for node in nodes:
        branch = branches[node]
        inputs = [stages[before] for before in node.all_input_nodes if before in stages]
        waits = [stage + (other != branch) for other, stage in inputs]
        stages[node] = branch, max([due[node], *waits])
    return stages


def _own_weights(split: fx.GraphModule) -> None:
    """Give each part the weights that it would be passed, so that a compiler sees them as constants."""
    for node in split.graph.nodes:
        if node.op != "call_module":
            continue
        part = split.get_submodule(node.target)
        assert isinstance(part, fx.GraphModule)
        passed = [inner for inner in part.graph.nodes if inner.op == "placeholder"]
        for given, placeholder in zip(node.args, passed, strict=True):
            if given.op == "get_attr":
                weight = operator.attrgetter(given.target)(split)
                part.register_buffer(placeholder.name, weight.detach())
                with part.graph.inserting_before(placeholder):
                    placeholder.replace_all_uses_with(part.graph.get_attr(placeholder.name))
                part.graph.erase_node(placeholder)
        node.args = tuple(given for given in node.args if given.op != "get_attr")
        part.recompile()
    split.graph.eliminate_dead_code()
    split.recompile()


def _branch_of(node: fx.Node) -> str:
    """The branch of an operation, by the module that ran it; '' for what joins them."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    first, *rest = path.split(".")
    if first not in BRANCHES:
        return ""
    return ".".join([first, *rest[:1]]) if first != "source" else first


class _BranchStreams(fx.Interpreter):
    """Runs a split graph with a stream for each branch; the first branch has the current one."""

    def __init__(self, split: fx.GraphModule, branches: Mapping[str, str], device: torch.device) -> None:
        super().__init__(split, garbage_collect_values=False)  # memory of one stream is not for another
        self.parts = split.graph
        self.branches, names = branches, list(dict.fromkeys(branches.values()))
        self.streams = {name: torch.cuda.Stream(device) for name in names[1:]}
        self.done: dict[fx.Node, list[Any]] = {}  # the events to wait for before a value is used

    def run(self, *args: Any, **options: Any) -> Any:
        current = torch.cuda.current_stream()
        begun = current.record_event()
        self.done = {node: [begun] for node in self.parts.nodes if node.op == "placeholder"}
        result = super().run(*args, **options)
        for stream in self.streams.values():
            current.wait_stream(stream)
        return result

    def run_node(self, n: fx.Node) -> Any:
        needs = [event for node in n.all_input_nodes for event in self.done.get(node, [])]
        if n.op != "call_module":
            self.done.setdefault(n, needs)
            return super().run_node(n)
        stream = self.streams.get(self.branches[str(n.target)], torch.cuda.current_stream())
        for event in dict.fromkeys(needs):
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            result = super().run_node(n)
        self.done[n] = [stream.record_event()]
        return result
