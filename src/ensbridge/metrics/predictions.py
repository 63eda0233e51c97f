"""Metrics of a prediction in one call."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ensbridge.metrics.checks import checked
from ensbridge.metrics.stream import MetricStream, nll_each
from ensbridge.metrics.temperature import fit_temperature


def accuracy(log_probs: Tensor, labels: Tensor) -> float:
    """The share of images, from 0 to 1, whose most probable class is the label.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log(), torch.tensor([0, 0]))
    0.5
    """
    return _measure(log_probs, labels)["acc"]


def nll(log_probs: Tensor, labels: Tensor) -> float:
    """The mean negative log-likelihood of the labels, in nats; inf where a label was given probability zero.

    >>> round(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log(), torch.tensor([0, 0])), 4)
    1.0397
    """
    return _measure(log_probs, labels)["nll"]


def brier(log_probs: Tensor, labels: Tensor) -> float:
    """The mean over images of the squared distance to the one-hot label, summed over classes.

    >>> round(brier(torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log(), torch.tensor([0, 0])), 4)
    0.37
    """
    return _measure(log_probs, labels)["brier"]


def ece(log_probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """The expected calibration error of the most probable class over the whole set.

    Confidences fall in `bins` bins (a, b] of equal width: one on an edge belongs to the bin below it, so 1 to
    the last bin, and 0 belongs to the first.

    >>> round(ece(torch.tensor([[1.0, 0.0], [1.0, 0.0]]).log(), torch.tensor([0, 1])), 4)
    0.5
    """
    return _measure(log_probs, labels, bins=bins)["ece"]


def calibrated_nll(log_probs: Tensor, labels: Tensor, val_log_probs: Tensor, val_labels: Tensor) -> float:
    """The NLL on (log_probs, labels) at the one temperature that is best on the validation set.

    >>> sure = torch.tensor([[0.99, 0.01]]).log().expand(4, 2)
    >>> labels = torch.tensor([0, 0, 0, 1])
    >>> round(nll(sure, labels), 4), round(calibrated_nll(sure, labels, sure, labels), 4)
    (1.1588, 0.5623)
    """
    return _measure(log_probs, labels, temperature=fit_temperature(val_log_probs, val_labels))["cnll"]


def standard_error(values: Tensor) -> float:
    """The standard error of a mean; infinite for a single value, of which nothing is known.

    >>> round(standard_error(torch.tensor([0.0, 2.0])), 6), standard_error(torch.ones(1))
    (1.0, inf)
    """
    return values.double().std().item() / math.sqrt(len(values)) if len(values) > 1 else math.inf


def bootstrap_error(
    statistic: Callable[..., float], *columns: Tensor, generator: torch.Generator, resamples: int = 200
) -> float:
    """The standard error of a statistic of images: its deviation over resamples of them with replacement.

    Columns are (…, N), images last. Those of one tensor are drawn together, those of another by themselves.

    >>> draws = torch.Generator().manual_seed(0)
    >>> values = torch.randn(400, generator=draws)
    >>> error = bootstrap_error(lambda drawn: drawn.mean().item(), values, generator=draws)
    >>> abs(error - standard_error(values)) < 0.01
    True
    """
    values = []
    for _ in range(resamples):
        sizes = [column.shape[-1] for column in columns]
        indices = [torch.randint(size, (size,), generator=generator) for size in sizes]
        values.append(
            statistic(*(column[..., index] for column, index in zip(columns, indices, strict=True)))
        )
    return torch.tensor(values, dtype=torch.float64).std().item()


def kl_per_image(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) of each image (B,) in float64; a class of probability zero under p costs nothing.

    >>> certain, even = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log()
    >>> round(kl_per_image(certain, even).exp().item(), 6)
    2.0
    """
    terms = log_p.exp() * (log_p - log_q)
    return torch.where(log_p == -math.inf, 0.0, terms).sum(-1).double()


def nll_per_image(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Each image's negative log-likelihood (B,) in float64, what `gap_closed` takes.

    >>> nll_per_image(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log(), torch.tensor([0, 0])).tolist()
    [0.0, inf]
    """
    return nll_each(*checked(log_probs, labels))


def _measure(log_probs: Tensor, labels: Tensor, bins: int = 15, temperature: float = 1.0) -> dict[str, float]:
    stream = MetricStream(bins=bins, temperature=temperature)
    stream.update(log_probs, labels)
    return stream.compute()
