"""Metrics of a prediction, in one call or in batches, and the one place of each formula."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ensbridge.metrics.checks import checked
from ensbridge.metrics.temperature import fit_source_logit_weight, fit_temperature

MIN_IMAGES = 100  # from which a share of the source is fitted


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


class MetricStream:
    """The metrics of a set that is seen in batches.

    `compute` gives acc (a fraction), nll, brier, ece, cnll (the NLL at `temperature`) and count.

    >>> from ensbridge.metrics import nll
    >>> log_probs, labels = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log(), torch.tensor([0, 0])
    >>> stream = MetricStream()
    >>> for image in range(2):
    ...     stream.update(log_probs[image : image + 1], labels[image : image + 1])
    >>> scores = stream.compute()
    >>> scores["count"], scores["acc"], scores["nll"] == nll(log_probs, labels)
    (2, 0.5, True)
    """

    def __init__(self, bins: int = 15, temperature: float = 1.0) -> None:
        if bins < 1:
            raise ValueError(f"bins is {bins}; the calibration error needs at least 1 bin")
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature is {temperature}; it must be a finite number above 0")
        self.bins = bins
        self.temperature = temperature
        # Sums of NLL, Brier and tempered NLL; then each bin's images, right answers and confidence.
        # Counts are whole numbers, which float64 holds exactly up to 2^53.
        self._sums = torch.zeros(3 + 3 * bins, dtype=torch.float64)

    def update(self, log_probs: Tensor, labels: Tensor) -> None:
        """Add a batch, which may be empty: log-probabilities (B, K) and labels (B,)."""
        log_probs_BK, labels_B = checked(log_probs, labels)
        if len(labels_B) == 0:
            return
        top_B, guess_B = log_probs_BK.max(1)
        confidence_B = top_B.exp()
        bin_B = _bin_index(confidence_B, top_B, self.bins, torch.finfo(log_probs.dtype).eps)
        totals = torch.stack(
            [
                nll_each(log_probs_BK, labels_B).sum(),
                _brier_each(log_probs_BK, labels_B).sum(),
                _tempered_nll_each(log_probs_BK, labels_B, self.temperature).sum(),
            ]
        )
        right_B = (guess_B == labels_B).double()
        by_bin = [
            torch.bincount(bin_B, weights=weight_B, minlength=self.bins)
            for weight_B in (torch.ones_like(right_B), right_B, confidence_B)
        ]
        self._sums += torch.cat([totals, *by_bin])

    def compute(self) -> dict[str, float]:
        """The metrics of all that was seen so far."""
        nll_sum, brier_sum, tempered_sum = self._sums[:3].tolist()
        seen, right, confidence = self._sums[3:].view(3, self.bins)
        count = int(seen.sum())
        if count == 0:
            raise ValueError("the metrics of 0 images were asked for; give at least 1 image")
        return {
            "acc": right.sum().item() / count,
            "nll": nll_sum / count,
            "brier": brier_sum / count,
            # Σ_bins (n / N) |accuracy - confidence|, in which n cancels, so that an empty bin adds nothing.
            "ece": (right - confidence).abs().sum().item() / count,
            "cnll": tempered_sum / count,
            "count": count,
        }

    def by_bin(self) -> list[tuple[int, float | None, float | None]]:
        """Each confidence bin's images, mean confidence and accuracy; the means of an empty bin are None."""
        table = self._sums[3:].view(3, self.bins).T.tolist()
        return [
            (int(seen), confidence / seen, right / seen) if seen else (0, None, None)
            for seen, right, confidence in table
        ]


def nll_each(log_probs_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Each image's NLL (B,), of what `checked` gave."""
    return 0.0 - log_probs_BK.gather(1, labels_B[:, None])[:, 0]  # 0 - 0 is 0, where -(0) is -0


def _brier_each(log_probs_BK: Tensor, labels_B: Tensor) -> Tensor:
    residual_BK = log_probs_BK.exp()
    residual_BK[torch.arange(len(labels_B)), labels_B] -= 1
    return residual_BK.square().sum(1)


def _tempered_nll_each(log_probs_BK: Tensor, labels_B: Tensor, temperature: float) -> Tensor:
    each_B = nll_each((log_probs_BK / temperature).log_softmax(1), labels_B)
    return each_B.nan_to_num(nan=math.inf, posinf=math.inf)  # nan: no class has any probability


def _bin_index(confidence_B: Tensor, log_confidence_B: Tensor, bins: int, epsilon: float) -> Tensor:
    """Which of the right-closed bins each confidence falls in, from 0.

    A confidence of 0.2 comes here as exp(log 0.2), a rounding error of its dtype away from the edge that it
    lies on; `slack` is that error, so that it still falls in the bin below the edge.
    """
    slack_B = (
        confidence_B * epsilon * (1 - log_confidence_B.clamp(min=-1e3)) + 4 * torch.finfo(torch.float64).eps
    )
    return ((confidence_B - slack_B) * bins).ceil().long().sub(1).clamp(0, bins - 1)


def calibrated(logits: Tensor, source: Tensor, temperature: float, source_logit_weight: float) -> Tensor:
    """Logits (B, K) with a share of the source's own, which are centred as they are, over the temperature.

    >>> calibrated(torch.tensor([[2.0, -2.0]]), torch.tensor([[3.0, 1.0]]), 2.0, 0.5)
    tensor([[ 1.2500, -1.2500]])
    """
    if source_logit_weight:
        logits = logits + source_logit_weight * (source - source.mean(-1, keepdim=True))
    return logits / temperature


def fit_calibration(log_probs: Tensor, source: Tensor, labels: Tensor) -> tuple[float, float]:
    """Temperature and share of the source for predictions (B, K) of validation images.

    The share is 0 with fewer than a hundred images, or unless it gains more than a standard error of NLL on
    images that it was not fitted on: it is fitted on every other one and tried on the rest, both ways round.

    >>> draws = torch.Generator().manual_seed(0)
    >>> truth, source = torch.randn(2, 2000, 3, generator=draws)
    >>> labels = torch.multinomial(truth.softmax(1), 1, generator=draws)[:, 0]
    >>> [fit_calibration(logits, source, labels)[1] != 0 for logits in (truth, truth + source)]
    [False, True]
    """
    alone = fit_temperature(log_probs, labels), 0.0
    if len(labels) < MIN_IMAGES:
        return alone
    halves = slice(0, None, 2), slice(1, None, 2)
    gains = []
    for here, there in (halves, halves[::-1]):
        fits = (
            (fit_temperature(log_probs[here], labels[here]), 0.0),
            fit_source_logit_weight(log_probs[here], source[here], labels[here]),
        )
        without, with_share = (
            nll_per_image(calibrated(log_probs[there], source[there], *fit).log_softmax(-1), labels[there])
            for fit in fits
        )
        gains.append(without - with_share)
    gain = torch.cat(gains)
    if gain.mean().item() > standard_error(gain):
        return fit_source_logit_weight(log_probs, source, labels)
    return alone
