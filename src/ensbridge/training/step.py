"""Training steps, of which this is the plain way, on any device.

A step draws its batch, augments it, runs forward and backward, updates the weights and their average.

Of several processes each takes its slice of every batch, so that a run is the run of one process but for
rounding: order, augmentation and the draws of the losses are those of the whole batch, gradients are its
mean's. Only batch norm sees less, the slice of its process; its running statistics are averaged.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ensbridge.data.augment import augment_inputs
from ensbridge.data.stream import random_from
from ensbridge.methods.base import AbstractTrainable, Batch, Runner, feature_names_of
from ensbridge.models.features import forward_with_features
from ensbridge.training.batches import AbstractBatches, Inputs, StreamedBatches, TrainData, open_batches
from ensbridge.training.config import FitConfig, derive_seed
from ensbridge.training.distributed import Engine, Losses
from ensbridge.training.optimizers import Average, Optimizers
from ensbridge.utils.inputs import Inputs as NetworkInputs
from ensbridge.utils.inputs import count_rows, map_inputs, tensors_of

TIMED_EVERY = 20  # steps, where measuring has to wait for a GPU
Buffers = Sequence[tuple[Tensor, Tensor]]  # running statistics, and how they were before a step


class AbstractStep(ABC):
    """Steps of one run, asked for in spans; `stride` is the longest span that is worth asking for."""

    stride: int

    def __init__(
        self,
        method: AbstractTrainable,
        data: TrainData,
        config: FitConfig,
        optimizers: Optimizers,
        average: Average,
        batches: AbstractBatches | None = None,
        timing: TimeSplit | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.method, self.config, self.engine = method, config, engine
        self.optimizers, self.average = optimizers, average
        self.batches = batches or open_batches(data, config)
        self.timing = timing or TimeSplit()
        self.feature_names = feature_names_of(method.teachers())
        self.call_losses: Callable[[Losses], dict[str, Tensor]] = lambda losses: losses()
        self.connected: Engine | None = None  # the engine, once gradients are averaged over processes
        if engine and config.batch_size < engine.size:
            raise ValueError(
                f"batch_size is {config.batch_size} and there are {engine.size} processes; each needs an "
                "image of every batch"
            )

    @abstractmethod
    def prepare(self) -> None:
        """Make ready what steps need, once; weights and memory may change, which the caller puts back.

        Each process does so by itself. With an `engine` a trial leaves the gradients, for `connect`.
        """

    @abstractmethod
    def run(self, start: int, stop: int) -> dict[str, float]:
        """Run steps start … stop - 1 and return the sums of their losses."""

    @abstractmethod
    def close(self) -> None:
        """Leave the networks as they were found, but for their weights."""

    def connect(self, engine: Engine) -> None:
        """From here on, average over processes the gradients of the weights that got one when prepared."""
        weights = [weight for weight in self.method.student.parameters() if weight.grad is not None]
        self.call_losses, self.connected = engine.wrap(weights), engine
        self.optimizers.zero_grad()

    def seed(self, step: int) -> int:
        """The seed of a step's draws."""
        seed = derive_seed(self.config.seed, "step", step)
        if self.engine and self.engine.rank and isinstance(self.batches, StreamedBatches):
            return derive_seed(seed, "process", self.engine.rank)  # it has images, and draws, of its own
        return seed

    def part(self, batch: Batch) -> tuple[Batch, AbstractContextManager[Any], float]:
        """This process's part of a batch, the mode in which its losses draw, and its share of the whole."""
        if self.engine is None:
            return batch, nullcontext(), 1.0
        if isinstance(self.batches, StreamedBatches):
            return batch, nullcontext(), self.batches.rows / self.config.batch_size
        return shard(batch, self.engine)

    def buffers(self) -> Buffers:
        """The student's running statistics, and how they are now."""
        return [(buffer, buffer.clone()) for buffer in self.method.student.buffers()]

    def refusal(self, problem: str) -> FloatingPointError:
        """The error of a step that must not be taken."""
        return FloatingPointError(
            f"{problem}; the weights were left as they were before it: lower lr "
            f"(now {self.optimizers.rate:.3g}), in a folder of its own, or look at the data"
        )


class EagerStep(AbstractStep):
    """Plain steps, each a function of the seed and its number, so that a resumed run repeats them.

    With an `engine` several processes take them together, each on its slice of the batch.
    """

    stride = 1

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        # Dropout, DropPath and the like; others draw nothing, and threads share the global state.
        modules = self.method.student.modules()
        self.has_dropout = any("drop" in type(module).__name__.lower() for module in modules)

    def prepare(self) -> None:
        """Find, by a trial, the weights that get a gradient, where several processes average these."""
        if self.engine:
            self.optimizers.zero_grad()
            total_loss(self._losses(self.batches.start)[0]()).backward()

    def close(self) -> None:
        """Nothing was changed."""

    def run(self, start: int, stop: int) -> dict[str, float]:
        """Run a span of steps."""
        sums: dict[str, float] = {}
        for step in range(start, stop):
            with self._measure("total", step):
                losses = self._step(step)
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def _measure(self, part: str, step: int) -> AbstractContextManager[None]:
        """Time a part of a step; on a GPU, which has to be waited for, of one step among many."""
        device = self.batches.device
        if device.type == "cuda" and step % TIMED_EVERY:
            return nullcontext()
        return self.timing.measure(part, device)

    def _step(self, step: int) -> dict[str, float]:
        self.optimizers.set_rates(step)
        buffers = self.buffers()
        compute, share = self._losses(step)
        losses = self.call_losses(compute)
        values = self._values(losses, share)
        for name, value in values.items():
            if not math.isfinite(value):
                restore(buffers)
                named = "" if name == "loss" else f" of {name}"
                raise self.refusal(f"the loss{named} is {value} at step {step + 1}")
        self.optimizers.zero_grad()
        # Processes' gradients are averaged, however many images each has.
        (total_loss(losses) * (share * self.engine.size if self.engine else 1)).backward()
        if not bool(self.optimizers.gradient_norm().isfinite()):
            restore(buffers)
            raise self.refusal(f"a gradient is not finite at step {step + 1}")
        self.optimizers.step()
        if self.engine:
            average_buffers(buffers, share, self.engine)
        self.average.update(self.average.decays(step))
        return values

    def _values(self, losses: Mapping[str, Tensor], share: float) -> dict[str, float]:
        """The losses of the whole batch, of which this process has a share."""
        if self.engine is None:
            return {name: loss.item() for name, loss in losses.items()}
        values = torch.stack([loss.detach().double() for loss in losses.values()])
        return dict(zip(losses, self.engine.sum(values * share).tolist(), strict=True))

    def _losses(self, step: int) -> tuple[Losses, float]:
        """What computes the losses of a step, or of this process's slice of it, and the slice's share."""
        with self._measure("data", step):
            inputs = self.batches.read(step)
        seed = self.seed(step)
        generator = torch.Generator(self.batches.device).manual_seed(seed)
        batch, draws, share = self.part(
            augmented(inputs, self.config, generator, self.feature_names, self._runners(inputs, step))
        )

        def losses() -> dict[str, Tensor]:
            # From the global state, but by the step alone, so that a resumed run repeats it.
            dropout = random_from(derive_seed(seed, "dropout")) if self.has_dropout else nullcontext()
            with draws, dropout, in_precision(batch.images, self.config.precision == "bfloat16"):
                return self.method.losses(batch)

        return losses, share

    def _runners(self, inputs: Inputs, step: int) -> dict[nn.Module, Runner]:
        """Each teacher's pass, timed; what is known of it already needs none."""

        def run(network: nn.Module, names: tuple[str, ...], images: Any) -> tuple[Tensor, ...]:
            if network in inputs.outputs:
                return inputs.outputs[network]
            with self._measure("teachers", step):
                # Each has images of its own: a network may well work in place.
                return forward_with_features(network, map_inputs(torch.clone, images), *names)

        return {network: partial(run, network, names) for network, names in self.feature_names.items()}


def total_loss(losses: Mapping[str, Tensor]) -> Tensor:
    """What the backward pass begins with."""
    return torch.stack(list(losses.values())).sum()


def restore(buffers: Buffers) -> None:
    """Restore running statistics, which move in the forward pass."""
    for buffer, before in buffers:
        buffer.copy_(before)


def in_precision(images: NetworkInputs, bf16: bool) -> torch.autocast | nullcontext[None]:
    """Where networks run: under autocast to bf16, which keeps float32 where it matters, or as they are."""
    if not bf16:
        return nullcontext()
    # A cache of weights would outlive a capture.
    device = tensors_of(images)[0].device
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def augmented(
    inputs: Inputs,
    config: FitConfig,
    generator: torch.Generator,
    feature_names: Mapping[nn.Module, tuple[str, ...]],
    runners: Mapping[nn.Module, Runner] | None = None,
) -> Batch:
    """The batch of a step, augmented."""
    images, share = augment_inputs(config.augment, inputs.images, generator)
    images, labels = map_inputs(Tensor.contiguous, images), inputs.labels
    mixed = None if share is None or labels is None else (labels.roll(1), share)
    return Batch(images, labels, generator, feature_names, runners or {}, mixed)


class ShardedRNG(TorchFunctionMode):
    """Draws for a slice of a batch that are those rows of the whole batch's draws.

    It knows `torch.rand`, `torch.randn` and `torch.randint` with the batch's generator and the images first;
    a draw of another shape, as one number for all images, is the same in every process.

    >>> one, other = (torch.Generator().manual_seed(0) for _ in range(2))
    >>> with ShardedRNG(one, slice(2, 5), whole=5):
    ...     part = torch.rand(3, 2, generator=one)
    >>> part.equal(torch.rand(5, 2, generator=other)[2:])
    True
    """

    def __init__(self, generator: torch.Generator, rows: slice, whole: int) -> None:
        super().__init__()
        self.generator, self.rows, self.whole = generator, rows, whole

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Draw for the whole batch where its images are drawn for."""
        kwargs = kwargs or {}
        draws = func in (torch.rand, torch.randn, torch.randint)
        if not draws or kwargs.get("generator") is not self.generator:
            return func(*args, **kwargs)
        bounds, sizes = (args[:2], args[2:]) if func is torch.randint else ((), args)
        shape = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)
        if not shape or shape[0] != self.rows.stop - self.rows.start:
            return func(*args, **kwargs)
        return func(*bounds, (self.whole, *shape[1:]), **kwargs)[self.rows]


def shard(batch: Batch, engine: Engine) -> tuple[Batch, ShardedRNG, float]:
    """This process's slice of a batch, the mode in which its losses draw, and its share of the batch."""
    assert batch.generator
    count = count_rows(batch.images)
    rows = engine.rows(count)
    labels = None if batch.labels is None else batch.labels[rows]
    images = map_inputs(lambda tensor: tensor[rows].contiguous(), batch.images)
    mixed = batch.mixed and (batch.mixed[0][rows], batch.mixed[1][rows])
    part = Batch(images, labels, batch.generator, batch.feature_names, batch.runners, mixed)
    return part, ShardedRNG(batch.generator, rows, count), (rows.stop - rows.start) / count


@torch.no_grad()
def average_buffers(buffers: Buffers, share: float, engine: Engine) -> None:
    """Give running statistics, which each process moved by its slice, the mean of their moves."""
    moved = [(now, before) for now, before in buffers if now.is_floating_point()]
    if not moved:
        return
    moves = [torch.where(now == before, 0, now - before).double().flatten() for now, before in moved]
    mean = engine.sum(torch.cat(moves) * share)
    for (now, before), move in zip(moved, mean.split([len(part) for part in moves]), strict=True):
        now.copy_(before + move.view_as(before))


class TimeSplit:
    """Seconds spent on data and on teachers, of all seconds that were measured.

    >>> split = TimeSplit()
    >>> split.seconds |= {"data": 61.0, "teachers": 30.0, "total": 100.0}
    >>> print(split)
    data 61 %, teachers 30 %, bridge 9 %
    """

    def __init__(self) -> None:
        self.seconds = {"data": 0.0, "teachers": 0.0, "total": 0.0}

    @contextmanager
    def measure(self, part: str, device: torch.device | None = None) -> Iterator[None]:
        """Add the time spent inside to a part; with a `device`, a GPU's work is waited for."""
        synchronize(device)
        begun = time.perf_counter()
        try:
            yield
        finally:
            synchronize(device)
            self.seconds[part] += time.perf_counter() - begun

    def shares(self) -> dict[str, float]:
        """Each part's share of the time; what is neither data nor teachers is the bridge's."""
        total = max(self.seconds["total"], 1e-9)
        data = min(self.seconds["data"] / total, 1.0)
        teachers = min(self.seconds["teachers"] / total, 1.0 - data)
        return {"data": data, "teachers": teachers, "bridge": 1.0 - data - teachers}

    def __str__(self) -> str:
        return ", ".join(f"{part} {100 * share:.0f} %" for part, share in self.shares().items())


def synchronize(device: torch.device | None) -> None:
    """Wait until a GPU has done what it was given."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
