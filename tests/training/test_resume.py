"""`fit` can be killed anywhere, run again, and ends with the same weights in the same files."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import _runs
from ensbridge.data import Augment, ImageSet
from ensbridge.training import checkpoint, fit
from ensbridge.training.checkpoint import load_checkpoint
from ensbridge.training.fit import TimeBudgetExceeded
from ensbridge.utils.files import locked

KINDS = _runs.KINDS
Run = _runs.Run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The weights and the folder of each kind's run that nothing interrupted."""
    return {kind: _runs.whole(kind, tmp_path_factory.mktemp(kind) / "run") for kind in KINDS}


# ------------------------------------------------------------------------------ killed, and run again


def test_the_tests_runs_do_train(whole: dict[str, Run]) -> None:
    for kind in KINDS:
        fresh = _runs.state(_runs.method(kind).student)
        assert not any(torch.equal(fresh[name], each) for name, each in whole[kind][0].items())
        steps = [json.loads(line)["step"] for line in (whole[kind][1] / "log.jsonl").read_text().splitlines()]
        assert steps == [3, 6, 9, 12]
        assert [path.name[-14:-12] for path in _runs.checkpoints(whole[kind][1])] == ["08", "12"]


DEATHS = [
    ("half-written", 0, 0),  # config.json
    ("before-rename", 0, 0),
    ("after-step", 1, 0),
    ("after-step", 3, 0),
    ("half-written", 4, 0),
    ("after-rename", 4, 4),
    ("after-step", 4, 4),
    ("after-step", 5, 4),
    ("half-logged", 6, 4),
    ("half-written", 8, 4),
    ("before-rename", 8, 4),
    ("after-rename", 8, 8),
    ("after-step", 11, 8),
    ("before-rename", 12, 8),
    ("after-step", 12, 12),
]
# Files are written the same way for every method: of those that learn together only some deaths are tried.
ALL = [(kind, *death) for kind in KINDS for death in (DEATHS[2::4] if kind == "together" else DEATHS)]


@pytest.mark.parametrize(("kind", "where", "when", "resumed_from"), ALL)
def test_killed_anywhere_it_ends_the_same(
    kind: str, where: str, when: int, resumed_from: int, tmp_path: Path, whole: dict[str, Run]
) -> None:
    folder = tmp_path / "run"
    _runs.killed(kind, folder, where, when)
    assert _runs.finish(kind, folder, whole).resumed_from == resumed_from
    there, uninterrupted = _runs.contents(folder), _runs.contents(whole[kind][1])
    assert there.keys() == uninterrupted.keys()  # and so nothing temporary is left
    for name in ("log.jsonl", "config.json"):
        assert there[name].splitlines() == uninterrupted[name].splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again(kind: str, tmp_path: Path, whole: dict[str, Run]) -> None:
    for where, when in (("after-step", 2), ("after-step", 7), ("half-written", 8), ("half-logged", 12)):
        _runs.killed(kind, tmp_path, where, when)
    assert _runs.finish(kind, tmp_path, whole).resumed_from == 8
    assert (tmp_path / "log.jsonl").read_text() == (whole[kind][1] / "log.jsonl").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_run_is_only_read(kind: str, whole: dict[str, Run]) -> None:
    weights, folder = whole[kind]
    before = _runs.contents(folder)
    method = _runs.method(kind)
    told: list[tuple[int, int, float]] = []
    result = fit(method, _runs.data(), _runs.config(kind), folder, lambda *each: told.append(each))
    assert (result.steps, result.resumed_from) == (12, 12)
    assert told == [(12, 12, pytest.approx(math.nan, nan_ok=True))]  # no step, but the end
    assert _runs.same(_runs.state(method.student), weights)
    assert not method.student.training
    assert _runs.contents(folder) == before


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_logging_may_change_between_runs(kind: str, tmp_path: Path, whole: dict[str, Run]) -> None:
    _runs.begin(kind, tmp_path, until=7)
    assert _runs.finish(kind, tmp_path, whole, checkpoint_every=5, log_every=1).resumed_from == 4
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, *range(5, 13)]


# ------------------------------------------------------------------------------ another run's folder


def wider(images: ImageSet) -> ImageSet:
    return ImageSet(images.images + 0.5, images.labels)


@pytest.mark.parametrize(
    ("field", "values", "config", "method", "data"),
    [
        ("fit.lr", ("0.1", "0.2"), {"lr": 0.2}, "members", _runs.data()),
        ("fit.seed", ("0", "3"), {"seed": 3}, "members", _runs.data()),
        ("fit.optimizer", ('"sgd"', '"adam"'), {"optimizer": "adam"}, "members", _runs.data()),
        ("fit.augment.crop", ("1", "2"), {"augment": Augment(crop=2, flip=True)}, "members", _runs.data()),
        ("method.method", ('"deep_ensemble"', '"diffusion_bridge"'), {}, "bridge", _runs.data()),
        (
            "data",
            (json.dumps(_runs.data().fingerprint()), json.dumps(wider(_runs.data()).fingerprint())),
            {},
            "members",
            wider(_runs.data()),
        ),
    ],
)
def test_another_run_is_refused_and_nothing_changes(
    field: str,
    values: tuple[str, str],
    config: dict[str, Any],
    method: str,
    data: ImageSet,
    tmp_path: Path,
    whole: dict[str, Run],
) -> None:
    _runs.begin("members", tmp_path)
    (tmp_path / "log.jsonl").open("a").write('{"step": 9, "lo')
    files, other = _runs.contents(tmp_path), _runs.method(method)
    weights = _runs.state(other.student)
    with pytest.raises(ValueError) as caught:
        fit(other, data, replace(_runs.config("members"), **config), tmp_path, _runs.unexpected)
    assert re.search(rf"{field} .*{values[0]}.* {values[1]} ", str(caught.value))
    assert str(tmp_path) in str(caught.value)
    assert _runs.contents(tmp_path) == files
    assert _runs.same(_runs.state(other.student), weights)
    _runs.finish("members", tmp_path, whole)


def test_a_folder_whose_configuration_is_lost_or_broken_is_refused(tmp_path: Path) -> None:
    _runs.begin("members", tmp_path)
    config = (tmp_path / "config.json").read_bytes()
    for broken, words in ((None, r"config\.json"), (config[:50], r"config\.json.*JSON")):
        (tmp_path / "config.json").unlink()
        if broken:
            (tmp_path / "config.json").write_bytes(broken)
        files = _runs.contents(tmp_path)
        with pytest.raises(ValueError, match=words):
            fit(_runs.method("members"), _runs.data(), _runs.config("members"), tmp_path, _runs.unexpected)
        assert _runs.contents(tmp_path) == files
        (tmp_path / "config.json").write_bytes(config)


@pytest.mark.parametrize("inner", ["", "runs/one"])
def test_a_file_where_the_folder_should_be_is_refused(inner: str, tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("mine")
    with pytest.raises(ValueError, match="taken is a file"):
        fit(_runs.method("members"), _runs.data(), _runs.config("members"), file / inner, _runs.unexpected)
    assert _runs.contents(tmp_path) == {"taken": b"mine"}


# ------------------------------------------------------------------------------ out of time


@pytest.mark.parametrize("kind", KINDS)
def test_at_its_deadline_a_run_stops_at_a_checkpoint_and_goes_on_from_there(
    kind: str, whole: dict[str, Run], tmp_path: Path
) -> None:
    for step in range(1, 6):  # a deadline that is over allows one step
        with pytest.raises(TimeBudgetExceeded, match=f"run is at step {step} of 12"):
            fit(_runs.method(kind), _runs.data(), _runs.config(kind), tmp_path / "run", deadline=0.0)
    done = _runs.finish(kind, tmp_path / "run", whole)
    assert done.resumed_from == 5
    far = time.monotonic() + 1e6
    fit(_runs.method(kind), _runs.data(), _runs.config(kind), tmp_path / "other", deadline=far)


@pytest.mark.parametrize("kind", KINDS)
def test_at_its_deadline_the_student_has_the_averaged_weights_of_the_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    method = _runs.method(kind)
    _runs.begin(kind, tmp_path, until=5)
    with pytest.raises(TimeBudgetExceeded, match="at step 5 of 12"):
        fit(method, _runs.data(), _runs.config(kind), tmp_path, deadline=0.0)
    tensors, _ = load_checkpoint(_runs.checkpoints(tmp_path)[-1])
    state = _runs.state(method.student)
    live = {name: tensors[f"student/{name}"] for name in state}
    average = {name: tensors.get(f"average/{name}", each) for name, each in live.items()}
    assert _runs.same(state, average)
    assert _runs.same(live, average) == (kind == "members")  # which has no average
    assert not method.student.training


# ------------------------------------------------------------------------------ slow steps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that run folders see, to be moved by hand."""
    now = [0.0]
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seconds", "expected"), [(100.0, [9, 10]), (11.0, [7, 10]), (3.9, [9]), (0.0, [])])
def test_slow_steps_are_saved_each_half_minute_and_the_end_is_the_same(
    kind: str, seconds: float, expected: list[int], clock: list[float], tmp_path: Path, whole: dict[str, Run]
) -> None:
    def progress(step: int, total: int, loss: float) -> None:
        clock[0] += seconds
        if step == 10:
            raise _runs.Stopped

    config = _runs.config(kind, checkpoint_every=1000)
    with pytest.raises(_runs.Stopped):
        fit(_runs.method(kind), _runs.data(), config, tmp_path, progress)
    steps = [int(path.stem[-9:]) for path in _runs.checkpoints(tmp_path)]
    assert steps == expected
    result = _runs.finish(kind, tmp_path, whole, checkpoint_every=1000)
    assert result.resumed_from == (steps[-1] if steps else 0)
    assert (tmp_path / "log.jsonl").read_text() == (whole[kind][1] / "log.jsonl").read_text()


def test_a_folder_is_kept_for_one_process(tmp_path: Path, whole: dict[str, Run]) -> None:
    refused = []

    def intrude(step: int, total: int, loss: float) -> None:
        if step == 5:
            before = _runs.contents(tmp_path)
            with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))} is in use") as error:
                fit(_runs.method("bridge"), _runs.data(), _runs.config("bridge"), tmp_path)
            refused.append(error)
            assert _runs.contents(tmp_path) == before

    trained = _runs.method("bridge")
    fit(trained, _runs.data(), _runs.config("bridge"), tmp_path, intrude)
    assert len(refused) == 1
    assert _runs.same(_runs.state(trained.student), whole["bridge"][0])
    _runs.finish("bridge", tmp_path, whole)  # and is free again afterwards


def test_a_folder_in_use_or_of_another_run_gets_no_file(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ValueError, match="is in use"):
        fit(_runs.method("bridge"), _runs.data(), _runs.config("bridge"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    (tmp_path / ".lock").unlink()
    (tmp_path / "config.json").write_text('{"another": "run"}')
    with pytest.raises(ValueError, match="made with another configuration"):
        fit(_runs.method("bridge"), _runs.data(), _runs.config("bridge"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_without_locks_training_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Run]
) -> None:
    def none(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="cannot be locked"):
        _runs.finish("bridge", tmp_path, whole)
