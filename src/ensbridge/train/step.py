"""Training steps in two ways: eager, on any device; compiled and captured in a CUDA graph, on a GPU.

A step draws its batch, augments it, runs forward and backward, updates the weights and their average.
Captured, all of it is one launch: a small network on a fast GPU is otherwise bound by Python.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from ensbridge.data.loader import ImageSet
from ensbridge.methods.method import AbstractMethod, Batch, Runner, taps_of
from ensbridge.nets.tap import StandingTap
from ensbridge.train.config import FitConfig, derive_seed
from ensbridge.train.ema import Average
from ensbridge.train.optimizers import Optimizers


class AbstractStep(ABC):
    """Steps of one run, asked for in spans; `stride` is the longest span that is worth asking for."""

    stride: int

    def __init__(
        self,
        method: AbstractMethod,
        data: ImageSet,
        config: FitConfig,
        optimizers: Optimizers,
        average: Average,
    ) -> None:
        self.method, self.data, self.config = method, data, config
        self.optimizers, self.average = optimizers, average
        self.taps = taps_of(method.teachers())
        self.standing: list[StandingTap] = []  # in the teachers, while a captured step uses them

    @abstractmethod
    def run(self, start: int, stop: int) -> dict[str, float]:
        """Run steps start … stop - 1 and return the sums of their losses."""

    def close(self) -> None:
        """Leave the networks as they were found, but for their weights."""
        for tap in self.standing:
            tap.close()

    def refusal(self, problem: str) -> FloatingPointError:
        """The error of a step that must not be taken."""
        return FloatingPointError(
            f"{problem}; the weights were left as they were before it: lower lr "
            f"(now {self.optimizers.rate:.3g}) or look at the data, then run again"
        )


class EagerStep(AbstractStep):
    """Plain steps, each a function of the seed and its number, so that a resumed run repeats them."""

    stride = 1

    def run(self, start: int, stop: int) -> dict[str, float]:
        """Run a span of steps."""
        sums: dict[str, float] = {}
        for step in range(start, stop):
            for name, value in self._step(step).items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def _step(self, step: int) -> dict[str, float]:
        self.optimizers.set_rates(step)
        device = self.data.images.device
        generator = torch.Generator(device).manual_seed(derive_seed(self.config.seed, "step", step))
        indices = self.config.indices(len(self.data), step).to(device)
        buffers = [(buffer, buffer.clone()) for buffer in self.method.student.buffers()]
        losses = self.method.losses(draw_batch(self.data, self.config, indices, generator, self.taps))
        values = {name: loss.item() for name, loss in losses.items()}
        for name, value in values.items():
            if not math.isfinite(value):
                _put_back(buffers)
                named = "" if name == "loss" else f" of {name}"
                raise self.refusal(f"the loss{named} is {value} at step {step + 1}")
        self.optimizers.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        if not bool(self.optimizers.gradient_norm().isfinite()):
            _put_back(buffers)
            raise self.refusal(f"a gradient is not finite at step {step + 1}")
        self.optimizers.step()
        self.average.follow(self.average.keeps(step))
        return values


def _put_back(buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Restore running statistics, which move in the forward pass."""
    for buffer, before in buffers:
        buffer.copy_(before)


class CapturedStep(AbstractStep):
    """Steps compiled by Inductor and captured in one CUDA graph, in bf16 where that is safe.

    What changes between steps lives in tensors that the graph reads: image indices, rate, the average's
    share. A step whose loss or gradient is not finite leaves the weights alone; it is reported at the end
    of its span. The warm-up before the capture changes weights: the caller puts them back.
    """

    stride = 100

    def capture(self) -> None:
        """Compile, warm up and capture; to be called once, before the first span."""
        device = self.data.images.device
        self.indices = self.config.indices(len(self.data), 0).to(device)
        self.keeps = [torch.zeros((), device=device) for _ in self.average.rules]
        self.refused = torch.zeros((), device=device)
        self.sums: dict[str, Tensor] = {}
        self.generator = torch.Generator(device)
        self.runners: dict[nn.Module, Runner] = {}
        self.graph = torch.cuda.CUDAGraph()
        self._compile()
        self._record()

    def run(self, start: int, stop: int) -> dict[str, float]:
        """Run a span of steps and look once at what they gave."""
        self.generator.manual_seed(derive_seed(self.config.seed, "span", start))
        indices = torch.stack([self.config.indices(len(self.data), step) for step in range(start, stop)])
        indices = indices.to(self.indices.device)
        for step in range(start, stop):
            self.indices.copy_(indices[step - start])
            self.optimizers.set_rates(step)
            for keep, value in zip(self.keeps, self.average.keeps(step), strict=True):
                keep.fill_(value)
            self.graph.replay()
        sums, refused = {name: each.item() for name, each in self.sums.items()}, self.refused.item()
        for each in self.sums.values():
            each.zero_()
        if refused:
            raise self.refusal(f"the loss or a gradient is not finite at steps {start + 1} to {stop}")
        return sums

    def _compile(self) -> None:
        from torch._inductor import config as inductor

        # Inductor of torch 2.11 trips over the backward of filter response normalisation with this on.
        with suppress(AttributeError):  # other releases have no such switch
            inductor.triton.mix_order_reduction = False
        for network in self.method.networks():
            network.compile()
        for network, features in self.taps.items():
            self.standing.append(StandingTap(network, *features))
            self.runners[network] = torch.compile(self.standing[-1])

    def _record(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph.register_generator_state(self.generator)
        with torch.cuda.graph(self.graph):
            self._step()
        for each in self.sums.values():
            each.zero_()
        self.refused.zero_()

    def _step(self) -> None:
        batch = draw_batch(self.data, self.config, self.indices, self.generator, self.taps, self.runners)
        # The cache of bf16 weights would outlive the capture.
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            losses = self.method.losses(batch)
        loss = torch.stack(list(losses.values())).sum()
        self.optimizers.zero_grad()
        loss.backward()
        bad = (~torch.isfinite(loss + self.optimizers.gradient_norm())).float()
        self.optimizers.step(refuse=bad)
        self.average.follow(self.keeps)
        self.refused += bad
        for name, each in losses.items():
            self.sums.setdefault(name, torch.zeros_like(each.detach())).add_(each.detach())


def draw_batch(
    data: ImageSet,
    config: FitConfig,
    indices: Tensor,
    generator: torch.Generator,
    taps: Mapping[nn.Module, tuple[str, ...]],
    runners: Mapping[nn.Module, Runner] | None = None,
) -> Batch:
    """The augmented batch of the images at `indices`."""
    images, labels = data.batch(indices)
    images = config.augment(images, generator).contiguous()
    return Batch(images, labels, generator, taps, runners or {})
