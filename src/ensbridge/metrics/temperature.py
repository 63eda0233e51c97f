"""The one temperature that is best for a prediction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ensbridge.metrics.checks import checked

INVERSE_TEMPERATURE_RANGE = (0.01, 100.0)


def fit_temperature(log_probs: Tensor, labels: Tensor) -> float:
    """The temperature T in [0.01, 100] for which softmax(log_probs / T) has the least NLL.

    Logits give the same T as their log-probabilities. Where no temperature is better than another, T is 1;
    images whose label has probability zero cost infinitely much at any T and are left out.

    >>> log_probs = torch.tensor([[0.99, 0.01]]).log().expand(4, 2)
    >>> round(fit_temperature(log_probs, torch.tensor([0, 0, 0, 1])), 3)  # log 99 / log 3
    4.183
    """
    log_probs_BK, labels_B = checked(log_probs, labels, normalised=False)
    if len(labels_B) == 0:
        raise ValueError("a temperature was to be fitted on 0 images; give at least 1 image")
    own_B = log_probs_BK.gather(1, labels_B[:, None])[:, 0]
    possible_B = own_B > -math.inf
    if not possible_B.any():
        raise ValueError(
            f"all of the {len(labels_B)} labels have probability zero, so no temperature is best; check them"
        )
    return 1.0 / _least_nll((log_probs_BK - own_B[:, None])[possible_B])


def _least_nll(margin_BK: Tensor) -> float:
    """The x = 1/T that minimises f(x) = mean over B of log Σ_k exp(x margin_k): Newton, else bisection."""
    finite_BK = margin_BK.clamp(min=torch.finfo(margin_BK.dtype).min)  # so that 0 · -inf is 0 below

    def slopes(x: float) -> tuple[float, float]:
        # f is convex: f' is the mean of the margin under softmax(x margin), f'' its variance.
        probs_BK = (x * margin_BK).softmax(1)
        mean_B = (probs_BK * finite_BK).sum(1)
        variance_B = torch.where(probs_BK > 0, probs_BK * (finite_BK - mean_B[:, None]) ** 2, 0).sum(1)
        return mean_B.mean().item(), variance_B.mean().item()

    low, high = INVERSE_TEMPERATURE_RANGE
    low_slope, high_slope = slopes(low)[0], slopes(high)[0]
    if low_slope == high_slope == 0:
        return 1.0
    if low_slope >= 0:
        return low
    if high_slope <= 0:
        return high
    x, step = 1.0, high - low
    for _ in range(200):
        slope, curvature = slopes(x)
        low, high = (x, high) if slope < 0 else (low, x)
        newton = x - slope / curvature if curvature > 0 else math.nan
        # Newton's step is taken only inside the bracket and while steps at least halve; nan fails both.
        safe = low <= newton <= high and abs(newton - x) <= step / 2
        following = newton if safe else math.sqrt(low * high)
        x, step = following, abs(following - x)
        if step <= 1e-13 * x:
            break
    return x
