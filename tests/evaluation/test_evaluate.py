"""Rows of `evaluate` against numbers computed by hand, and `scores.json` as a file that others read."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import _runs
import _tiny
from _tables import (
    IMAGES,
    LABELS,
    MEMBERS,
    SET,
    TEST,
    VALIDATION,
    ensembles,
    metrics_by_hand,
    nll_by_hand,
    probabilities,
    row_of,
    table,
    temperature_by_hand,
)
from ensbridge.data import ImageSet
from ensbridge.evaluation.evaluate import MODELS_PER_PASS, environment, evaluate
from ensbridge.evaluation.predict import predict
from ensbridge.evaluation.scores import ModelInfo, Row, Scores, read_scores
from ensbridge.methods import Bridge, DiffusionBridge
from ensbridge.metrics import gap_closed
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models import ResNet, ScoreNet
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble

KEYS = ["dataset", "seed", "class_names", "environment", "rows"]
KEYS += ["settings", "target", "transitions", "curves", "tradeoff", "capacity", "corrupted", "corrupted_set"]
ROW_KEYS = [
    "model",
    "method",
    "members",
    "bridges",
    "steps",
    "macs",
    "macs_ratio",
    "params",
    "params_ratio",
    "acc",
    "nll",
]
ROW_KEYS += ["brier", "ece", "cnll", "temperature", "dee", "gap", "gap_error", "reliability", "loss"]
ROW_KEYS += ["source_temperature", "control", "width", "source", "tau", "seed", "headline"]
ROW_KEYS += ["nll_gain_over_control", "nll_gain_over_control_se", "uncertainty"]


# ------------------------------------------------------------------------------ numbers


def test_rows_are_what_plain_loops_say() -> None:
    baseline = table(9, knowledge=1.4)
    scores = evaluate({**ensembles(), "baseline": baseline}, SET, VALIDATION)
    expected = {"DE-1": MEMBERS[:1], "DE-2": MEMBERS[:2], "DE-3": MEMBERS, "baseline": [baseline]}
    assert [row.model for row in scores.rows] == list(expected)
    for model, tables in expected.items():
        row, probs = row_of(scores, model), probabilities(tables)
        for name, value in metrics_by_hand(probs[:TEST], LABELS[:TEST].tolist()).items():
            assert getattr(row, name) == pytest.approx(value, rel=1e-5), (model, name)
        temperature = temperature_by_hand(probs[TEST:], LABELS[TEST:].tolist())
        assert row.temperature == pytest.approx(temperature, rel=1e-4)
        powered = probs[:TEST] ** (1 / temperature)
        cnll = nll_by_hand(powered / powered.sum(1, keepdims=True), LABELS[:TEST].tolist()).mean()
        assert row.cnll == pytest.approx(cnll, rel=1e-5)
    assert len({row.acc for row in scores.rows}) > 1


def test_dee_and_gap_are_measured_against_the_ensembles() -> None:
    baseline = table(9, knowledge=1.4)
    labels = LABELS[:TEST].tolist()
    own = nll_by_hand(probabilities([baseline])[:TEST], labels)
    steps = [nll_by_hand(probabilities(MEMBERS[:size])[:TEST], labels) for size in (1, 2, 3)]
    nlls = [each.mean() for each in steps]
    assert nlls[0] > own.mean() > nlls[1] > nlls[2]
    for target in (None, 3, 2):
        row = row_of(evaluate({**ensembles(), "baseline": baseline}, SET, target=target), "baseline")
        assert row.dee == pytest.approx(1 + (nlls[0] - own.mean()) / (nlls[0] - nlls[1]), rel=1e-4)
        goal = (target or 3) - 1
        assert row.gap == pytest.approx((nlls[0] - own.mean()) / (nlls[0] - nlls[goal]), rel=1e-4)
        assert row.gap_error == pytest.approx(gap_closed(steps[0], own, steps[goal])[1], rel=1e-3)


def test_a_bridge_is_compared_with_its_own_control_image_by_image() -> None:
    bridge = ModelInfo("DBN", 3, 1, 1, "kl", 2.0)
    tables = {"ours": table(30, knowledge=1.4), "its control": table(31, knowledge=1.4)}
    info = {"ours": bridge, "its control": bridge.as_control()}
    info |= {"two": replace(bridge, members=5, bridges=2), "steps": replace(bridge, steps=5)}
    info |= {"other loss": replace(bridge, loss="bridge").as_control()}
    info |= {"other temperature": replace(bridge, source_temperature=4.0)}
    others = {name: table(seed) for seed, name in enumerate(info, 40) if name not in tables}
    scores = evaluate(
        {**others, **tables, **ensembles()}, SET, reference=Ensemble(MEMBERS), info=info, seed=5
    )
    nlls = [nll_by_hand(probabilities([each])[:TEST], LABELS[:TEST].tolist()) for each in tables.values()]
    row, gain = row_of(scores, "ours"), nlls[1] - nlls[0]
    assert row.nll_gain_over_control == pytest.approx(gain.mean(), rel=1e-4)
    assert row.nll_gain_over_control_se == pytest.approx(scipy.stats.sem(gain), rel=1e-4)
    for row in scores.rows:
        assert row.info == info.get(row.model, row.info)
        assert row.seed == 5
        if row.model != "ours":
            assert (row.nll_gain_over_control, row.nll_gain_over_control_se) == (None, None), row.model


def test_rows_of_ensembles_have_their_size_as_dee_also_where_it_is_not_monotone() -> None:
    liar = table(5, knowledge=-4.0)
    members = [MEMBERS[0], liar, MEMBERS[1], MEMBERS[2]]
    scores = evaluate({**ensembles(members), "alone": MEMBERS[0]}, SET)
    assert scores.rows[1].nll > scores.rows[0].nll  # DE-2 is worse than DE-1
    assert [row.dee for row in scores.rows] == [1.0, 2.0, 3.0, 4.0, 1.0]
    assert all(type(row.dee) is float for row in scores.rows)
    assert all(row.gap is None and row.gap_error is None for row in scores.rows)


def test_an_ensemble_of_others_or_in_another_order_is_none_of_the_target() -> None:
    models = {
        "reversed": Ensemble([MEMBERS[1], MEMBERS[0]]),
        "second": MEMBERS[1],
        "too long": Ensemble([*MEMBERS, table(4)]),
    }
    scores = evaluate(models, SET, reference=Ensemble(MEMBERS))
    assert all(row.gap is not None and row.gap_error is not None for row in scores.rows)
    assert [row.members for row in scores.rows] == [2, 1, 4]
    assert row_of(scores, "reversed").dee == pytest.approx(2.0, abs=1e-3)  # by interpolation, not by name


def test_beyond_the_largest_ensemble_dee_is_a_string_in_json_too() -> None:
    scores = evaluate({**ensembles(), "oracle": table(9, knowledge=8.0)}, SET)
    assert row_of(scores, "oracle").dee == ">3"
    assert '"dee": ">3"' in scores.to_json()


def test_the_reference_is_the_largest_ensemble_unless_given() -> None:
    baseline = table(9, knowledge=1.4)
    models = {"small": Ensemble(MEMBERS[:2]), "large": Ensemble(MEMBERS), "baseline": baseline}
    found = evaluate(models, SET)
    assert asdict(found) == asdict(evaluate(models, SET, reference=Ensemble(MEMBERS)))
    short = evaluate(models, SET, reference=Ensemble(MEMBERS[:2]))
    assert row_of(short, "baseline").gap != row_of(found, "baseline").gap
    assert row_of(short, "large").gap is not None


def test_to_a_target_of_one_there_is_no_gap() -> None:
    row = row_of(evaluate({**ensembles(), "baseline": table(9)}, SET, target=1), "baseline")
    assert (row.gap, row.gap_error) == (None, None)


def test_without_validation_nothing_is_calibrated() -> None:
    for row in evaluate(ensembles(), SET).rows:
        assert (row.cnll, row.temperature) == (None, None)
    for row in evaluate(ensembles(), SET, VALIDATION).rows:
        assert row.cnll is not None
        assert row.temperature is not None


def numbers_of(row: Row) -> dict[str, Any]:
    """Every value of a row, its reliability bin by bin."""
    assert row.reliability is not None
    assert row.reliability.after is not None
    values = asdict(row)
    del values["reliability"]
    for number, one in enumerate(row.reliability.before + row.reliability.after):
        values |= {f"bin {number} {name}": value for name, value in asdict(one).items()}
    return values


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_the_batch_size_changes_nothing(batch_size: int) -> None:
    models = {**ensembles([_runs.member(seed) for seed in range(3)]), "baseline": _runs.member(9)}
    data, val = _runs.data(1, images=30), _runs.data(2, images=20)
    whole, parts = (evaluate(models, data, val, batch_size=size) for size in (256, batch_size))
    for row, other in zip(whole.rows, parts.rows, strict=True):
        others = numbers_of(other)
        for name, value in numbers_of(row).items():
            near = pytest.approx(value, rel=2e-4) if isinstance(value, float) else value
            assert others[name] == near, (row.model, name)


def test_models_are_run_in_evaluation_mode_and_left_as_they_were() -> None:
    nets = [nn.Sequential(_runs.member(seed), nn.Dropout(0.5)).train() for seed in range(2)]
    data = _runs.data(1, images=30)
    before = [_runs.state(net) for net in nets]
    random_state = torch.get_rng_state()
    scores = evaluate({"DE-2": Ensemble(nets), "other": nets[1]}, data, data)
    assert all(_runs.same(_runs.state(net), state) for net, state in zip(nets, before, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    plain = [_runs.member(seed).eval() for seed in range(2)]
    again = evaluate({"DE-2": Ensemble(plain), "other": plain[1]}, data, data)
    assert [row.nll for row in scores.rows] == [row.nll for row in again.rows]


def test_bytes_are_images_too() -> None:
    pixels = torch.randint(
        0, 256, (30, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    models = ensembles([_runs.member(seed) for seed in range(2)])
    labels = torch.arange(30) % 3
    scores = [evaluate(models, (images, labels)) for images in (pixels, pixels.float() / 255)]
    assert scores[0].rows == scores[1].rows


def test_predictions_are_log_probabilities_without_gradients() -> None:
    log_probs = predict(MEMBERS[0], ImageSet(IMAGES), batch_size=7)
    np.testing.assert_allclose(log_probs.exp().numpy(), probabilities(MEMBERS[:1]), rtol=1e-5)
    assert not log_probs.requires_grad


def test_many_models_are_measured_as_few_are() -> None:
    members = [_runs.member(seed) for seed in range(2)]
    baselines = {f"baseline {seed}": _runs.member(10 + seed) for seed in range(MODELS_PER_PASS + 3)}
    images = torch.rand(30, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3
    whole = evaluate({**ensembles(members), **baselines}, images, images)
    for name, net in baselines.items():
        alone = evaluate({**ensembles(members), name: net}, images, images)
        assert alone.rows[-1] in whole.rows


def test_a_model_of_other_classes_than_the_members_is_named() -> None:
    other = nn.Sequential(nn.Flatten(), nn.Linear(IMAGES[0].numel(), 5))
    with pytest.raises(ValueError, match=r"'other' has 5.*\d"):
        evaluate({**ensembles(MEMBERS), "other": other}, (IMAGES, LABELS))


# ------------------------------------------------------------------------------ costs


def costs() -> tuple[dict[str, nn.Module], list[DiffusionBridge], Tensor]:
    ensemble = Ensemble([ResNet((1, 1), (8, 16), 3, stem=8) for _ in range(3)])
    scores = [ScoreNet(3, 8, [(1, 8, 1, 1), (2, 16, 1, 2)], 16, z_input="none") for _ in range(2)]
    five, one = (DiffusionBridge(ensemble, score) for score in scores)
    control = DiffusionBridge(ensemble, scores[1], target=(0,))
    models = {
        "ensemble": ensemble,
        "five": FastEnsemble.of(five),
        "one": FastEnsemble.of(one.with_bridge(one.bridge.one_step())),
        "both": FastEnsemble.of(five, one.with_bridge(one.bridge.one_step())),
        "control": FastEnsemble.of(control),
    }
    return models, [five, one], torch.rand(9, 3, 8, 8)


def test_costs_are_the_source_and_each_pass_of_the_score_network() -> None:
    models, bridges, images = costs()
    scores = evaluate(models, (images, torch.arange(9) % 3))
    source, score = bridges[0].ensemble.source, bridges[0].bridge.score
    net = count_macs(source, images[:1])
    feature = torch.rand(1, 8, 8, 8)
    once = count_macs(score, feature, torch.rand(1, 3), torch.ones(1))
    assert net > once > 0
    assert [row.macs for row in scores.rows] == [
        3 * net,
        net + 5 * once,
        net + once,
        net + 6 * once,
        net + 5 * once,
    ]
    assert [row.macs_ratio for row in scores.rows] == [row.macs / net for row in scores.rows]
    own, more = count_params(source), count_params(score)
    assert [row.params for row in scores.rows] == [
        3 * own,
        own + more,
        own + more,
        own + 2 * more,
        own + more,
    ]
    assert [row.params_ratio for row in scores.rows] == [row.params / own for row in scores.rows]
    assert [(row.members, row.bridges, row.steps) for row in scores.rows] == [
        (3, 0, 0),
        (3, 1, 5),
        (3, 1, 1),
        (3, 2, 5),
        (1, 1, 5),
    ]
    assert scores.class_names == ("0", "1", "2")


def test_costs_do_not_depend_on_how_many_images_there_are() -> None:
    models, _, images = costs()
    few, many = (evaluate(models, (images[:n], torch.arange(n) % 3), batch_size=4) for n in (2, 9))
    assert [row.macs for row in few.rows] == [row.macs for row in many.rows]


# ------------------------------------------------------------------------------ the fast ensemble itself


def test_a_fast_ensemble_is_source_and_bridges_in_one_call() -> None:
    models, bridges, images = costs()
    both = models["both"].eval()
    with torch.no_grad():
        seen = _tiny.teacher_outputs(bridges[0].ensemble, "stages.0.0", images)
        ends = [bridges[0].bridge, bridges[1].bridge.one_step().eval()]
        mean = torch.stack([bridge(seen.feature, seen.logits[0]).softmax(-1) for bridge in ends]).mean(0)
        torch.testing.assert_close(both(images).softmax(-1), mean)
        assert isinstance(both, FastEnsemble)
        cooler = FastEnsemble(both.source, both.each_bridge(), both.feature, temperature=2.0).eval()
        torch.testing.assert_close(cooler(images), both(images) / 2)


def test_a_fast_ensemble_names_what_it_cannot_use() -> None:
    source, bridge = ResNet((1,), (8,), 3, stem=8), Bridge(ScoreNet(3, 8, [(1, 8, 1, 1)], 8, z_input="none"))
    with pytest.raises(ValueError, match=r"'stages\.7'"):
        FastEnsemble(source, [bridge], "stages.7")
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"temperature is {wrong}"):
            FastEnsemble(source, [bridge], "stages.0.0", temperature=wrong)
    first, second = _runs.bridge(), _runs.bridge()
    with pytest.raises(ValueError, match="do not share"):
        FastEnsemble.of(first, second)


# ------------------------------------------------------------------------------ the file


def whole_scores() -> Scores:
    models = {**ensembles(), "baseline": table(9), "oracle": table(9, knowledge=8.0)}
    return evaluate(models, SET, VALIDATION, dataset="tables", seed=5)


def test_scores_json_has_exactly_its_keys() -> None:
    scores = whole_scores()
    document = json.loads(scores.to_json())
    assert list(document) == KEYS
    assert all(list(row) == ROW_KEYS for row in document["rows"])
    assert (document["dataset"], document["seed"], document["class_names"]) == ("tables", 5, ["0", "1", "2"])
    assert document["environment"] == environment()


def test_scores_json_can_be_read_back(tmp_path: Path) -> None:
    scores = whole_scores()
    (tmp_path / "scores.json").write_text(scores.to_json())
    assert read_scores(tmp_path) == scores
    assert read_scores(tmp_path / "scores.json").to_json() == scores.to_json()


def strings(value: Any) -> list[str]:
    """Every string of a JSON document, keys too."""
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in strings(each)]
    return [value] if isinstance(value, str) else []


def test_scores_json_knows_no_place_and_no_time() -> None:
    scores = whole_scores()
    for text in strings(json.loads(scores.to_json())):
        assert not re.search(r"[/\\~]|\d{4}-\d\d-\d\d|\d\d:\d\d", text), text
    assert whole_scores().to_json() == scores.to_json()


def test_numbers_that_json_cannot_hold_are_refused() -> None:
    scores = whole_scores()
    with pytest.raises(ValueError):
        replace(scores, rows=(replace(scores.rows[0], nll=math.nan),)).to_json()


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("models", "data", "options", "named"),
    [
        ({}, SET, {}, "0 models"),
        ({"one": MEMBERS[0], "two": MEMBERS[1]}, SET, {}, r"one, two.*reference="),
        ({"all": Ensemble(MEMBERS)}, ImageSet(IMAGES), {}, r"test.*no labels"),
        ({"all": Ensemble(MEMBERS)}, SET, {"val": ImageSet(IMAGES)}, r"val.*no labels"),
        ({"all": Ensemble(MEMBERS)}, SET, {"target": 4}, r"target is 4.*\b3"),
        ({"all": Ensemble(MEMBERS)}, SET, {"target": 0}, r"target is 0.*\b3"),
        ({"all": Ensemble(MEMBERS)}, (IMAGES, LABELS[:5]), {}, r"labels.*\(5,\)"),
    ],
)
def test_errors_say_what_is_wrong(
    models: dict[str, nn.Module], data: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        evaluate(models, data, **options)


@pytest.mark.parametrize("part", ["test", "validation"])
def test_labels_of_other_classes_are_refused_after_one_image(part: str) -> None:
    nets = [_runs.member(seed) for seed in range(2)]
    seen: list[int] = []
    for net in nets:
        net.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    right = _runs.data(1, 20)
    wrong = ImageSet(right.images, torch.full((20,), 7))
    sets = (wrong, right) if part == "test" else (right, wrong)
    with pytest.raises(ValueError, match=r"labels contain 7.*0\.\.2"):
        evaluate({"one": nets[0]}, *sets, reference=Ensemble(nets))
    assert seen == [1]
