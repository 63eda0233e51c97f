"""The bridge between the source's logits and the ensemble's: its schedule and its source temperature.

Pure mathematics: no networks, no data. Equation numbers are those of "Fast Ensembling with Diffusion
Schrödinger Bridge" (ICLR 2024), where Z_1 is the source's tempered logit and Z_0 the ensemble's.

Shapes: B images, K classes. Times t lie in (0, 1] and have shape (B,).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

PosteriorVariance = Literal["exact", "released"]
MOST_STEPS = 1000  # of a bridge; a file may ask for more than there is memory for


class BridgeSample(NamedTuple):
    """A point on the bridge with what the score network should say there.

    >>> z_0, z_1, t = torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.ones(1)
    >>> sample = BridgeSchedule(beta=1e-4).sample(z_0, z_1, t)  # at t = 1 the bridge is at Z_1
    >>> sample.z_t.tolist(), (0.01 * sample.target).round(decimals=4).tolist()
    ([[1.0, -1.0]], [[1.0, -1.0]])
    """

    z_t: Tensor  # (B, K)
    target: Tensor  # (B, K), (z_t - z_0) / sigma_t
    t: Tensor  # (B,)


@dataclass(frozen=True)
class BridgeSchedule:
    """A bridge of constant diffusion `beta`, sampled in `num_steps` equal steps.

    `variance` is the noise of a sampling step: "exact" is the posterior's own, zero at the last step;
    "released" is beta·(t - t_prev) at every step, the last included, as in the paper's released code.

    >>> schedule = BridgeSchedule(beta=1e-4, num_steps=5)
    >>> schedule.times().tolist()
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> z_0, z_1 = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    >>> sample = schedule.sample(z_0, z_1, torch.ones(2))
    >>> sample.z_t.equal(z_1), round(sample.target[0, 0].item(), 6)
    (True, 100.0)
    >>> mean, variance = schedule.posterior(z_1, z_0, torch.tensor([1.0, 1.0]), torch.tensor([0.8, 0.0]))
    >>> [round(value, 6) for value in mean[:, 0].tolist()], variance.shape
    ([0.8, 0.0], torch.Size([2, 1]))
    """

    beta: float = 1e-4
    num_steps: int = 5
    variance: PosteriorVariance = "exact"

    def __post_init__(self) -> None:
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ValueError(f"beta is {self.beta}; it must be a positive number, such as 1e-4")
        whole = isinstance(self.num_steps, int) and not isinstance(self.num_steps, bool)
        if not whole or not 1 <= self.num_steps <= MOST_STEPS:
            raise ValueError(
                f"num_steps is {self.num_steps}; it must be a whole number from 1 to {MOST_STEPS:,}, "
                "such as 5"
            )
        if self.variance not in ("exact", "released"):
            raise ValueError(f"variance is {self.variance!r}; it must be 'exact' or 'released'")

    def times(self) -> Tensor:
        """The grid 0 = tau_0 < tau_1 < … < tau_N = 1 in float64, shape (N + 1,)."""
        return torch.arange(self.num_steps + 1, dtype=torch.float64) / self.num_steps

    def sigma(self, t: Tensor) -> Tensor:
        """The forward deviation sigma_t, where sigma_t² = ∫₀ᵗ beta = beta·t."""
        return (self.beta * t).sqrt()

    def sigma_bar(self, t: Tensor) -> Tensor:
        """The backward deviation, whose square ∫ₜ¹ beta = beta·(1 - t) completes sigma_t² to beta."""
        return (self.beta * (1 - t)).sqrt()

    def sample(
        self, z0: Tensor, z1: Tensor, t: Tensor, generator: torch.Generator | None = None
    ) -> BridgeSample:
        """Draw Z_t given both ends, z0 and z1 of shape (B, K), at times t of shape (B,) in (0, 1]."""
        _check_pair(z0, z1)
        time = _column(t, z0)
        _check_times(t, lower=None)
        # Eq. 4: q(Z_t | Z_0, Z_1) = N((1 - t) Z_0 + t Z_1, beta t (1 - t)); beta cancels from the mean.
        noise = torch.randn(z0.shape, generator=generator, dtype=z0.dtype, device=z0.device)
        z_t = (1 - time) * z0 + time * z1 + (self.beta * time * (1 - time)).sqrt() * noise
        # Eq. 8: the score network's target.
        return BridgeSample(z_t, (z_t - z0) / self.sigma(time), t)

    def posterior(self, z_t: Tensor, z0_hat: Tensor, t: Tensor, t_prev: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of Z_{t_prev} given Z_t and an estimate of Z_0, for 0 ≤ t_prev < t ≤ 1.

        The mean has the shape of z_t; the variance has shape (B, 1) and broadcasts to it.
        """
        _check_pair(z0_hat, z_t)
        time, previous = _column(t, z_t), _column(t_prev, z_t)
        _check_times(t, lower=t_prev)
        # q(Z_s | Z_0, Z_t) of the bridge between Z_0 and Z_t, s < t: Brownian, so linear in between.
        share = previous / time
        mean = (1 - share) * z0_hat + share * z_t
        if self.variance == "released":
            return mean, self.beta * (time - previous)
        return mean, self.beta * previous * (time - previous) / time

    def step_target(self, z_t: Tensor, z_prev: Tensor, t: Tensor, t_prev: Tensor) -> Tensor:
        """The score with which one noiseless step from z_t at t lands on z_prev at t_prev."""
        _check_pair(z_prev, z_t)
        time, previous = _column(t, z_t), _column(t_prev, z_t)
        _check_times(t, lower=t_prev)
        # Eq. 9, put right for any step: ε = (Z_t - Z_s)·sigma_t / (sigma_t² - sigma_s²).
        return (z_t - z_prev) * self.sigma(time) / (self.beta * (time - previous))


@dataclass(frozen=True)
class TemperatureLaw:
    """The law of the source's temperature, T = base·(1 + spread·α) with α ~ Beta(1, concentration).

    `spread=0` gives the constant `base`.

    >>> law = TemperatureLaw()
    >>> round(law.mean, 4)
    2.0667
    >>> draws = law.sample((10_000,), generator=torch.Generator().manual_seed(0))
    >>> bool((draws >= 2).all() and (draws <= 2.4).all())
    True
    """

    base: float = 2.0
    spread: float = 0.2
    concentration: float = 5.0

    def __post_init__(self) -> None:
        if not (self.base > 0 and math.isfinite(self.base)):
            raise ValueError(
                f"the temperature's base is {self.base}; it must be a positive number, such as 2.0"
            )
        if not (self.spread >= 0 and math.isfinite(self.spread)):
            raise ValueError(f"the temperature's spread is {self.spread}; it must be 0 or more, such as 0.2")
        if not (self.concentration > 0 and math.isfinite(self.concentration)):
            raise ValueError(
                f"the temperature's concentration is {self.concentration}; it must be positive, such as 5.0"
            )

    @property
    def mean(self) -> float:
        """The law's mean; α has mean 1 / (1 + concentration)."""
        return self.base * (1 + self.spread / (1 + self.concentration))

    def sample(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Draw temperatures; Beta(1, b) has the closed inverse 1 - (1 - u)^(1/b)."""
        uniform = torch.rand(shape, generator=generator, device=device)
        alpha = 1 - (1 - uniform) ** (1 / self.concentration)
        return self.base * (1 + self.spread * alpha)


def _column(t: Tensor, like: Tensor) -> Tensor:
    """Times (B,) as a column (B, 1) in the dtype of the logits (B, K)."""
    if t.shape != like.shape[:1]:
        raise ValueError(
            f"times have shape {tuple(t.shape)}; logits of shape {tuple(like.shape)} need ({like.shape[0]},)"
        )
    return t.to(like.dtype)[:, None]


def _check_pair(z0: Tensor, z1: Tensor) -> None:
    if z0.ndim != 2 or z0.shape != z1.shape:
        raise ValueError(
            f"logits have shapes {tuple(z0.shape)} and {tuple(z1.shape)}; both must be the same (B, K)"
        )


def _check_times(t: Tensor, lower: Tensor | None) -> None:
    """Refuse times outside (0, 1] or not above `lower` ≥ 0; looking at an accelerator's would stall it."""
    if t.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if not bool(((t > 0) & (t <= 1)).all()):
        raise ValueError(f"times span {t.min().item():g} to {t.max().item():g}; each t must lie in (0, 1]")
    if lower is not None and not bool(((lower >= 0) & (lower < t)).all()):
        raise ValueError(
            f"previous times span {lower.min().item():g} to {lower.max().item():g}; each must lie in [0, t)"
        )
