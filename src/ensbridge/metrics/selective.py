"""Selective classification: how many errors are left when a model may abstain on what it is least sure of.

Images are accepted from the lowest score to the highest. Where scores are equal, the errors among them count
as if they came evenly: it is the mean over every order of these images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ensbridge.metrics.checks import checked_scores


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
