"""Classifiers that look their logits up, and their scores by plain loops; used as `import _tables`.

Image number n is the n-th unit vector; the first `TEST` images are the test split, the rest validation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from ensbridge.evaluation.scores import Row, Scores
from ensbridge.models.ensemble import Ensemble

TEST, VAL, CLASSES = 40, 25, 3
Array = NDArray[np.float64]


class Table(nn.Module):
    """A classifier that looks its logits up: image number n gets row n."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(*logits.shape, bias=False))
        self.net[1].weight.data = logits.T.clone()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


def table(seed: int, knowledge: float = 1.5) -> Table:
    logits = torch.randn(TEST + VAL, CLASSES, generator=torch.Generator().manual_seed(seed))
    return Table(logits + knowledge * torch.eye(CLASSES)[LABELS])


LABELS = torch.arange(TEST + VAL) % CLASSES
IMAGES = torch.eye(TEST + VAL)[:, None, None, :]  # image number n is the n-th unit vector
SET, VALIDATION = (IMAGES[:TEST], LABELS[:TEST]), (IMAGES[TEST:], LABELS[TEST:])
MEMBERS = [table(seed) for seed in (14, 15, 16)]  # whose ensembles falls from step to step


def probabilities(tables: Sequence[Table]) -> Array:
    """The mean softmax, in double, of every image."""
    logits = np.stack([each.net[1].weight.detach().double().numpy().T for each in tables])
    exponentials = np.exp(logits)
    return (exponentials / exponentials.sum(-1, keepdims=True)).mean(0)


def nll_by_hand(probs: Array, labels: Sequence[int]) -> Array:
    return np.array([-math.log(row[label]) for row, label in zip(probs, labels, strict=True)])


def metrics_by_hand(probs: Array, labels: Sequence[int]) -> dict[str, float]:
    right = [int(row.argmax() == label) for row, label in zip(probs, labels, strict=True)]
    brier = [((row - np.eye(CLASSES)[label]) ** 2).sum() for row, label in zip(probs, labels, strict=True)]
    top, error = probs.max(1), 0.0
    for number in range(15):
        inside = [i for i in range(len(top)) if number / 15 < top[i] <= (number + 1) / 15]
        error += abs(sum(right[i] for i in inside) - sum(top[i] for i in inside)) / len(top)
    measured = {"acc": 100 * sum(right) / len(right), "brier": sum(brier) / len(brier), "ece": error}
    return measured | {"nll": nll_by_hand(probs, labels).mean()}


def temperature_by_hand(probs: Array, labels: Sequence[int]) -> float:
    def cost(log_temperature: float) -> float:
        powered = probs ** math.exp(-log_temperature)
        return nll_by_hand(powered / powered.sum(1, keepdims=True), labels).mean()

    return math.exp(minimize_scalar(cost, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x)


def row_of(scores: Scores, model: str) -> Row:
    (row,) = [row for row in scores.rows if row.model == model]
    return row


def ensembles(members: Sequence[nn.Module] = MEMBERS) -> dict[str, nn.Module]:
    ensemble = Ensemble(members)
    return {f"DE-{size}": ensemble.first(size) for size in range(1, len(ensemble) + 1)}
