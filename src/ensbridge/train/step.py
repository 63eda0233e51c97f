"""Training steps in two ways: eager, on any device; compiled and captured in a CUDA graph, on a GPU.

A step draws its batch, augments it, runs forward and backward, updates the weights and their average.
Captured, all of it is one launch: a small network on a fast GPU is otherwise bound by Python.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import suppress

import torch
from torch import Tensor, nn

from ensbridge.data.loader import ImageSet
from ensbridge.ensemble import Ensemble, Observation
from ensbridge.methods.method import AbstractMethod, Batch, Observer, Teacher
from ensbridge.nets.tap import StandingTap
from ensbridge.train.config import FitConfig, derive_seed
from ensbridge.train.ema import Average


class AbstractStep(ABC):
    """Steps of one run, asked for in spans; `stride` is the longest span that is worth asking for."""

    stride: int

    def __init__(
        self,
        method: AbstractMethod,
        data: ImageSet,
        config: FitConfig,
        optimizer: torch.optim.Optimizer,
        average: Average | None,
    ) -> None:
        self.method, self.data, self.config = method, data, config
        self.optimizer, self.average = optimizer, average
        self.total = config.total_steps(len(data))

    @abstractmethod
    def run(self, start: int, stop: int) -> float:
        """Run steps start … stop - 1 and return the sum of their losses."""

    def close(self) -> None:
        """Leave the networks as they were found, but for their weights."""
        return


def make_optimizer(config: FitConfig, student: nn.Module, captured: bool = False) -> torch.optim.Optimizer:
    """The optimiser; a captured step needs its rate on the device and fused kernels."""
    parameters = list(student.parameters())
    lr = torch.tensor(config.lr, device=parameters[0].device) if captured else config.lr
    decay = config.weight_decay
    if config.optimizer == "adam":
        return torch.optim.Adam(
            parameters, lr=lr, weight_decay=decay, fused=captured or None, capturable=captured
        )
    return torch.optim.SGD(
        parameters, lr=lr, momentum=config.momentum, weight_decay=decay, fused=captured or None
    )


class EagerStep(AbstractStep):
    """Plain steps, each a function of the seed and its number, so that a resumed run repeats them."""

    stride = 1

    def run(self, start: int, stop: int) -> float:
        """Run a span of steps."""
        return sum(self._step(step) for step in range(start, stop))

    def _step(self, step: int) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(step, self.total)
        device = self.data.images.device
        generator = torch.Generator(device).manual_seed(derive_seed(self.config.seed, "step", step))
        indices = self.config.indices(len(self.data), step).to(device)
        buffers = [(buffer, buffer.clone()) for buffer in self.method.student.buffers()]
        loss = self.method.loss(draw_batch(self.data, self.config, indices, generator))
        value = loss.item()
        if not math.isfinite(value):
            for buffer, before in buffers:  # running statistics move in the forward pass
                buffer.copy_(before)
            raise _refusal(f"the loss is {value} at step {step + 1}", self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if not bool(_gradient_norm(self.optimizer).isfinite()):
            raise _refusal(f"a gradient is not finite at step {step + 1}", self.optimizer)
        self.optimizer.step()
        if self.average:
            self.average.follow(self.average.rule.keep(step))
        return value


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
        self.keep, self.loss_sum, self.refused = (torch.zeros((), device=device) for _ in range(3))
        self.generator = torch.Generator(device)
        self.observers: dict[Teacher, Observer] = {}
        self.taps: list[StandingTap] = []
        self.graph = torch.cuda.CUDAGraph()
        self._compile()
        self._record()

    def run(self, start: int, stop: int) -> float:
        """Run a span of steps and look once at what they gave."""
        self.generator.manual_seed(derive_seed(self.config.seed, "span", start))
        indices = torch.stack([self.config.indices(len(self.data), step) for step in range(start, stop)])
        indices = indices.to(self.indices.device)
        for step in range(start, stop):
            self.indices.copy_(indices[step - start])
            for group in self.optimizer.param_groups:
                group["lr"].fill_(self.config.lr_at(step, self.total))
            if self.average:
                self.keep.fill_(self.average.rule.keep(step))
            self.graph.replay()
        loss, refused = self.loss_sum.item(), self.refused.item()
        self.loss_sum.zero_()
        if refused:
            raise _refusal(
                f"the loss or a gradient is not finite at steps {start + 1} to {stop}", self.optimizer
            )
        return loss

    def close(self) -> None:
        """Take the standing taps out of the teachers."""
        for tap in self.taps:
            tap.close()

    def _compile(self) -> None:
        from torch._inductor import config as inductor

        # Inductor of torch 2.11 trips over the backward of filter response normalisation with this on.
        with suppress(AttributeError):  # other releases have no such switch
            inductor.triton.mix_order_reduction = False
        for network in self.method.networks():
            network.compile()
        for ensemble, feature in self.method.teachers():
            self.observers[ensemble, feature] = self._compile_observer(ensemble, feature)

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
        self.loss_sum.zero_()
        self.refused.zero_()

    def _compile_observer(self, ensemble: Ensemble, feature: str) -> Observer:
        self.taps.append(StandingTap(ensemble.source, feature))
        source, *others = [torch.compile(net) for net in (self.taps[-1], *list(ensemble.members)[1:])]

        def observe(images: Tensor) -> Observation:
            with torch.no_grad():
                logits, tapped = source(images)
                return Observation(tapped, torch.stack([logits, *(net(images) for net in others)]).float())

        return observe

    def _step(self) -> None:
        batch = draw_batch(self.data, self.config, self.indices, self.generator, self.observers)
        # The cache of bf16 weights would outlive the capture.
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = self.method.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        bad = (~torch.isfinite(loss + _gradient_norm(self.optimizer))).float()
        # Fused kernels take these as a gradient scaler would set them, and skip the update.
        self.optimizer.found_inf, self.optimizer.grad_scale = bad, None  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.average:
            self.average.follow(self.keep)
        self.refused += bad
        self.loss_sum += loss.detach()


def draw_batch(
    data: ImageSet,
    config: FitConfig,
    indices: Tensor,
    generator: torch.Generator,
    observers: dict[Teacher, Observer] | None = None,
) -> Batch:
    """The augmented batch of the images at `indices`."""
    images, labels = data.batch(indices)
    images = config.augment(images, generator).contiguous()
    return Batch(images, labels, generator, observers or {})


def _gradient_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return nn.utils.get_total_norm(gradients)


def _refusal(problem: str, optimizer: torch.optim.Optimizer) -> FloatingPointError:
    return FloatingPointError(
        f"{problem}; the weights were left as they were before it: lower lr "
        f"(now {float(optimizer.param_groups[0]['lr']):.3g}) or look at the data, then run again"
    )
