"""A set as one `.npz`: train_images, train_labels, test_images, test_labels, and val_… where it has them."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ensbridge.data.checks import channels_first, check_size, few, hold_out_last, image_set, join
from ensbridge.data.digits import Splits
from ensbridge.data.examples import ImageSet
from ensbridge.data.npy import Header, read_header
from ensbridge.data.sources import damage_named
from ensbridge.utils.files import open_regular_file, replacing

_NEEDED = tuple(f"{part}_{what}" for part in ("train", "test") for what in ("images", "labels"))
_READ = (*_NEEDED, "val_images", "val_labels")
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those that NumPy writes


def read_npz(path: Path | str) -> Splits:
    """The set in an `.npz` of uint8 images, channels last or first, and integer labels.

    Without `val_images` and `val_labels`, validation is the last part of the training images in their order,
    9,040 of 50,000; a set sorted by class is refused, as validation would have only some classes.
    """
    path = Path(path)
    arrays, names = _arrays(path)
    if missing := [name for name in _NEEDED if name not in arrays]:
        raise ValueError(
            f"{path} has no {', '.join(missing)} (it has: {few(names)}); save the arrays by these names"
        )
    train, test = _part(arrays, "train", path), _part(arrays, "test", path)
    assert train.labels is not None
    if "val_images" in arrays or "val_labels" in arrays:
        if not {"val_images", "val_labels"} <= set(arrays):
            raise ValueError(f"{path} has one of val_images and val_labels; give both or none")
        val = _part(arrays, "val", path)
    elif len(train.labels.unique()) > 1 and bool((train.labels.diff() >= 0).all()):
        raise ValueError(
            f"{path} has its training images class by class, so that the last ones are no validation set; "
            "shuffle them, or add val_images and val_labels"
        )
    else:
        train, val = hold_out_last(train)
    _agree(Splits(train, val, test), path)
    return Splits(train, val, test)


def read_images(path: Path | str) -> ImageSet | None:
    """The images of an `.npz` with `images` and maybe `labels`; None where it has train_images and so on."""
    path = Path(path)
    if any(name in shapes_in(path) for name in _NEEDED):
        return None
    arrays, names = _arrays(path, ("images", "labels"))
    if "images" not in arrays:
        raise ValueError(
            f"{path} has no images (it has: {few(names)}); save them as images and labels, or as "
            "train_images, train_labels and so on"
        )
    images = channels_first(arrays["images"], f"{path}: images")
    known = image_set(images, arrays.get("labels", np.zeros(len(images), np.int64)), str(path))
    return known if "labels" in arrays else known.without_labels()


def _agree(splits: Splits, path: Path) -> None:
    shapes = [tuple(part.images.shape[1:]) for part in splits]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"{path} has training images of {shapes[0]} and test images of {shapes[2]}; one shape is needed"
        )
    most = max(int(part.labels.max()) for part in splits[:2] if part.labels is not None)
    if splits.test.labels is not None and int(splits.test.labels.max()) > most:
        raise ValueError(
            f"{path} has the label {int(splits.test.labels.max())} in test_labels; training ends with {most}"
        )


def _arrays(path: Path, wanted: Sequence[str] = _READ) -> tuple[dict[str, Any], list[str]]:
    """The wanted arrays that an `.npz` has, and the names of all that it has."""
    with _opened(path) as (archive, entries, stored):
        headers = {name: _header(archive, entries[name], path) for name in wanted if name in entries}
        check_size(sum(header.size for header in headers.values()), stored, str(path))
        arrays = {}
        for name in headers:
            with _damage_named(path), archive.open(entries[name]) as file:
                arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
        return arrays, list(entries)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo], int]]:
    """The archive, its entries by the names of their arrays, and the size of the file."""
    try:
        file = open_regular_file(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; give an .npz") from error
    with file:
        with _damage_named(path):
            archive = zipfile.ZipFile(file)
        with archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            yield archive, entries, os.fstat(file.fileno()).st_size


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> Header:
    with _damage_named(path):
        if entry.compress_type not in _COMPRESSIONS:
            raise ValueError("it is compressed in a way that NumPy does not support")
        with archive.open(entry) as file:
            return read_header(file, entry.file_size)


def _damage_named(path: Path) -> AbstractContextManager[None]:
    return damage_named(path, "no .npz of plain arrays", "write it again")


def _part(arrays: dict[str, Any], part: str, path: Path) -> ImageSet:
    images = channels_first(arrays[f"{part}_images"], f"{path}: {part}_images")
    if len(images) == 0:
        raise ValueError(f"{path}: {part}_images holds no image; give at least one")
    return image_set(images, arrays[f"{part}_labels"], f"{path}: {part}")


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a set's arrays in an `.npz`, from their headers alone."""
    with _opened(path) as (archive, entries, _):
        return {name: _header(archive, entries[name], path).shape for name in _READ if name in entries}


def write_npz(path: Path, splits: Splits, validation_apart: bool = False) -> None:
    """Write a set, atomically.

    Validation is stored as the last of the training images, where `read_npz` finds it, or separately.
    """
    train = splits.train if validation_apart else join(splits[:2])
    parts = {"train": train, "test": splits.test} | ({"val": splits.val} if validation_apart else {})
    arrays = {}
    for name, part in parts.items():
        assert part.labels is not None
        arrays[f"{name}_images"] = part.images.numpy().transpose(0, 2, 3, 1)
        arrays[f"{name}_labels"] = part.labels.numpy()
    with replacing(path) as file:
        np.savez(file, **arrays)
