"""Reliability bins reproduce accuracy and ECE, before and after calibration; rows know what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import _tiny
from _tables import (
    CLASSES,
    LABELS,
    MEMBERS,
    SET,
    TEST,
    VALIDATION,
    Array,
    ensembles,
    probabilities,
    row_of,
    table,
)
from ensbridge.evaluation.evaluate import Evaluator, evaluate
from ensbridge.evaluation.scores import Bin, ModelInfo, Reliability
from ensbridge.metrics import MetricStream, accuracy, ece, nll
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble

BINS = 15


def bins_by_hand(probs: Array, labels: list[int]) -> list[tuple[int, float | None, float | None]]:
    """Count, mean confidence and accuracy of each right-closed bin."""
    found: list[tuple[int, float | None, float | None]] = []
    for number in range(BINS):
        inside = [i for i, row in enumerate(probs) if number / BINS < row.max() <= (number + 1) / BINS]
        if not inside:
            found.append((0, None, None))
            continue
        confidence = sum(float(probs[i].max()) for i in inside) / len(inside)
        right = sum(int(probs[i].argmax()) == labels[i] for i in inside) / len(inside)
        found.append((len(inside), confidence, right))
    return found


def near(bins: tuple[Bin, ...], expected: list[tuple[int, float | None, float | None]]) -> None:
    assert len(bins) == len(expected) == BINS
    for one, (count, confidence, right) in zip(bins, expected, strict=True):
        assert one.count == count
        assert one.confidence == (None if confidence is None else pytest.approx(confidence, rel=1e-4))
        assert one.accuracy == right


def powered(probs: Array, temperature: float) -> Array:
    tempered = probs ** (1 / temperature)
    return tempered / tempered.sum(1, keepdims=True)


# ------------------------------------------------------------------------------ bins of a stream


@pytest.mark.parametrize("bins", [1, 4, 15, 40])
def test_bins_give_back_accuracy_and_ece(bins: int) -> None:
    log_probs, labels = _tiny.predictions()
    stream = MetricStream(bins=bins)
    for part, some in zip(log_probs.split(50), labels.split(50), strict=True):
        stream.update(part, some)
    table = stream.by_bin()
    assert len(table) == bins
    assert all(isinstance(count, int) for count, *_ in table)
    assert sum(count for count, *_ in table) == 157
    filled = [each for each in table if each[0]]
    assert all(each == (0, None, None) for each in table if not each[0])
    right = sum(count * share for count, _, share in filled if share is not None) / 157
    error = sum(count * abs(share - sure) for count, sure, share in filled if None not in (sure, share)) / 157
    assert right == pytest.approx(accuracy(log_probs, labels), abs=1e-14)
    assert error == pytest.approx(ece(log_probs, labels, bins=bins), abs=1e-14)
    for index, (_, sure, _) in enumerate(table):
        assert sure is None or index / bins < sure <= (index + 1) / bins


# ------------------------------------------------------------------------------ bins of a row


def test_every_rows_bins_reproduce_its_numbers() -> None:
    scores = evaluate({**ensembles(), "baseline": table(9, knowledge=1.4)}, SET, VALIDATION)
    for row in scores.rows:
        assert row.reliability is not None
        for bins in (row.reliability.before, row.reliability.after):
            assert bins is not None
            assert sum(each.count for each in bins) == TEST
            right = sum(each.count * each.accuracy for each in bins if each.accuracy is not None)
            assert 100 * right / TEST == pytest.approx(row.acc, abs=1e-9)  # no temperature changes it
        error = sum(
            each.count * abs(each.accuracy - each.confidence)
            for each in row.reliability.before
            if each.accuracy is not None and each.confidence is not None
        )
        assert error / TEST == pytest.approx(row.ece, abs=1e-12)


def test_bins_are_what_plain_loops_say_before_and_after_calibration() -> None:
    baseline = table(9, knowledge=1.4)
    scores = evaluate({**ensembles(), "baseline": baseline}, SET, VALIDATION)
    for model, tables in {"DE-1": MEMBERS[:1], "DE-3": MEMBERS, "baseline": [baseline]}.items():
        row, probs = row_of(scores, model), probabilities(tables)[:TEST]
        assert isinstance(row.reliability, Reliability)
        assert row.reliability.after is not None
        assert row.temperature is not None
        labels = LABELS[:TEST].tolist()
        near(row.reliability.before, bins_by_hand(probs, labels))
        near(row.reliability.after, bins_by_hand(powered(probs, row.temperature), labels))
        assert row.reliability.before != row.reliability.after
        log_probs = torch.from_numpy(powered(probs, row.temperature)).log()
        assert row.cnll == pytest.approx(nll(log_probs, LABELS[:TEST]), rel=1e-5)


def test_without_validation_there_are_no_bins_after_calibration() -> None:
    for row in evaluate(ensembles(), SET).rows:
        assert row.reliability is not None
        assert row.reliability.after is None


# ------------------------------------------------------------------------------ what a row is called


def baselines() -> tuple[dict[str, nn.Module], dict[str, Any]]:
    ensemble = _tiny.ensemble(4)
    source, *others = ensemble.members
    groups = [(0, 1), (0, 2, 3)]
    models: dict[str, nn.Module] = {
        "DE-1": source,
        "DE-4": ensemble,
        "others": Ensemble(others),
        "DBN": FastEnsemble.of(*(_tiny.bridge_to(ensemble, target=group) for group in groups)),
        "control": FastEnsemble.of(_tiny.bridge_to(ensemble, target=(0,))),
        "BN": FastEnsemble.of(*(_tiny.bridge_network(source, [other]) for other in others[:2])),
        "ED": _tiny.member(9),
        "unknown": _tiny.member(10),
    }
    expected = {
        "DE-1": ("DE", 1, 0, 0),
        "DE-4": ("DE", 4, 0, 0),
        "others": ("DE", 3, 0, 0),
        "DBN": ("DBN", 4, 2, 5),
        "control": ("control", 1, 1, 5),
        "BN": ("BN", 3, 2, 1),
        "ED": ("ED", 4, 0, 0),
        "unknown": ("other", 1, 0, 0),
    }
    return models, expected


def test_rows_know_their_method_and_aim() -> None:
    models, expected = baselines()
    scores = evaluate(models, _tiny.data(), info={"ED": ModelInfo("ED", 4)})
    found = {row.model: (row.kind, row.members, row.bridges, row.steps) for row in scores.rows}
    assert found == expected


def test_info_overrules_what_a_model_shows_but_not_that_of_an_ensemble() -> None:
    models, _ = baselines()
    info = {"DBN": ModelInfo("other", 2), "DE-4": ModelInfo("ED", 9)}
    scores = evaluate(models, _tiny.data(), info=info)
    assert [(row_of(scores, name).method, row_of(scores, name).members) for name in info] == [
        ("other", 2),
        ("DE", 4),
    ]


def test_info_of_models_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"info.*'ED'.*DE-1, DE-2, DE-3"):
        evaluate(ensembles(), SET, info={"ED": ModelInfo("ED", 3)})


def test_class_names_must_fit() -> None:
    names = ["cat", "dog", "bird"]
    assert evaluate(ensembles(), SET, class_names=names).class_names == tuple(names)
    with pytest.raises(ValueError, match=r"class_names.*\b2\b.*3 classes"):
        evaluate(ensembles(), SET, class_names=names[:2])


def test_an_evaluator_measures_again_and_again_with_one_pass_of_its_members() -> None:
    members, baseline = [table(seed) for seed in (14, 15, 16)], table(9, knowledge=1.4)
    once = evaluate(
        {**ensembles(members), "baseline": baseline}, SET, VALIDATION, reference=Ensemble(members)
    )
    calls = _tiny.count_runs(members)
    evaluator = Evaluator(Ensemble(members), SET, VALIDATION)
    assert calls == {0: 3, 1: 2, 2: 2}  # on the test split and on validation, the source on one image first
    calls.clear()
    assert evaluator.measure({"baseline": baseline}) == once.rows[3:]
    assert calls.keys() == {0}  # to count its cost
    assert evaluator.measure(ensembles(members)) == once.rows[:3]
    assert evaluator.target == 3
    assert [each.mean().item() for each in evaluator.nlls] == pytest.approx(
        [row.nll for row in once.rows[:3]]
    )
    assert evaluator.classes == CLASSES
