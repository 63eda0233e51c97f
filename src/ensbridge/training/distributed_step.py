"""Training steps that several processes take together.

Every process takes its slice of each global batch, so that a run is the run of one process but for rounding:
order, augmentation and the draws of the losses are those of the whole batch, gradients are its mean's. Only
batch norm sees less, the slice of its process; its running statistics are averaged, so everywhere the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ensbridge.methods.base import Batch
from ensbridge.training.distributed import Engine, Losses
from ensbridge.training.step import (
    AbstractStep,
    Buffers,
    draw_batch,
    in_precision,
    restore,
    step_seed,
    sum_losses,
)


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


class SharedStep(AbstractStep):
    """Plain steps of several processes, each a function of the seed and its number, on slices of a batch."""

    stride = 1

    def __init__(self, engine: Engine, *parts: Any) -> None:
        super().__init__(*parts)
        self.engine = engine

    def prepare(self) -> None:
        """Find, by a trial, the weights that get a gradient, and wrap them; others stay as they are."""
        if self.config.batch_size < self.engine.size:
            raise ValueError(
                f"batch_size is {self.config.batch_size} and there are {self.engine.size} processes; each "
                "needs an image of every batch"
            )
        if self.data.images.is_cuda and self.engine.first:
            warnings.warn(
                "steps of several processes are eager; captured ones are for one process, as each member's",
                stacklevel=2,
            )
        buffers = self._buffers()
        torch.stack(list(self._losses(0)[0]().values())).sum().backward()
        weights = [weight for weight in self.method.student.parameters() if weight.grad is not None]
        restore(buffers)
        self.optimizers.zero_grad()
        self.wrapped = self.engine.wrap(weights)

    def close(self) -> None:
        """Nothing was changed."""

    def run(self, start: int, stop: int) -> dict[str, float]:
        """Run a span of steps."""
        return sum_losses(self._step(step) for step in range(start, stop))

    def _step(self, step: int) -> dict[str, float]:
        self.optimizers.set_rates(step)
        buffers = self._buffers()
        losses, share = self._losses(step)
        found = self.wrapped(losses)
        own = torch.stack([loss.detach().double() for loss in found.values()])
        values = dict(zip(found, self.engine.sum(own * share).tolist(), strict=True))
        self.check_losses(values, step, buffers)
        self.optimizers.zero_grad()
        # Processes' gradients are averaged, however many images each has.
        (torch.stack(list(found.values())).sum() * share * self.engine.size).backward()
        self.check_gradients(step, buffers)
        self.optimizers.step()
        self._level(buffers, share)
        self.average.update(self.average.decays(step))
        return values

    def _losses(self, step: int) -> tuple[Losses, float]:
        """The losses of this process's slice of a batch, and the slice's share of it."""
        device = self.data.images.device
        generator = torch.Generator(device).manual_seed(step_seed(self.config, step))
        indices = self.config.indices(len(self.data), step).to(device)
        count, rows = len(indices), self.engine.rows(len(indices))
        whole = draw_batch(self.data, self.config, indices, generator, self.taps)
        labels = None if whole.labels is None else whole.labels[rows]
        batch = Batch(whole.images[rows].contiguous(), labels, generator, self.taps)

        def losses() -> dict[str, Tensor]:
            bf16 = self.config.precision == "bfloat16"
            with ShardedRNG(generator, rows, count), in_precision(batch.images, bf16):
                return self.method.losses(batch)

        return losses, (rows.stop - rows.start) / count

    def _buffers(self) -> Buffers:
        return [(buffer, buffer.clone()) for buffer in self.method.student.buffers()]

    @torch.no_grad()
    def _level(self, buffers: Buffers, share: float) -> None:
        """Give running statistics, which each process moved by its slice, the mean of their moves."""
        moved = [(now, before) for now, before in buffers if now.is_floating_point()]
        if not moved:
            return
        moves = [torch.where(now == before, 0, now - before).double().flatten() for now, before in moved]
        mean = self.engine.sum(torch.cat(moves) * share)
        for (now, before), move in zip(moved, mean.split([len(each) for each in moves]), strict=True):
            now.copy_(before + move.view_as(before))
