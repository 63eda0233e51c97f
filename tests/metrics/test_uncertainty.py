"""Metrics of uncertainty against scikit-learn, scipy, plain loops and identities."""

from __future__ import annotations

import itertools
import math

import pytest
import scipy.stats
import torch
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

import _tiny
from ensbridge.metrics import (
    augrc,
    aurc,
    auroc,
    auroc_difference,
    bootstrap_error,
    conformal_sets,
    conformal_threshold,
    coverage,
    decompose_entropy,
    delong,
    entropy,
    fpr95,
    msp_uncertainty,
    nll,
    rank_correlation,
    total_variation,
)
from ensbridge.metrics.conformal import ConformalMethod


def made_up(count: int, shift: float, seed: int, ties: bool) -> Tensor:
    scores = torch.randn(count, generator=_tiny.generator(seed), dtype=torch.float64) + shift
    return (2 * scores).round() if ties else scores


# ------------------------------------------------------------------------------------------- detection


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shift", [-1.0, 0.0, 2.0])
def test_auroc_and_fpr95_match_scikit_learn(shift: float, ties: bool) -> None:
    inside, outside = made_up(143, 0.0, 0, ties), made_up(61, shift, 1, ties)
    scores, is_outside = torch.cat([inside, outside]), torch.arange(204) >= 143
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(is_outside, scores), rel=1e-12)
    # In-distribution images are the positives of FPR95, as in ODIN.
    false, true, _ = roc_curve(~is_outside, -scores, drop_intermediate=False)
    assert fpr95(inside, outside) == pytest.approx(false[true >= 0.95][0], abs=1e-12)
    assert fpr95(inside, outside, tpr=1.0) == pytest.approx(false[true >= 1][0], abs=1e-12)


def test_auroc_of_the_same_scores_is_a_half_and_of_swapped_ones_the_rest() -> None:
    inside, outside = made_up(30, 0.0, 2, True), made_up(40, 0.7, 3, True)
    assert auroc(inside, inside) == 0.5
    assert auroc(inside, outside) + auroc(outside, inside) == pytest.approx(1, abs=1e-12)
    assert auroc(inside.exp(), outside.exp()) == auroc(inside, outside)
    assert (auroc(inside, inside + 99), fpr95(inside, inside + 99)) == (1.0, 0.0)
    assert fpr95(torch.zeros(7), torch.zeros(3)) == 1.0
    assert auroc(torch.tensor([0.0, -math.inf]), torch.tensor([math.inf])) == 1.0


def test_fpr95_takes_exactly_the_share_that_is_asked_for() -> None:
    for count in (20, 40, 100, 1000, 10_000):  # 0.95 · 20 is 19.000…01 or 18.999…9 in floats
        inside = torch.arange(count, dtype=torch.float64)
        threshold = torch.tensor([0.95 * count - 1])
        assert fpr95(inside, threshold) == 1.0
        assert fpr95(inside, threshold + 0.5) == 0.0


def delong_by_hand(inside: list[Tensor], outside: list[Tensor]) -> tuple[list[float], list[list[float]]]:
    """The definition: every pair of images."""

    def wins(low: float, high: float) -> float:
        return 1.0 if high > low else 0.5 if high == low else 0.0

    by_inside, by_outside = [], []
    for low, high in zip(inside, outside, strict=True):
        table = [[wins(a, b) for b in high.tolist()] for a in low.tolist()]
        by_inside.append([sum(row) / len(row) for row in table])
        by_outside.append([sum(column) / len(column) for column in zip(*table, strict=True)])
    areas = [sum(parts) / len(parts) for parts in by_inside]
    shape = range(len(inside))

    def covariance(parts: list[list[float]], i: int, j: int) -> float:
        pairs = zip(parts[i], parts[j], strict=True)
        total = sum((a - areas[i]) * (b - areas[j]) for a, b in pairs)
        return total / (len(parts[i]) - 1) / len(parts[i])

    return areas, [[covariance(by_inside, i, j) + covariance(by_outside, i, j) for j in shape] for i in shape]


@pytest.mark.parametrize("ties", [False, True])
def test_delong_matches_its_definition(ties: bool) -> None:
    base_in, base_out = made_up(25, 0, 4, False), made_up(17, 0.8, 5, False)
    inside = [base_in, base_in + 0.5 * made_up(25, 0, 6, False), made_up(25, 0, 7, False)]
    outside = [base_out, base_out + 0.5 * made_up(17, 0, 8, False), made_up(17, 0.3, 9, False)]
    if ties:
        inside, outside = ([(2 * scores).round() for scores in kind] for kind in (inside, outside))
    areas, covariance = delong(torch.stack(inside), torch.stack(outside))
    expected_areas, expected = delong_by_hand(inside, outside)
    torch.testing.assert_close(areas, torch.tensor(expected_areas, dtype=torch.float64))
    torch.testing.assert_close(covariance, torch.tensor(expected, dtype=torch.float64))
    assert covariance[0, 1] > covariance[0, 2]  # which pairing is about
    assert delong(inside[0], outside[0])[0].item() == areas[0].item()
    assert delong(torch.zeros(1), torch.ones(5))[1].isnan().all()
    difference, error = auroc_difference(torch.stack(inside[:2]), torch.stack(outside[:2]))
    assert difference == pytest.approx(expected_areas[0] - expected_areas[1], abs=1e-12)
    assert error**2 == pytest.approx(expected[0][0] + expected[1][1] - 2 * expected[0][1], rel=1e-9)
    assert auroc_difference(torch.stack(inside[:1] * 2), torch.stack(outside[:1] * 2)) == (0.0, 0.0)
    with pytest.raises(ValueError, match="3 and 3 scores"):
        auroc_difference(torch.stack(inside), torch.stack(outside))


def test_delongs_error_is_the_spread_over_samples() -> None:
    draws = [auroc(made_up(60, 0, seed, False), made_up(50, 1, 1000 + seed, False)) for seed in range(400)]
    _, covariance = delong(made_up(60, 0, 0, False), made_up(50, 1, 1000, False))
    assert covariance.sqrt().item() == pytest.approx(torch.tensor(draws).std().item(), rel=0.25)


def test_the_bootstraps_error_is_that_of_pairs_and_of_groups() -> None:
    inside, outside = made_up(300, 0, 20, False), made_up(200, 1, 21, False)
    error = bootstrap_error(auroc, inside, outside, generator=_tiny.generator(), resamples=400)
    assert error == pytest.approx(delong(inside, outside)[1].sqrt().item(), rel=0.15)
    pairs = torch.stack([inside, inside + 0.1 * made_up(300, 0, 22, False)])
    apart = bootstrap_error(lambda two: (two[0] - two[1]).mean().item(), pairs, generator=_tiny.generator())
    assert apart == pytest.approx(scipy.stats.sem(pairs[0] - pairs[1]), rel=0.15)


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation_matches_scipy(ties: bool) -> None:
    one, noise = made_up(80, 0, 10, ties), made_up(80, 0, 11, ties)
    for other in (noise, one + noise, -one):
        assert rank_correlation(one, other) == pytest.approx(scipy.stats.spearmanr(one, other)[0], abs=1e-12)
    assert math.isnan(rank_correlation(one, torch.ones(80)))


@pytest.mark.parametrize(
    ("inside", "outside", "named"),
    [
        (torch.empty(0), torch.ones(1), r"\(0,\)"),
        (torch.ones(2), torch.tensor([math.nan]), "nan"),
        (torch.ones(2, 3), torch.ones(3, 3), "2 scores .* 3"),
    ],
)
def test_bad_scores_are_named(inside: Tensor, outside: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        auroc(inside, outside)


# ------------------------------------------------------------------------------------------- abstaining


def errors_of(scores: Tensor, seed: int) -> Tensor:
    """Errors that are more frequent at high scores."""
    chance = (scores - 1).sigmoid()
    return torch.rand(len(scores), generator=_tiny.generator(seed), dtype=torch.float64) < chance


def areas_by_hand(errors: list[bool]) -> tuple[float, float]:
    """AURC and AUGRC of images in the order in which they are accepted."""
    count, wrong, risk, area = len(errors), 0, 0.0, 0.0
    for accepted, error in enumerate(errors, 1):
        before, wrong = wrong, wrong + error
        risk += wrong / accepted / count
        area += (before + wrong) / 2 / count / count  # the trapezoid between two coverages
    return risk, area


def test_aurc_and_augrc_match_a_loop() -> None:
    scores = made_up(120, 0, 12, False)
    errors = errors_of(scores, 13)
    expected = areas_by_hand(errors[scores.argsort()].tolist())
    assert (aurc(scores, errors), augrc(scores, errors)) == pytest.approx(expected, rel=1e-12)


def test_equal_scores_are_the_mean_over_their_orders() -> None:
    scores = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0, 2.0])
    errors = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.bool)
    found = []
    for middle in itertools.permutations([1, 2, 3]):
        for last in itertools.permutations([4, 5]):
            found.append(areas_by_hand(errors[[0, *middle, *last]].tolist()))
    expected = tuple(sum(parts) / len(found) for parts in zip(*found, strict=True))
    assert (aurc(scores, errors), augrc(scores, errors)) == pytest.approx(expected, rel=1e-12)
    order = torch.randperm(6, generator=_tiny.generator(3))
    assert aurc(scores[order], errors[order]) == aurc(scores, errors)


@pytest.mark.parametrize("ties", [False, True])
def test_augrc_is_what_auroc_and_accuracy_make_of_it(ties: bool) -> None:
    scores = made_up(300, 0, 14, ties)
    errors = errors_of(scores, 15)
    wrong = errors.double().mean().item()
    area = auroc(scores[~errors], scores[errors])
    assert augrc(scores, errors) == pytest.approx((1 - area) * wrong * (1 - wrong) + wrong**2 / 2, rel=1e-12)


def test_the_ends_of_abstaining() -> None:
    scores = made_up(50, 0, 16, False)
    none, every = torch.zeros(50, dtype=torch.bool), torch.ones(50, dtype=torch.bool)
    assert (aurc(scores, none), augrc(scores, none)) == (0.0, 0.0)
    assert (aurc(scores, every), augrc(scores, every)) == (1.0, 0.5)
    errors = errors_of(scores, 17)
    assert aurc(errors.double(), errors) <= aurc(scores, errors) <= aurc(-errors.double(), errors)
    with pytest.raises(ValueError, match=r"\(50,\).*\(3,\)"):
        aurc(scores, none[:3])


# ------------------------------------------------------------------------------------------- information


def test_entropy_and_total_variation_match_loops() -> None:
    log_probs, _ = _tiny.predictions()
    other, _ = _tiny.predictions(seed=1)
    expected = [-sum(math.exp(value) * value for value in row) for row in log_probs.tolist()]
    assert entropy(log_probs).tolist() == pytest.approx(expected, rel=1e-12)
    assert entropy(log_probs).tolist() == pytest.approx(
        scipy.stats.entropy(log_probs.exp(), axis=1), rel=1e-12
    )
    apart = [
        sum(abs(math.exp(a) - math.exp(b)) for a, b in zip(one, two, strict=True)) / 2
        for one, two in zip(log_probs.tolist(), other.tolist(), strict=True)
    ]
    assert total_variation(log_probs, other).tolist() == pytest.approx(apart, rel=1e-9)
    assert total_variation(other, log_probs).equal(total_variation(log_probs, other))
    assert msp_uncertainty(log_probs).tolist() == pytest.approx((1 - log_probs.exp().amax(1)).tolist())


@pytest.mark.parametrize("scale", [0.01, 3.0, 100.0])
def test_entropy_is_expected_entropy_and_mutual_information(scale: float) -> None:
    members = _tiny.logits(50, members=4, scale=scale).log_softmax(-1)
    parts = decompose_entropy(members)
    torch.testing.assert_close(parts.total, parts.expected + parts.mutual_information, rtol=0, atol=1e-12)
    assert (parts.mutual_information >= 0).all()
    assert (parts.mutual_information <= math.log(4)).all()
    assert parts.total.tolist() == pytest.approx(entropy(members.exp().mean(0).log()).tolist(), abs=1e-12)
    # I(y; member): the joint distribution of class and member against the product of its margins.
    joint = (members.exp() / 4).permute(1, 0, 2)  # (images, members, classes)
    product = joint.sum(1, keepdim=True) * joint.sum(2, keepdim=True)
    information = torch.where(joint > 0, joint * (joint / product).log(), 0).sum((1, 2))
    torch.testing.assert_close(parts.mutual_information, information, rtol=1e-6, atol=1e-12)


def test_members_that_agree_have_no_mutual_information() -> None:
    one = _tiny.logits(20).log_softmax(-1)
    assert decompose_entropy(one.expand(3, -1, -1)).mutual_information.max() < 1e-12
    assert decompose_entropy(one[None]).mutual_information.max() < 1e-12
    impossible = torch.tensor([[[0.5, 0.5, 0.0]], [[0.5, 0.0, 0.5]]]).log()
    parts = decompose_entropy(impossible)
    assert [part.item() for part in parts] == pytest.approx(
        [1.5 * math.log(2), math.log(2), 0.5 * math.log(2)]
    )
    with pytest.raises(ValueError, match=r"\(20, 3\)"):
        decompose_entropy(one)


def test_confident_predictions_stay_apart_where_float32_rounds_to_one() -> None:
    logits = torch.tensor([[20.0, 0.0, 0.0], [30.0, 0.0, 0.0], [40.0, 0.0, 0.0]])
    log_probs = logits.log_softmax(-1)
    assert (log_probs.exp().amax(1) == 1).all()
    exact = 2 * (-logits[:, 0].double()).exp()
    assert msp_uncertainty(log_probs).tolist() == pytest.approx(exact.tolist(), rel=1e-5)
    assert entropy(log_probs).diff().max() < 0


# ------------------------------------------------------------------------------------------- conformal sets


def test_lac_and_aps_match_their_definitions() -> None:
    log_probs, labels = _tiny.predictions(count=60)
    held, held_labels = _tiny.predictions(count=99, seed=1)
    for method in ("lac", "aps"):

        def scores(row: list[float], method: str = method) -> list[float]:
            probs = [math.exp(value) for value in row]
            if method == "lac":
                return [1 - p for p in probs]
            return [sum(q for q in probs if q >= p) for p in probs]

        own = sorted(
            scores(row)[label] for row, label in zip(held.tolist(), held_labels.tolist(), strict=True)
        )
        threshold = conformal_threshold(held, held_labels, 0.2, method)
        assert threshold == pytest.approx(own[79], rel=1e-9)  # the 80th of 99: ⌈100 · 0.8⌉
        sets = conformal_sets(log_probs, threshold, method)
        assert sets.tolist() == [[s <= threshold + 1e-12 for s in scores(row)] for row in log_probs.tolist()]
        hits = [bool(sets[i, label]) for i, label in enumerate(labels.tolist())]
        assert coverage(sets, labels) == sum(hits) / len(hits)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
@pytest.mark.parametrize(("method", "drawn"), [("lac", False), ("aps", False), ("aps", True)])
def test_sets_hold_the_label_as_often_as_promised(method: ConformalMethod, drawn: bool, alpha: float) -> None:
    """Coverage over new calibration and test images is at least 1 - alpha, and not far above it."""
    count, kept = 40, []
    for seed in range(300):
        log_probs, labels = _tiny.predictions(2 * count, classes=5, seed=seed)
        generator = _tiny.generator(seed) if drawn else None
        threshold = conformal_threshold(log_probs[:count], labels[:count], alpha, method, generator)
        kept.append(coverage(conformal_sets(log_probs[count:], threshold, method, generator), labels[count:]))
    mean, error = torch.tensor(kept).mean().item(), torch.tensor(kept).std().item() / math.sqrt(300)
    exact = math.ceil((count + 1) * (1 - alpha)) / (count + 1)  # without ties
    assert mean == pytest.approx(exact, abs=4 * error)
    assert mean > 1 - alpha - 4 * error


def test_aps_gives_hard_images_larger_sets_and_lac_the_smallest_on_average() -> None:
    log_probs, labels = _tiny.predictions(4000, sharpness=1.0)
    held, rest = log_probs[:2000], log_probs[2000:]
    sizes = {}
    for method in ("lac", "aps"):
        threshold = conformal_threshold(held, labels[:2000], 0.1, method, _tiny.generator())
        sets = conformal_sets(rest, threshold, method, _tiny.generator(1))
        assert coverage(sets, labels[2000:]) == pytest.approx(0.9, abs=0.03)
        sizes[method] = sets.sum(1).double()
    assert sizes["lac"].mean() < sizes["aps"].mean()
    assert rank_correlation(sizes["aps"], entropy(rest)) > 0.5


def test_equal_scores_and_few_images_leave_the_promise_intact() -> None:
    even, labels = torch.zeros(10, 4).log_softmax(1), torch.arange(10) % 4
    threshold = conformal_threshold(even, labels, 0.2)
    assert conformal_sets(even, threshold).all()
    assert conformal_threshold(even, labels, 0.05) == math.inf  # 10 images cannot promise 95 %
    assert conformal_sets(even, math.inf, "aps").all()
    generator = _tiny.generator()
    for bad in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"alpha is {bad}"):
            conformal_threshold(even, labels, bad)
    with pytest.raises(ValueError, match="'raps'"):
        conformal_sets(even, 0.5, "raps", generator)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(10, 4\)"):
        coverage(conformal_sets(even, 0.5), labels[:3])
    assert nll(even, labels) == pytest.approx(math.log(4))
