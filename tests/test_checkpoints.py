"""Checkpoints and logs that were damaged, cut short or left behind, and how files are written."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import _runs
from ensbridge.files import open_folder, write_atomically
from ensbridge.train import checkpoint
from ensbridge.train.checkpoint import RunFolder, load_checkpoint, save_checkpoint

KINDS = _runs.KINDS
Run = _runs.Run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The weights and the folder of each kind's run that nothing interrupted."""
    return {kind: _runs.whole(kind, tmp_path_factory.mktemp(kind) / "run") for kind in KINDS}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = [truncate, empty, flip_last_bit]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_left_for_the_one_before(
    kind: str, damage: Callable[[Path], None], tmp_path: Path, whole: dict[str, Run]
) -> None:
    _runs.begin(kind, tmp_path)
    damage(_runs.checkpoints(tmp_path)[-1])
    with pytest.warns(UserWarning, match=r"checkpoint-000000008.*damaged") as warned:
        assert _runs.finish(kind, tmp_path, whole).resumed_from == 4
    assert len(warned) == 1
    assert (tmp_path / "log.jsonl").read_bytes() == (whole[kind][1] / "log.jsonl").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_when_all_are_damaged_it_starts_over(kind: str, tmp_path: Path, whole: dict[str, Run]) -> None:
    _runs.begin(kind, tmp_path)
    for path in _runs.checkpoints(tmp_path):
        flip_last_bit(path)
    with pytest.warns(UserWarning, match="damaged") as warned:
        assert _runs.finish(kind, tmp_path, whole).resumed_from == 0
    assert [str(each.message)[:20] for each in warned] == ["checkpoint-000000008", "checkpoint-000000004"]
    assert (tmp_path / "log.jsonl").read_bytes() == (whole[kind][1] / "log.jsonl").read_bytes()


def test_new_checkpoints_outlive_damaged_ones_of_later_steps(tmp_path: Path, whole: dict[str, Run]) -> None:
    _runs.begin("bridge", tmp_path)
    for path in _runs.checkpoints(tmp_path):
        truncate(path)
    with pytest.warns(UserWarning, match="damaged"):
        _runs.begin("bridge", tmp_path, until=3, checkpoint_every=2)
    assert _runs.finish("bridge", tmp_path, whole).resumed_from == 2


def test_any_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    # Header and tensors alike: names, types, shapes, the step and the checksum itself.
    path = tmp_path / "checkpoint-000000021.safetensors"
    tensors = {"student/weight": torch.arange(6.0).view(2, 3), "optimizer/0/step": torch.tensor(21.0)}
    save_checkpoint(path, tensors, {"step": "21", "loss_sum": "1.5"})
    content = path.read_bytes()
    loaded, metadata = load_checkpoint(path)
    assert _runs.same(loaded, tensors)
    assert (metadata["step"], metadata["loss_sum"]) == ("21", "1.5")
    unnoticed = []
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                load_checkpoint(path)
            except ValueError as error:
                assert path.name in str(error)  # noqa: PT017
            else:
                unnoticed.append((place, bit, bytes(content[place - 5 : place + 5])))
    assert not unnoticed


@pytest.mark.parametrize(("true", "false"), [(b'"F32"', b'"I32"'), (b"[2,3]", b"[3,2]"), (b"head", b"tail")])
def test_another_type_shape_or_name_for_the_same_numbers_is_noticed(
    true: bytes, false: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint-000000001.safetensors"
    save_checkpoint(path, {"student/head": torch.arange(6.0).view(2, 3)}, {"step": "1"})
    assert path.read_bytes().count(true) == 1
    path.write_bytes(path.read_bytes().replace(true, false))
    with pytest.raises(ValueError, match="does not match its checksum"):
        load_checkpoint(path)


def test_any_truncation_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-000000001.safetensors"
    save_checkpoint(path, {"student/weight": torch.arange(6.0)}, {"step": "1"})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged"):
            load_checkpoint(path)


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_line_and_later_lines_of_the_log_are_dropped(
    kind: str, tmp_path: Path, whole: dict[str, Run]
) -> None:
    _runs.begin(kind, tmp_path, until=9)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 7, "im')
    _runs.finish(kind, tmp_path, whole)
    assert (tmp_path / "log.jsonl").read_bytes() == (whole[kind][1] / "log.jsonl").read_bytes()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scores.json"
    write_atomically(path, b"old")
    for function in ("os.fsync", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(function, lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
            with pytest.raises(OSError, match="the disk is full"):
                write_atomically(path, b"new")
        assert _runs.contents(tmp_path) == {"scores.json": b"old"}
    write_atomically(path, b"new")
    assert _runs.contents(tmp_path) == {"scores.json": b"new"}


def test_a_file_reaches_the_disk_before_its_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        file = os.fstat(descriptor)
        events.append("folder" if stat.S_ISDIR(file.st_mode) else f"{file.st_size} bytes")
        fsync(descriptor)

    def noted_rename(source: Path, destination: Path) -> None:
        events.append("rename")
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_rename)
    write_atomically(tmp_path / "file", b"12345")
    assert events == ["5 bytes", "rename", "folder"]


def test_open_folder_makes_parents_and_takes_what_is_there(tmp_path: Path) -> None:
    made = open_folder(tmp_path / "a" / "b")
    assert made.is_dir()
    assert open_folder(str(made)) == made


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    for step in (1, 2, 10, 100):
        folder.save(step, {"weight": torch.tensor(float(step))}, {"step": str(step)})
    assert [int(path.stem.split("-")[1]) for path in _runs.checkpoints(tmp_path)] == [10, 100]
    found = folder.newest()
    assert found is not None
    assert found[0]["weight"] == 100


@pytest.mark.parametrize(("writing", "due"), [(0.0, 30.0), (1.0, 30.0), (4.0, 80.0), (60.0, 1200.0)])
def test_a_checkpoint_is_due_after_half_a_minute_or_twenty_times_what_writing_took(
    writing: float, due: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0

    def save(*_: object) -> None:
        nonlocal now
        now += writing

    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(checkpoint, "save_checkpoint", save)
    folder = RunFolder(tmp_path, {})
    now += 29.0
    assert not folder.is_due()
    now += 1.0
    assert folder.is_due()
    folder.save(1, {}, {})
    now += due - 0.5
    assert not folder.is_due()
    now += 0.5
    assert folder.is_due()
