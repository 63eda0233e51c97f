"""Folders of images in folders named by class: read, held out of, and refused by the name of a file."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import _sets
from ensbridge.data import ImageSet, class_folders, open_splits
from ensbridge.data.image_io import decode

Image = pytest.importorskip("PIL.Image")


def image_folder(folder: Path, *parts: str, count: int = 12) -> Path:
    """Classes cat and dog; the pixels of image i of class c are 100·c + i, plus 50 outside of training."""
    for part in parts:
        files = {}
        for label, name in enumerate(("cat", "dog")):
            for i in range(count):
                flat = np.full((4, 5, 3), 100 * label + i + 50 * (part in ("val", "test")), np.uint8)
                files[f"{part}/{name}/{i:03}.{'png' if i % 2 else 'PNG'}"] = _sets.picture(flat)
        _sets.write(folder, {**files, f"{part}/cat/notes.txt": b"", f"{part}/cat/.hidden.png": b""})
    return folder


def firsts(part: ImageSet) -> list[int]:
    return part.images[:, 0, 0, 0].tolist()


CATS, DOGS = list(range(12)), list(range(100, 112))


@pytest.mark.parametrize(
    ("parts", "train", "val", "test"),
    [
        ((".",), CATS[:10] + DOGS[:10], [10, 110], [11, 111]),
        (("train",), CATS[:10] + DOGS[:10], [10, 110], [11, 111]),
        (("train", "val"), CATS[:11] + DOGS[:11], [i + 50 for i in CATS + DOGS], [11, 111]),
        (("train", "test"), CATS[:11] + DOGS[:11], [11, 111], [i + 50 for i in CATS + DOGS]),
        (("train", "val", "test"), CATS + DOGS, [i + 50 for i in CATS + DOGS], [i + 50 for i in CATS + DOGS]),
    ],
)
def test_an_image_folder_is_read_and_missing_parts_are_held_out(
    parts: tuple[str, ...], train: list[int], val: list[int], test: list[int], tmp_path: Path
) -> None:
    image_folder(tmp_path, *parts)
    assert class_folders(tmp_path) == ("cat", "dog")
    splits = open_splits(tmp_path)
    for part, expected in zip(splits, (train, val, test), strict=True):
        assert part.images.shape[1:] == (3, 4, 5)
        assert firsts(part) == expected
        assert part.labels.tolist() == [int(value >= 100) for value in expected]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train/dog/001.png": b"\x89PNG"}, r"dog/001\.png.*PNG, JPEG, BMP, WEBP, PPM"),
        ({"train/dog/001.png": _sets.picture(np.zeros((4, 6, 3), np.uint8))}, r"001\.png.*6×4.*5×4"),
        ({"val/cow/0.png": b""}, r"val/cow.*cat, dog"),
        ({"train/cow/readme.txt": b""}, r"train/cow.*no images"),
        ({"train/cow/0.png": _sets.picture(np.zeros((4, 5, 3), np.uint8))}, r"\bcow\b.*too few"),
    ],
)
def test_a_bad_file_of_an_image_folder_is_named(change: dict[str, bytes], named: str, tmp_path: Path) -> None:
    _sets.write(image_folder(tmp_path, "train"), change)
    with pytest.raises(ValueError, match=named):
        open_splits(tmp_path)


def test_folders_without_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 folders"):
        open_splits(tmp_path)
    with pytest.raises(ValueError, match=r"test.*no train"):
        open_splits(image_folder(tmp_path, "test", "x"))


def test_an_image_that_would_fill_memory_is_refused_and_leaves_pillow_as_it_was(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    huge = _sets.picture(np.zeros((4, 4), np.uint8))
    wide = huge[:16] + (60_000).to_bytes(4, "big") * 2 + huge[24:29]
    wide += zlib.crc32(wide[12:]).to_bytes(4, "big") + huge[33:]
    before = image.MAX_IMAGE_PIXELS
    _sets.write(image_folder(tmp_path, "train"), {"train/cat/000.PNG": wide})
    with pytest.raises(ValueError, match=r"cat/000\.PNG"):
        open_splits(tmp_path)
    assert before == image.MAX_IMAGE_PIXELS


def test_pictures_are_read_as_they_are_meant_to_be_seen() -> None:
    deep = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    assert np.array_equal(decode(_png(Image.fromarray(deep)), "deep")[..., 0], deep >> 8)
    flat = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    turned = Image.Exif()
    turned[0x0112] = 6  # the orientation of a camera on its side
    assert np.array_equal(decode(_png(Image.fromarray(flat), exif=turned), "turned"), np.rot90(flat, -1))
    with pytest.raises(ValueError, match=r"^numbers.*pixels"):
        decode(b"Pf\n4 3\n-1.0\n" + deep.astype("<f4").tobytes(), "numbers")


def _png(image: Any, format: str = "PNG", **options: object) -> bytes:
    held = io.BytesIO()
    image.save(held, format, **options)
    return held.getvalue()
