"""A `FastEnsemble` with no bridge, the source and its temperature, is taken wherever any other is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

import _tiny
import ensbridge as eb
from ensbridge.deploy.batch import predict_images
from ensbridge.deploy.benchmark import bench
from ensbridge.deploy.cuda_graph import split_streams
from ensbridge.deploy.fuse import prepare_for_inference
from ensbridge.evaluation.evaluate import infer_info
from ensbridge.evaluation.predict import predict_batch
from ensbridge.evaluation.scores import ModelInfo
from ensbridge.metrics.cost import count_macs

IMAGES = _tiny.images()


def alone(source: nn.Module | None = None, **options: object) -> eb.FastEnsemble:
    return eb.FastEnsemble(source or _tiny.member(), temperature=1.7, **options).eval()  # type: ignore[arg-type]


@torch.no_grad()
def test_it_is_the_source_at_its_temperature() -> None:
    fast = alone()
    logits, source = fast.with_source(IMAGES)
    assert source.equal(fast.source(IMAGES))
    torch.testing.assert_close(logits.softmax(-1), (source / 1.7).softmax(-1))
    assert count_macs(fast, IMAGES[:1]) == count_macs(fast.source, IMAGES[:1])
    assert (fast.feature, fast.features, fast.members) == ("", (), 1)
    named = eb.FastEnsemble(fast.source, [], "a module that nothing reads")
    assert named.feature == ""


@pytest.mark.parametrize("source", [_tiny.member, _tiny.batch_norm_member])
@torch.no_grad()
def test_saved_and_loaded_it_is_the_same(source: type[nn.Module], tmp_path: Path) -> None:
    fast = alone(source(), members=3, source_distilled=True)
    fast.save(tmp_path, image_shape=(3, 8, 8))
    again = eb.load(tmp_path, source=None if source is _tiny.member else source(seed=9))
    assert again(IMAGES).equal(fast(IMAGES))
    assert (again.members, again.source_distilled, len(again.bridges)) == (3, True, 0)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["bridges"], config["feature"], config["source_distilled"]) == ([], "", True)
    assert "×1.000" in (tmp_path / "README.md").read_text()


def test_a_file_without_the_new_field_has_a_source_that_is_a_member(tmp_path: Path) -> None:
    alone().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["source_distilled"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eb.load(tmp_path).source_distilled is False


@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_it_is_exported(to: Literal["onnx", "pt2"], tmp_path: Path) -> None:
    exported = eb.export(alone(), tmp_path / f"model.{to}", to, IMAGES[:2])
    assert exported.path.exists()
    assert 0 <= exported.difference < 1e-4


@torch.no_grad()
def test_it_is_fused_split_timed_and_predicts() -> None:
    fast = alone(members=2)
    torch.testing.assert_close(prepare_for_inference(fast)(IMAGES), fast(IMAGES))
    split, branches = split_streams(prepare_for_inference(fast), IMAGES)
    assert set(branches.values()) == {"source", ""}
    torch.testing.assert_close(split(IMAGES)[0], fast(IMAGES))
    found = bench(fast, IMAGES[:1], runtimes=["eager"], batches=[2], threads=1, rounds=1)
    assert [row.model for row in found.tables[0].rows] == ["one member", found.fast, "DE-2"]
    assert [row.macs for row in found.tables[0].rows[:2]] == [count_macs(fast.source, IMAGES[:1])] * 2
    prediction = predict_images(fast, IMAGES)[0]
    assert prediction.label == prediction.source_label
    assert prediction.probability == pytest.approx(fast(IMAGES)[0].softmax(-1).max().item(), rel=1e-5)


def test_its_source_runs_once_for_all_models_that_share_it() -> None:
    source = _tiny.member()
    bridged = eb.FastEnsemble(source, [_tiny.bridge_to(_tiny.ensemble()).bridge], _tiny.FEATURE).eval()
    models = {"one": source, "alone": alone(source), "bridged": bridged}
    separate = {name: predict_batch({name: model}, IMAGES)[name] for name, model in models.items()}
    calls = _tiny.count_runs([source])
    together = predict_batch(models, IMAGES)
    assert calls[0] == 1
    assert all(together[name].equal(separate[name]) for name in models)


def test_it_says_what_it_is() -> None:
    assert infer_info(alone(members=3, source_distilled=True)) == ModelInfo("ED", 3)
    assert infer_info(alone()) == ModelInfo()
    members = [_tiny.member(seed) for seed in range(3)]
    data = _tiny.data()
    models = {
        "ensemble": eb.Ensemble(members),
        "distilled": alone(_tiny.member(5), members=3, source_distilled=True),
    }
    row = eb.evaluate(models, data, data).rows[1]
    assert (row.method, row.members, row.bridges, row.macs_ratio) == ("ED", 3, 0, 1.0)


def test_fidelity_knows_a_distilled_source_from_a_member(tmp_path: Path) -> None:
    members = [_tiny.member(seed) for seed in range(3)]
    data = _tiny.data()
    fidelity = alone(members[0]).fidelity(data, members=members)
    assert (fidelity.macs_ratio, fidelity.worth_it) == (1.0, False)  # a temperature alone is no gain
    assert fidelity.kl == pytest.approx(fidelity.source_kl)
    with pytest.raises(ValueError, match="first of members"):
        alone(_tiny.member(9)).fidelity(data, members=members)
    other = alone(_tiny.member(9), members=3, source_distilled=True)
    found = other.fidelity(data, members=members)
    want = eb.FastEnsemble(other.source, members=3, source_distilled=True).fidelity(data, members=members)
    assert found.kl == pytest.approx(want.kl)  # before calibration, of its own source
    assert found.source_kl == pytest.approx(fidelity.source_kl)
    other.save(tmp_path, scores=found)
    assert eb.load(tmp_path).fidelity(data, members=members) == replace(found, kl=pytest.approx(found.kl))


def test_bridges_beside_a_distilled_source_must_be_better_than_it_alone() -> None:
    """A bridge that changes nothing is not worth its cost, however good the source is."""
    data = _tiny.data(240)
    members = [_tiny.member(seed) for seed in range(3)]
    with torch.no_grad():
        labels = members[2](data.images).argmax(-1)
    bridge = _tiny.bridge_to(_tiny.ensemble(), loss="kl").bridge
    nn.init.zeros_(bridge.score.head.weight)  # type: ignore[union-attr,arg-type]
    nn.init.zeros_(bridge.score.head.bias)  # type: ignore[union-attr,arg-type]
    fast = eb.FastEnsemble(members[2], [bridge], _tiny.FEATURE, temperature=0.01, members=3)
    fast.source_distilled = True
    found = fast.fidelity((data.images, labels), members=members)
    assert found.row is not None
    assert found.source_row is not None
    assert found.row.nll < found.source_row.nll
    assert not found.worth_it
    assert "budget=1.0" in found.verdict
