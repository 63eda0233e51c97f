"""Files that are made to do harm: images that run programs or fill memory, pipes that keep one waiting."""

from __future__ import annotations

import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import _sets
from _limits import outcome, pipe
from ensbridge.data import checks, list_sets, open_splits, read_corrupted, read_npz
from ensbridge.data.cifar import read_cifar
from ensbridge.data.image_io import FORMATS, decode
from ensbridge.data.sources import from_folder, from_tar, from_zip
from ensbridge.deploy.batch import open_image
from ensbridge.utils.files import open_regular_file

Image = pytest.importorskip("PIL.Image")
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n0 0 8 8 rectfill\n%%EOF\n"


def images_in(folder: Path, **others: bytes) -> Path:
    """An image folder of two classes, three images each."""
    flat = _sets.picture(np.zeros((4, 4, 3), np.uint8))
    files = {f"{name}/{number}.png": flat for name in ("cat", "dog") for number in range(3)}
    return _sets.write(folder, {**files, **{f"cat/{name}.png": content for name, content in others.items()}})


def claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims so many pixels."""
    whole = _sets.picture(np.zeros((4, 4), np.uint8))
    start = whole[:16] + struct.pack(">II", width, height) + whole[24:29]
    return start + zlib.crc32(start[12:]).to_bytes(4, "big") + whole[33:]


# ------------------------------------------------------------------------------ regular files


def test_a_regular_file_is_opened_and_all_else_refused(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(place)
    for path in (place, tmp_path / "link"):
        with open_regular_file(path, 5) as file:
            assert file.read() == b"12345"
    with pytest.raises(ValueError, match=r"file.*\b5\b.*\b4\b"):
        open_regular_file(place, 4)
    (tmp_path / "zero").symlink_to("/dev/zero")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pipe(tmp_path / "pipe"):
        for path in (tmp_path, tmp_path / "zero", tmp_path / "pipe", Path("/dev/null")):
            with pytest.raises(ValueError, match="not a regular file"):
                open_regular_file(path)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        open_regular_file(tmp_path / "none")
    with pytest.raises(ValueError, match="inside"):
        open_regular_file(place / "inside")


def read_batches(folder: Path) -> Any:
    return read_cifar(from_folder(folder), _sets.CIFAR10, folder)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "predict": ("x.png", lambda path: open_image(path, (3, 4, 4))),
    "npz": ("x.npz", read_npz),
    "a path": ("x.npz", open_splits),
    "batches": ("data_batch_1", lambda path: read_batches(path.parent)),
    "corruptions": ("fog.npy", lambda path: read_corrupted(path.parent, "fog", 1)),
    "tar": ("x.tar", lambda path: from_tar(path, "x", ["a"])),
    "zip": ("x.zip", lambda path: from_zip(path, "x").__enter__()),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_pipe_is_read(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    _sets.write(tmp_path, {"labels.npy": b""})
    with pipe(tmp_path / name), pytest.raises(ValueError, match=r"not a regular file|missing"):
        read(tmp_path / name)


def test_no_pipe_is_read_among_images_nor_beside_arrays(tmp_path: Path) -> None:
    with (
        pipe(images_in(tmp_path / "images") / "dog" / "9.png"),
        pytest.raises(ValueError, match=r"dog/9\.png.*not a regular file"),
    ):
        open_splits(tmp_path / "images")
    (tmp_path / "corrupted").mkdir()
    np.save(tmp_path / "corrupted" / "fog.npy", np.zeros((5, 4, 4, 3), np.uint8))
    with (
        pipe(tmp_path / "corrupted" / "labels.npy"),
        pytest.raises(ValueError, match=r"labels\.npy.*not a regular file"),
    ):
        read_corrupted(tmp_path / "corrupted", "fog", 1)


def test_a_pipe_is_listed_as_one(tmp_path: Path) -> None:
    with pipe(tmp_path / "mine.npz"):
        found = list_sets(tmp_path)[-1]
    assert (found.name, found.valid) == ("mine.npz", False)
    assert "not a regular file" in found.description


def test_a_link_to_a_device_among_images_is_named(tmp_path: Path) -> None:
    place = images_in(tmp_path)
    (place / "cat" / "9.png").symlink_to("/dev/zero")
    found = outcome(f"folder.read_image_folder({str(place)!r})")
    assert re.match(r"ValueError: .*9\.png.*not a regular file", found)


def test_a_file_of_a_set_may_be_so_large_and_no_larger(tmp_path: Path) -> None:
    """Files of holes, which take no disk."""
    for name, read, limit in (
        ("data_batch_1", read_batches, 2**29),
        ("train_data_batch_1", lambda folder: open_splits(folder), 2**31),
        ("cat/0.png", lambda folder: open_splits(folder), 2**28),
    ):
        place = images_in(tmp_path / str(limit)) / name
        with open(place, "wb") as file:
            file.truncate(limit + 1)
        with pytest.raises(ValueError, match=rf"{limit + 1:,}.*{limit:,}"):
            read(tmp_path / str(limit))


# ------------------------------------------------------------------------------ images


def test_an_image_runs_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import EpsImagePlugin

    program, trace = tmp_path / "bin" / "gs", tmp_path / "it ran"
    _sets.write(tmp_path, {"bin/gs": f'#!/bin/sh\n/usr/bin/touch "{trace}"\n'.encode(), "cat.png": EPS})
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    for read in (lambda: decode(EPS, "cat.png"), lambda: open_image(tmp_path / "cat.png", (3, 8, 8))):
        with pytest.raises(ValueError, match="PNG, JPEG, BMP, WEBP, PPM"):
            read()
    with pytest.raises(ValueError, match=r"cat/eps\.png"):
        open_splits(images_in(tmp_path / "images", eps=EPS))
    assert not trace.exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_formats_that_are_meant_are_read(kind: str) -> None:
    flat = np.full((4, 6, 3), 77, np.uint8)
    assert np.array_equal(decode(_sets.picture(flat, kind), "x"), flat)


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "DDS", "TGA", "ICO", "SGI", "PCX"])
def test_others_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="PNG, JPEG"):
        decode(_sets.picture(np.full((16, 16, 3), 77, np.uint8), kind), "x")


def test_pixels_are_counted_before_they_are_decoded(tmp_path: Path) -> None:
    """Decoding would fail in another way, as they are not there."""
    content = claiming(13_300, 13_300)
    (tmp_path / "cat.png").write_bytes(content)
    for read in (lambda: decode(content, "cat.png"), lambda: open_image(tmp_path / "cat.png", (3, 8, 8))):
        with pytest.raises(ValueError, match=r"13300×13300.*33,554,432"):
            read()


def test_what_is_odd_about_an_image_needs_no_remark() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="10000×10000 pixels"):
            decode(claiming(10_000, 10_000), "x")


def test_many_small_files_of_large_images_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = images_in(tmp_path)
    monkeypatch.setattr(checks, "UNPACKED", 100)
    monkeypatch.setattr(checks, "RATIO", 0.01)
    with pytest.raises(ValueError, match="288 bytes"):
        open_splits(place)


def test_a_set_that_memory_has_no_room_for_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> np.ndarray:
        raise MemoryError("Unable to allocate 9 TiB")

    place = images_in(tmp_path)
    monkeypatch.setattr(np, "empty", full)
    with pytest.raises(ValueError, match="9 TiB"):
        open_splits(place)
