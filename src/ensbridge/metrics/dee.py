"""A model beside the deep ensemble: how many members it is worth, how much of the way it goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike

ROUNDING = 1e-6  # nats an image: models that differ by less are equally good, such as copies of one network


def deep_ensemble_equivalent(nll: float, nll_by_size: Sequence[float]) -> float:
    """DEE: how many members a deep ensemble needs for this NLL; `nll_by_size` is that of DE-1, DE-2, …, DE-M.

    Sizes count by their running minimum, in which a larger ensemble is better only beyond rounding. Between
    two sizes DEE is linear in NLL, at a tie it is the smallest size, above DE-1's NLL it is extrapolated
    below 1 (0 where there is no slope to extrapolate with), and below the NLL of every size it is M, the most
    that was measured.

    >>> round(deep_ensemble_equivalent(0.25, [0.4, 0.3, 0.2]), 4)
    2.5
    >>> round(deep_ensemble_equivalent(0.45, [0.4, 0.3, 0.2]), 4)
    0.5
    """
    best = _running_minimum(nll, nll_by_size)
    first = best[0]
    if nll > first + ROUNDING:
        # DE-1 → DE-2, or the first size that is strictly better than DE-1 where DE-2 is not.
        for size, value in enumerate(best, start=1):
            if value < first:
                return 1 - (nll - first) * (size - 1) / (first - value)
        return 0.0
    for size, value in enumerate(best, start=1):
        if abs(value - nll) <= ROUNDING:
            return float(size)
        if value < nll:
            above = best[size - 2]
            return (size - 1) + (above - nll) / (above - value)
    return float(len(best))


def format_dee(nll: float, nll_by_size: Sequence[float]) -> float | str:
    """DEE as it is reported: a number, or ">M" where the NLL is below that of every measured ensemble.

    >>> format_dee(0.3, [0.4, 0.3]), format_dee(0.1, [0.4, 0.3])
    (2.0, '>2')
    """
    if nll < _running_minimum(nll, nll_by_size)[-1] - ROUNDING:
        return f">{len(nll_by_size)}"
    return deep_ensemble_equivalent(nll, nll_by_size)


def gap_closed(
    nll_one: ArrayLike, nll_model: ArrayLike, nll_target: ArrayLike, *, resamples: int = 1000, seed: int = 0
) -> tuple[float, float] | tuple[None, None]:
    """The share of the NLL distance from one member to the target that a model closes, with its error.

    Takes each image's NLL (B,) under the one member, the model and the target (say DE-3), on the same images.
    The error is the standard deviation over paired bootstrap resamples of the images. Where the target is no
    better than one member, or an NLL is infinite, there is no such share: (None, None).

    >>> gap, error = gap_closed([0.4, 0.6, 0.8], [0.3, 0.4, 0.8], [0.2, 0.4, 0.6])
    >>> round(gap, 4), error > 0
    (0.5, True)
    """
    if resamples < 2:
        raise ValueError(f"resamples is {resamples}; a standard deviation needs at least 2")
    one, model, target = (np.asarray(nll, dtype=np.float64) for nll in (nll_one, nll_model, nll_target))
    if one.ndim != 1 or one.size == 0 or not one.shape == model.shape == target.shape:
        raise ValueError(
            f"per-image NLLs have shapes {one.shape}, {model.shape} and {target.shape}; "
            "they must be the same (B,) with at least 1 image"
        )
    if np.isnan([one, model, target]).any():
        raise ValueError("per-image NLLs contain nan; check the predictions that they were computed from")
    if not np.isfinite([one, model, target]).all():
        return None, None
    closed, whole = one - model, one - target
    if whole.mean() <= ROUNDING:
        return None, None
    rng = np.random.default_rng(seed)
    gaps = []
    for _ in range(resamples):
        image = rng.integers(one.size, size=one.size)
        distance = whole[image].sum()
        if distance != 0:  # a small set may be drawn without any image that tells the two apart
            gaps.append(closed[image].sum() / distance)
    if len(gaps) < 2:
        return None, None
    return float(closed.sum() / whole.sum()), float(np.std(gaps, ddof=1))


def _running_minimum(nll: float, nll_by_size: Sequence[float]) -> list[float]:
    if len(nll_by_size) == 0:
        raise ValueError("nll_by_size is empty; give the NLL of DE-1, DE-2, … with at least one value")
    if not math.isfinite(nll):
        raise ValueError(f"nll is {nll}; a deep-ensemble equivalent needs a finite NLL")
    for size, value in enumerate(nll_by_size, start=1):
        if not math.isfinite(value):
            raise ValueError(f"the NLL of DE-{size} is {value}; each must be finite")
    return list(
        accumulate(map(float, nll_by_size), lambda best, value: value if value < best - ROUNDING else best)
    )
