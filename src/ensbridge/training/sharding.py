"""A training step's batch, shared among several processes.

Every process takes its slice of each global batch, so that a run is the run of one process but for rounding:
order, augmentation and the draws of the losses are those of the whole batch, gradients are its mean's. Only
batch norm sees less, the slice of its process; its running statistics are averaged, so everywhere the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ensbridge.methods.base import Batch
from ensbridge.training.distributed import Engine
from ensbridge.utils.inputs import count_rows, map_inputs

Buffers = Sequence[tuple[Tensor, Tensor]]  # running statistics, and how they were before a step


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
    part = Batch(images, labels, batch.generator, batch.feature_names, batch.runners)
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
