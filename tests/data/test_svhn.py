"""SVHN's files, whole and damaged; scipy writes them as MATLAB does."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

import _sets
from ensbridge.data import open_splits
from ensbridge.data.sources import from_folder
from ensbridge.data.svhn import read_mat, read_svhn


def mat(compressed: bool = True, **arrays: Any) -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, arrays, do_compression=compressed)
    return file.getvalue()


def part(count: int, seed: int, **changes: Any) -> dict[str, Any]:
    labels = np.arange(count, dtype=np.uint8)[:, None] % 10 + 1  # 10 is the digit 0
    return {"X": np.moveaxis(_sets.pixels(count, 32, 32, 3, seed=seed), 0, 3), "y": labels} | changes


def files(compressed: bool = True, **changes: Any) -> dict[str, bytes]:
    test = {"test_32x32.mat": mat(compressed, **part(20, 1))}
    return test | {"train_32x32.mat": mat(compressed, **part(50, 0, **changes))}


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.int32])
def test_the_two_files_are_a_set(compressed: bool, dtype: type, tmp_path: Path) -> None:
    labels = (np.arange(50)[:, None] % 10 + 1).astype(dtype)
    folder = _sets.write(tmp_path / "svhn", files(compressed, y=labels))
    train, val, test = open_splits(folder)
    assert (len(train), len(val), len(test)) == (41, 9, 20)
    images = np.moveaxis(_sets.pixels(50, 32, 32, 3), 3, 1)
    np.testing.assert_array_equal(train.images.numpy(), images[:41])
    np.testing.assert_array_equal(val.images.numpy(), images[41:])
    assert train.labels is not None
    assert train.labels[:12].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    with pytest.raises(ValueError, match=r"60,012 \+ 13,245 \+ 26,032"):
        open_splits("svhn", tmp_path)


@pytest.mark.parametrize("compressed", [True, False])
def test_arrays_are_those_that_scipy_reads(compressed: bool) -> None:
    arrays = {
        "whole": np.arange(24, dtype=np.int16).reshape(2, 3, 4),
        "one": np.array([[7]], np.uint8),
        "real": np.linspace(0, 1, 7)[None],
        "a_name_that_is_rather_long": np.zeros((0, 3)),
        "text": "left out",
        "cells": np.array([[1, "a"]], dtype=object),
    }
    content = mat(compressed, **arrays)
    found, expected = read_mat(content, "here"), scipy.io.loadmat(io.BytesIO(content))
    assert list(found) == [name for name in arrays if name not in ("text", "cells")]
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])


def announce(content: bytes, offset: int, size: int) -> bytes:
    return content[:offset] + struct.pack("<I", size) + content[offset + 4 :]


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (None, r"train_32x32\.mat.*missing"),
        (b"", r"train_32x32\.mat.*cut short"),
        (files()["train_32x32.mat"][:-20], "cut short"),
        (files(compressed=False)["train_32x32.mat"][:-20], "cut short"),
        (files()["train_32x32.mat"][:150], "cut short"),
        (announce(files(compressed=False)["train_32x32.mat"], 132, 2**32 - 1), "4,294,967,295"),
        (b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM", "format 5"),
        (mat(X=part(3, 0)["X"]), "no y"),
        (mat(**part(3, 0, y=np.zeros((2, 1), np.uint8))), "3 images and 2 labels"),
        (mat(**part(3, 0, y=np.full((3, 1), 11, np.uint8))), "label 11"),
        (mat(**part(3, 0, y=np.full((3, 1), 0.5))), "float64"),
        (mat(**part(3, 0, X=np.zeros((32, 32, 3)))), r"\(32, 32, 3\)"),
        (mat(**part(3, 0, X=np.zeros((32, 32, 3, 3)))), "float64"),
    ],
)
def test_a_bad_file_is_named(train: bytes | None, named: str, tmp_path: Path) -> None:
    written = files() | ({} if train is None else {"train_32x32.mat": train})
    _sets.write(tmp_path, {name: written[name] for name in written if train is not None or "test" in name})
    with pytest.raises(ValueError, match=named):
        read_svhn(from_folder(tmp_path), tmp_path)


def test_damage_is_a_value_error_and_nothing_else() -> None:
    rng = _sets.draws()
    for compressed in (True, False):
        content = mat(compressed, X=np.zeros((2, 2), np.uint8), y=np.ones((3, 1)))
        for _ in range(500):
            damaged = bytearray(content)
            for place in rng.integers(128, len(content), 3):
                damaged[place] = rng.integers(256)
            with contextlib.suppress(ValueError):
                read_mat(bytes(damaged), "here")


def test_a_compressed_element_that_grows_without_end_is_refused() -> None:
    head = b"MATLAB 5.0".ljust(124) + b"\x00\x01IM"
    bomb = zlib.compress(struct.pack("<2I", 14, 2**32 - 8) + bytes(2**20))
    with pytest.raises(ValueError, match="4,294,967,288 bytes"):
        read_mat(head + struct.pack("<2I", 15, len(bomb)) + bomb, "here")
