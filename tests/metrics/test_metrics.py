"""Metrics against independent truths: scikit-learn, scipy, exact fractions and plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from sklearn.metrics import accuracy_score, log_loss
from torch import Tensor

import _tiny
from ensbridge.metrics import (
    MetricStream,
    accuracy,
    brier,
    calibrated_nll,
    ece,
    fit_source_logit_weight,
    fit_temperature,
    nll,
    nll_per_image,
)

ONE_SHOT = [accuracy, nll, brier, ece, fit_temperature, nll_per_image]


def naive_ece(confidences: list[Fraction], right: list[bool], bins: int) -> float:
    """The definition, in exact arithmetic."""
    total = Fraction(0)
    for index in range(bins):
        low, high = Fraction(index, bins), Fraction(index + 1, bins)
        inside = [
            (confidence, answer)
            for confidence, answer in zip(confidences, right, strict=True)
            if low < confidence <= high or (index == 0 and confidence == 0)
        ]
        total += abs(sum(Fraction(answer) - confidence for confidence, answer in inside))
    return float(total / len(confidences))


# ------------------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_accuracy_and_nll_match_scikit_learn(dtype: torch.dtype) -> None:
    log_probs, labels = _tiny.predictions()
    log_probs = log_probs.to(dtype)
    exact = log_probs.double()
    assert accuracy(log_probs, labels) == pytest.approx(accuracy_score(labels, exact.argmax(1)), abs=1e-15)
    if dtype == torch.float64:  # scikit-learn would normalise what rounding left unnormalised
        assert nll(log_probs, labels) == pytest.approx(
            log_loss(labels, exact.exp(), labels=range(7)), rel=1e-12
        )
    expected = -sum(exact[row, label].item() for row, label in enumerate(labels)) / len(labels)
    assert nll(log_probs, labels) == pytest.approx(expected, rel=1e-13)


def test_brier_matches_a_loop() -> None:
    log_probs, labels = _tiny.predictions()
    total = 0.0
    for row, label in zip(log_probs.tolist(), labels.tolist(), strict=True):
        total += sum((math.exp(value) - (column == label)) ** 2 for column, value in enumerate(row))
    assert brier(log_probs, labels) == pytest.approx(total / len(labels), rel=1e-13)


def test_nll_per_image_is_each_images_share() -> None:
    log_probs, labels = _tiny.predictions()
    each = nll_per_image(log_probs.float(), labels)
    assert each.dtype == torch.float64
    assert each.shape == labels.shape
    assert each[3].item() == -log_probs.float()[3, labels[3]].item()
    assert each.mean().item() == pytest.approx(nll(log_probs.float(), labels), rel=1e-13)


@pytest.mark.parametrize("bins", [1, 7, 15, 40])
def test_ece_matches_the_definition(bins: int) -> None:
    log_probs, labels = _tiny.predictions(seed=3)
    confidences = [Fraction(value) for value in log_probs.exp().amax(1).tolist()]
    right = (log_probs.argmax(1) == labels).tolist()
    assert ece(log_probs, labels, bins=bins) == pytest.approx(naive_ece(confidences, right, bins), rel=1e-12)


def test_ece_has_15_bins_unless_told() -> None:
    log_probs, labels = _tiny.predictions()
    assert ece(log_probs, labels) == ece(log_probs, labels, bins=15) != ece(log_probs, labels, bins=14)


CLASSES = 40


def rows_of(confidences: list[Fraction], dtype: torch.dtype) -> Tensor:
    """Log-probabilities whose class 0 has the given confidence, computed the way that a user would."""
    top = torch.tensor([float(each) for each in confidences], dtype=dtype)[:, None]
    rest = ((1 - top) / (CLASSES - 1)).expand(-1, CLASSES - 1)
    return torch.cat([top, rest], 1).log()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bins", [10, 15])
def test_a_confidence_on_an_edge_falls_in_the_bin_below(bins: int, dtype: torch.dtype) -> None:
    tolerance = 20 * torch.finfo(dtype).eps
    for edge in range(1, bins + 1):
        on_edge = Fraction(edge, bins)
        for neighbour in (Fraction(2 * edge - 1, 2 * bins), Fraction(2 * edge + 1, 2 * bins)):
            if neighbour > 1:
                continue
            confidences = [on_edge, neighbour]  # the first is right, the second wrong: together they cancel
            expected = naive_ece(confidences, [True, False], bins)
            measured = ece(rows_of(confidences, dtype), torch.tensor([0, 1]), bins=bins)
            assert measured == pytest.approx(expected, abs=tolerance), (edge, neighbour)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_confidence_just_above_an_edge_falls_in_the_bin_above(dtype: torch.dtype) -> None:
    above = Fraction(7, 15) + Fraction(1, 100_000)
    confidences = [above, Fraction(13, 30)]
    expected = naive_ece(confidences, [True, False], 15)
    assert ece(rows_of(confidences, dtype), torch.tensor([0, 1])) == pytest.approx(expected, abs=1e-6)


def test_full_confidence_falls_in_the_last_bin() -> None:
    # Wrong with confidence 1 and right with 0.95 share the last bin: |1 - 1.95| / 2, not (1 + 0.05) / 2.
    log_probs = torch.tensor([[1.0, 0.0], [0.95, 0.05]], dtype=torch.float64).log()
    assert ece(log_probs, torch.tensor([1, 0])) == pytest.approx(0.475, abs=1e-12)
    # The exponential of a log-probability that rounding pushed above 0 is above 1.
    above = torch.tensor([[1e-7, -math.inf], [math.log(0.95), math.log(0.05)]], dtype=torch.float64)
    assert ece(above, torch.tensor([1, 0])) == pytest.approx(0.475, abs=1e-6)


def test_zero_confidence_falls_in_the_first_bin() -> None:
    log_probs = torch.full((2, CLASSES), -800.0, dtype=torch.float64)
    log_probs[1] = -math.log(CLASSES)
    assert log_probs[0].exp().sum() == 0
    # Right with 0, wrong with 1/40, in one bin: |1 - 1/40| / 2.
    assert ece(log_probs, torch.tensor([0, 1])) == pytest.approx((1 - 1 / CLASSES) / 2, abs=1e-12)


def test_probability_zero_is_legal() -> None:
    log_probs = torch.tensor([[0.0, -math.inf], [math.log(0.5), math.log(0.5)]])
    stream = MetricStream(temperature=2.0)
    stream.update(log_probs, torch.tensor([0, 0]))
    assert stream.compute() == pytest.approx(
        {"acc": 1, "nll": math.log(2) / 2, "brier": 0.25, "ece": 0.25, "cnll": math.log(2) / 2, "count": 2}
    )
    impossible = torch.tensor([1, 0])
    assert nll(log_probs, impossible) == math.inf
    assert brier(log_probs, impossible) == pytest.approx((2 + 0.5) / 2)
    nothing = MetricStream()
    nothing.update(torch.full((1, 3), -math.inf), torch.tensor([0]))
    assert nothing.compute()["nll"] == nothing.compute()["cnll"] == math.inf


# ----------------------------------------------------------------------------------------- temperature


@pytest.mark.parametrize("sharpness", [0.05, 0.3, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_fitted_temperature_is_scipys(sharpness: float, seed: int) -> None:
    log_probs, labels = _tiny.predictions(seed=seed, sharpness=sharpness)

    def cost(log_inverse: float) -> float:
        scaled = (math.exp(log_inverse) * log_probs).log_softmax(-1)
        return -scaled.gather(1, labels[:, None]).mean().item()

    best = minimize_scalar(
        cost, bounds=(math.log(0.01), math.log(100)), method="bounded", options={"xatol": 1e-10}
    )
    assert fit_temperature(log_probs, labels) == pytest.approx(math.exp(-best.x), rel=1e-6)


def test_at_the_fitted_temperature_the_slope_is_zero() -> None:
    log_probs, labels = _tiny.predictions(seed=5)
    inverse = torch.tensor(1 / fit_temperature(log_probs, labels), dtype=torch.float64, requires_grad=True)
    torch.nn.functional.nll_loss((inverse * log_probs).log_softmax(-1), labels).backward()
    assert inverse.grad is not None
    assert abs(inverse.grad.item()) < 1e-12


def test_scaling_the_logits_scales_the_temperature() -> None:
    log_probs, labels = _tiny.predictions()
    base = fit_temperature(log_probs, labels)
    assert fit_temperature(2.5 * log_probs + 4.0, labels) == pytest.approx(2.5 * base, rel=1e-10)


@pytest.mark.parametrize(
    ("rows", "labels", "expected"),
    [
        pytest.param([[0.0, -1.0], [-1.0, 0.0]], [0, 1], 0.01, id="always right: the sharpest"),
        pytest.param([[0.0, -50.0], [-700.0, 0.0]], [0, 1], 0.01, id="right, and sure of it"),
        pytest.param([[0.0, -1.0], [-1.0, 0.0]], [1, 0], 100.0, id="always wrong: the flattest"),
        pytest.param([[0.0, -1e5], [-1e5, 0.0]], [1, 0], 100.0, id="wrong, and sure of it"),
        pytest.param([[-0.7, -0.7], [-0.7, -0.7]], [0, 1], 1.0, id="uniform: any will do"),
        pytest.param([[0.0, -math.inf]], [0], 1.0, id="certain: any will do"),
        pytest.param([[-0.1]], [0], 1.0, id="one class"),
    ],
)
def test_temperatures_at_the_ends(rows: list[list[float]], labels: list[int], expected: float) -> None:
    assert fit_temperature(torch.tensor(rows), torch.tensor(labels)) == pytest.approx(expected, rel=1e-12)


def test_probability_zero_does_not_disturb_the_fit() -> None:
    log_probs, labels = _tiny.predictions(classes=4)
    padded = torch.cat([log_probs, torch.full((157, 1), -math.inf, dtype=torch.float64)], 1)
    base = fit_temperature(log_probs, labels)
    assert fit_temperature(padded, labels) == pytest.approx(base, rel=1e-12)
    impossible = torch.tensor([[0.0, -math.inf, -math.inf, -math.inf, -math.inf]], dtype=torch.float64)
    more, more_labels = torch.cat([padded, impossible]), torch.cat([labels, torch.tensor([2])])
    assert fit_temperature(more, more_labels) == pytest.approx(base, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_share_of_another_prediction_is_the_best_that_scipy_finds(seed: int) -> None:
    log_probs, labels = _tiny.predictions(seed=seed)
    source = _tiny.predictions(seed=seed + 10, sharpness=3.0)[0] + log_probs / 2

    def loss(inverse: float, weight: float) -> float:
        return nll((inverse * log_probs + weight * source).log_softmax(-1), labels)

    temperature, share = fit_source_logit_weight(log_probs, source, labels)
    found = minimize(
        lambda x: loss(*x), [1.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-14}
    )
    assert (1 / temperature, share / temperature) == pytest.approx(tuple(found.x), rel=1e-4)
    assert loss(1 / temperature, share / temperature) <= min(
        found.fun + 1e-12, loss(1 / fit_temperature(log_probs, labels), 0)
    )
    # Constants that softmax does not see change nothing, nor does the source's own scale.
    assert fit_source_logit_weight(log_probs + 3, 2 * source - 1, labels) == pytest.approx(
        (temperature, share / 2), rel=1e-6
    )


def test_where_no_share_is_best_there_is_none() -> None:
    log_probs, labels = _tiny.predictions(classes=4)
    alone = fit_temperature(log_probs, labels), 0.0
    assert fit_source_logit_weight(log_probs, torch.zeros(157, 4), labels) == pytest.approx(alone, rel=1e-6)
    impossible = log_probs.clone()
    impossible[0, labels[0] - 1] = -math.inf
    assert fit_source_logit_weight(log_probs, impossible, labels) == alone
    backwards = -log_probs  # against which the best temperature would be negative
    assert fit_source_logit_weight(backwards, torch.zeros(157, 4), labels) == (
        fit_temperature(backwards, labels),
        0.0,
    )


def test_calibrated_nll_uses_the_temperature_of_validation() -> None:
    log_probs, labels = _tiny.predictions(seed=1)
    val_log_probs, val_labels = _tiny.predictions(seed=2, sharpness=6.0)
    temperature = fit_temperature(val_log_probs, val_labels)
    expected = log_loss(labels, (log_probs / temperature).softmax(-1), labels=range(7))
    assert calibrated_nll(log_probs, labels, val_log_probs, val_labels) == pytest.approx(expected, rel=1e-12)
    assert calibrated_nll(log_probs, labels, log_probs, labels) < nll(log_probs, labels)


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("metric", ONE_SHOT)
@pytest.mark.parametrize(
    ("log_probs", "labels", "says"),
    [
        pytest.param(torch.zeros(3), torch.zeros(3).long(), r"shape \(3,\)", id="1-D"),
        pytest.param(torch.zeros(2, 3, 4), torch.zeros(2).long(), r"shape \(2, 3, 4\)", id="3-D"),
        pytest.param(torch.zeros(2, 0), torch.zeros(2).long(), r"shape \(2, 0\)", id="no classes"),
        pytest.param(torch.zeros(2, 1).long(), torch.zeros(2).long(), "torch.int64", id="whole numbers"),
        pytest.param(torch.zeros(2, 1), torch.zeros(3).long(), r"shape \(3,\).*\(2,\)", id="too many labels"),
        pytest.param(torch.zeros(2, 1), torch.zeros(2, 1).long(), r"shape \(2, 1\)", id="2-D labels"),
        pytest.param(
            torch.zeros(2, 1), torch.zeros(2), r"labels are torch.float32.*\.long\(\)", id="float labels"
        ),
        pytest.param(torch.zeros(2, 1), torch.tensor([0, 1]), r"labels contain 1.*0\.\.0", id="label K"),
        pytest.param(torch.zeros(2, 1), torch.tensor([0, -1]), r"labels contain -1.*0\.\.0", id="label -1"),
        pytest.param(
            torch.tensor([[0.0], [math.nan]]), torch.tensor([0, 0]), "nan, first at image 1", id="nan"
        ),
        pytest.param(torch.tensor([[math.inf]]), torch.tensor([0]), "inf, first at image 0", id="inf"),
    ],
)
def test_wrong_predictions_are_refused(
    metric: Callable[[Tensor, Tensor], object], log_probs: Tensor, labels: Tensor, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        metric(log_probs, labels)


@pytest.mark.parametrize("metric", [accuracy, nll, brier, ece, fit_temperature])
def test_no_images_are_refused(metric: Callable[[Tensor, Tensor], float]) -> None:
    with pytest.raises(ValueError, match="0 images"):
        metric(torch.zeros(0, 3), torch.zeros(0).long())


@pytest.mark.parametrize("metric", [accuracy, nll, brier, ece, nll_per_image])
@pytest.mark.parametrize("rows", [[[4.0, 2.0]], [[0.5, 0.5]], [[-0.1, -0.2]]])
def test_logits_and_probabilities_are_refused(
    metric: Callable[[Tensor, Tensor], object], rows: list[list[float]]
) -> None:
    with pytest.raises(ValueError, match=r"total probability of .*log_softmax"):
        metric(torch.tensor(rows), torch.tensor([0]))


def test_a_temperature_needs_a_possible_label() -> None:
    with pytest.raises(ValueError, match=r"\b1 labels.*zero"):
        fit_temperature(torch.tensor([[0.0, -math.inf]]), torch.tensor([1]))


# ------------------------------------------------------------------------------ in batches


@pytest.mark.parametrize("chunk", [1, 10, 64, 157, 1000])
def test_streaming_equals_one_pass(chunk: int) -> None:
    log_probs, labels = _tiny.predictions()
    stream = MetricStream(temperature=1.7)
    for some_log_probs, some_labels in zip(log_probs.split(chunk), labels.split(chunk), strict=True):
        stream.update(some_log_probs, some_labels)
    scores = stream.compute()
    tempered = (log_probs / 1.7).log_softmax(-1)
    truths = {
        "acc": accuracy(log_probs, labels),
        "nll": nll(log_probs, labels),
        "brier": brier(log_probs, labels),
        "ece": ece(log_probs, labels),
        "cnll": log_loss(labels, tempered.exp(), labels=range(7)),
        "count": 157,
    }
    assert scores == pytest.approx(truths, rel=1e-12)
    assert scores["acc"] == truths["acc"]
    assert isinstance(scores["count"], int)


def test_wrong_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="bins is 0"):
        MetricStream(bins=0)
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temperature is {temperature}"):
            MetricStream(temperature=temperature)
    with pytest.raises(ValueError, match="0 images"):
        MetricStream().compute()
