"""Models whose bridges read several maps of the source, wherever a model is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import _serving
import _tiny
import ensbridge as eb
from _saving import change, put, runner
from _tiny import FEATURES, pyramid, pyramids
from ensbridge.bridge.bridge import Bridge
from ensbridge.deploy.batch import predict_images
from ensbridge.deploy.benchmark import bench
from ensbridge.deploy.fuse import OneStep, prepare_for_inference
from ensbridge.deploy.saving.description import MOST_FEATURES
from ensbridge.evaluation.predict import predict_batch
from ensbridge.experiments import find_transitions
from ensbridge.methods import JointDistillation
from ensbridge.methods.base import kl_loss
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models.features import forward_with_features
from ensbridge.training import fit
from ensbridge.utils.extras import missing

IMAGES = _tiny.images()


@torch.no_grad()
def test_bridges_read_the_maps_in_the_order_of_their_names() -> None:
    fast = pyramids(2)
    assert (fast.features, fast.feature) == (FEATURES, FEATURES[0])
    logits, *read = forward_with_features(fast.source, IMAGES, *FEATURES)
    ends = [bridge(tuple(read), logits).softmax(-1) for bridge in fast.each_bridge()]
    torch.testing.assert_close(fast(IMAGES).softmax(-1), (ends[0] + ends[1]) / 2)
    other = eb.FastEnsemble(fast.source, [*fast.each_bridge()], [FEATURES[2], *FEATURES[1::-1]]).eval()
    assert not other(IMAGES).allclose(fast(IMAGES), atol=1e-3)  # the first and the third are of one shape
    assert eb.FastEnsemble(fast.source, [], FEATURES).features == ()


@pytest.mark.parametrize(
    ("feature", "named"),
    [
        ([], "feature ''"),
        (None, "feature ''"),
        (["stem", "layer9"], "feature 'layer9'"),
        (["stem", 3], "feature is 3"),
        (3, "feature is 3"),
        (["stem", "stem"], r'feature is \["stem", "stem"\]'),
    ],
)
def test_names_that_are_no_modules_are_refused(feature: Any, named: str) -> None:
    bridge = Bridge(pyramid()).one_step()
    with pytest.raises(ValueError, match=named):
        eb.FastEnsemble(_tiny.member(), [bridge], feature)
    with pytest.raises(ValueError, match=named):
        JointDistillation(_tiny.ensemble(), _tiny.member(), {"a": bridge}, feature)


def test_a_bridge_of_other_maps_is_refused_when_it_runs() -> None:
    for feature in (FEATURES[0], FEATURES[:2], FEATURES[1:]):
        fast = eb.FastEnsemble(_tiny.member(), [Bridge(pyramid()).one_step()], feature).eval()
        with pytest.raises(ValueError, match=r"takes \(B, 8, H, W\), \(B, 16, H, W\), \(B, 8, H, W\)"):
            fast(IMAGES)


def test_joint_distillation_trains_them(tmp_path: Path) -> None:
    bridge, source = Bridge(pyramid()).one_step(), _tiny.member(7)
    method = JointDistillation(_tiny.ensemble(), source, {"a": bridge}, FEATURES)
    before, source_before = _tiny.state(bridge), _tiny.state(source)
    fit(method, _tiny.data(), dict.fromkeys(method.parts, _tiny.FEW_STEPS), tmp_path)
    fast = method.model()
    assert (fast.features, fast.source_distilled) == (FEATURES, True)
    assert not _tiny.same(before, _tiny.state(bridge))
    assert not _tiny.same(source_before, _tiny.state(source))
    described = json.loads((tmp_path / "config.json").read_text())["method"]
    assert described["feature"] == [*FEATURES]


def test_bridges_send_no_gradient_into_the_source_unless_asked() -> None:
    def gradient(end_to_end: bool) -> torch.Tensor:
        source = _tiny.member(7)
        method = JointDistillation(
            _tiny.ensemble(), source, {"a": Bridge(pyramid()).one_step()}, FEATURES, end_to_end=end_to_end
        )
        method.loss(_tiny.batch()).backward()
        weight = next(iter(source.parameters())).grad
        assert weight is not None
        return weight

    source = _tiny.member(7)
    kl_loss(_tiny.ensemble()(IMAGES).log_softmax(-1).detach(), source(IMAGES)).backward()
    expected = next(iter(source.parameters())).grad
    torch.testing.assert_close(gradient(False), expected)
    assert not gradient(True).allclose(gradient(False), atol=1e-6)


# ------------------------------------------------------------------------------ saved and loaded


@torch.no_grad()
def test_saved_and_loaded_it_is_the_same_to_the_bit(tmp_path: Path) -> None:
    fast = pyramids(2, temperature=1.3, source_logit_weight=-0.2, members=4)
    fast.save(tmp_path, image_shape=(3, 8, 8))
    again = eb.load(tmp_path)
    assert again.features == FEATURES
    assert again(IMAGES).equal(fast(IMAGES))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["feature"] == [*FEATURES]
    assert config["bridges"][1]["network"]["build"] == "ensbridge.nets:PyramidScore"
    card = (tmp_path / "README.md").read_text()
    assert "features `stages.0.0` and `stages.1.0` and `stem`" in card
    assert f"{count_macs(fast, IMAGES[:1]):,}" in card
    assert f"{count_params(fast):,}" in card


def test_a_file_of_one_feature_has_a_string(tmp_path: Path) -> None:
    one = eb.FastEnsemble(_tiny.member(), [Bridge(_tiny.score())], [_tiny.FEATURE]).eval()
    one.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["feature"] == _tiny.FEATURE
    assert eb.load(tmp_path).features == one.features == (_tiny.FEATURE,)


@pytest.mark.parametrize("name", ["dbn", "dbn-steps", "bn"])
def test_what_was_saved_with_one_feature_is_loaded(name: str) -> None:
    fast = eb.load(Path(__file__).parent / "files_v0_1" / "models" / name)
    assert fast.features == (fast.feature,) == ("stages.0.0",)


def test_the_zoos_model_reads_the_features_of_three_depths() -> None:
    assert eb.load("zoo:cifar10").features == ("stages.0.0", "stages.1.4", "stages.2.4")


@pytest.mark.parametrize(
    ("feature", "named"),
    [
        ([], r"feature is \[\], expected .* 2 to 64"),
        (["stem"], r'feature is \["stem"\], expected .* 2 to 64'),
        (["stem"] * 3, r'feature is \["stem", "stem", "stem"\], expected .* different'),
        ([f"layer{number}" for number in range(MOST_FEATURES + 1)], "expected .* 2 to 64"),
        ([f"{number}" for number in range(100_000)], "expected .* 2 to 64"),
        (["stem", 3], r"feature\[1\] is 3, expected one line of text"),
        ([["stem"], "stages.0.0"], r'feature\[0\] is \["stem"\]'),
        (["stem", None], r"feature\[1\] is null"),
        (["stem", "x" * 5000], r"feature\[1\] is "),
        (["stem", "layer9"], "feature 'layer9'"),
        (["stem", "\x1b[2J"], r"feature\[1\] is "),
        ({"stem": 1}, "feature is "),
        (None, "feature is null"),
        (3, "feature is 3"),
    ],
)
def test_hostile_names_are_refused_in_one_sentence(feature: Any, named: str, tmp_path: Path) -> None:
    pyramids().save(tmp_path)
    change(tmp_path, put("feature", feature))
    with pytest.raises(ValueError, match=named) as caught:
        eb.load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


NETWORK = "bridges.0.network.arguments"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (f"{NETWORK}.joins", [7, 0], "joins are"),
        (f"{NETWORK}.joins", [-1, 0], "joins are"),
        (f"{NETWORK}.joins", [0] * 100_000, "joins are"),
        (f"{NETWORK}.joins", "ab", "joins is"),
        (f"{NETWORK}.channels", [8, 10**12, 8], r"channels|shape"),
        (f"{NETWORK}.channels", [8] * 50_000, "joins are|far more tensors"),
        (f"{NETWORK}.stages", [[1, 8, 10**9, 1]] * 2, "far more tensors"),
        (f"{NETWORK}.stages", [[1, 8, 1, 1]] * 50_000, "far more tensors|has no"),
        (f"{NETWORK}.stem", 0, "each must be at least 1"),
        (f"{NETWORK}.colour", 1, "PyramidScore has not"),
    ],
)
def test_hostile_networks_are_refused_in_one_sentence(
    path: str, value: Any, named: str, tmp_path: Path
) -> None:
    pyramids().save(tmp_path)
    change(tmp_path, put(path, value))
    with pytest.raises(ValueError, match=named) as caught:
        eb.load(tmp_path)
    assert len(str(caught.value)) < 700
    assert str(caught.value).isprintable()


# ------------------------------------------------------------------------------ deployed


@torch.no_grad()
def test_prepared_for_inference_it_gives_the_same_logits() -> None:
    for bridges in (1, 2):
        fast = pyramids(bridges, temperature=1.3, source_logit_weight=0.2)
        before = _tiny.state(fast)
        prepared = prepare_for_inference(fast)
        assert all(isinstance(bridge, OneStep) for bridge in prepared.bridges)
        assert not any(isinstance(module, nn.BatchNorm2d) for module in prepared.bridges.modules())
        torch.testing.assert_close(prepared(IMAGES), fast(IMAGES), rtol=1e-5, atol=1e-5)
        double = fast.double()
        torch.testing.assert_close(
            prepare_for_inference(double)(IMAGES.double()), double(IMAGES.double()), rtol=0, atol=1e-12
        )
        assert _tiny.same({name: each.double() for name, each in before.items()}, _as_double(fast))


def _as_double(fast: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.double() for name, each in _tiny.state(fast).items()}


@pytest.mark.parametrize("to", ["onnx", "pt2"])
@torch.no_grad()
def test_an_export_gives_the_models_logits(to: Literal["onnx", "pt2"], tmp_path: Path) -> None:
    fast = pyramids(temperature=1.3)
    done = eb.export(fast, tmp_path / f"model.{to}", to, IMAGES[:4])
    assert done.difference <= 1e-5
    again = runner(done.path)
    for count in (1, 5, 17):
        images = _tiny.images(count, seed=9)
        torch.testing.assert_close(again(images), fast(images), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_it_is_timed_and_predicts() -> None:
    fast = pyramids(members=2)
    found = bench(fast, IMAGES[:1], runtimes=["eager"], batches=[2], threads=1, rounds=1)
    one, both, _ = found.tables[0].rows
    assert (one.macs, both.macs) == (count_macs(fast.source, IMAGES[:1]), count_macs(fast, IMAGES[:1]))
    assert both.params == count_params(fast)
    first, *_ = predict_images(fast, IMAGES)
    assert first.probability == pytest.approx(fast(IMAGES)[0].softmax(-1).max().item(), rel=1e-5)


@torch.no_grad()
def test_the_source_runs_once_for_models_that_read_different_maps_of_it() -> None:
    source = _tiny.member()
    several = pyramids(source=source)
    (bridge,) = several.each_bridge()
    models = {
        "source": source,
        "several": several,
        "calibrated": eb.FastEnsemble(source, [bridge], FEATURES, temperature=2.0).eval(),
        "other order": eb.FastEnsemble(source, [bridge], (FEATURES[2], *FEATURES[1::-1])).eval(),
        "one": eb.FastEnsemble(source, [Bridge(_tiny.score())], FEATURES[0]).eval(),
        "none": eb.FastEnsemble(source, temperature=2.0).eval(),
        "ensemble": eb.Ensemble([source, _tiny.member(1)]).eval(),
    }
    alone = {name: model(IMAGES).log_softmax(-1) for name, model in models.items()}
    calls = _tiny.count_runs([source, bridge])
    together = predict_batch(models, IMAGES)
    assert calls == {0: 1, 1: 2}  # the bridge once for each order
    assert all(together[name].equal(alone[name]) for name in models)


@torch.no_grad()
def test_transitions_have_the_path_of_the_bridge() -> None:
    fast, data = pyramids(), _tiny.data()
    source = torch.eye(3)[torch.zeros(len(data), dtype=torch.long)]
    target = torch.eye(3)[torch.ones(len(data), dtype=torch.long)]
    (first, *rest) = find_transitions(fast, source, target, data, count=3)
    assert len(rest) == 2
    assert first.times == (1.0, 0.0)
    expected = fast(data.images[first.index][None]).softmax(-1)[0]  # of one bridge, uncalibrated
    torch.testing.assert_close(torch.tensor(first.path[-1]), expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(bool(missing("serve")), reason=missing("serve") or "")
@torch.no_grad()
def test_served_it_explains_itself(tmp_path: Path) -> None:
    fast = pyramids(2, class_names=_serving.NAMES, pixel_range=(0.0, 1.0))
    fast.save(tmp_path / "model", image_shape=(3, 8, 8))
    model = _serving.registry(tmp_path / "model").find()
    outputs = model._explain(IMAGES)
    torch.testing.assert_close(outputs["logits"], fast(IMAGES))
    logits, *read = forward_with_features(fast.source, IMAGES, *FEATURES)
    for number, bridge in enumerate(fast.each_bridge()):
        assert isinstance(bridge, Bridge)
        expected = torch.stack(bridge.path(tuple(read), logits), 1)
        torch.testing.assert_close(outputs[f"path{number}"], expected)
    assert model.path_times() == [[1.0, 0.0]] * 2
    assert model._predict(IMAGES)["logits"].allclose(fast(IMAGES), atol=1e-5)
    macs, _ = model.costs["model"]
    assert macs == count_macs(fast, IMAGES[:1])
