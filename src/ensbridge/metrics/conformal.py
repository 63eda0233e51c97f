"""Conformal prediction: sets of classes that hold the label with a chosen probability.

A threshold is calibrated on labelled images; sets of exchangeable new images then hold their labels with a
probability of at least 1 - alpha, whatever the model. The score of a class is high where it fits badly:

    lac   1 - p(class), least ambiguous sets (Sadinle et al., 2019): the smallest sets on average
    aps   the probability of all more probable classes + u·p(class) (Romano et al., 2020): sets that grow with
          the difficulty of an image. u is uniform on [0, 1] with a `generator`, else 1.

The sets of `lac`, and with a generator of `aps`, can be empty.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ensbridge.metrics.checks import checked, checked_labels

ConformalMethod = Literal["lac", "aps"]


def conformal_threshold(
    log_probs: Tensor,
    labels: Tensor,
    alpha: float = 0.1,
    method: ConformalMethod = "lac",
    generator: torch.Generator | None = None,
) -> float:
    """The ⌈(n + 1)(1 - alpha)⌉-th smallest score of the labels; infinity where n images are too few.

    >>> log_probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]]).log()
    >>> round(conformal_threshold(log_probs, torch.tensor([0, 0, 0]), alpha=0.5), 6)
    0.2
    >>> conformal_threshold(log_probs, torch.tensor([0, 0, 0]), alpha=0.1)
    inf
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}; it must lie between 0 and 1, such as 0.1 for a coverage of 90 %")
    log_probs_BK, labels_B = checked(log_probs, labels)
    scores_B = _scores(log_probs_BK, method, generator).gather(1, labels_B[:, None])[:, 0]
    rank = math.ceil((len(scores_B) + 1) * (1 - alpha) - 1e-9)
    return scores_B.sort().values[rank - 1].item() if rank <= len(scores_B) else math.inf


def conformal_sets(
    log_probs: Tensor,
    threshold: float,
    method: ConformalMethod = "lac",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Which classes each image's set holds, (B, K): those whose score is at most the threshold.

    >>> conformal_sets(torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log(), threshold=0.7).tolist()
    [[True, False], [True, True]]
    """
    no_labels = torch.zeros(len(log_probs), dtype=torch.long)
    return _scores(checked(log_probs, no_labels)[0], method, generator) <= threshold


def coverage(sets: Tensor, labels: Tensor) -> float:
    """The share of images whose set holds their label.

    >>> coverage(torch.tensor([[True, False], [True, True]]), torch.tensor([1, 1]))
    0.5
    """
    if sets.ndim != 2 or sets.dtype != torch.bool or len(sets) == 0 or labels.shape != sets.shape[:1]:
        raise ValueError(
            f"sets are {sets.dtype} of shape {tuple(sets.shape)}, labels of {tuple(labels.shape)}; give "
            "booleans (images, classes) as conformal_sets does, and a label for each of at least 1 image"
        )
    labels_B = checked_labels(labels, sets.shape[1])
    return sets.cpu().gather(1, labels_B[:, None]).double().mean().item()


def _scores(log_probs_BK: Tensor, method: ConformalMethod, generator: torch.Generator | None) -> Tensor:
    """How badly each class fits each image (B, K)."""
    if method not in ("lac", "aps"):
        raise ValueError(f"method is {method!r}; it must be 'lac' or 'aps'")
    probs_BK = log_probs_BK.log_softmax(1).exp()
    if method == "lac":
        return 1 - probs_BK
    sorted_BK, order_BK = probs_BK.sort(stable=True, dim=1, descending=True)
    above_BK = sorted_BK.cumsum(1) - sorted_BK
    share_B1 = torch.ones(len(probs_BK), 1, dtype=probs_BK.dtype)
    if generator is not None:
        share_B1 = torch.rand(
            len(probs_BK), 1, generator=generator, dtype=probs_BK.dtype, device=generator.device
        )
    return torch.empty_like(probs_BK).scatter_(1, order_BK, above_BK + share_B1.cpu() * sorted_BK)
