"""The schedule against the mathematics of the Brownian bridge, and the temperature against its law."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

import _tiny
from ensbridge.bridge.schedule import BridgeSchedule, TemperatureLaw

F64 = torch.float64
GRIDS = [
    (0.0, 1.0),
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    (0.0, 0.2, 0.6, 1.0),
    (0.0, 0.001, 0.03, 0.5, 0.97, 1.0),
    tuple(n / 1000 for n in range(1001)),
]


def times(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


# The two deviations and the grid


@pytest.mark.parametrize("beta", [1e-4, 5e-3, 1.0, 7.0])
def test_both_deviations_complete_each_other_to_beta_and_know_their_ends(beta: float) -> None:
    schedule, t = BridgeSchedule(beta), torch.linspace(0, 1, 41, dtype=F64)
    total = schedule.sigma(t) ** 2 + schedule.sigma_bar(t) ** 2
    torch.testing.assert_close(total, torch.full_like(t, beta), rtol=1e-14, atol=0)
    assert schedule.sigma(t)[0] == 0
    assert schedule.sigma_bar(t)[-1] == 0
    torch.testing.assert_close(schedule.sigma(t) ** 2, beta * t, rtol=1e-14, atol=0)


@pytest.mark.parametrize("steps", [1, 3, 5, 10])
def test_the_grid_goes_from_zero_to_one_in_equal_steps(steps: int) -> None:
    grid = BridgeSchedule(num_steps=steps).times()
    assert grid.dtype == F64
    assert grid.tolist() == [n / steps for n in range(steps + 1)]


# Points on the bridge


@pytest.mark.parametrize("t", [0.05, 0.5, 0.9])
def test_points_on_the_bridge_have_the_closed_forms_mean_and_variance(t: float) -> None:
    draws, beta = 40_000, 2.0
    z0, z1 = times(1.0, -2.0, 0.0), times(-3.0, 0.5, 4.0)
    sample = BridgeSchedule(beta).sample(
        z0.expand(draws, 3), z1.expand(draws, 3), torch.full((draws,), t), _tiny.generator()
    )
    variance = beta * t * (1 - t)
    mean_error = (sample.z_t.mean(0) - ((1 - t) * z0 + t * z1)).abs().max().item()
    assert mean_error < 4.5 * math.sqrt(variance / draws)
    variance_error = (sample.z_t.var(0) - variance).abs().max().item()
    assert variance_error < 4.5 * variance * math.sqrt(2 / draws)
    # Classes and images have noise of their own.
    assert np.abs(np.corrcoef(sample.z_t.T.numpy()) - np.eye(3)).max() < 4.5 / math.sqrt(draws)


def test_a_point_is_its_mean_plus_the_bridges_deviation_times_one_normal_draw() -> None:
    schedule, z0, z1 = BridgeSchedule(0.3), _tiny.logits(5, 0), _tiny.logits(5, 1)
    t = times(0.01, 0.2, 0.5, 0.99, 1.0)
    z_t = schedule.sample(z0, z1, t, _tiny.generator(7)).z_t
    noise = torch.randn(5, 3, generator=_tiny.generator(7), dtype=F64)
    # sigma²·sigma_bar² / (sigma² + sigma_bar²), the variance of two Gaussians' product
    deviation = (schedule.sigma(t) * schedule.sigma_bar(t) / math.sqrt(0.3))[:, None]
    expected = (1 - t)[:, None] * z0 + t[:, None] * z1 + deviation * noise
    torch.testing.assert_close(z_t, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_at_time_one_the_bridge_is_exactly_at_its_source(dtype: torch.dtype) -> None:
    z0, z1 = _tiny.logits(4, 0).to(dtype), _tiny.logits(4, 1).to(dtype)
    assert BridgeSchedule(9.0).sample(z0, z1, torch.ones(4), _tiny.generator()).z_t.equal(z1)


def test_the_target_leads_back_to_the_ensemble_from_every_time() -> None:
    schedule, z0, z1 = BridgeSchedule(1e-3), _tiny.logits(4, 0), _tiny.logits(4, 1)
    t = times(1e-3, 0.3, 0.7, 1.0)
    sample = schedule.sample(z0, z1, t, _tiny.generator())
    sigma = (1e-3 * t).sqrt()[:, None]
    torch.testing.assert_close(sample.target, (sample.z_t - z0) / sigma, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sample.z_t - sigma * sample.target, z0, rtol=1e-12, atol=1e-12)
    assert sample.t is t


def test_a_point_is_repeated_by_its_generator_and_no_other_randomness() -> None:
    z0, z1, t = _tiny.logits(4, 0), _tiny.logits(4, 1), torch.full((4,), 0.5)
    one, same, other = (
        BridgeSchedule(1.0).sample(z0, z1, t, _tiny.generator(seed)).z_t for seed in (1, 1, 2)
    )
    assert one.equal(same)
    assert not one.equal(other)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("time_dtype", [torch.float32, F64])
def test_results_have_the_logits_dtype_whatever_the_times(
    dtype: torch.dtype, time_dtype: torch.dtype
) -> None:
    schedule, z0, z1 = BridgeSchedule(), _tiny.logits(2, 0).to(dtype), _tiny.logits(2, 1).to(dtype)
    t, before = torch.tensor([0.5, 1.0], dtype=time_dtype), torch.tensor([0.0, 0.25], dtype=time_dtype)
    sample = schedule.sample(z0, z1, t, _tiny.generator())
    results = [sample.z_t, sample.target, *schedule.posterior(z1, z0, t, before)]
    results.append(schedule.step_target(z1, z0, t, before))
    assert {result.dtype for result in results} == {dtype}
    # 0.5, 0.25 and 1 are the same in both, so double logits keep their whole precision.
    mean = schedule.posterior(z1.double(), z0.double(), t, before)[0]
    torch.testing.assert_close(mean[1], 0.75 * z0[1].double() + 0.25 * z1[1].double(), rtol=1e-15, atol=0)


# The posterior


@pytest.mark.parametrize("grid", GRIDS, ids=["one", "five", "halved", "uneven", "thousand"])
@pytest.mark.parametrize("beta", [1e-4, 3.0])
def test_chained_posteriors_are_the_bridge_itself(grid: tuple[float, ...], beta: float) -> None:
    """q(Z_s | Z_0, Z_t) chained from t = 1 gives q(Z_s | Z_0, Z_1): (1 - s) Z_0 + s Z_1, beta s (1 - s)."""
    schedule = BridgeSchedule(beta)
    share, variance = 1.0, 0.0  # Z_t = share·Z_1 + (1 - share)·Z_0 + noise of this variance
    for before, now in reversed(list(pairwise(grid))):
        # The posterior's coefficients, read off unit vectors: rows are (Z_t, Z_0) = (1, 0) and (0, 1).
        z_t, z0 = times(1.0, 0.0)[:, None], times(0.0, 1.0)[:, None]
        mean, own = schedule.posterior(z_t, z0, times(now, now), times(before, before))
        of_now, of_end = mean[:, 0].tolist()
        assert math.isclose(of_now + of_end, 1, rel_tol=1e-14)
        share, variance = of_now * share, of_now**2 * variance + own[0, 0].item()
        assert math.isclose(share, before, abs_tol=1e-12)
        assert math.isclose(variance, beta * before * (1 - before), abs_tol=1e-12 * beta)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("beta", [1e-4, 2.0])
def test_a_step_has_the_variance_of_its_rule(steps: int, beta: float) -> None:
    n = torch.arange(1, steps + 1, dtype=F64)
    z = torch.zeros(steps, 3, dtype=F64)
    exact = BridgeSchedule(beta, steps).posterior(z, z, n / steps, (n - 1) / steps)[1]
    expected = (beta * (n - 1) / (steps * n))[:, None]
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-16)
    assert exact[0].item() == 0
    released = BridgeSchedule(beta, steps, "released").posterior(z, z, n / steps, (n - 1) / steps)[1]
    torch.testing.assert_close(released, torch.full_like(released, beta / steps), rtol=1e-12, atol=0)


def test_the_released_variance_leaves_the_mean_alone() -> None:
    z_t, z0, t, before = _tiny.logits(3, 0), _tiny.logits(3, 1), times(0.2, 0.7, 1.0), times(0, 0.1, 0.8)
    means = [BridgeSchedule(variance=rule).posterior(z_t, z0, t, before)[0] for rule in ("exact", "released")]
    assert means[0].equal(means[1])


def test_the_last_step_ends_on_the_estimate_exactly() -> None:
    z_t, z0 = _tiny.logits(3, 0).float(), _tiny.logits(3, 1).float()
    mean, variance = BridgeSchedule().posterior(z_t, z0, torch.tensor([0.2, 0.7, 1.0]), torch.zeros(3))
    assert mean.equal(z0)
    assert variance.eq(0).all()


# One step that replaces several


def step(schedule: BridgeSchedule, z_t: Tensor, score: Tensor, t: Tensor, before: Tensor) -> Tensor:
    """One noiseless step, from the definitions Ẑ_0 = Z_t - sigma_t·ε and Z_s = Ẑ_0 + (s/t)(Z_t - Ẑ_0)."""
    z0_hat = z_t - (schedule.beta * t).sqrt()[:, None] * score
    return z0_hat + (before / t)[:, None] * (z_t - z0_hat)


@pytest.mark.parametrize("beta", [1e-4, 3.0])
def test_a_step_target_lands_where_it_was_told_to(beta: float) -> None:
    schedule, z_t, goal = BridgeSchedule(beta), _tiny.logits(4, 0), _tiny.logits(4, 1)
    t, before = times(1.0, 0.6, 0.2, 1.0), times(0.6, 0.2, 0.0, 0.0)
    target = schedule.step_target(z_t, goal, t, before)
    torch.testing.assert_close(step(schedule, z_t, target, t, before), goal, rtol=1e-11, atol=1e-11)
    # The same through the package's own posterior.
    z0_hat = z_t - schedule.sigma(t)[:, None] * target
    torch.testing.assert_close(schedule.posterior(z_t, z0_hat, t, before)[0], goal, rtol=1e-11, atol=1e-11)


def test_the_papers_step_formula_is_right_only_for_a_step_to_zero() -> None:
    schedule, z_t, goal = BridgeSchedule(0.5), _tiny.logits(2, 0), _tiny.logits(2, 1)
    t, before = times(0.6, 0.6), times(0.0, 0.2)
    papers = (z_t - goal) / schedule.sigma(t)[:, None]
    ours = schedule.step_target(z_t, goal, t, before)
    torch.testing.assert_close(papers[0], ours[0], rtol=1e-12, atol=0)
    landed = step(schedule, z_t, papers, t, before)
    torch.testing.assert_close(landed[0], goal[0], rtol=1e-12, atol=1e-12)
    assert (landed[1] - goal[1]).abs().min() > 0.01


# The source's temperature


def test_the_temperatures_mean_is_two_and_a_fifteenth() -> None:
    assert math.isclose(TemperatureLaw().mean, 2 + 0.4 / 6, rel_tol=1e-15)
    for law in (TemperatureLaw(3.0, 0.5, 1.0), TemperatureLaw(1.0, 2.0, 9.0)):
        alpha = scipy.stats.beta(1, law.concentration)
        assert math.isclose(law.mean, law.base * (1 + law.spread * alpha.mean()), rel_tol=1e-12)


@pytest.mark.parametrize("law", [TemperatureLaw(), TemperatureLaw(4.0, 0.5, 2.0)])
def test_temperatures_follow_their_law(law: TemperatureLaw) -> None:
    draws = law.sample((20_000,), _tiny.generator(3)).double().numpy()
    assert draws.min() >= law.base
    assert draws.max() <= law.base * (1 + law.spread) * (1 + 1e-6)
    alpha = (draws / law.base - 1) / law.spread
    assert scipy.stats.kstest(alpha, scipy.stats.beta(1, law.concentration).cdf).pvalue > 0.01


def test_temperatures_are_repeated_by_their_generator() -> None:
    law = TemperatureLaw()
    draws = [law.sample((4, 1), _tiny.generator(seed)) for seed in (1, 1, 2)]
    assert draws[0].shape == (4, 1)
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])


def test_without_spread_the_temperature_is_constant() -> None:
    law = TemperatureLaw(base=3.0, spread=0.0)
    assert law.sample((50,), _tiny.generator()).eq(3.0).all()
    assert law.mean == 3.0


# What is refused, with the value in the message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"beta": 0.0}, "beta is 0.0"),
        ({"beta": -1e-4}, "beta is -0.0001"),
        ({"beta": math.nan}, "beta is nan"),
        ({"beta": math.inf}, "beta is inf"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"num_steps": -3}, "num_steps is -3"),
        ({"num_steps": 5.0}, "num_steps is 5.0"),
        ({"num_steps": True}, "num_steps is True"),
        ({"variance": "exactly"}, "variance is 'exactly'"),
    ],
)
def test_a_bad_schedule_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        BridgeSchedule(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"base": 0.0}, "base is 0.0"),
        ({"base": -2.0}, "base is -2.0"),
        ({"base": math.nan}, "base is nan"),
        ({"spread": -0.1}, "spread is -0.1"),
        ({"spread": math.inf}, "spread is inf"),
        ({"concentration": 0.0}, "concentration is 0.0"),
        ({"concentration": math.nan}, "concentration is nan"),
    ],
)
def test_a_bad_temperature_law_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        TemperatureLaw(**arguments)


@pytest.mark.parametrize(
    ("t", "named"),
    [
        ((0.5, 0.0), "0 to 0.5"),
        ((-0.25, 0.5), "-0.25 to 0.5"),
        ((0.5, 1.5), "0.5 to 1.5"),
        ((0.5, math.nan), "nan"),
    ],
)
def test_times_outside_the_bridge_are_refused(t: tuple[float, ...], named: str) -> None:
    schedule, z = BridgeSchedule(), _tiny.logits(2)
    with pytest.raises(ValueError, match=re.escape(named)):
        schedule.sample(z, z, times(*t))
    with pytest.raises(ValueError, match=re.escape(named)):
        schedule.posterior(z, z, times(*t), times(-1, -1))
    with pytest.raises(ValueError, match=re.escape(named)):
        schedule.step_target(z, z, times(*t), times(-1, -1))


@pytest.mark.parametrize(
    ("before", "named"),
    [
        ((0.1, 0.5), "0.1 to 0.5"),
        ((0.1, 0.75), "0.1 to 0.75"),
        ((-0.25, 0.1), "-0.25 to 0.1"),
        ((0.1, math.nan), "nan"),
    ],
)
def test_a_step_that_does_not_go_down_is_refused(before: tuple[float, ...], named: str) -> None:
    schedule, z, t = BridgeSchedule(), _tiny.logits(2), times(1.0, 0.5)
    with pytest.raises(ValueError, match=re.escape(named)):
        schedule.posterior(z, z, t, times(*before))
    with pytest.raises(ValueError, match=re.escape(named)):
        schedule.step_target(z, z, t, times(*before))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1)])
def test_times_that_do_not_match_the_images_are_refused(shape: tuple[int, ...]) -> None:
    schedule, z, good = BridgeSchedule(), _tiny.logits(2), times(0.25, 0.25)
    bad = torch.full(shape, 0.5, dtype=F64)
    named = re.escape(f"{shape}; logits of shape (2, 3) need (2,)")
    with pytest.raises(ValueError, match=named):
        schedule.sample(z, z, bad)
    for function in (schedule.posterior, schedule.step_target):
        with pytest.raises(ValueError, match=named):
            function(z, z, bad, good)
        with pytest.raises(ValueError, match=named):
            function(z, z, 2 * good, bad / 2)


@pytest.mark.parametrize(
    ("one", "other"), [((2, 3), (2, 4)), ((2, 3), (1, 3)), ((2,), (2,)), ((2, 3, 1),) * 2]
)
def test_logits_that_do_not_match_are_refused(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    schedule, t, before = BridgeSchedule(), times(0.5, 0.5), times(0.25, 0.25)
    with pytest.raises(ValueError, match=re.escape(f"{one} and {other}")):
        schedule.sample(torch.zeros(one), torch.zeros(other), t)
    for function in (schedule.posterior, schedule.step_target):
        with pytest.raises(ValueError, match=re.escape(f"{one} and {other}")):
            function(torch.zeros(other), torch.zeros(one), t, before)
