"""Training steps for a GPU: compiled networks in bf16, launched one by one or captured in one CUDA graph.

A small network on a fast GPU is bound by Python: captured, a whole step is one launch. Its kernels are too
small to fill the GPU, so much runs beside each other: while a step trains, the next batch is drawn and its
teachers run, each teacher on a stream of its own, and so do methods that are trained together. A run takes
the fastest kind of step that works where it runs; with several processes, one that works in all of them.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from ensbridge.methods.base import Batch, JointTraining, Runner
from ensbridge.models.features import FeatureExtractor
from ensbridge.training.batches import AbstractBatches, Inputs, MemoryBatches
from ensbridge.training.distributed import Engine
from ensbridge.training.step import (
    AbstractStep,
    EagerStep,
    TimeSplit,
    augmented,
    average_buffers,
    in_precision,
    synchronize,
    total_loss,
)

Result = TypeVar("Result")
StepKind = Literal["captured", "compiled", "eager"]
TIMED = 3  # passes of the teachers


class CompiledStep(AbstractStep):
    """Steps of networks that Inductor compiled, whose results are read at the end of a span only.

    What changes between steps lives in tensors: image indices, rate, the average's share. A step whose loss
    or gradient is not finite leaves the weights alone; it is reported at the end of its span. Random draws
    are those of an eager step.

    With an `engine` several processes take them together. Networks are compiled and tried before processes
    are connected, so that one in which that fails leaves no other waiting.
    """

    stride = 100
    compiled: Sequence[tuple[nn.Module, Callable[..., Any] | None]] = ()  # networks, and how they were called

    @property
    def bf16(self) -> bool:
        """Whether networks run in bf16: on a GPU unless the configuration says otherwise."""
        wanted = self.config.precision
        return wanted == "bfloat16" or (wanted == "auto" and self.batches.device.type == "cuda")

    def prepare(self) -> None:
        """Compile, and run to see that it works."""
        device, batches = self.batches.device, self.batches
        self.feed = _IndexFeed(batches) if isinstance(batches, MemoryBatches) else _CopyFeed(batches)
        self.decays = [torch.zeros((), device=device) for _ in self.average.rules]
        self.refused = torch.zeros((), device=device)
        self.sums: dict[str, Tensor] = {}
        self.drawing = torch.Generator(device)  # makes the next batch
        self.generator = torch.Generator(device)  # continues where the drawing of this batch ended
        self.fetching, self.teaching, self.training, self.updating = (_Streams(device) for _ in range(4))
        self.compile()
        self.held = self.fetch().clone()
        self.held_step = -1
        self.record()
        self._read_sums()
        self._time_teachers()

    def compile(self) -> None:
        """Have the networks compiled when they run first."""
        _set_up_compiler()
        self.compiled = [(network, network._compiled_call_impl) for network in self.method.networks()]
        for network, _ in self.compiled:
            network.compile(dynamic=False)
            if self.engine:
                network._compiled_call_impl = _without_sharded_rng(network._compiled_call_impl)
        self.runners: dict[nn.Module, Runner] = {}
        for network, features in self.feature_names.items():
            if network in self.batches.known:
                continue
            teacher = in_bf16(network) if self.bf16 else copy.deepcopy(network)
            self.runners[network] = torch.compile(FeatureExtractor(teacher, *features), dynamic=False)

    def record(self) -> None:
        """Run a step as all will run."""
        self.step()
        self.launch: Callable[[], None] = self.step

    def run(self, start: int, stop: int) -> dict[str, float]:
        """Run a span of steps and read their losses once."""
        with self.timing.measure("total"):
            sums, refused = self._run(start, stop)
        self.timing.seconds["teachers"] += self.teachers_time * (stop - start)
        if refused:
            wrong = [name for name, value in sums.items() if name != "loss" and not math.isfinite(value)]
            named = f" of {', '.join(wrong)}" if wrong else ""
            raise self.refusal(f"the loss{named} or a gradient is not finite at steps {start + 1} to {stop}")
        return sums

    def _run(self, start: int, stop: int) -> tuple[dict[str, float], float]:
        self.feed.begin_span(start, stop)
        if self.held_step != start:
            self._draw_next(start)
            self.hold(self.fetch())
        for step in range(start, stop):
            self.generator.set_state(self.drawing.get_state())
            self._draw_next(step + 1)
            self.optimizers.set_rates(step)
            for decay, value in zip(self.decays, self.average.decays(step), strict=True):
                decay.fill_(value)
            self.launch()
        self.held_step = stop
        return self._read_sums()

    def close(self) -> None:
        """Restore the networks and the optimisers as they were."""
        for network, call in self.compiled:
            network._compiled_call_impl = call
        for optimizer, _ in self.optimizers.parts.values():
            vars(optimizer).pop("found_inf", None)

    def step(self) -> None:
        """One step, as a graph may hold it: nothing in it waits for the GPU."""
        (fetched,) = self.fetching.start([self.fetch])
        engine, buffers = self.connected, self.buffers() if self.connected else []
        losses = self.call_losses(self._losses)
        values, loss = {name: value.detach() for name, value in losses.items()}, total_loss(losses)
        total = loss.detach()
        if engine:
            # Processes' gradients are averaged, however many images each has; losses are the whole batch's.
            loss = loss * (self.share * engine.size)
            values = dict(zip(values, engine.sum(torch.stack([*values.values()]) * self.share), strict=True))
            total = total_loss(values)
        self.optimizers.zero_grad()
        loss.backward()
        self.training.join()  # the backward pass runs where the forward pass ran
        bad = (~torch.isfinite(total + self.optimizers.gradient_norm())).float()
        if loss.is_cuda:
            self.updating.start(self.optimizers.updates(refuse=bad))
            self.updating.join()
        elif not bad:
            self.optimizers.step()
        if engine:
            average_buffers(buffers, self.share, engine)
        self.average.update(self.decays)
        self.refused += bad
        for name, value in values.items():
            self.sums.setdefault(name, torch.zeros_like(value)).add_(value)
        self.fetching.join()
        self.hold(fetched)

    def fetch(self) -> Inputs:
        """The batch that the feed holds, with the teachers' outputs."""
        inputs = self.feed.take()
        batch = augmented(inputs, self.config, self.drawing, self.feature_names)
        batch, self.draws, self.share = self.part(replace(batch, generator=self.generator))
        with torch.no_grad(), in_precision(batch.images, self.bf16):
            passes = [lambda run=run: run(batch.images) for run in self.runners.values()]
            outputs = self.teaching.start(passes)
        self.teaching.join()
        known = {**inputs.outputs, **dict(zip(self.runners, outputs, strict=True))}
        return Inputs(batch.images, batch.labels, known, batch.mixed)

    def hold(self, fetched: Inputs) -> None:
        """Make this the batch of the next step."""
        for mine, new in zip(self.held.tensors(), fetched.tensors(), strict=True):
            mine.copy_(new)

    def _losses(self) -> dict[str, Tensor]:
        held = self.held
        known: dict[nn.Module, Runner] = {
            network: lambda _, output=output: output for network, output in held.outputs.items()
        }
        batch = Batch(held.images, held.labels, self.generator, self.feature_names, known, held.mixed)
        with self.draws, in_precision(held.images, self.bf16):
            # Processes' gradients are averaged on one stream.
            if self.engine or not isinstance(self.method, JointTraining):
                return self.method.losses(batch)
            methods = self.method.methods
            losses = self.training.start([lambda one=one: one.loss(batch) for one in methods.values()])
        self.training.join()
        return dict(zip(methods, losses, strict=True))

    def _draw_next(self, step: int) -> None:
        """Have the next batch be that of a step; after the last step there is none."""
        if step < self.optimizers.total:
            with self.timing.measure("data"):
                self.feed.put(step)
        self.drawing.manual_seed(self.seed(step))

    def _time_teachers(self) -> None:
        """Measure the teachers' passes by themselves, as they run beside the training later."""
        device, trial = self.batches.device, TimeSplit()
        with trial.measure("teachers", device):
            for _ in range(TIMED):
                self.fetch()
        self.teachers_time = trial.seconds["teachers"] / TIMED
        synchronize(device)

    def _read_sums(self) -> tuple[dict[str, float], float]:
        """The losses' sums and how many steps were refused since the last call."""
        sums = {name: value.item() for name, value in self.sums.items()}, self.refused.item()
        for value in (*self.sums.values(), self.refused):
            value.zero_()
        return sums


class CapturedStep(CompiledStep):
    """Compiled steps as one CUDA graph."""

    def record(self) -> None:
        """Warm up on a stream aside, as a capture needs, and capture."""
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.step()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        for generator in (self.drawing, self.generator):
            graph.register_generator_state(generator)
        try:
            # Another thread may train meanwhile, and allocate.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.step()
        except Exception as error:
            # What is left of a failed capture: its stream, and the device's generator that waits for its end.
            torch.cuda.set_stream(current)
            waiting = torch.cuda.default_generators[current.device_index]
            waiting.graphsafe_set_state(waiting.clone_state())
            raise RuntimeError(f"a capture failed: {error.__context__ or error}") from error
        self.launch = graph.replay


class _IndexFeed:
    """Images that are on the device already: what changes from step to step is their indices."""

    def __init__(self, batches: MemoryBatches) -> None:
        self.batches = batches
        self.indices = batches.indices(batches.start).to(batches.device)

    def begin_span(self, start: int, stop: int) -> None:
        """Bring the indices of a span, and of the step after it, to the device at once."""
        self.begin = start
        span = torch.stack([self.batches.indices(step) for step in range(start, stop + 1)])
        self.span = span.to(self.indices.device)

    def put(self, step: int) -> None:
        """Hold the indices of a step."""
        self.indices.copy_(self.span[step - self.begin])

    def take(self) -> Inputs:
        """The images at the indices."""
        return Inputs(*self.batches.data.batch(self.indices))


class _CopyFeed:
    """Batches that come from elsewhere into memory that stays, as a captured step needs it."""

    def __init__(self, batches: AbstractBatches) -> None:
        self.batches, self.held = batches, batches.read(batches.start).clone()

    def begin_span(self, start: int, stop: int) -> None:
        """Nothing is known before it is read."""

    def put(self, step: int) -> None:
        """Hold the batch of a step."""
        for mine, new in zip(self.held.tensors(), self.batches.read(step).tensors(), strict=True):
            if mine.shape != new.shape:
                raise ValueError(
                    f"a batch has the shape {tuple(new.shape)} after {tuple(mine.shape)}; compiled steps "
                    "need all alike, so ask for step='eager'"
                )
            mine.copy_(new, non_blocking=True)

    def take(self) -> Inputs:
        """The batch that was put last."""
        return self.held


class _Streams:
    """Runs functions on a stream each; on the CPU one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: list[torch.cuda.Stream] = []

    def start(self, functions: Sequence[Callable[[], Result]]) -> list[Result]:
        """Their results, which the current stream may use after `join`."""
        if self.device.type != "cuda":
            return [function() for function in functions]
        while len(self.streams) < len(functions):
            self.streams.append(torch.cuda.Stream(self.device))
        results = []
        for stream, function in zip(self.streams, functions, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(function())
        return results

    def join(self) -> None:
        """Have the current stream wait for all."""
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)


def in_bf16(network: nn.Module) -> nn.Module:
    """A copy whose convolutions and linear layers hold the bf16 weights that autocast makes of them.

    >>> in_bf16(nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1)))[0].weight.dtype
    torch.bfloat16
    """
    network = copy.deepcopy(network)
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            module.to(torch.bfloat16)
    return network


def _without_sharded_rng(call: Callable[..., Any] | None) -> Callable[..., Any]:
    """A compiled network's call outside `ShardedRNG`, which Dynamo would trace with the network."""
    assert call

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return run


def _set_up_compiler() -> None:
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    with suppress(AttributeError):  # other releases have no such switch
        # Inductor of torch 2.11 trips over the backward of filter response normalisation with this on.
        inductor.triton.mix_order_reduction = False
    with suppress(AttributeError):
        # Every network and batch size is a compilation of the same function, which is no reason to give up.
        dynamo.recompile_limit = max(dynamo.recompile_limit, 64)


STEPS: dict[StepKind, type[AbstractStep]] = {
    "captured": CapturedStep,
    "compiled": CompiledStep,
    "eager": EagerStep,
}


def step_kinds(
    wish: StepKind | None, device: torch.device, engine: Engine | None = None
) -> Sequence[StepKind]:
    """The kinds to be tried on a device, in their order; a wish is the only one.

    >>> step_kinds(None, torch.device("cuda")), step_kinds(None, torch.device("cpu"))
    (('captured', 'compiled', 'eager'), ('eager',))
    """
    if engine and wish == "captured":
        raise ValueError(
            "step is 'captured'; several processes take 'compiled' or 'eager' ones, so leave it out"
        )
    if wish is None and device.type == "cuda":
        return ("compiled", "eager") if engine else get_args(StepKind)
    if wish is None:
        return ("eager",)
    if wish not in STEPS:
        raise ValueError(f"step is {wish!r}; it must be one of {', '.join(map(repr, STEPS))}")
    if wish == "captured" and device.type != "cuda":
        raise ValueError(f"step is 'captured' and the data is on the {device.type}; move it to a GPU")
    return (wish,)


def steps_that_work(
    kinds: Sequence[StepKind], parts: Sequence[Any], restore: Callable[[], None], engine: Engine | None = None
) -> AbstractStep:
    """Steps of the first kind that can be prepared; a warning says why another could not.

    `parts` is what a step is made of; `restore` undoes what preparing did to weights and memory, whether it
    worked or not. Several processes take the first kind that all of them can prepare.
    """
    for kind, following in zip(kinds, (*kinds[1:], None), strict=True):
        steps, reason = STEPS[kind](*parts), ""
        with ExitStack() as undo:
            undo.callback(steps.close)
            try:
                steps.prepare()
            except Exception as error:  # compilers and drivers raise what they like
                if following is None:
                    raise
                reason = _reason(error)
            finally:
                restore()
            if engine:
                reason = next(filter(None, engine.wait(reason)), "")
            if not reason:
                if engine:
                    steps.connect(engine)
                undo.pop_all()
                return steps
        if engine is None or engine.first:
            warnings.warn(
                f"{kind} steps do not work here ({reason}); falling back to {following} ones", stacklevel=3
            )
    raise AssertionError("there is always a last kind")


def _reason(error: Exception) -> str:
    """The first line of an error, and the second where the first only announces it.

    >>> _reason(RuntimeError("backend='inductor' raised:\\nno compiler was found\\nmore"))
    "backend='inductor' raised: no compiler was found"
    """
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {more[0]}" if first.endswith(":") and more else first
