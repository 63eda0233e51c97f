"""A set as one `.npz`: train_images, train_labels, test_images, test_labels, and val_… where it has them."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ensbridge.data.checks import channels_first, hold_out_last, image_set, join
from ensbridge.data.digits import Splits
from ensbridge.data.loader import ImageSet
from ensbridge.files import replacing
from ensbridge.words import one_line

_NEEDED = tuple(f"{part}_{what}" for part in ("train", "test") for what in ("images", "labels"))
_DAMAGE = (zipfile.BadZipFile, EOFError, zlib.error, ValueError, OSError, KeyError, NotImplementedError)


def read_npz(path: Path | str) -> Splits:
    """The set in an `.npz` of uint8 images, channels last or first, and whole-numbered labels.

    Without `val_images` and `val_labels`, validation is the last part of the training images in their order,
    9,040 of 50,000; a set that lies class by class is refused, as only some classes would be in it.
    """
    path = Path(path)
    found, names = _arrays(path)
    if missing := [name for name in _NEEDED if name not in found]:
        has = ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "") or "nothing"
        raise ValueError(
            f"{path} has no {', '.join(missing)} (it has: {has}); save the arrays by these names"
        )
    train, test = _part(found, "train", path), _part(found, "test", path)
    assert train.labels is not None
    if "val_images" in found or "val_labels" in found:
        if not {"val_images", "val_labels"} <= set(found):
            raise ValueError(f"{path} has one of val_images and val_labels; give both or none")
        val = _part(found, "val", path)
    elif len(train.labels.unique()) > 1 and bool((train.labels.diff() >= 0).all()):
        raise ValueError(
            f"{path} has its training images class by class, so that the last ones make no validation set; "
            "shuffle them, or add val_images and val_labels"
        )
    else:
        train, val = hold_out_last(train)
    _agree(Splits(train, val, test), path)
    return Splits(train, val, test)


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


def _arrays(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The arrays of a set, and the names of all that are there."""
    try:
        if path.is_file() and not zipfile.is_zipfile(path):  # np.load would take other kinds as well
            raise ValueError("it is no zip file")
        with np.load(path, allow_pickle=False) as file:
            ours = [name for name in file.files if name.split("_")[0] in ("train", "val", "test")]
            return {name: file[name] for name in ours}, file.files
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; give an .npz") from error
    except _DAMAGE as error:
        raise ValueError(
            f"{path} is cut short or no .npz of plain arrays ({one_line(error)}); write it again"
        ) from error


def _part(found: dict[str, Any], part: str, path: Path) -> ImageSet:
    images = channels_first(found[f"{part}_images"], f"{path}: {part}_images")
    if len(images) == 0:
        raise ValueError(f"{path}: {part}_images holds no image; give at least one")
    return image_set(images, found[f"{part}_labels"], f"{path}: {part}")


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays in an `.npz`, from their headers alone."""
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    version = np.lib.format.read_magic(file)
                    header = "read_array_header_1_0" if version == (1, 0) else "read_array_header_2_0"
                    found[name.removesuffix(".npy")] = getattr(np.lib.format, header)(file)[0]
    except _DAMAGE as error:
        raise ValueError(
            f"{path} is cut short or no .npz of plain arrays ({one_line(error)}); write it again"
        ) from error
    return found


def write_npz(path: Path, splits: Splits, validation_apart: bool = False) -> None:
    """Write a set so that a reader, or a crash, sees the whole file or none.

    Validation is stored as the last of the training images, where `read_npz` finds it, or apart.
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
