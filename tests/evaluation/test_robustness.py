"""Models under corruptions: the right numbers on the right images, kept when killed, else refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import _tiny
from _recipe import RecordedProgress, tiny
from _report import make_document
from ensbridge import metrics
from ensbridge.data import ImageSet, read_corrupted
from ensbridge.data.corruptions import CORRUPTIONS, write_corrupted
from ensbridge.evaluation import robustness
from ensbridge.evaluation.robustness import add_corrupted, describe_corrupted, measure_corrupted
from ensbridge.evaluation.scores import (
    CorruptedSet,
    parse_scores,
    read_scores,
)
from ensbridge.experiments import evaluate_run, train_recipe
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble

COUNT = 7  # images of the tiny set
LABELS = np.arange(COUNT) % 3


def make_set(
    folder: Path,
    labels: np.ndarray = LABELS,
    shape: tuple[int, ...] = (8, 8, 3),
    seed: int = 0,
    severities: int = 5,
) -> Path:
    """Nineteen files of noise in the published layout; with fewer severities a manifest lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for name in CORRUPTIONS:
        np.save(folder / f"{name}.npy", rng.integers(0, 256, (severities * len(labels), *shape), np.uint8))
    np.save(folder / "labels.npy", np.tile(labels, severities))
    if severities < 5:
        (folder / "manifest.json").write_text(json.dumps({"severities": list(range(1, severities + 1))}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("sets") / "CIFAR-10-C")


def models() -> dict[str, nn.Module]:
    members = _tiny.ensemble(3)
    bridge = FastEnsemble.of(_tiny.bridge_to(members, 5)).eval()
    return {"DE-1": members.first(1), "DE-3": members, "+1 DBN": bridge, "net": _tiny.member(9)}


# ------------------------------------------------------------------------------ the numbers


def test_rows_are_the_metrics_of_each_file(folder: Path) -> None:
    temperatures = {"DE-1": 1.7, "+1 DBN": 0.6}
    found = measure_corrupted(models(), folder, temperatures, [4], batch_size=4)
    nets = models()
    places = [(name, 4, each) for name in nets for each in CORRUPTIONS]
    assert [(row.model, row.severity, row.corruption) for row in found] == places
    for row in found:
        part = slice((row.severity - 1) * COUNT, row.severity * COUNT)
        images = np.load(folder / f"{row.corruption}.npy")[part]
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
        with torch.no_grad():
            log_probs = nets[row.model](pixels).log_softmax(-1)
        labels = torch.from_numpy(LABELS)
        assert row.acc == pytest.approx(100 * metrics.accuracy(log_probs, labels))
        assert row.nll == pytest.approx(metrics.nll(log_probs, labels), rel=1e-5)
        assert row.brier == pytest.approx(metrics.brier(log_probs, labels), rel=1e-5)
        assert row.ece == pytest.approx(metrics.ece(log_probs, labels), rel=1e-5)
        temperature = temperatures.get(row.model)
        if temperature is None:
            assert row.cnll is None
        else:
            calibrated = (log_probs / temperature).log_softmax(-1)
            assert row.cnll == pytest.approx(metrics.nll(calibrated, labels), rel=1e-5)
        assert row.images == read_corrupted(folder, row.corruption, row.severity).fingerprint()


def test_all_severities_of_the_folder_and_members_run_once_a_batch(folder: Path) -> None:
    members = _tiny.ensemble(3)
    calls = _tiny.count_runs(members)
    found = measure_corrupted({f"DE-{k}": members.first(k) for k in (1, 2, 3)}, folder, batch_size=8)
    assert sorted({row.severity for row in found}) == [1, 2, 3, 4, 5]
    assert len(found) == 3 * 5 * 19
    assert set(calls.values()) == {5 * 19}


def test_progress_counts_images_for_each_model(folder: Path, tmp_path: Path) -> None:
    nets = {"a": _tiny.member(0), "b": _tiny.member(1)}
    options: dict[str, Any] = {"severities": [1], "keep": tmp_path / "kept.jsonl"}
    measure_corrupted({"a": nets["a"]}, folder, **options)
    recorded = RecordedProgress()
    measure_corrupted(nets, folder, stage=recorded, **options)
    total, steps = recorded.stages["corrupted"]
    assert total == sum(steps) == 2 * 19 * COUNT


# ------------------------------------------------------------------------------ kept


def counted(nets: dict[str, nn.Module]) -> list[str]:
    """The names of networks, as often as each has run since."""
    runs: list[str] = []
    for name, net in nets.items():
        net.register_forward_hook(lambda *_, name=name: runs.append(name))
    return runs


def test_a_killed_run_goes_on_and_ends_with_the_same_rows(folder: Path, tmp_path: Path) -> None:
    nets: dict[str, nn.Module] = {"a": _tiny.member(0), "b": _tiny.member(1)}
    temperatures = {"a": 1.5}
    whole = measure_corrupted(nets, folder, temperatures, [1, 2])
    keep = tmp_path / "kept.jsonl"
    stopping = RecordedProgress(("corrupted", 2 * 25))  # each of the parts advances twice
    with pytest.raises(ConnectionError):
        measure_corrupted(nets, folder, temperatures, [1, 2], keep=keep, stage=stopping)
    assert len(keep.read_text().splitlines()) == 24 * 2
    runs = counted(nets)
    assert measure_corrupted(nets, folder, temperatures, [1, 2], keep=keep) == whole
    assert len(runs) == (38 - 24) * 2
    runs.clear()
    before = keep.read_bytes()
    assert measure_corrupted(nets, folder, temperatures, [1, 2], keep=keep) == whole
    assert (runs, keep.read_bytes()) == ([], before)


def test_other_weights_settings_temperatures_and_images_are_measured_anew(
    folder: Path, tmp_path: Path
) -> None:
    keep = tmp_path / "kept.jsonl"
    bridge = FastEnsemble.of(_tiny.bridge_to(_tiny.ensemble(2), 5)).eval()
    options: dict[str, Any] = {"severities": [1], "corruptions": ["fog"], "keep": keep}

    def runs_of(model: nn.Module, where: Path = folder, **more: Any) -> int:
        runs = counted({"x": model.source if isinstance(model, FastEnsemble) else model})
        (row,) = measure_corrupted({"x": model}, where, **{**options, **more})
        (plain,) = measure_corrupted({"x": model}, where, **{**options, **more, "keep": None})
        assert row == plain
        return len(runs) - 1

    net = _tiny.member(0)
    assert [runs_of(net), runs_of(_tiny.member(0)), runs_of(_tiny.member(1))] == [1, 0, 1]
    assert [runs_of(net, temperatures={"x": 2.0}), runs_of(net, temperatures={"x": 2.0})] == [1, 0]
    other = make_set(tmp_path / "other", seed=1)
    assert [runs_of(net, other), runs_of(net, other), runs_of(net)] == [1, 0, 0]
    one_step = FastEnsemble(bridge.source, [each.one_step() for each in bridge.bridges], _tiny.FEATURE)  # type: ignore[operator]
    assert [runs_of(bridge), runs_of(one_step), runs_of(bridge)] == [1, 1, 0]


@pytest.mark.parametrize(
    "content", [b"dear diary\n", b'{"weights": "a"}\n', b"[1]\n", b"\xff\n", b"[" * 5000 + b"\n"]
)
def test_a_strange_file_of_kept_rows_is_refused_and_left(
    content: bytes, folder: Path, tmp_path: Path
) -> None:
    keep = tmp_path / "corrupted.jsonl"
    keep.write_bytes(content)
    with pytest.raises(ValueError, match=r"corrupted\.jsonl.*line 1"):
        measure_corrupted({"a": _tiny.member()}, folder, keep=keep)
    assert keep.read_bytes() == content


# ------------------------------------------------------------------------------ refusals


def clean(labels: np.ndarray = LABELS, side: int = 8) -> ImageSet:
    return ImageSet(torch.zeros(len(labels), 3, side, side), torch.from_numpy(labels))


@pytest.mark.parametrize(
    ("test", "named"),
    [
        (clean(np.arange(9) % 3), r"CIFAR-10-C has 7 .* 9;"),
        (clean(side=4), "CIFAR-10-C.* 3×8×8.* 3×4×4;"),
        (clean(LABELS[::-1].copy()), "CIFAR-10-C: image 1.* class 1.* class 2;"),
        (ImageSet(torch.zeros(COUNT, 3, 8, 8)), "test.*no labels"),
    ],
)
def test_images_of_another_split_are_refused(test: ImageSet, named: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=named):
        measure_corrupted({"a": _tiny.member()}, folder, test=test)
    with pytest.raises(ValueError, match=named):
        robustness.check_corrupted(folder, test)
    robustness.check_corrupted(folder, clean())


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    nets = {"a": _tiny.member()}
    with pytest.raises(ValueError, match="gone is no folder"):
        measure_corrupted(nets, tmp_path / "gone")
    place = make_set(tmp_path / "set")
    (place / "fog.npy").unlink()
    (place / "snow.npy").unlink()
    with pytest.raises(ValueError, match=r"set lacks 2 of 19.*snow, fog"):
        measure_corrupted(nets, place)
    make_set(place)
    (place / "manifest.json").write_text('{"severities": "all"}')
    with pytest.raises(ValueError, match=r"manifest\.json.*severities"):
        measure_corrupted(nets, place)
    (place / "manifest.json").write_text('{"severities": [1, 2, 3, 4, 5]}')
    with pytest.raises(ValueError, match="severity is 6"):
        measure_corrupted(nets, place, severities=[6])


def test_models_and_temperatures_must_fit(folder: Path) -> None:
    with pytest.raises(ValueError, match="0 models"):
        measure_corrupted({}, folder)
    with pytest.raises(ValueError, match=r"temperatures.*'b'.* a"):
        measure_corrupted({"a": _tiny.member()}, folder, {"b": 1.0})
    with pytest.raises(ValueError, match="cpu and meta"):
        measure_corrupted({"a": _tiny.member(), "b": _tiny.member().to("meta")}, folder)


def test_the_manifest_says_who_made_a_set(tmp_path: Path) -> None:
    images = np.zeros((2, 32, 32, 3), np.uint8)
    own = write_corrupted(images, np.array([0, 1]), tmp_path / "own", 3, [1], processes=1)
    said = describe_corrupted(own)
    assert said.made_by is not None
    assert said.made_by.startswith("ensbridge ")
    assert said.seed == 3
    assert describe_corrupted(make_set(tmp_path / "published")) == CorruptedSet(None, None)


# ------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_recipe(tiny(), folder, stages=["members", "bridge"])
    return folder


def of_recipe(folder: Path) -> Path:
    labels = tiny().load().test.labels
    image = tiny().load().test.images.shape[1:]
    assert labels is not None
    return make_set(folder, labels.numpy(), (*image[1:], image[0]), severities=1)


def test_a_run_is_measured_at_the_temperatures_of_its_rows(run: Path, tmp_path: Path) -> None:
    place = of_recipe(tmp_path / "set")
    recorded = RecordedProgress()
    scores, missing = evaluate_run(run, tiny(), recorded, corrupted=place)
    assert read_scores(run) == scores
    assert {row.model for row in scores.corrupted} == {row.model for row in scores.rows}
    assert scores.corrupted_set == CorruptedSet(None, None)
    assert list(recorded.stages) == ["evaluate", "corrupted"]
    assert not any("corruptions" in each for each in missing)
    kept = [json.loads(line) for line in (run / "corrupted.jsonl").read_text().splitlines()]
    fitted = {row.model: row.temperature for row in scores.rows}
    assert {(line["model"], line["temperature"]) for line in kept} == set(fitted.items())
    without, missing = evaluate_run(run, tiny())
    assert (without.corrupted, replace(scores, corrupted=(), corrupted_set=None)) == ((), without)
    assert "--corrupted" in missing[-1]
    assert evaluate_run(run, tiny(), corrupted=place)[0] == scores


def test_a_run_refuses_images_that_are_not_its_own_and_keeps_its_scores(run: Path, tmp_path: Path) -> None:
    before = evaluate_run(run, tiny())[0]
    with pytest.raises(ValueError, match=r"has 7 .* 30;"):
        evaluate_run(run, tiny(), corrupted=make_set(tmp_path / "set"))
    assert read_scores(run) == before


def test_add_corrupted_uses_the_rows_temperatures(tmp_path: Path) -> None:
    net = _tiny.member()
    scores = parse_scores(make_document())
    temperature = scores.rows[0].temperature
    assert temperature is not None
    folder = make_set(tmp_path / "set", severities=1)
    found = add_corrupted(scores, {"DE-1": Ensemble([net])}, folder)
    assert found.corrupted == measure_corrupted({"DE-1": Ensemble([net])}, folder, {"DE-1": temperature})
    assert asdict(found) | {"corrupted": (), "corrupted_set": None} == asdict(scores)
