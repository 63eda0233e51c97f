"""`evaluate(…, ood=…)` against the metrics of predictions made one network at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import _tiny
from _tables import IMAGES, LABELS, MEMBERS, SET, TEST, VALIDATION, ensembles, row_of, table
from ensbridge import metrics
from ensbridge.data import ImageSet
from ensbridge.evaluation import score_images
from ensbridge.evaluation.evaluate import MODELS_PER_PASS, evaluate
from ensbridge.evaluation.scores import Scores, Uncertainty, parse_scores, read_scores
from ensbridge.evaluation.uncertainty import ALPHA
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble

OTHER = {"blends": IMAGES[:30] / 2 + IMAGES[30:60] / 2, "nothing": torch.zeros(7, *IMAGES.shape[1:])}


def uncertainty_of(scores: Scores, model: str) -> Uncertainty:
    found = row_of(scores, model).uncertainty
    assert found is not None
    return found


def log_probs_of(net: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return net(images).double().log_softmax(-1)


def fast_ensembles() -> tuple[Ensemble, dict[str, FastEnsemble]]:
    ensemble = _tiny.ensemble()
    bridges = [_tiny.bridge_to(ensemble, seed).bridge.one_step().eval() for seed in (20, 21)]
    fast = {
        "bridge": FastEnsemble(ensemble.source, bridges[:1], _tiny.FEATURE),
        "two": FastEnsemble(ensemble.source, bridges, _tiny.FEATURE, temperature=1.5),
        "no bridge": FastEnsemble(ensemble.source, temperature=2.0),
    }
    return ensemble, {name: model.eval() for name, model in fast.items()}


# ------------------------------------------------------------------------------ scores of images


def test_scores_are_what_single_networks_say() -> None:
    ensemble, fast = fast_ensembles()
    images = _tiny.images(11)
    models: dict[str, nn.Module] = {
        "DE-1": ensemble.first(1),
        "DE-3": ensemble,
        "net": ensemble.members[1],
        **fast,
    }
    found = score_images(models, ImageSet(images), batch_size=4)
    assert {name: list(scores)[2:] for name, scores in found.items()} == {
        "DE-1": [],
        "DE-3": ["mutual_information"],
        "net": [],
        "bridge": ["disagreement"],
        "two": ["disagreement"],
        "no bridge": [],
    }
    for name, model in models.items():
        probs = log_probs_of(model, images).exp()
        expected = {"msp": 1 - probs.amax(1), "entropy": -(probs * probs.log()).sum(1)}
        if name == "DE-3":
            each = torch.stack([log_probs_of(net, images).exp() for net in ensemble.members])
            expected["mutual_information"] = expected["entropy"] + (each * each.log()).sum(2).mean(0)
        if name in ("bridge", "two"):
            source = log_probs_of(ensemble.source, images).exp()
            expected["disagreement"] = (probs - source).abs().sum(1) / 2
        for score, values in found[name].items():
            torch.testing.assert_close(values, expected[score], rtol=1e-4, atol=1e-6)


def test_networks_that_models_share_run_once_a_batch() -> None:
    ensemble, fast = fast_ensembles()
    runs = _tiny.count_runs(ensemble)
    score_images({**ensemble.by_size(), **fast}, ImageSet(_tiny.images(8)), batch_size=4)
    assert runs == {0: 2, 1: 2, 2: 2}


# ------------------------------------------------------------------------------ rows


def test_rows_have_the_metrics_of_their_predictions() -> None:
    baseline = table(9, knowledge=1.4)
    scores = evaluate({**ensembles(), "baseline": baseline}, SET, VALIDATION, ood=OTHER, seed=4)
    for model, net in {**ensembles(), "baseline": baseline}.items():
        own, log_probs = uncertainty_of(scores, model), log_probs_of(net, IMAGES)
        test, val = log_probs[:TEST], log_probs[TEST:]
        msp, errors = metrics.msp_uncertainty(test), test.argmax(1) != LABELS[:TEST]
        expected = metrics.aurc(msp, errors), metrics.augrc(msp, errors)
        assert (own.aurc, own.augrc) == pytest.approx(expected, rel=1e-6)
        for sets in own.sets:
            generator = _tiny.generator(4)
            threshold = metrics.conformal_threshold(val, LABELS[TEST:], ALPHA, sets.method, generator)
            chosen = metrics.conformal_sets(test, threshold, sets.method, generator)
            found = metrics.coverage(chosen, LABELS[:TEST]), chosen.sum(1).double().mean().item()
            assert (sets.coverage, sets.size) == pytest.approx(found, rel=1e-6)
        for detection in own.ood:
            other = log_probs_of(net, OTHER[detection.images])
            if detection.score == "msp":
                pair = msp, metrics.msp_uncertainty(other)
            elif detection.score == "entropy":
                pair = metrics.entropy(test), metrics.entropy(other)
            else:
                continue
            area, covariance = metrics.delong(*pair)
            assert detection.auroc == pytest.approx(area.item(), abs=1e-6)
            assert detection.auroc_se == pytest.approx(covariance.sqrt().item(), abs=1e-6)
            assert detection.fpr95 == pytest.approx(metrics.fpr95(*pair), abs=1e-6)


def test_every_set_and_score_has_one_detection() -> None:
    scores = evaluate(ensembles(), SET, ood=OTHER)
    kinds = {model: ["msp", "entropy", "mutual_information"] for model in ("DE-2", "DE-3")}
    for model, names in {"DE-1": ["msp", "entropy"], **kinds}.items():
        own = uncertainty_of(scores, model)
        assert [(each.images, each.score) for each in own.ood] == [(s, n) for s in OTHER for n in names]
        assert own.sets == ()  # without validation


def test_no_other_images_are_needed_and_nothing_is_measured_unasked() -> None:
    plain, asked = evaluate(ensembles(), SET, VALIDATION), evaluate(ensembles(), SET, VALIDATION, ood={})
    assert all(row.uncertainty is None for row in plain.rows)
    own = uncertainty_of(asked, "DE-3")
    assert (own.ood, [each.method for each in own.sets]) == ((), ["lac", "aps"])
    rows = [json.loads(scores.to_json())["rows"] for scores in (plain, asked)]
    assert [row | {"uncertainty": None} for row in rows[1]] == rows[0]


def test_more_models_than_run_together_are_all_measured() -> None:
    models = {**ensembles(), **{f"table {seed}": table(seed) for seed in range(60, 60 + MODELS_PER_PASS)}}
    scores = evaluate(models, SET, ood={"nothing": OTHER["nothing"]})
    assert all(len(uncertainty_of(scores, row.model).ood) >= 2 for row in scores.rows)


def test_images_that_the_ensemble_knows_nothing_of_are_found() -> None:
    scores = evaluate(ensembles(), SET, ood=OTHER)
    by_set = {each.images: each for each in uncertainty_of(scores, "DE-3").ood if each.score == "entropy"}
    assert by_set["nothing"].auroc == 1.0  # zeros give equal probabilities
    assert by_set["nothing"].fpr95 == 0.0


def test_images_of_another_shape_are_refused_before_anything_runs() -> None:
    runs = _tiny.count_runs(MEMBERS)
    with pytest.raises(ValueError, match=r"'odd' .*\(1, 2, 2\).*\(1, 1, 65\)"):
        evaluate(ensembles(), SET, ood={"odd": torch.rand(3, 1, 2, 2)})
    assert not runs


def test_other_images_may_have_labels_and_be_a_single_one() -> None:
    scores = evaluate(ensembles(), SET, ood={"one": (OTHER["nothing"][:1], torch.zeros(1).long())})
    assert {each.auroc_se for each in uncertainty_of(scores, "DE-1").ood} == {None}


# ------------------------------------------------------------------------------ the file


def test_scores_with_uncertainty_survive_the_round_trip_and_older_files_are_read(tmp_path: Path) -> None:
    scores = evaluate(ensembles(), SET, VALIDATION, ood=OTHER)
    (tmp_path / "scores.json").write_text(scores.to_json())
    assert read_scores(tmp_path) == scores
    document = json.loads(scores.to_json())
    for row in document["rows"]:
        del row["uncertainty"]
    assert all(row.uncertainty is None for row in parse_scores(document).rows)


@pytest.mark.parametrize(
    ("key", "value"), [("auroc", 1.5), ("score", "doubt"), ("images", "a\x1b[1m"), ("fpr95", None)]
)
def test_a_damaged_value_is_named(key: str, value: object) -> None:
    document = json.loads(evaluate(ensembles(), SET, ood=OTHER).to_json())
    document["rows"][1]["uncertainty"]["ood"][2][key] = value
    with pytest.raises(ValueError, match=rf"^here: rows\[1\]\.uncertainty\.ood\[2\]\.{key} is "):
        parse_scores(document, where="here")
