"""What a prediction must be to be measured."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def checked(log_probs: Tensor, labels: Tensor, normalised: bool = True) -> tuple[Tensor, Tensor]:
    """The inputs as float64 and int64 on the CPU, or a ValueError that says what is wrong with them."""
    shape = tuple(log_probs.shape)
    if log_probs.ndim != 2 or shape[1] == 0:
        raise ValueError(f"log_probs have shape {shape}; they must be (images, classes)")
    if not log_probs.is_floating_point():
        raise ValueError(f"log_probs are {log_probs.dtype}; they must be floating point")
    if tuple(labels.shape) != shape[:1]:
        raise ValueError(f"labels have shape {tuple(labels.shape)}; {shape[0]} images need ({shape[0]},)")
    log_probs_BK, labels_B = log_probs.detach().cpu().double(), checked_labels(labels, shape[1])
    for name, wrong_BK in (("nan", log_probs_BK.isnan()), ("inf", log_probs_BK == math.inf)):
        if wrong_BK.any():
            image = int(wrong_BK.any(1).nonzero()[0])
            raise ValueError(
                f"log_probs contain {name}, first at image {image}; check the model that made them"
            )
    if normalised and len(labels_B) > 0:
        total = log_probs_BK.logsumexp(1).max().exp().item()
        if total > 1.1:  # far beyond rounding, also in bfloat16: these are logits or probabilities
            raise ValueError(
                f"log_probs give an image a total probability of {total:.4g}; pass logits.log_softmax(-1)"
            )
    return log_probs_BK, labels_B


def checked_labels(labels: Tensor, classes: int) -> Tensor:
    """The labels as int64 on the CPU, or a ValueError where they are none of so many classes.

    >>> checked_labels(torch.tensor([0, 3]), classes=3)
    Traceback (most recent call last):
    ValueError: labels contain 3; with 3 classes they lie in 0..2
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}; they must be integers, so convert them with .long()")
    labels_B = labels.detach().cpu().long()
    outside = labels_B[(labels_B < 0) | (labels_B >= classes)]
    if len(outside) > 0:
        first = int(outside[0])
        raise ValueError(f"labels contain {first}; with {classes} classes they lie in 0..{classes - 1}")
    return labels_B


def checked_scores(scores: Tensor) -> Tensor:
    """Scores of images as float64 on the CPU, or a ValueError that says what is wrong with them.

    >>> checked_scores(torch.tensor([0.5, math.nan]))
    Traceback (most recent call last):
    ValueError: scores contain nan; check the predictions that they were computed from
    """
    if scores.numel() == 0:
        raise ValueError(f"scores have shape {tuple(scores.shape)}; give those of at least 1 image")
    if scores.isnan().any():
        raise ValueError("scores contain nan; check the predictions that they were computed from")
    return scores.detach().cpu().double()
