"""DEE and the gap closed, against plain loops and a bootstrap by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from ensbridge.metrics import (
    deep_ensemble_equivalent,
    format_dee,
    gap_closed,
)

MONOTONE = [0.4, 0.3, 0.25, 0.24, 0.2]
BUMPY = [0.4, 0.3, 0.35, 0.3, 0.2]
LATE = [0.4, 0.5, 0.4, 0.2]


@pytest.mark.parametrize("size", range(1, 6))
def test_dee_of_a_deep_ensemble_is_its_size(size: int) -> None:
    assert deep_ensemble_equivalent(MONOTONE[size - 1], MONOTONE) == size
    assert format_dee(MONOTONE[size - 1], MONOTONE) == size


@pytest.mark.parametrize(
    ("nll", "nll_by_size", "expected"),
    [
        pytest.param(0.35, MONOTONE, 1.5, id="between 1 and 2"),
        pytest.param(0.21, MONOTONE, 4.75, id="between 4 and 5"),
        pytest.param(0.4, BUMPY, 1, id="bumpy, 1"),
        pytest.param(0.3, BUMPY, 2, id="the smallest size at a tie"),
        pytest.param(0.35, BUMPY, 1.5, id="a bump does not count"),
        pytest.param(0.25, BUMPY, 4.5, id="after the bump"),
        pytest.param(0.2, BUMPY, 5, id="bumpy, 5"),
        pytest.param(0.4, LATE, 1, id="tie with 1"),
        pytest.param(0.3, LATE, 3.5, id="after a flat start"),
        pytest.param(0.45, MONOTONE, 0.5, id="below 1"),
        pytest.param(0.7, MONOTONE, -2, id="far below 1"),
        pytest.param(0.5, LATE, -0.5, id="below 1, with the slope to the first better size"),
        pytest.param(0.1, MONOTONE, 5, id="no more than M"),
        pytest.param(0.1, [0.4], 1, id="one member, better"),
        pytest.param(0.4, [0.4], 1, id="one member, equal"),
        pytest.param(0.5, [0.4], 0, id="one member, worse"),
        pytest.param(0.5, [0.4, 0.4, 0.6], 0, id="flat, worse"),
        pytest.param(0.4, [0.4, 0.4, 0.6], 1, id="flat, equal"),
        pytest.param(0.3, [0.4, 0.4, 0.6], 3, id="flat, better"),
        pytest.param(-0.1, [0.1, 0.0, -0.2], 2.5, id="the sign does not matter"),
    ],
)
def test_dee(nll: float, nll_by_size: list[float], expected: float) -> None:
    measured = deep_ensemble_equivalent(nll, nll_by_size)
    assert isinstance(measured, float)
    assert measured == pytest.approx(expected, abs=1e-9)


def test_dee_falls_as_nll_grows() -> None:
    for nll_by_size in (MONOTONE, BUMPY, LATE):
        values = [deep_ensemble_equivalent(value, nll_by_size) for value in np.linspace(0.1, 0.9, 161)]
        assert all(above >= below for above, below in pairwise(values))


def test_dee_is_reported_as_more_than_m_only_below_every_ensemble() -> None:
    assert format_dee(0.19, MONOTONE) == ">5"
    assert format_dee(0.2, MONOTONE) == 5.0
    assert format_dee(0.25, [0.4, 0.3, 0.5]) == ">3"
    assert format_dee(0.3, [0.4, 0.3, 0.5]) == 2.0
    assert format_dee(0.45, MONOTONE) == pytest.approx(0.5)


# --------------------------------------------------------------------------------------------------- gap


def per_image_nlls(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    one = rng.exponential(1.0, count)
    target = 0.7 * one + rng.normal(0, 0.1, count)
    return one, 0.8 * one + rng.normal(0, 0.2, count), target


def test_the_gap_is_the_share_of_the_distance() -> None:
    one, model, target = per_image_nlls(200)
    gap, _ = gap_closed(one, model, target)
    assert gap == pytest.approx((one.mean() - model.mean()) / (one.mean() - target.mean()), rel=1e-12)
    assert gap_closed(one, target, target) == pytest.approx((1.0, 0.0), abs=1e-12)
    assert gap_closed(one, one, target) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert gap_closed(*(torch.from_numpy(each) for each in (one, model, target))) == gap_closed(
        one, model, target
    )


def test_the_error_of_the_gap_is_that_of_a_paired_bootstrap() -> None:
    one, model, target = per_image_nlls(200)
    rng = np.random.default_rng(123)
    gaps = []
    for _ in range(2000):
        draw = [int(rng.integers(200)) for _ in range(200)]
        means = [sum(each[image] for image in draw) / 200 for each in (one, model, target)]
        gaps.append((means[0] - means[1]) / (means[0] - means[2]))
    _, error = gap_closed(one, model, target)
    assert error == pytest.approx(np.std(gaps), rel=0.12)  # two spreads of 1000 draws differ by about 3 %


def test_the_error_repeats_with_its_seed() -> None:
    nlls = per_image_nlls(50)
    assert gap_closed(*nlls) == gap_closed(*nlls, seed=0) == gap_closed(*nlls, resamples=1000)
    assert gap_closed(*nlls, seed=1) != gap_closed(*nlls)
    assert gap_closed(*nlls, resamples=999) != gap_closed(*nlls)


def test_without_a_distance_there_is_no_gap() -> None:
    assert gap_closed([0.5, 0.25], [0.1, 0.1], [0.25, 0.5]) == (None, None)
    assert gap_closed([0.5, math.inf], [0.1, 0.1], [0.25, 0.5]) == (None, None)
    worse = gap_closed([0.3, 0.3], [0.9, 0.9], [0.6, 0.6])
    assert worse == (None, None)  # else a model worse than both would have closed it twice over


def test_members_that_are_one_network_span_no_sizes() -> None:
    same = [0.3, 0.3 - 1e-9, 0.3 + 1e-9]  # rounding of one and the same prediction
    assert deep_ensemble_equivalent(0.4, same) == 0.0
    assert deep_ensemble_equivalent(0.3, same) == 1.0
    assert format_dee(0.2, same) == ">3"
    for other in (0.3 - 2e-9, 0.3 + 2e-9):  # another copy of it
        assert format_dee(other, same) == deep_ensemble_equivalent(other, same) == 1.0
    assert gap_closed([0.3, 0.4], [0.9, 0.9], [0.3 - 1e-9, 0.4]) == (None, None)


def test_a_resample_without_a_distance_is_left_out() -> None:
    # A third of the draws of these images sees only those on which one member and the target agree.
    gap, error = gap_closed([0.5, 0.5, 0.5], [0.4, 0.45, 0.3], [0.5, 0.5, 0.2])
    assert gap == pytest.approx(0.35 / 0.3)
    assert error is not None
    assert 0 < error < 1


@pytest.mark.parametrize("function", [deep_ensemble_equivalent, format_dee])
def test_wrong_nll_by_size_is_refused(function: Callable[[float, list[float]], object]) -> None:
    with pytest.raises(ValueError, match="nll_by_size is empty"):
        function(0.3, [])
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=f"nll is {value}"):
            function(value, [0.4, 0.3])
        with pytest.raises(ValueError, match=f"DE-2 is {value}"):
            function(0.3, [0.4, value])


def test_wrong_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2,\), \(1,\) and \(2,\)"):
        gap_closed([0.1, 0.2], [0.1], [0.1, 0.2])
    with pytest.raises(ValueError, match="at least 1 image"):
        gap_closed([], [], [])
    with pytest.raises(ValueError, match="contain nan"):
        gap_closed([0.1], [math.nan], [0.2])
    with pytest.raises(ValueError, match="resamples is 1"):
        gap_closed([0.1], [0.1], [0.2], resamples=1)
