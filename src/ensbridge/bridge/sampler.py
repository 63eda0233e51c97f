"""Sampling the bridge from the source's logits Z_1 to the ensemble's Z_0.

Pure functions of (score, schedule, z1, h, generator). A score is any function ε(h, z_t, t) -> (B, K); the
sampler only asks the schedule for its posterior, so that any time grid and any score can be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ensbridge.bridge.schedule import BridgeSchedule

Features = Tensor | tuple[Tensor, ...]  # what is read of the source: one module's output, or several modules'
Score = Callable[[Features, Tensor, Tensor], Tensor]


def estimate_z0(score: Score, schedule: BridgeSchedule, z_t: Tensor, h: Features, t: Tensor) -> Tensor:
    """One estimate of the end of the bridge from time t: Ẑ_0 = Z_t - sigma_t·ε(h, Z_t, t).

    >>> schedule = BridgeSchedule()
    >>> exact = lambda h, z_t, t: (z_t - h) / schedule.sigma(t)[:, None]
    >>> z_0 = torch.tensor([[1.0, -1.0]])
    >>> estimate_z0(exact, schedule, torch.zeros(1, 2), z_0, torch.ones(1)).allclose(z_0)
    True
    """
    return z_t - schedule.sigma(t.to(z_t.dtype))[:, None] * score(h, z_t, t)


def sample(
    score: Score,
    schedule: BridgeSchedule,
    z1: Tensor,
    h: Features,
    times: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
    noise: bool = True,
) -> list[Tensor]:
    """Sample the bridge from z1 to Z_0 and return every state [Z_1, …, Z_0].

    `times` is any increasing grid inside [0, 1], the schedule's own by default; sampling starts at its last
    time, where the state is `z1`, and ends at its first. With `noise=False` each step takes its posterior's
    mean, which is deterministic.

    >>> schedule = BridgeSchedule(num_steps=3)
    >>> exact = lambda h, z_t, t: (z_t - h) / schedule.sigma(t)[:, None]
    >>> path = sample(exact, schedule, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), noise=False)
    >>> len(path), [round(value, 3) for value in path[-1][0].tolist()]
    (4, [1.0, -1.0])
    """
    grid = schedule.times().tolist() if times is None else [float(t) for t in times]
    if len(grid) < 2 or grid[0] < 0 or grid[-1] > 1 or any(b <= a for a, b in pairwise(grid)):
        raise ValueError(f"the time grid is {grid}; it must increase inside [0, 1], such as [0, 0.5, 1]")
    path = [z1]
    for t_prev, t in reversed(list(pairwise(grid))):
        z_t = path[-1]
        now, before = z_t.new_full(z_t.shape[:1], t), z_t.new_full(z_t.shape[:1], t_prev)
        z0_hat = estimate_z0(score, schedule, z_t, h, now)
        mean, variance = schedule.posterior(z_t, z0_hat, now, before)
        # The exact posterior ends without noise; the released code adds some there too.
        if noise and (t_prev > 0 or schedule.variance == "released"):
            xi = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            mean = mean + variance.sqrt() * xi
        path.append(mean)
    return path
