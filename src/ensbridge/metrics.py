"""How good a prediction is: accuracy, NLL, Brier score, ECE, calibrated NLL, DEE and the gap closed.

Every metric of a prediction is a ratio of sums over images. `MetricStream` keeps those sums, so that a set
measured in one pass, in batches or in shards gives the same number; the one-shot functions are a stream
that is updated once. All sums are float64 on the CPU, whatever the precision of the prediction.

Shapes: B images, K classes, M members of the largest deep ensemble. `log_probs` are log-probabilities (B, K)
of any float dtype, in which -inf is a probability of zero; `labels` are integers (B,) in 0..K-1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

INVERSE_TEMPERATURE_RANGE = (0.01, 100.0)


# ------------------------------------------------------------------------------------------- predictions


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


def kl_per_image(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) of each image (B,) in float64; a class of probability zero under p costs nothing.

    >>> certain, even = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log()
    >>> round(kl_per_image(certain, even).exp().item(), 6)
    2.0
    """
    each = log_p.exp() * (log_p - log_q)
    return torch.where(log_p == -math.inf, 0.0, each).sum(-1).double()


def nll_per_image(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Each image's negative log-likelihood (B,) in float64, what `gap_closed` takes.

    >>> nll_per_image(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log(), torch.tensor([0, 0])).tolist()
    [0.0, inf]
    """
    return _nll_each(*_checked(log_probs, labels))


class MetricStream:
    """The metrics of a set that is seen in batches, or in shards by several processes.

    `compute` gives acc (a fraction), nll, brier, ece, cnll (the NLL at `temperature`) and count.

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
        log_probs_BK, labels_B = _checked(log_probs, labels)
        if len(labels_B) == 0:
            return
        top_B, guess_B = log_probs_BK.max(1)
        confidence_B = top_B.exp()
        bin_B = _bin_index(confidence_B, top_B, self.bins, torch.finfo(log_probs.dtype).eps)
        totals = torch.stack(
            [
                _nll_each(log_probs_BK, labels_B).sum(),
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

    def merge(self, other: MetricStream) -> None:
        """Add what another stream, with the same bins and temperature, has seen."""
        mine, theirs = (self.bins, self.temperature), (other.bins, other.temperature)
        if mine != theirs:
            raise ValueError(
                f"a stream of (bins, temperature) {theirs} cannot join one of {mine}; make them equal"
            )
        self._sums += other._sums

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

    def state(self) -> Tensor:
        """All sums as one flat float64 tensor: the sum of the states of shards is the state of the whole."""
        return self._sums.clone()

    @classmethod
    def from_state(cls, state: Tensor, temperature: float = 1.0) -> MetricStream:
        """The stream whose `state` this is, or the whole whose shards' states were summed into it.

        >>> shards = [MetricStream(), MetricStream()]
        >>> for label, shard in enumerate(shards):
        ...     shard.update(torch.tensor([[0.9, 0.1]]).log(), torch.tensor([label]))
        >>> MetricStream.from_state(shards[0].state() + shards[1].state()).compute()["acc"]
        0.5
        """
        if state.ndim != 1 or len(state) < 6 or len(state) % 3 != 0 or state.dtype != torch.float64:
            raise ValueError(
                f"a state of shape {tuple(state.shape)} and {state.dtype} is not one of a MetricStream; "
                "pass what state() returned, a flat float64 tensor of 3 + 3 * bins numbers"
            )
        stream = cls(bins=len(state) // 3 - 1, temperature=temperature)
        stream._sums += state.detach().cpu()
        return stream


def fit_temperature(log_probs: Tensor, labels: Tensor) -> float:
    """The temperature T in [0.01, 100] for which softmax(log_probs / T) has the least NLL.

    Logits give the same T as their log-probabilities. Where no temperature is better than another, T is 1;
    images whose label has probability zero cost infinitely much at any T and are left out.

    >>> log_probs = torch.tensor([[0.99, 0.01]]).log().expand(4, 2)
    >>> round(fit_temperature(log_probs, torch.tensor([0, 0, 0, 1])), 3)  # log 99 / log 3
    4.183
    """
    log_probs_BK, labels_B = _checked(log_probs, labels, normalised=False)
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


# ------------------------------------------------------------------------------ beside the deep ensemble


def deep_ensemble_equivalent(nll: float, ladder: Sequence[float]) -> float:
    """DEE: how many members a deep ensemble needs for this NLL; `ladder` is the NLL of DE-1, DE-2, …, DE-M.

    The ladder counts as its running minimum. Between two sizes DEE is linear in NLL, at a tie it is the
    smallest size, above DE-1's NLL it is extrapolated below 1 (0 where the ladder has no slope to extrapolate
    with), and below the whole ladder it is M, the most that was measured.

    >>> round(deep_ensemble_equivalent(0.25, [0.4, 0.3, 0.2]), 4)
    2.5
    >>> round(deep_ensemble_equivalent(0.45, [0.4, 0.3, 0.2]), 4)
    0.5
    """
    best = _running_minimum(nll, ladder)
    first = best[0]
    if nll > first:
        # DE-1 → DE-2, or the first size that is strictly better than DE-1 where DE-2 is not.
        for size, value in enumerate(best, start=1):
            if value < first:
                return 1 - (nll - first) * (size - 1) / (first - value)
        return 0.0
    for size, value in enumerate(best, start=1):
        if value == nll:
            return float(size)
        if value < nll:
            above = best[size - 2]
            return (size - 1) + (above - nll) / (above - value)
    return float(len(best))


def format_dee(nll: float, ladder: Sequence[float]) -> float | str:
    """DEE as it is reported: a number, or ">M" where the NLL is below that of every measured ensemble.

    >>> format_dee(0.3, [0.4, 0.3]), format_dee(0.1, [0.4, 0.3])
    (2.0, '>2')
    """
    if nll < _running_minimum(nll, ladder)[-1]:
        return f">{len(ladder)}"
    return deep_ensemble_equivalent(nll, ladder)


def gap_closed(
    nll_one: ArrayLike, nll_model: ArrayLike, nll_target: ArrayLike, *, resamples: int = 1000, seed: int = 0
) -> tuple[float, float] | tuple[None, None]:
    """The share of the NLL distance from one member to the target that a model closes, with its error.

    Takes each image's NLL (B,) under the one member, the model and the target (say DE-3), on the same images.
    The error is the standard deviation over paired bootstrap resamples of the images. Where one member and
    the target are equally good, or an NLL is infinite, there is no such share: (None, None).

    >>> gap, error = gap_closed([0.4, 0.6, 0.8], [0.3, 0.4, 0.8], [0.2, 0.4, 0.6])
    >>> round(gap, 4), error > 0
    (0.5, True)
    """
    if resamples < 2:
        raise ValueError(f"resamples is {resamples}; a standard deviation needs at least 2")
    one, model, target = (np.asarray(each, dtype=np.float64) for each in (nll_one, nll_model, nll_target))
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
    if whole.sum() == 0:
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


def _running_minimum(nll: float, ladder: Sequence[float]) -> list[float]:
    if len(ladder) == 0:
        raise ValueError("ladder is empty; give the NLL of DE-1, DE-2, … with at least one value")
    if not math.isfinite(nll):
        raise ValueError(f"nll is {nll}; a deep-ensemble equivalent needs a finite NLL")
    for size, value in enumerate(ladder, start=1):
        if not math.isfinite(value):
            raise ValueError(f"the NLL of DE-{size} in the ladder is {value}; each must be finite")
    return list(accumulate((float(value) for value in ladder), min))


# ---------------------------------------------------------------------------- one place for each formula


def _measure(log_probs: Tensor, labels: Tensor, bins: int = 15, temperature: float = 1.0) -> dict[str, float]:
    stream = MetricStream(bins=bins, temperature=temperature)
    stream.update(log_probs, labels)
    return stream.compute()


def _nll_each(log_probs_BK: Tensor, labels_B: Tensor) -> Tensor:
    return 0.0 - log_probs_BK.gather(1, labels_B[:, None])[:, 0]  # 0 - 0 is 0, where -(0) is -0


def _brier_each(log_probs_BK: Tensor, labels_B: Tensor) -> Tensor:
    residual_BK = log_probs_BK.exp()
    residual_BK[torch.arange(len(labels_B)), labels_B] -= 1
    return residual_BK.square().sum(1)


def _tempered_nll_each(log_probs_BK: Tensor, labels_B: Tensor, temperature: float) -> Tensor:
    each_B = _nll_each((log_probs_BK / temperature).log_softmax(1), labels_B)
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


def _checked(log_probs: Tensor, labels: Tensor, normalised: bool = True) -> tuple[Tensor, Tensor]:
    """The inputs as float64 and int64 on the CPU, or a ValueError that says what is wrong with them."""
    shape = tuple(log_probs.shape)
    if log_probs.ndim != 2 or shape[1] == 0:
        raise ValueError(f"log_probs have shape {shape}; they must be (images, classes)")
    if not log_probs.is_floating_point():
        raise ValueError(f"log_probs are {log_probs.dtype}; they must be floating point")
    if tuple(labels.shape) != shape[:1]:
        raise ValueError(f"labels have shape {tuple(labels.shape)}; {shape[0]} images need ({shape[0]},)")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}; they must be integers, so convert them with .long()")
    log_probs_BK, labels_B = log_probs.detach().cpu().double(), labels.detach().cpu().long()
    outside = labels_B[(labels_B < 0) | (labels_B >= shape[1])]
    if len(outside) > 0:
        raise ValueError(
            f"labels contain {int(outside[0])}; with {shape[1]} classes they lie in 0..{shape[1] - 1}"
        )
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
