"""What may run side by side on a GPU: a model in parts, each of which waits for what it uses alone."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, fx, nn

import _tiny
from ensbridge.bridge.bridge import ZInput
from ensbridge.deploy.cuda_graph import CUDAGraphModel, capture, split_streams
from ensbridge.deploy.fuse import prepare_for_inference
from ensbridge.methods import Bridge
from ensbridge.models import ResNet, ScoreNet
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def source() -> ResNet:
    return ResNet((2, 1), (8, 16), 3, stem=8).eval()


def bridge(z_input: ZInput = "none") -> Bridge:
    score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input=z_input)
    return Bridge(score).one_step()


def fast(*bridges: Bridge) -> nn.Module:
    return prepare_for_inference(FastEnsemble(source(), bridges, feature="stages.0.0"))


def needs(split: fx.GraphModule, part: str) -> set[str]:
    """All parts that must be run before one."""
    (node,) = (each for each in split.graph.nodes if each.op == "call_module" and each.target == part)
    found: set[str] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        each = waiting.pop()
        if each.op == "call_module":
            found.add(str(each.target))
        waiting += each.all_input_nodes
    return found


def convolutions(split: fx.GraphModule, part: str) -> int:
    graph = split.get_submodule(part).graph
    assert isinstance(graph, fx.Graph)
    return sum("conv" in str(node.target) for node in graph.nodes if node.op == "call_function")


MODELS = {
    "one bridge": lambda: fast(bridge()),
    "two bridges": lambda: fast(bridge(), bridge()),
    "a bridge that sees the logits": lambda: fast(bridge("informative")),
    "a bridge that reads several maps": lambda: prepare_for_inference(_tiny.pyramids()),
    "an ensemble": lambda: Ensemble([source() for _ in range(3)]),
    "one network": source,
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_give_the_logits_of_the_whole(name: str) -> None:
    model = MODELS[name]()
    split, branches = split_streams(model, IMAGES)
    with torch.no_grad():
        assert torch.equal(split(IMAGES)[0], model(IMAGES))
    assert set(branches) == {str(node.target) for node in split.graph.nodes if node.op == "call_module"}


def test_a_bridge_does_not_wait_for_the_end_of_the_source() -> None:
    split, branches = split_streams(fast(bridge()), IMAGES)
    early, late = (part for part, branch in branches.items() if branch == "source")
    # All but the last subtraction of a bridge of one step.
    beside = [
        part for part, branch in branches.items() if branch == "bridges.0" and convolutions(split, part)
    ]
    assert len(beside) == 1
    assert needs(split, beside[0]) == {early}
    assert needs(split, late) == {early}
    assert convolutions(split, early) == 3  # the stem's and the first block's


def test_a_bridge_that_reads_several_maps_waits_for_each_when_it_adds_it() -> None:
    split, branches = split_streams(prepare_for_inference(_tiny.pyramids()), IMAGES)
    by_branch = {
        branch: [part for part, other in branches.items() if other == branch and convolutions(split, part)]
        for branch in ("source", "bridges.0")
    }
    waits = [len(needs(split, part) & {*by_branch["source"]}) for part in by_branch["bridges.0"]]
    assert sorted(waits) == [1, 2, 3]  # the stem's output, the first block's, the second's
    assert len(by_branch["source"]) == 3


def test_members_do_not_wait_for_each_other() -> None:
    split, branches = split_streams(Ensemble([source() for _ in range(3)]), IMAGES)
    members = [part for part, branch in branches.items() if branch.startswith("members.")]
    assert len(members) == 3
    assert all(needs(split, part) == set() for part in members)
    (joined,) = (part for part, branch in branches.items() if branch == "")
    assert needs(split, joined) == set(members)


def test_each_part_has_its_weights_and_is_passed_none() -> None:
    split, branches = split_streams(fast(bridge()), IMAGES)
    assert not any(node.op == "get_attr" for node in split.graph.nodes)
    held = sum(buffer.numel() for part in branches for buffer in split.get_submodule(part).buffers())
    assert held >= sum(weight.numel() for weight in source().parameters())


def test_a_source_that_works_in_place_keeps_its_feature() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.last(self.first(images).relu_().mul_(2).mean((2, 3)))

    model = prepare_for_inference(FastEnsemble(InPlace().eval(), [bridge()], feature="first"))
    with torch.no_grad():
        assert torch.equal(split_streams(model, IMAGES)[0](IMAGES)[0], model(IMAGES))


def test_capture_names_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"cpu.*GPU"):
        capture(source(), IMAGES)


# ------------------------------------------------------------------------------ a graph and its callers


class Stream:
    """A stream in name: what is put on it runs at once, and what waits for what is written down."""

    def __init__(self, log: list[tuple[str, object]]) -> None:
        self.log = log

    def wait_event(self, _event: object) -> None:
        self.log.append(("waits", self))


class Event:
    def record(self, stream: Stream) -> None:
        stream.log.append(("recorded", stream))


class Graph:
    """A CUDA graph in name: it runs a network from the same images to the same logits."""

    def __init__(self, net: nn.Module, images: Tensor, logits: Tensor) -> None:
        self.net, self.images, self.logits = net, images, logits

    def replay(self) -> None:
        if not self.images.isfinite().all():
            raise RuntimeError("broken on purpose")
        self.logits.copy_(self.net(self.images))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What streams wait for, each thread with a stream of its own."""
    log: list[tuple[str, object]] = []
    own = threading.local()

    def current(_device: torch.device) -> Stream:
        own.stream = getattr(own, "stream", None) or Stream(log)
        return own.stream

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    return log


def captured() -> tuple[CUDAGraphModel, nn.Module]:
    net, images, logits = source(), torch.zeros_like(IMAGES), torch.zeros(2, 3)
    return CUDAGraphModel(Graph(net, images, logits), images, logits, None), net  # type: ignore[arg-type]


def test_threads_that_share_a_captured_model_get_their_own_logits(log: list[tuple[str, object]]) -> None:
    run, net = captured()
    given = [torch.rand(IMAGES.shape, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]

    def calls(images: Tensor) -> list[Tensor]:
        return [run(images) for _ in range(50)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(calls, given))
    with torch.inference_mode():
        for images, answers in zip(given, found, strict=True):
            expected = net(images)
            assert all(answer.equal(expected) for answer in answers)
    # Each call waits for the one before on its own stream, and says there when it is done.
    assert len(log) == 2 * 8 * 50
    assert all(
        (first, last) == (("waits", stream), ("recorded", stream))
        for first, last in zip(log[::2], log[1::2], strict=True)
        for stream in [first[1]]
    )
    assert len({stream for _, stream in log}) > 1


def test_a_call_that_fails_leaves_a_captured_model_ready(log: list[tuple[str, object]]) -> None:
    run, net = captured()
    with pytest.raises(RuntimeError, match="broken on purpose"):
        run(IMAGES / 0)
    with torch.inference_mode():
        assert run(IMAGES).equal(net(IMAGES))
    assert [what for what, _ in log] == ["waits", "recorded"] * 2
    with pytest.raises(ValueError, match=r"float32.*\(2, 3, 8, 8\)"):
        run(IMAGES[:1])


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_captured_model_is_neither_copied_nor_saved(way: Callable[[object], object]) -> None:
    with pytest.raises(ValueError, match="cannot be copied or saved"):
        way(captured()[0])
