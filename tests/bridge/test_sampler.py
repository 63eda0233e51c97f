"""Sampling: with an exact score it ends on Z_0, whatever the grid and whatever the noise on the way."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import _tiny
from ensbridge.bridge.sampler import Score, estimate_z0, sample
from ensbridge.bridge.schedule import BridgeSchedule

STEPS = [1, 2, 3, 5, 10]
UNEVEN = (0.0, 0.01, 0.5, 0.55, 1.0)


def exact_score(schedule: BridgeSchedule) -> Score:
    """The score that knows Z_0: it is handed over as the feature h."""
    return lambda h, z_t, t: (z_t - h) / (schedule.beta * t).sqrt()[:, None]


def wrong_score(h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
    """A smooth score that is not exact, so that the path depends on the grid."""
    return torch.sin(z_t + h) + t[:, None]


# Where sampling ends


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("beta", [1e-4, 1.0])
@pytest.mark.parametrize("steps", STEPS)
def test_an_exact_score_samples_the_ensemble_in_any_number_of_steps(
    steps: int, beta: float, noise: bool
) -> None:
    schedule, z0, z1 = BridgeSchedule(beta, steps), _tiny.logits(6, 0), _tiny.logits(6, 1)
    path = sample(exact_score(schedule), schedule, z1, z0, generator=_tiny.generator(), noise=noise)
    assert len(path) == steps + 1
    assert path[0] is z1
    torch.testing.assert_close(path[-1], z0, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("grid", [UNEVEN, (0, 1), [0.0, 0.999, 1.0], torch.linspace(0, 1, 8).tolist()])
def test_an_exact_score_samples_the_ensemble_on_any_grid(grid: list[float], noise: bool) -> None:
    schedule, z0, z1 = BridgeSchedule(0.1), _tiny.logits(6, 0), _tiny.logits(6, 1)
    path = sample(exact_score(schedule), schedule, z1, z0, grid, _tiny.generator(), noise)
    assert len(path) == len(grid)
    torch.testing.assert_close(path[-1], z0, rtol=1e-12, atol=1e-12)


def test_an_exact_score_lands_to_float_precision_in_float32() -> None:
    schedule, z0, z1 = BridgeSchedule(), _tiny.logits(6, 0).float(), _tiny.logits(6, 1).float()
    path = sample(exact_score(schedule), schedule, z1, z0, generator=_tiny.generator())
    assert {stop.dtype for stop in path} == {torch.float32}
    torch.testing.assert_close(path[-1], z0, rtol=0, atol=4e-6)


@pytest.mark.parametrize("steps", STEPS)
def test_with_an_exact_score_sampling_without_noise_stops_on_the_straight_line(steps: int) -> None:
    schedule, z0, z1 = BridgeSchedule(1e-4, steps), _tiny.logits(6, 0), _tiny.logits(6, 1)
    path = sample(exact_score(schedule), schedule, z1, z0, noise=False)
    for n, stop in zip(range(steps, -1, -1), path, strict=True):
        torch.testing.assert_close(stop, (1 - n / steps) * z0 + n / steps * z1, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", STEPS)
def test_one_step_equals_many_with_an_exact_score(steps: int) -> None:
    schedule, z0, z1 = BridgeSchedule(1e-4, steps), _tiny.logits(6, 0), _tiny.logits(6, 1)
    score = exact_score(schedule)
    many = sample(score, schedule, z1, z0, noise=False)[-1]
    one = sample(score, schedule, z1, z0, times=(0.0, 1.0), noise=False)[-1]
    torch.testing.assert_close(one, many, rtol=1e-12, atol=1e-12)


def test_sampling_follows_the_samplers_formula_step_by_step() -> None:
    """Z_{n-1} = Ẑ_0/n + (1 - 1/n) Z_n + √(beta (n - 1) / (N n)) ξ with Ẑ_0 = Z_n - sigma_n ε."""
    beta, steps, h, z1 = 0.7, 5, _tiny.logits(4, 0), _tiny.logits(4, 1)
    path = sample(wrong_score, BridgeSchedule(beta, steps), z1, h, generator=_tiny.generator(5))
    draws, z = _tiny.generator(5), z1
    for n in range(steps, 0, -1):
        t = torch.full((4,), n / steps, dtype=torch.float64)
        z0_hat = z - math.sqrt(beta * n / steps) * wrong_score(h, z, t)
        z = z0_hat / n + (1 - 1 / n) * z
        if n > 1:
            xi = torch.randn(4, 3, generator=draws, dtype=torch.float64)
            z = z + math.sqrt(beta * (n - 1) / (steps * n)) * xi
        torch.testing.assert_close(path[steps + 1 - n], z, rtol=1e-12, atol=1e-12)


def test_sampling_may_stop_before_the_end() -> None:
    schedule, z0, z1 = BridgeSchedule(), _tiny.logits(6, 0), _tiny.logits(6, 1)
    path = sample(exact_score(schedule), schedule, z1, z0, times=(0.25, 0.5, 1.0), noise=False)
    torch.testing.assert_close(path[-1], 0.75 * z0 + 0.25 * z1, rtol=1e-12, atol=1e-12)


def test_the_score_is_asked_at_the_grids_times_from_the_end() -> None:
    asked: list[float] = []

    def note(h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        assert t.shape == (2,)
        asked.extend(t.unique().tolist())
        return torch.zeros_like(z_t)

    z = _tiny.logits(2)
    sample(note, BridgeSchedule(num_steps=2), z, z, noise=False)
    sample(note, BridgeSchedule(), z, z, times=UNEVEN, noise=False)
    assert asked == [1.0, 0.5, 1.0, 0.55, 0.5, 0.01]


# Noise


def test_noisy_stops_have_the_bridges_own_spread() -> None:
    draws, beta = 20_000, 2.0
    schedule = BridgeSchedule(beta, num_steps=4)
    z0, z1 = torch.full((draws, 1), -1.0), torch.full((draws, 1), 3.0)
    path = sample(exact_score(schedule), schedule, z1, z0, generator=_tiny.generator())
    for n, stop in zip((3, 2, 1), path[1:-1], strict=True):
        t = n / 4
        variance = beta * t * (1 - t)
        assert abs(stop.mean().item() - (-1 + 4 * t)) < 4.5 * math.sqrt(variance / draws)
        assert abs(stop.var().item() - variance) < 4.5 * variance * math.sqrt(2 / draws)


@pytest.mark.parametrize("steps", [1, 5])
def test_released_sampling_ends_with_noise_of_variance_beta_over_n(steps: int) -> None:
    draws, beta = 30_000, 2.0
    schedule = BridgeSchedule(beta, steps, "released")
    z0, z1 = torch.full((draws, 1), -1.0), torch.full((draws, 1), 3.0)
    end = sample(exact_score(schedule), schedule, z1, z0, generator=_tiny.generator())[-1]
    variance = beta / steps
    assert abs(end.mean().item() + 1) < 4.5 * math.sqrt(variance / draws)
    assert abs(end.var().item() - variance) < 4.5 * variance * math.sqrt(2 / draws)
    quiet = sample(exact_score(schedule), schedule, z1, z0, noise=False)[-1]
    torch.testing.assert_close(quiet, z0, rtol=0, atol=1e-6)


def test_sampling_without_noise_is_the_same_under_both_variance_rules_and_draws_nothing() -> None:
    h, z1, generator = _tiny.logits(4, 0), _tiny.logits(4, 1), _tiny.generator()
    before = generator.get_state()
    ends = [
        sample(wrong_score, BridgeSchedule(0.5, variance=rule), z1, h, generator=generator, noise=False)[-1]
        for rule in ("exact", "released")
    ]
    assert ends[0].equal(ends[1])
    assert generator.get_state().equal(before)


def test_sampling_with_noise_is_repeated_by_its_generator() -> None:
    h, z1, schedule = _tiny.logits(4, 0), _tiny.logits(4, 1), BridgeSchedule(0.5)
    ends = [sample(wrong_score, schedule, z1, h, generator=_tiny.generator(seed))[-1] for seed in (1, 1, 2)]
    assert ends[0].equal(ends[1])
    assert not ends[0].equal(ends[2])


# One look at the end


@pytest.mark.parametrize("t", [0.2, 1.0])
def test_an_exact_score_sees_the_end_from_any_time(t: float) -> None:
    schedule, z0, z1 = BridgeSchedule(1e-4), _tiny.logits(6, 0), _tiny.logits(6, 1)
    now = torch.full((6,), t, dtype=torch.float64)
    z_t = schedule.sample(z0, z1, now, _tiny.generator()).z_t
    seen = estimate_z0(exact_score(schedule), schedule, z_t, z0, now)
    torch.testing.assert_close(seen, z0, rtol=1e-12, atol=1e-12)


def test_the_estimate_goes_against_the_score_by_sigma() -> None:
    z_t, t = _tiny.logits(2), torch.tensor([0.25, 1.0])
    seen = estimate_z0(lambda h, z, t: torch.ones_like(z), BridgeSchedule(4.0), z_t, z_t, t)
    torch.testing.assert_close(z_t - seen, torch.tensor([[1.0], [2.0]]).expand(2, 3).double())
    assert seen.dtype == torch.float64


# What is refused


@pytest.mark.parametrize(
    "grid",
    [
        (),
        (1.0,),
        (1.0, 0.0),
        (0.0, 0.5, 0.5, 1.0),
        (0.0, 0.6, 0.4, 1.0),
        (-0.1, 1.0),
        (0.0, 1.1),
        (0.0, math.nan),
    ],
)
def test_a_bad_grid_is_refused_with_its_values(grid: tuple[float, ...]) -> None:
    schedule, z = BridgeSchedule(), _tiny.logits(2)
    named = "nan" if any(map(math.isnan, grid)) else re.escape(str(list(grid)))
    with pytest.raises(ValueError, match=named):
        sample(exact_score(schedule), schedule, z, z, grid)
