"""Training steps, of which this is the plain way, on any device.

A step draws its batch, augments it, runs forward and backward, updates the weights and their average.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.data.augment import augment_inputs
from ensbridge.data.examples import ExampleSet
from ensbridge.methods.base import AbstractTrainable, Batch, Runner, feature_names_of
from ensbridge.training.config import FitConfig, derive_seed
from ensbridge.training.distributed import Engine, Losses
from ensbridge.training.ema import Average
from ensbridge.training.optimizers import Optimizers
from ensbridge.training.sharding import (
    Buffers,
    average_buffers,
    check_batch_size,
    mean_losses,
    shard,
    wrap_trained,
)
from ensbridge.utils.inputs import Inputs, map_inputs, tensors_of


class AbstractStep(ABC):
    """Steps of one run, asked for in spans; `stride` is the longest span that is worth asking for."""

    stride: int

    def __init__(
        self,
        method: AbstractTrainable,
        data: ExampleSet,
        config: FitConfig,
        optimizers: Optimizers,
        average: Average,
    ) -> None:
        self.method, self.data, self.config = method, data, config
        self.optimizers, self.average = optimizers, average
        self.feature_names = feature_names_of(method.teachers())

    @abstractmethod
    def prepare(self) -> None:
        """Make ready what steps need, once; weights and memory may change, which the caller puts back."""

    @abstractmethod
    def run(self, start: int, stop: int) -> dict[str, float]:
        """Run steps start … stop - 1 and return the sums of their losses."""

    @abstractmethod
    def close(self) -> None:
        """Leave the networks as they were found, but for their weights."""

    def check_losses(self, values: Mapping[str, float], step: int, buffers: Buffers) -> None:
        """Refuse a step whose loss is not finite, with running statistics put back."""
        for name, value in values.items():
            if not math.isfinite(value):
                restore(buffers)
                named = "" if name == "loss" else f" of {name}"
                raise self.refusal(f"the loss{named} is {value} at step {step + 1}")

    def check_gradients(self, step: int, buffers: Buffers) -> None:
        """Refuse a step whose gradient is not finite, with running statistics put back."""
        if not bool(self.optimizers.gradient_norm().isfinite()):
            restore(buffers)
            raise self.refusal(f"a gradient is not finite at step {step + 1}")

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

    def __init__(self, *parts: Any, engine: Engine | None = None) -> None:
        super().__init__(*parts)
        self.engine = engine

    def prepare(self) -> None:
        """Find, by a trial, the weights that get a gradient, where several processes average these."""
        if self.engine is None:
            return
        check_batch_size(self.config.batch_size, self.engine, self.data.device)
        buffers = self._buffers()
        total_loss(self._losses(0)[0]()).backward()
        restore(buffers)
        self.call_losses = wrap_trained(self.engine, self.method.student)
        self.optimizers.zero_grad()

    def close(self) -> None:
        """Nothing was changed."""

    def run(self, start: int, stop: int) -> dict[str, float]:
        """Run a span of steps."""
        return sum_losses(self._step(step) for step in range(start, stop))

    def _step(self, step: int) -> dict[str, float]:
        self.optimizers.set_rates(step)
        buffers = self._buffers()
        compute, share = self._losses(step)
        losses = self.call_losses(compute) if self.engine else compute()
        if self.engine:
            values = mean_losses(losses, share, self.engine)
        else:
            values = {name: loss.item() for name, loss in losses.items()}
        self.check_losses(values, step, buffers)
        self.optimizers.zero_grad()
        # Processes' gradients are averaged, however many images each has.
        total_loss(losses, share * self.engine.size if self.engine else 1).backward()
        self.check_gradients(step, buffers)
        self.optimizers.step()
        if self.engine:
            average_buffers(buffers, share, self.engine)
        self.average.update(self.average.decays(step))
        return values

    def _losses(self, step: int) -> tuple[Losses, float]:
        """What computes the losses of a step, or of this process's slice of it, and the slice's share."""
        device = self.data.device
        generator = torch.Generator(device).manual_seed(step_seed(self.config, step))
        indices = self.config.indices(len(self.data), step).to(device)
        batch = draw_batch(self.data, self.config, indices, generator, self.feature_names)
        draws, share = nullcontext(), 1.0
        if self.engine:
            batch, draws, share = shard(batch, self.engine)

        def losses() -> dict[str, Tensor]:
            with draws, in_precision(batch.images, self.config.precision == "bfloat16"):
                return self.method.losses(batch)

        return losses, share

    def _buffers(self) -> Buffers:
        return [(buffer, buffer.clone()) for buffer in self.method.student.buffers()]


def total_loss(losses: Mapping[str, Tensor], scale: float = 1) -> Tensor:
    """What the backward pass begins with."""
    total = torch.stack(list(losses.values())).sum()
    return total if scale == 1 else total * scale


def sum_losses(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The losses of several steps, summed by name.

    >>> sum_losses([{"a": 1.0, "b": 2.0}, {"a": 0.5, "b": 1.0}])
    {'a': 1.5, 'b': 3.0}
    """
    sums: dict[str, float] = {}
    for losses in steps:
        for name, value in losses.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def restore(buffers: Buffers) -> None:
    """Restore running statistics, which move in the forward pass."""
    for buffer, before in buffers:
        buffer.copy_(before)


def in_precision(images: Inputs, bf16: bool) -> torch.autocast | nullcontext[None]:
    """Where networks run: under autocast to bf16, which keeps float32 where it matters, or as they are."""
    if not bf16:
        return nullcontext()
    # A cache of weights would outlive a capture.
    device = tensors_of(images)[0].device
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def step_seed(config: FitConfig, step: int) -> int:
    """What the draws of a step begin with."""
    return derive_seed(config.seed, "step", step)


def draw_batch(
    data: ExampleSet,
    config: FitConfig,
    indices: Tensor,
    generator: torch.Generator,
    feature_names: Mapping[nn.Module, tuple[str, ...]],
    runners: Mapping[nn.Module, Runner] | None = None,
) -> Batch:
    """The augmented batch of the images at `indices`."""
    images, labels = data.batch(indices)
    images = map_inputs(Tensor.contiguous, augment_inputs(config.augment, images, generator))
    return Batch(images, labels, generator, feature_names, runners or {})
