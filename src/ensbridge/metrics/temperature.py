"""The temperature that is best for a prediction, alone or with a share of another prediction's logits."""

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


def fit_source_logit_weight(log_probs: Tensor, source: Tensor, labels: Tensor) -> tuple[float, float]:
    """The T and w for which softmax((log_probs + w·source) / T) has the least NLL; T is above 0.

    `source` is another prediction (B, K) for the same images, as logits or log-probabilities. The NLL is
    convex in 1/T and w/T. Where the least is not at a T in [0.01, 100], it is `fit_temperature`'s, and w 0.

    >>> draws = torch.Generator().manual_seed(0)
    >>> truth, source = torch.randn(2, 20_000, 3, generator=draws)
    >>> labels = torch.multinomial(truth.softmax(1), 1, generator=draws)[:, 0]
    >>> temperature, weight = fit_source_logit_weight(2 * (truth + source), source, labels)  # twice too much
    >>> round(temperature, 1), round(weight, 1)
    (2.0, -2.0)
    """
    log_probs_BK, labels_B = checked(log_probs, labels, normalised=False)
    source_BK = checked(source, labels, normalised=False)[0]
    alone = fit_temperature(log_probs, labels)
    both_BKP = torch.stack([log_probs_BK, source_BK], -1)
    margin_BKP = both_BKP - both_BKP.gather(1, labels_B[:, None, None].expand(-1, 1, 2))
    if not margin_BKP.isfinite().all():
        return alone, 0.0
    low, high = INVERSE_TEMPERATURE_RANGE
    inverse, weight = _least_nll_of_two(margin_BKP, torch.tensor([1 / alone, 0.0]).to(margin_BKP)).tolist()
    return (1 / inverse, weight / inverse) if low <= inverse <= high else (alone, 0.0)


def _least_nll_of_two(margin_BKP: Tensor, start_P: Tensor) -> Tensor:
    """The x that minimises f(x) = mean over B of log Σ_k exp(margin_k · x): Newton, in steps that go down."""

    def loss(x_P: Tensor) -> Tensor:
        return (margin_BKP @ x_P).logsumexp(1).mean()

    x_P = start_P
    for _ in range(100):
        probs_BK1 = (margin_BKP @ x_P).softmax(1)[..., None]
        mean_BP = (probs_BK1 * margin_BKP).sum(1)
        slope_P = mean_BP.mean(0)
        away_BKP = margin_BKP - mean_BP[:, None]
        curvature_PP = torch.einsum("bkp,bkq->pq", probs_BK1 * away_BKP, away_BKP) / len(margin_BKP)
        ridge = 1e-12 * curvature_PP.trace() + torch.finfo(x_P.dtype).tiny
        step_P = torch.linalg.solve(curvature_PP + ridge * torch.eye(2).to(x_P), slope_P)
        here = loss(x_P)
        while loss(x_P - step_P) > here and step_P.abs().max() > 1e-9:
            step_P = step_P / 2
        x_P = x_P - step_P
        if step_P.abs().max() <= 1e-9:
            break
    return x_P


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
