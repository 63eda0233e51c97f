"""Saving and loading: the same model to the bit, whole or not at all, with its card."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as unpack
from torch import nn

import _tiny
import ensbridge as eb
from _saving import FILES, assert_same, bridge, contents, foreign, model
from ensbridge.bridge.bridge import FeatureBridge
from ensbridge.deploy.saving import architecture
from ensbridge.deploy.saving.weights import digest
from ensbridge.methods import Bridge, BridgeConfig
from ensbridge.models import ResNet, ScoreNet
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble

# ------------------------------------------------------------------------------ round trips


def feature_bridge(width: float) -> FeatureBridge:
    return FeatureBridge(_tiny.tail(_tiny.member(), 3, width))


MODELS: dict[str, Callable[[], FastEnsemble]] = {
    "five steps": lambda: model(),
    "one step": lambda: model(bridge(1, times=(0.0, 1.0))),
    "uneven steps": lambda: model(bridge(1, times=(0.0, 0.3, 1.0))),
    "two bridges of different steps": lambda: model(bridge(1), bridge(2, times=(0.0, 1.0)), members=5),
    "calibrated": lambda: model(temperature=1.37),
    "with a share of the source": lambda: model(temperature=0.8, source_logit_weight=-0.21),
    "bridge networks": lambda: model(feature_bridge(1.0), feature_bridge(0.5), average_source=True),
    "both kinds": lambda: model(bridge(), feature_bridge(0.25)),
    "a control": lambda: model(members=1),
    "another input": lambda: model(
        source=ResNet((1,), (8,), 3, stem=8, strides=(2,), bias=False, mean=(0.1, 0.2, 0.3), std=(1, 2, 3))
    ),
    "released": lambda: model(bridge(config=BridgeConfig.preset("released"))),
    "paper": lambda: model(bridge(config=BridgeConfig.preset("paper"))),
    "informative": lambda: model(bridge(config=BridgeConfig(z_input="informative", num_steps=3, beta=1))),
    "float64": lambda: model().double(),
    "bfloat16": lambda: model().bfloat16(),
    "float16": lambda: model(bridge(times=(0.0, 1.0))).half(),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_was_saved_is_loaded_to_the_bit(name: str, tmp_path: Path) -> None:
    fast = MODELS[name]()
    fast.save(tmp_path / "a", image_shape=(3, 8, 8))
    assert sorted(contents(tmp_path / "a")) == FILES
    loaded = eb.load(tmp_path / "a")
    assert_same(loaded, fast)
    assert _tiny.same(loaded.state_dict(), fast.state_dict())
    assert [each.dtype for each in loaded.buffers()] == [each.dtype for each in fast.buffers()]
    assert not any(module.training for module in loaded.modules())
    assert str(loaded) == str(fast)
    kept = ("feature", "temperature", "source_logit_weight", "members", "average_source")
    assert [getattr(loaded, each) for each in kept] == [getattr(fast, each) for each in kept]
    for here, there in zip(fast.each_bridge(), loaded.each_bridge(), strict=True):
        assert vars(here).get("times") == vars(there).get("times")
        assert vars(here).get("config") == vars(there).get("config")
    # Saving again, also what was loaded, and also over what is there, changes no byte.
    loaded.save(tmp_path / "b", image_shape=(3, 8, 8))
    fast.save(tmp_path / "a", image_shape=(3, 8, 8))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_loading_leaves_random_state_and_threads_of_the_caller_alone(tmp_path: Path) -> None:
    model().save(tmp_path)
    before = torch.get_rng_state()
    with torch.device("meta"):  # the caller's own default device does not matter
        loaded = eb.load(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cpu"}


def test_a_model_in_training_mode_is_saved_as_it_is_and_stays_in_it(tmp_path: Path) -> None:
    fast = model().train()
    before = _tiny.state(fast)
    fast.save(tmp_path, image_shape=(3, 8, 8))
    assert fast.training
    assert _tiny.same(before, fast.state_dict())
    assert_same(eb.load(tmp_path), fast.eval())


def test_pixels_normalisation_that_was_set_by_hand_is_kept(tmp_path: Path) -> None:
    fast = model()
    assert isinstance(fast.source, ResNet)
    fast.source.mean.copy_(torch.rand(fast.source.mean.shape, generator=_tiny.generator()))
    fast.save(tmp_path)
    assert_same(eb.load(tmp_path), fast)


def test_shared_networks_are_stored_once_and_shared_again(tmp_path: Path) -> None:
    score = _tiny.score()
    fast = model(Bridge(score), Bridge(score, times=(0.0, 1.0)))
    fast.save(tmp_path / "a")
    stored = unpack((tmp_path / "a/model.safetensors").read_bytes())
    assert not [name for name in stored if name.startswith("bridges.1")]
    loaded = eb.load(tmp_path / "a")
    assert_same(loaded, fast)
    assert eb.cost.count_params(loaded) == eb.cost.count_params(fast)
    loaded.save(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


# ------------------------------------------------------------------------------ folders


def test_what_is_no_model_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        eb.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        eb.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file"):
        eb.load(tmp_path / "file")


def test_what_is_not_a_saved_model_is_never_overwritten(tmp_path: Path) -> None:
    fast = model()
    (tmp_path / "file").write_text("mine")
    for path in ("file", "file/model"):
        with pytest.raises(ValueError, match="file is a file"):
            fast.save(tmp_path / path)
    for name, content, words in (
        ("README.md", "# My project", r"README\.md.*not the card"),
        ("config.json", '{"beta": 1}', r"config\.json.*no saved model"),
        ("config.json", "{", r"config\.json.*JSON"),
        ("model.safetensors", "mine", r"model\.safetensors.*config\.json"),
    ):
        place = tmp_path / f"{name}-{len(content)}"
        place.mkdir()
        (place / name).write_text(content)
        with pytest.raises(ValueError, match=words):
            fast.save(place)
        assert contents(place) == {name: content.encode()}


def test_a_models_own_folder_keeps_what_else_lies_in_it_but_no_export_of_another_model(
    tmp_path: Path,
) -> None:
    model().save(tmp_path)
    for name in ("notes.txt", "model.onnx", "model.pt2"):
        (tmp_path / name).write_text("mine")
    model(bridge(3), temperature=2.0).save(tmp_path)
    assert sorted(contents(tmp_path)) == sorted([*FILES, "notes.txt"])
    assert eb.load(tmp_path).temperature == 2.0


class Killed(BaseException):
    """As a kill: nothing catches it."""


def dying_at_the_card(source: Path, target: Path, replace: Callable[..., None] = os.replace) -> None:
    if target.name == "README.md":
        raise Killed
    replace(source, target)


@pytest.mark.parametrize("function", ["replace", "fsync"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_model_or_the_new_one(
    function: str, fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, last = model(bridge(1)), model(bridge(2), bridge(3)), model(bridge(4))
    real, seen = getattr(os, function), set()
    for moment in range(20):
        place, calls = tmp_path / str(moment), []
        if not fresh:
            old.save(place)

        def dying(*arguments: Any, calls: list[int] = calls, moment: int = moment) -> Any:
            calls.append(1)
            if len(calls) > moment:
                raise Killed
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, dying)
            try:
                new.save(place)
            except Killed:
                pass
            else:
                break
        if fresh and not (place / "config.json").exists():
            with pytest.raises(ValueError, match=r"holds no config\.json"):
                eb.load(place)
        else:
            found = eb.load(place)
            assert_same(found, new if len(found.bridges) == 2 else old)
            seen.add(len(found.bridges))
        # A second death, when new weights lie there again, does no more harm; then all is well again.
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying_at_the_card)
            with pytest.raises(Killed):
                last.save(place)
        if not fresh:
            assert_same(eb.load(place), found)
        last.save(place)
        assert sorted(contents(place)) == FILES
        assert_same(eb.load(place), last)
    assert moment > 3
    assert seen == ({2} if fresh else {1, 2})


def heated(temperature: float) -> FastEnsemble:
    """One whose temperature was set by hand."""
    fast = model()
    fast.temperature = temperature
    return fast


def test_a_model_that_cannot_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    class Extra(nn.Sequential):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    hooked = FastEnsemble(Extra(*_tiny.batch_norm_member()), [bridge()], "0")
    odd = foreign()
    odd.source.register_buffer("odd", torch.ones(1, dtype=torch.complex64))
    empty = foreign()
    empty.source.to("meta")
    endless = model()
    endless.source.mean.fill_(torch.inf)  # type: ignore[union-attr,operator]
    for fast, words in (
        (heated(float("inf")), "finite"),
        (heated(1e9), r"temperature is 1000000000\.0"),
        (model(members=0), "members is 0,"),
        (hooked, "_extra_state.*dict"),
        (endless, "finite"),
        (odd, r"source\.odd.*complex64"),
        (empty, "without values"),
    ):
        with pytest.raises(ValueError, match=words):
            fast.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


# ------------------------------------------------------------------------------ the card


def card(place: Path) -> str:
    return (place / "README.md").read_text()


def test_the_card_tells_how_the_model_was_calibrated(tmp_path: Path) -> None:
    model().save(tmp_path / "a")
    assert "at temperature 1." in card(tmp_path / "a")
    model(temperature=0.8, source_logit_weight=-0.21).save(tmp_path / "b")
    assert re.search(r"-0\.21 of the source's .* at temperature 0\.8\.", card(tmp_path / "b"))


def test_the_card_counts_costs_and_says_that_nothing_was_measured(tmp_path: Path) -> None:
    fast = model(bridge(times=(0.0, 1.0)))
    image = _tiny.images(1)
    params = [eb.cost.count_params(net) for net in (fast.source, fast)]
    macs = [eb.cost.count_macs(net, image) for net in (fast.source, fast)]
    fast.save(tmp_path)
    text = card(tmp_path)
    assert f"| parameters | {params[0]:,} | {params[1]:,} | ×{params[1] / params[0]:.3f} |" in text
    assert "no image shape" in text
    assert "Nothing was measured" in text
    fast.save(tmp_path, image_shape=(3, 8, 8))
    text = card(tmp_path)
    line = f"one image of 3×8×8 | {macs[0]:,} | {macs[1]:,} | ×{macs[1] / macs[0]:.3f} |"
    assert line in text
    assert digest(tmp_path / "model.safetensors") in text
    for shape in ((3, 8), (1, 8, 8), (3, 0, 8), (), (3.0, 8, 8), (3, 4096, 4096)):
        with pytest.raises(ValueError, match="image_shape is"):
            fast.save(tmp_path / "other", image_shape=shape)  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()


def test_what_a_model_takes_and_its_classes_names_travel_with_it(tmp_path: Path) -> None:
    names = ["cat", "dog", "a bird"]
    fast = model()
    fast.pixel_range = (-1.5, 2.25)
    fast.save(tmp_path / "a", image_shape=(3, 8, 8), class_names=names)
    assert (fast.image_shape, fast.class_names) == (None, None)  # the model at hand stays as it is
    loaded = eb.load(tmp_path / "a")
    assert loaded.image_shape == (3, 8, 8)
    assert loaded.pixel_range == (-1.5, 2.25)
    assert loaded.class_names == tuple(names)
    loaded.save(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    for wrong in ("cat", [1, 2, 3], ["cat", "two\nlines", "bird"], ["cat", "dog"]):
        with pytest.raises(ValueError, match="class_names"):
            fast.save(tmp_path / "c", class_names=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("as_mapping", [False, True])
def test_the_card_shows_what_was_measured_beside_its_control(
    control: bool, as_mapping: bool, tmp_path: Path
) -> None:
    ensemble = _tiny.ensemble(3)
    fast = FastEnsemble.of(_tiny.bridge_to(ensemble)).eval()
    models: dict[str, nn.Module] = {"DE-1": ensemble.first(1), "DE-3": ensemble, "a|b": fast}
    if control:
        models["towards itself"] = FastEnsemble.of(_tiny.bridge_to(ensemble, 1, target=(0,)))
    scores = eb.evaluate(models, _tiny.data(), dataset="tiny <set>", seed=7)
    fast.save(tmp_path, scores=json.loads(scores.to_json()) if as_mapping else scores)
    text = card(tmp_path)
    assert "Data set tiny &lt;set>, seed 7; python" in text
    row = next(row for row in scores.rows if row.model == "a|b")
    assert (
        f"| a\\|b | {row.macs_ratio:.2f} | {row.params_ratio:.2f} | {row.acc:.2f} | {row.nll:.3f} |" in text
    )
    assert "this model is the row a\\|b." in text
    assert ("towards itself: " in text) == control
    assert ("No control was measured" in text) != control
    assert "Nothing was measured" not in text
    FastEnsemble.of(*(_tiny.bridge_to(ensemble, seed) for seed in (1, 2))).save(tmp_path, scores=scores)
    assert "its own figures are not among these" in card(tmp_path)
    assert "No control of 2 bridges was measured" in card(tmp_path)


def test_wrong_scores_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="scores has no 'dataset'"):
        model().save(tmp_path / "model", scores={"rows": []})
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_the_three_lines_of_the_card_run(kind: str, tmp_path: Path) -> None:
    fast = model() if kind == "ours" else foreign()
    fast.save(tmp_path)
    code = card(tmp_path).split("```python\n")[1].split("```")[0]
    assert len(list(filter(None, code.splitlines()))) == 3
    names: dict[str, Any] = {"images": _tiny.images(), "net": _tiny.batch_norm_member(8)}
    exec(code.replace("path/to/this/folder", str(tmp_path)), names)
    assert torch.equal(names["probabilities"], fast(_tiny.images()).softmax(-1))


# ------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "net",
    [
        ResNet.resnet34(200, bias=False),
        ResNet((1, 2), (8, 16), 3, stem=8, strides=(2, 1), mean=(0.3,), std=(0.4,)),
        ScoreNet.cifar10(),
        ScoreNet.imagenet64(z_input="informative"),
        _tiny.tail(_tiny.member(), width=0.5),
    ],
    ids=lambda net: type(net).__name__,
)
def test_networks_of_ours_know_what_built_them(net: ResNet | ScoreNet) -> None:
    arguments = json.loads(json.dumps(net.arguments))
    with torch.device("meta"):
        again = type(net)(**arguments)
        assert again.arguments == net.arguments
    assert architecture.same_plan(again, net)


def test_members_of_an_ensemble_can_be_the_source(tmp_path: Path) -> None:
    ensemble: Ensemble = _tiny.ensemble(3)
    fast = FastEnsemble.of(_tiny.bridge_network(ensemble.source, [ensemble.members[1]])).eval()
    fast.save(tmp_path)
    assert_same(eb.load(tmp_path), fast)
