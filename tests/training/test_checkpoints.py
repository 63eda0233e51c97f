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
from ensbridge.training import checkpoint, fit
from ensbridge.training.checkpoint import RunFolder, load_checkpoint, save_checkpoint
from ensbridge.utils.files import open_folder, write_atomically

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
    with pytest.raises(ValueError, match="checksum"):
        load_checkpoint(path)


def test_any_truncation_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-000000001.safetensors"
    save_checkpoint(path, {"student/weight": torch.arange(6.0)}, {"step": "1"})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged"):
            load_checkpoint(path)


Tensors = dict[str, torch.Tensor]


def first(part: str, tensors: Tensors) -> str:
    return next(name for name in sorted(tensors) if name.startswith(f"{part}/"))


def change_first(part: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Change one tensor of a part of the state."""

    def change(tensors: Tensors) -> None:
        name = first(part, tensors)
        tensors[name] = how(tensors[name])

    return change


FORGED_METADATA = [
    {"step": None},
    {"step": "[" * 100_000},
    {"step": '"8"'},
    {"step": "8.5"},
    {"step": "true"},
    {"step": "-1"},
    {"step": "13"},  # of 12
    {"step": "1" + "0" * 5000},
    {"count": "-8"},
    {"count": "9"},
    {"count": "null"},
    {"sums": "[1]"},
    {"sums": '{"a": "b"}'},
    {"sums": '{"a": NaN}'},
    {"sums": '{"a": 1' + "0" * 400 + "}"},
    {"sums": None},
]
FORGED_TENSORS: dict[str, Callable[[Tensors], object]] = {
    "weight missing": lambda tensors: tensors.pop(first("student", tensors)),
    "weight more": lambda tensors: tensors.update({"student/more": torch.zeros(1)}),
    "weight of another shape": change_first("student", lambda each: each[..., None]),
    "weight of another type": change_first("student", torch.Tensor.double),
    "average missing": lambda tensors: tensors.pop(first("average", tensors)),
    "average more": lambda tensors: tensors.update({"average/more": torch.zeros(1)}),
    "average of another shape": change_first("average", lambda each: each[..., None]),
    "memory of another shape": change_first("optimizer", lambda each: each[..., None]),
    "memory incomplete": lambda tensors: tensors.pop(first("optimizer", tensors)),
    "memory of no weight": lambda tensors: tensors.update({"optimizer//99/step": torch.tensor(8.0)}),
    "memory of no number": lambda tensors: tensors.update({"optimizer//x/step": torch.tensor(8.0)}),
    "memory of no name": lambda tensors: tensors.update({"optimizer/": torch.zeros(1)}),
    "memory from before the start": lambda tensors: tensors["optimizer//0/step"].fill_(-1),
    "no part": lambda tensors: tensors.update({"weight": torch.zeros(1)}),
    "another part": lambda tensors: tensors.update({"oven/weight": torch.zeros(1)}),
    "an emoji": lambda tensors: tensors.update({"student/🙂\x1b": torch.zeros(0)}),
}


@pytest.mark.parametrize("change", [*FORGED_METADATA, *FORGED_TENSORS], ids=lambda each: str(each)[:40])
def test_a_forged_checkpoint_of_a_right_checksum_is_refused_and_nothing_is_lost(
    change: dict[str, str | None] | str, tmp_path: Path, whole: dict[str, Run]
) -> None:
    _runs.begin("bridge", tmp_path)
    newest = _runs.checkpoints(tmp_path)[-1]
    tensors, metadata = load_checkpoint(newest)
    if isinstance(change, str):
        FORGED_TENSORS[change](tensors)
    else:
        metadata = {key: text for key, text in {**metadata, **change}.items() if text is not None}
    save_checkpoint(newest, tensors, metadata)
    files, method = _runs.contents(tmp_path), _runs.method("bridge")
    weights = _runs.state(method.student)
    with pytest.raises(ValueError) as refused:
        fit(method, _runs.data(), _runs.config("bridge"), tmp_path, _runs.unexpected)
    assert type(refused.value) is ValueError
    assert str(newest) in str(refused.value)
    assert _runs.contents(tmp_path) == files
    assert _runs.same(_runs.state(method.student), weights)
    newest.rename(tmp_path / "moved")  # as the sentence says
    assert _runs.finish("bridge", tmp_path, whole).resumed_from == 4


def test_a_pipe_or_a_huge_file_in_place_of_a_checkpoint_is_left_aside(
    tmp_path: Path, whole: dict[str, Run]
) -> None:
    _runs.begin("bridge", tmp_path)
    os.mkfifo(tmp_path / "checkpoint-000000011.safetensors")
    header = b'{"a":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}}'
    with open(tmp_path / "checkpoint-000000012.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**40)  # a hole, which takes no space on disk
    with pytest.warns(UserWarning, match="damaged") as warned:
        assert _runs.finish("bridge", tmp_path, whole).resumed_from == 8
    assert len(warned) == 2


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 6, "\xff": 0}',
        b"oops",
        b'{"step": "6"}',
        b"[6]",
        b"{}",
        b'{"step": 1e999}',
        b"[" * 100_000,
        b"\0",
    ],
    ids=lambda line: repr(line[:20]),
)
def test_a_damaged_line_of_the_log_is_named_and_nothing_is_lost(
    line: bytes, tmp_path: Path, whole: dict[str, Run]
) -> None:
    _runs.begin("bridge", tmp_path)
    log = tmp_path / "log.jsonl"
    log.write_bytes(log.read_bytes().replace(b"\n", b"\n" + line + b"\n", 1))
    files = _runs.contents(tmp_path)
    with pytest.raises(ValueError, match=r"log\.jsonl.*line 2\b"):
        fit(_runs.method("bridge"), _runs.data(), _runs.config("bridge"), tmp_path, _runs.unexpected)
    assert _runs.contents(tmp_path) == files
    log.unlink()  # as the sentence says
    assert _runs.finish("bridge", tmp_path, whole).resumed_from == 8


@pytest.mark.parametrize("tail", [b'{"step": 9, "\xff', b"\0" * 50, b'{"step": 9}', b'{"step": 9}\r'])
def test_whatever_a_crash_left_behind_the_last_line_is_dropped(
    tail: bytes, tmp_path: Path, whole: dict[str, Run]
) -> None:
    _runs.begin("bridge", tmp_path)
    with open(tmp_path / "log.jsonl", "ab") as file:
        file.write(tail)
    _runs.finish("bridge", tmp_path, whole)
    assert (tmp_path / "log.jsonl").read_bytes() == (whole["bridge"][1] / "log.jsonl").read_bytes()


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
