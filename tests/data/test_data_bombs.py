"""Arrays and pickles that claim what they have not: refused in a sentence, before memory is taken."""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import _sets
from _limits import outcome
from ensbridge.data import arrays, checks, read_corrupted, read_npz
from ensbridge.data.cifar import read_cifar
from ensbridge.data.imagenet import read_imagenet64, read_tiny_imagenet
from ensbridge.data.sources import from_folder

ARRAYS = _sets.arrays_of(_sets.cifar_files())


def read_batches(folder: Path) -> Any:
    return read_cifar(from_folder(folder), _sets.CIFAR10, folder)


# ------------------------------------------------------------------------------ .npy and .npz


def header(shape: Any, kind: str = "|u1", version: tuple[int, int] = (1, 0)) -> bytes:
    text = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return np.lib.format.magic(*version) + struct.pack("<H" if version == (1, 0) else "<I", len(text)) + text


def npz(
    path: Path, change: Callable[[zipfile.ZipFile], None] | None = None, method: int = 0, **changed: bytes
) -> Path:
    """A set whose members may be of any bytes; `change` alters what the archive says of them."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, array in ARRAYS.items():
            with archive.open(f"{name}.npy", "w") as file:
                if name in changed:
                    file.write(changed[name])
                else:
                    np.lib.format.write_array(file, array)
        if change is not None:
            change(archive)
    return path


def encrypt(archive: zipfile.ZipFile) -> None:
    archive.infolist()[0].flag_bits |= 1


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(60, 400):
        content[place] ^= 0x55
    path.write_bytes(content)


def test_the_helper_writes_sets_that_are_read(tmp_path: Path) -> None:
    assert len(read_npz(npz(tmp_path / "x.npz")).test) == 10
    changed = header((10,), "<i8") + ARRAYS["test_labels"].astype("<i8").tobytes()
    assert len(read_npz(npz(tmp_path / "x.npz", test_labels=changed)).test) == 10


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"test_labels": header(()) + b"1"}, r"labels.*\(\)"),
        ({"test_labels": header((10, 1, 1)) + b"1" * 10}, r"labels.*\(10, 1, 1\)"),
        ({"test_images": header(()) + b"1"}, r"images.*\(\)"),
        ({"test_images": b""}, "header"),
        ({"test_images": header((10,))[:20]}, "header"),
        ({"test_images": b"\x93NUMPY\x03\x00" + header((10,))[8:]}, "header"),
        ({"test_images": header((10**13,)) + b"1"}, r"10,000,000,000,000.*\b1\b"),
        ({"test_images": header((2**40, 2**40)) + b"1"}, r"bytes.*\b1\b"),
        ({"test_images": header((-1, -5)) + b"12345"}, r"bytes.*\b5\b"),
        ({"test_images": header((10**13,), "<f8") + b"1"}, "80,000,000,000,000"),
        ({"test_images": header("'a'")}, "header"),
        ({"test_images": header("(" * 4000)}, "header"),
        ({"test_images": header("(" + "9" * 5000 + ",)")}, r"cut short.*npz"),
        ({"test_images": header((5,), "|O") + b"12345"}, "object"),
        ({"test_images": header((1,), "|V5") + b"12345"}, "plain numbers"),
        ({"test_images": header((5,)) + b"123456"}, r"\b5\b.*\b6\b"),
        ({"test_images": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"1" * 99}, "header"),
    ],
)
def test_odd_members_are_a_sentence(members: dict[str, bytes], named: str, tmp_path: Path) -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with pytest.raises(ValueError, match=named) as refused:
            read_npz(npz(tmp_path / "x.npz", method=method, **members))
        assert str(refused.value).startswith(str(tmp_path / "x.npz"))
        assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_encrypted_damaged_and_oddly_compressed_members_are_a_sentence(method: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.npz.*cut short"):
        read_npz(npz(tmp_path / "x.npz", encrypt, method))
    spoil(npz(tmp_path / "x.npz", method=method))
    with pytest.raises(ValueError, match=r"x\.npz.*cut short"):
        read_npz(tmp_path / "x.npz")
    with pytest.raises(ValueError, match=r"x\.npz.*cut short"):
        arrays.shapes_in(tmp_path / "x.npz")


def test_an_archive_that_claims_gigabytes_is_refused_before_they_are_taken(tmp_path: Path) -> None:
    size, start = 3 * 2**30, header((3 * 2**30,))

    def claim(archive: zipfile.ZipFile) -> None:
        archive.getinfo("test_images.npy").file_size = len(start) + size

    place = npz(tmp_path / "x.npz", claim, zipfile.ZIP_DEFLATED, test_images=start)
    found = outcome(f"ensbridge.data.read_npz({str(place)!r})")
    assert re.match("ValueError: .*bytes.*np.savez", found)


def test_sets_are_measured_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = npz(tmp_path / "x.npz")
    total = sum(array.nbytes for array in ARRAYS.values())

    def never(*_: Any, **__: Any) -> np.ndarray:
        raise AssertionError("an array was read")

    with monkeypatch.context() as patched:
        patched.setattr(np.lib.format, "read_array", never)
        patched.setattr(checks, "LARGEST_SET", total - 1)
        with pytest.raises(ValueError, match=f"{total:,}.*{total - 1:,}"):
            read_npz(place)
    monkeypatch.setattr(checks, "UNPACKED", total - 1)
    assert len(read_npz(place).test) == 10  # as large as its file, which is no bomb
    zeros = header((10, 32, 32, 3)) + bytes(30720)
    small = npz(tmp_path / "y.npz", None, zipfile.ZIP_DEFLATED, test_images=zeros)
    monkeypatch.setattr(checks, "RATIO", 1)
    with monkeypatch.context() as patched:
        patched.setattr(np.lib.format, "read_array", never)
        with pytest.raises(ValueError, match="without compression"):
            read_npz(small)


@pytest.mark.parametrize(
    "content",
    [
        header((10**13, 4, 4, 3)) + b"1",
        header((5, 4, 4, 3))[:30],
        header("(" * 4000),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        header((-1, -240)) + bytes(240),
        header((240,), "|O") + bytes(240),
    ],
)
def test_odd_arrays_of_corruptions_are_a_sentence(content: bytes, tmp_path: Path) -> None:
    _sets.write(tmp_path, {"fog.npy": content, "labels.npy": header((5,)) + b"1" * 5})
    with pytest.raises(ValueError, match=r"fog\.npy.*cut short"):
        read_corrupted(tmp_path, "fog", 1)


# ------------------------------------------------------------------------------ what is in pickles


def batch(**changes: bytes) -> bytes:
    whole = {"data": _sets.python2(_sets.pixels(10, 3072))[2:-1], "labels": b"](" + b"K\x00" * 10 + b"e"}
    parts = {**changes, **{name: each for name, each in whole.items() if name not in changes}}
    inside = b"".join(b"U" + bytes([len(name)]) + name.encode() + each for name, each in parts.items())
    return b"\x80\x02}(" + inside + b"u."


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"labels": b"K\x05"}, r"labels.*int"),
        ({"labels": b"U\x0a0123456789"}, r"labels.*str"),
        ({"labels": b"](" + b"](K\x00e" * 10 + b"e"}, r"list.*labels"),
        ({"labels": b"](" + b"}" * 10 + b"e"}, r"dict.*labels"),
        ({"labels": b"](" + (b"\x8a\x0a" + b"1" * 10) * 10 + b"e"}, r"labels.*object"),
        ({"labels": b"](" + (b"\x8a\x09" + b"\xff" * 8 + b"\x00") * 10 + b"e"}, "label -1"),
        ({"data": b"](" + (b"](" + b"K\x00" * 3072 + b"e") * 10 + b"e"}, r"data.*not an array"),
        ({"data": b"K\x05"}, r"data.*not an array"),
        ({"batch_label": b"](K\x00e", "data": b"N"}, r"data.*not an array"),
    ],
)
def test_odd_batches_are_a_sentence(changes: dict[str, bytes], named: str, tmp_path: Path) -> None:
    _sets.write(tmp_path, {**_sets.cifar_files(), "data_batch_2": batch()})
    assert len(read_batches(tmp_path).train) == 41
    (tmp_path / "data_batch_2").write_bytes(batch(**changes))
    with pytest.raises(ValueError, match=named) as refused:
        read_batches(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'data_batch_2'} ")
    content = {**_sets.imagenet_files(), "train_data_batch_1": batch(**changes)}
    _sets.write(tmp_path / "imagenet", content)
    with pytest.raises(ValueError, match="train_data_batch_1 "):
        read_imagenet64(from_folder(tmp_path / "imagenet"), tmp_path / "imagenet", layout=_sets.IMAGENET)


@pytest.mark.parametrize(("key", "named"), [("data", "not an array"), ("labels", "list")])
def test_a_list_of_one_list_over_and_over_is_not_made_an_array(key: str, named: str, tmp_path: Path) -> None:
    """A billion numbers from a file of 6 kB."""
    inner = b"]q\x00(" + b"K\x00" * 1000 + b"e"
    middle = b"]q\x01(" + b"h\x00" * 1000 + b"e"
    content = batch(a=inner, b=middle, **{key: b"](" + b"h\x01" * 1000 + b"e"})
    _sets.write(tmp_path, {**_sets.cifar_files(), "data_batch_1": content})
    found = outcome(f"cifar.read_cifar(sources.from_folder(Path({str(tmp_path)!r})), _sets.CIFAR10, '')")
    assert re.match(f"ValueError: .*{key}.*{named}|ValueError: .*{named}.*{key}", found)


def test_a_pickle_of_millions_of_lists_ends_early() -> None:
    """Each takes 200 bytes of memory, and one in the file."""
    found = outcome(
        "unpickling.read_pickle(b'}X' + bytes([1, 0, 0, 0]) + b'a](' + b']' * 9_000_000, 'batch')"
    )
    assert re.match("ValueError: batch.*2,000,000", found)


def test_texts_that_are_no_texts_are_named(tmp_path: Path) -> None:
    _sets.write(tmp_path, {**_sets.tiny_files(), "wnids.txt": b"\xff\xfe"})
    with pytest.raises(ValueError, match=r"wnids\.txt.*text"):
        read_tiny_imagenet(from_folder(tmp_path), tmp_path, layout=_sets.TINY)
    _sets.write(tmp_path, {"wnids.txt": b"n" + b"1" * 300 + b"\nn01\nn02"})
    with pytest.raises(ValueError, match=r"n1{9}"):
        read_tiny_imagenet(from_folder(tmp_path), tmp_path, layout=_sets.TINY)
