"""What a score of uncertainty is worth: for telling two kinds of images apart, and for abstaining.

A score is high where a model is uncertain. `inside` are the scores of images that should have low ones, such
as test images or those that were classified correctly; `outside` are those of the others, such as
out-of-distribution images or errors. Scores that are equal count half, whichever order they come in.

To abstain, images are accepted from the lowest score to the highest. Where scores are equal, the errors among
them count as if they came evenly: it is the mean over every order of these images.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ensbridge.metrics.checks import checked_scores


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The area under the ROC curve: the probability that a score of `outside` exceeds one of `inside`.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))
    0.875
    """
    return delong(inside, outside)[0].item()


def delong(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """AUROCs of several scores of the same images, and their covariance over images (DeLong et al., 1988).

    Scores are (N,) and (M,), or (S, N) and (S, M) for S scores; AUROCs are (S,), the covariance is (S, S).
    The standard error of an AUROC is the root of its variance. With one image of a kind it is nan.

    >>> one, other = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0]]), torch.tensor([[2.0, 4.0], [4.0, 5.0]])
    >>> areas, covariance = delong(one, other)
    >>> areas.tolist(), round(covariance.diagonal().sqrt()[0].item(), 4)
    ([0.75, 1.0], 0.2887)
    """
    inside_SN, outside_SM = (
        checked_scores(scores).reshape(-1, scores.shape[-1]) for scores in (inside, outside)
    )
    if len(inside_SN) != len(outside_SM):
        raise ValueError(f"there are {len(inside_SN)} scores of inside and {len(outside_SM)} of outside")
    count, more = inside_SN.shape[1], outside_SM.shape[1]
    ranks = mid_ranks(torch.cat([inside_SN, outside_SM], 1))
    # The share of the other kind that lies on the right side of each image.
    right_SN = 1 - (ranks[:, :count] - mid_ranks(inside_SN)) / more
    right_SM = (ranks[:, count:] - mid_ranks(outside_SM)) / count
    return right_SM.mean(1), _covariance(right_SN) + _covariance(right_SM)


def auroc_difference(inside: Tensor, outside: Tensor) -> tuple[float, float]:
    """By how much the first of two scores of the same images has the larger AUROC, and its standard error.

    Scores are (2, N) and (2, M); the error is DeLong's of paired scores.

    >>> one, other = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0]]), torch.tensor([[2.0, 4.0], [4.0, 5.0]])
    >>> difference, error = auroc_difference(one, other)
    >>> difference, round(error, 4)
    (-0.25, 0.2887)
    """
    if len(inside) != 2 or len(outside) != 2:
        raise ValueError(f"there are {len(inside)} and {len(outside)} scores; a difference is of 2")
    areas, covariance = delong(inside, outside)
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    return (areas[0] - areas[1]).item(), variance.clamp(min=0).sqrt().item()


def fpr95(inside: Tensor, outside: Tensor, tpr: float = 0.95) -> float:
    """The share of `outside` that passes for `inside` at the threshold that 95 % of `inside` pass.

    As for out-of-distribution detection (Liang et al., 2018): 0 is best, 0.95 is chance. The threshold is the
    lowest score that at least a share `tpr` of `inside` does not exceed.

    >>> fpr95(torch.arange(100.0), torch.tensor([50.0, 94.0, 94.5, 200.0]))
    0.5
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"tpr is {tpr}; it must be above 0 and at most 1")
    inside_N, outside_M = checked_scores(inside), checked_scores(outside)
    passing = math.ceil(tpr * len(inside_N) - 1e-9)  # 0.95 · 20 is 19, whatever rounding says
    return (outside_M <= inside_N.sort().values[passing - 1]).double().mean().item()


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's rank correlation of two scores of the same images; nan where one of them is constant.

    >>> round(rank_correlation(torch.tensor([1.0, 2.0, 30.0]), torch.tensor([0.1, 0.2, 0.3])), 6)
    1.0
    """
    if one.shape != other.shape:
        raise ValueError(f"scores have shapes {tuple(one.shape)} and {tuple(other.shape)}; give them alike")
    ranks = mid_ranks(torch.stack([checked_scores(one), checked_scores(other)]))
    return torch.corrcoef(ranks)[0, 1].item()


def mid_ranks(scores_SN: Tensor) -> Tensor:
    """The rank of each score in its row, from 1; equal scores share the mean of their ranks.

    >>> mid_ranks(torch.tensor([[5.0, 7.0, 5.0]])).tolist()
    [[1.5, 3.0, 1.5]]
    """
    rows = []
    for row in scores_SN:
        _, value, count = torch.unique(row, return_inverse=True, return_counts=True)
        rows.append((count.cumsum(0) - (count - 1) / 2).double()[value])
    return torch.stack(rows)


def _covariance(values_SN: Tensor) -> Tensor:
    """The covariance (S, S) of the rows' means."""
    count = values_SN.shape[1]
    away = values_SN - values_SN.mean(1, keepdim=True)
    return away @ away.T / (count * (count - 1)) if count > 1 else torch.full([len(values_SN)] * 2, math.nan)


def aurc(scores: Tensor, errors: Tensor) -> float:
    """The area under the risk-coverage curve: the error rate of the accepted images, mean over coverages.

    `scores` (N,) are high where the model is uncertain, `errors` (N,) say which images it got wrong
    (Geifman & El-Yaniv, 2017; Geifman et al., 2019). Lower is better; errors at high confidence weigh most.

    >>> round(aurc(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([False, False, False, True])), 6)
    0.0625
    """
    errors_N = _errors_accepted(scores, errors)
    return (errors_N / torch.arange(1, len(errors_N) + 1)).mean().item()


def augrc(scores: Tensor, errors: Tensor) -> float:
    """The area under the generalised risk-coverage curve: errors among all images that are accepted.

    It is (1 - AUROC)·acc·(1 - acc) + (1 - acc)²/2 with the AUROC of errors by the score (Traub et al., 2024):
    from 0 to 1/2, lower is better, and every error weighs the same.

    >>> augrc(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([False, False, False, True]))
    0.03125
    """
    errors_N = _errors_accepted(scores, errors)
    return (errors_N.sum() - errors_N[-1] / 2).item() / len(errors_N) ** 2


def _errors_accepted(scores: Tensor, errors: Tensor) -> Tensor:
    """How many errors are among the first 1, 2, …, N images (N,), as a mean over orders of equal scores."""
    if scores.ndim != 1 or errors.shape != scores.shape:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)}, errors {tuple(errors.shape)}; both must be (images,)"
        )
    _, value, count = torch.unique(checked_scores(scores), return_inverse=True, return_counts=True)
    wrong = torch.zeros(len(count), dtype=torch.float64).index_add(0, value, errors.detach().cpu().double())
    return (wrong / count).repeat_interleave(count).cumsum(0)
