"""How files are written, locked and read: no link is followed, a kill leaves old or new, errors name it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import _runs
import ensbridge
from ensbridge.data import ImageSet, Splits
from ensbridge.data.arrays import write_npz
from ensbridge.training.checkpoint import RunFolder
from ensbridge.utils.files import CannotLock, locked, open_folder, read_json, write_atomically

PACKAGE = str(Path(ensbridge.__file__).parents[1])


def fresh(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """A new process that runs `code`, ended after a while where it waits for something."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "PYTHONPATH": PACKAGE},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def temporary(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.name.endswith(".tmp")]


# ------------------------------------------------------------------------------ links


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".report.html.tmp").symlink_to(victim)
    write_atomically(run / "report.html", b"<html>")
    assert victim.read_text() == "precious"
    assert (run / "report.html").read_bytes() == b"<html>"


def test_a_set_of_images_is_written_through_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".set.npz.tmp").symlink_to(victim)
    images = torch.zeros(12, 3, 4, 4, dtype=torch.uint8)
    part = ImageSet(images, torch.arange(12) % 3)
    write_npz(tmp_path / "set.npz", Splits(part, part, part))
    assert victim.read_text() == "precious"
    assert sorted(np.load(tmp_path / "set.npz").files) == sorted(
        f"{name}_{what}" for name in ("train", "test") for what in ("images", "labels")
    )


def test_names_of_temporary_files_cannot_be_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, int]] = []
    real = os.open

    def noted(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            opened.append((Path(str(path)).name, flags))
        return real(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", noted)
    for _ in range(3):
        write_atomically(tmp_path / "scores.json", b"{}")
    assert len({name for name, _ in opened}) == 3
    assert all(flags & os.O_EXCL and flags & os.O_NOFOLLOW for _, flags in opened)
    assert _runs.contents(tmp_path) == {"scores.json": b"{}"}


def test_a_link_at_the_path_itself_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "scores.json"
    path.symlink_to(victim)
    write_atomically(path, b"new")
    assert not path.is_symlink()
    assert (victim.read_text(), path.read_text()) == ("precious", "new")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_that_the_user_gives_to_new_files(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "file", b"")
        RunFolder(tmp_path / "run", {}).log({"step": 1})
        with locked(tmp_path):
            pass
    finally:
        os.umask(before)
    for name in ("file", "run/log.jsonl", ".lock"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask, name


def test_a_log_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = RunFolder(tmp_path / "run", {})
    (folder.path / "log.jsonl").symlink_to(victim)
    with pytest.raises(ValueError, match=r"log\.jsonl is not a regular file"):
        folder.log({"step": 1})
    assert victim.read_text() == "precious"


# ------------------------------------------------------------------------------ what a kill leaves

DYING = """
import fcntl, os, signal, sys
from pathlib import Path
from ensbridge.utils import files

where, when, path = sys.argv[1:]
module = fcntl if where == "flock" else os
real = getattr(module, where)

def die(*arguments):
    if when == "after":
        real(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(module, where, die)
files.write_atomically(Path(path), b"new" * 100_000)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["open", "flock", "fsync", "replace", "close"])
def test_a_kill_leaves_the_old_content_or_the_new(where: str, when: str, tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    path.write_bytes(b"old")
    assert fresh(DYING, where, when, path).returncode == -signal.SIGKILL
    renamed = where == "close" or (where, when) == ("replace", "after")
    assert path.read_bytes() == (b"new" * 100_000 if renamed else b"old")
    open_folder(tmp_path)  # as the next writer begins
    assert [each.name for each in tmp_path.iterdir()] == ["scores.json"]


def test_the_file_of_a_writer_at_work_is_not_taken_for_left_behind(tmp_path: Path) -> None:
    def write_while_another_opens_the_folder(descriptor: int) -> None:
        met.append(len(temporary(tmp_path)))
        code = "import sys; from ensbridge.utils.files import open_folder; open_folder(sys.argv[1])"
        assert fresh(code, tmp_path).returncode == 0
        real(descriptor)

    real, met = os.fsync, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", write_while_another_opens_the_folder)
        write_atomically(tmp_path / "file", b"whole")
    assert met == [1, 0]  # the file's and the folder's turn
    assert _runs.contents(tmp_path) == {"file": b"whole"}


def test_another_file_is_opened_where_the_first_was_taken_for_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = fcntl.flock, 0

    def unlinked_before_it_is_locked(file: int, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (tmp_path / temporary(tmp_path)[0]).unlink()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", unlinked_before_it_is_locked)
    write_atomically(tmp_path / "file", b"whole")
    assert _runs.contents(tmp_path) == {"file": b"whole"}
    assert calls == 2


def test_what_is_not_ours_is_not_cleared_away(tmp_path: Path) -> None:
    names = [".ensbridge-notes.tmp", ".other.tmp", "ensbridge-0123456789abcdef.tmp"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".ensbridge-0123456789abcdef.tmp").symlink_to(tmp_path / names[0])
    open_folder(tmp_path)
    assert sorted(_runs.contents(tmp_path)) == sorted([*names, ".ensbridge-0123456789abcdef.tmp"])


# ------------------------------------------------------------------------------ the lock


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").symlink_to(victim)
    with pytest.raises(ValueError, match=r"\.lock is not a regular file"), locked(run):
        pass
    assert victim.read_text() == "precious"


def test_the_lock_file_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("kept")
    with locked(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "kept"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_in_place_of_the_lock_is_refused(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / ".lock")
    code = "import sys, pathlib; from ensbridge.utils.files import locked\n"
    code += "with locked(pathlib.Path(sys.argv[1])): pass"
    done = fresh(code, tmp_path)  # which would wait for the pipe's other end
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert ".lock is not a regular file" in done.stderr


def test_deleting_the_lock_file_lets_no_second_process_in(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / ".lock").unlink()
        with pytest.raises(ValueError, match="in use"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_a_process_that_was_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    (reading, writing), (heard, said) = os.pipe(), os.pipe()
    with locked(tmp_path):
        child = os.fork()
        if child == 0:  # lives on after the lock is given up, and must not give up its parent's
            os.write(said, b".")
            os.read(reading, 1)
            os._exit(0)
        os.read(heard, 1)
        with pytest.raises(ValueError, match="in use"), locked(tmp_path):
            pass
    try:
        with locked(tmp_path):
            pass
    finally:
        os.write(writing, b".")
        os.waitpid(child, 0)
        for descriptor in (reading, writing, heard, said):
            os.close(descriptor)


def test_a_file_system_without_locks_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(CannotLock, match=r"\.lock cannot be locked .*; choose"), locked(tmp_path):
        pass


def test_where_folders_cannot_be_locked_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def as_nfs(file: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    with (
        locked(tmp_path),
        pytest.raises(ValueError, match="in use"),
        locked(tmp_path),
    ):
        pass


def test_a_lock_file_deleted_before_it_was_locked_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, replaced = fcntl.flock, []

    def deleted_meanwhile(file: int, how: int) -> None:
        if stat.S_ISREG(os.fstat(file).st_mode) and not replaced:
            replaced.append(file)
            (tmp_path / ".lock").unlink()
            (tmp_path / ".lock").touch()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", deleted_meanwhile)
    with locked(tmp_path):
        with open(tmp_path / ".lock") as file, pytest.raises(BlockingIOError):
            real(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert replaced


# ------------------------------------------------------------------------------ a full disk


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("function", ["open", "fsync", "replace"])
def test_an_error_of_the_disk_names_the_file(
    function: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "scores.json"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing)
        with pytest.raises(OSError) as raised:
            write_atomically(path, b"new")
    assert (raised.value.errno, raised.value.filename) == (number, str(path))
    assert _runs.contents(tmp_path) == {"scores.json": b"old"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_names_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path, {})
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *rest: real("/dev/full", os.O_WRONLY))
    monkeypatch.setattr(stat, "S_ISREG", lambda mode: True)
    with pytest.raises(OSError) as raised:
        folder.log({"step": 1})
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path / "log.jsonl"))


# ------------------------------------------------------------------------------ reading JSON


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[" * 100_000, "deep"),
        (b'{"a": {"b": 1, "b": 2}}', '"b" twice'),
        (b'["\xff"]', "byte 2.*UTF-8"),
        (b"[1" + b"0" * 5000 + b"]", "digits"),
        (b"\x00" * 20, "not JSON"),
    ],
)
def test_what_is_not_json_is_one_sentence(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=named) as refused:
        read_json(path)
    assert str(path) in str(refused.value)
    assert "; " in str(refused.value)
    assert str(refused.value).isprintable()


READING = """
import pathlib, resource, sys
from ensbridge.utils.files import read_json
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
print(read_json(pathlib.Path(sys.argv[1])))
"""


def test_what_would_never_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    for name in ("pipe.json", "endless.json"):
        done = fresh(READING, tmp_path / name)
        assert f"{name} is not a regular file" in done.stderr
        assert "ValueError" in done.stderr
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(2**40)  # a hole, which takes no space on disk
    assert "huge.json has 1,099,511,627,776 bytes" in fresh(READING, tmp_path / "huge.json").stderr


def test_a_file_behind_a_link_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "link.json").symlink_to(tmp_path / "config.json")
    assert read_json(tmp_path / "link.json") == [1]
