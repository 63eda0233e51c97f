"""CIFAR-10's and CIFAR-100's official batches, and CIFAR-10-C's corrupted test images.

The split is 40,960 / 9,040 / 10,000: validation is the last part of the 50,000, in their own order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ensbridge.data.checks import channels_first, hold_out_last, image_set, join
from ensbridge.data.digits import Splits
from ensbridge.data.examples import ImageSet
from ensbridge.data.npy import open_npy
from ensbridge.data.sources import Read
from ensbridge.data.unpickling import read_batch
from ensbridge.utils.files import read_json


@dataclass(frozen=True)
class CifarLayout:
    """The files of a set with the number of images in each, and the key of the labels."""

    title: str
    train: Mapping[str, int]
    test: Mapping[str, int]
    labels: str
    classes: int

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all files."""
        return (*self.train, *self.test)


CIFAR10 = CifarLayout(
    "CIFAR-10",
    {f"data_batch_{number}": 10_000 for number in range(1, 6)},
    {"test_batch": 10_000},
    "labels",
    10,
)
CIFAR100 = CifarLayout("CIFAR-100", {"train": 50_000}, {"test": 10_000}, "fine_labels", 100)


def read_cifar(read: Read, layout: CifarLayout, where: Path | str) -> Splits:
    """The set in `cifar-10-batches-py` or `cifar-100-python`, whose files `read` returns."""
    numbered = enumerate(layout.train.items(), 1)
    train = join([_batch(read, name, size, layout, where, ("train", i)) for i, (name, size) in numbered])
    ((name, size),) = layout.test.items()
    return Splits(*hold_out_last(train), _batch(read, name, size, layout, where, ("test", 1)))


def _batch(
    read: Read, name: str, size: int, layout: CifarLayout, where: Path | str, role: tuple[str, int]
) -> ImageSet:
    path = f"{where}/{name}"
    batch = read_batch(read(name), layout.labels, 3072, path, layout.title, size)
    _check_batch_label(batch.get("batch_label"), role, path)
    return image_set(batch["data"].reshape(size, 3, 32, 32), batch[layout.labels], path, layout.classes)


def _check_batch_label(label: Any, role: tuple[str, int], path: str) -> None:
    """Refuse a renamed file: the official ones hold a label such as `training batch 2 of 5`."""
    text = label.decode("latin1") if isinstance(label, bytes) else label if isinstance(label, str) else ""
    inside = re.match(r"(train|test)\w* batch (\d{1,3}) of", text)
    if inside and (inside[1], int(inside[2])) != role:
        raise ValueError(f"{path} is labelled {text[:40]!r} inside, so it was renamed; get the set again")


def corruptions_in(folder: Path | str) -> tuple[str, ...]:
    """The corruptions in a folder of CIFAR-10-C's layout, by their names in alphabetical order."""
    return tuple(sorted(path.stem for path in Path(folder).glob("*.npy") if path.stem != "labels"))


def read_corrupted(folder: Path | str, corruption: str, severity: int) -> ImageSet:
    """One corruption of the test images at one severity, from `.npy` files in CIFAR-10-C's layout.

    Each file holds the whole test set once for each severity, the mildest first: 1 to 5, or those in the
    manifest.json beside them. Only the requested part is read.
    """
    folder = Path(folder)
    path, beside = folder / f"{corruption}.npy", folder / "labels.npy"
    severities = _severities(folder)
    if severity not in severities:
        raise ValueError(f"severity {severity} is not in {folder}; it has: {', '.join(map(str, severities))}")
    if not path.is_file():
        there = ", ".join(corruptions_in(folder)) or "none"
        raise ValueError(f"{path} is missing; corruptions in {folder}: {there}")
    images, labels = open_npy(path), open_npy(beside)
    if images.ndim != 4 or images.shape[3] not in (1, 3) or not len(images) or len(images) % len(severities):
        raise ValueError(
            f"{path} has images of shape {images.shape}; they must be ({len(severities)} times the test "
            "images, height, width, channels)"
        )
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{path} has {len(images):,} images, {beside} labels of shape {labels.shape}")
    count = len(images) // len(severities)
    start = severities.index(severity) * count
    part = slice(start, start + count)
    return image_set(channels_first(np.array(images[part]), str(path)), np.array(labels[part]), str(path))


def _severities(folder: Path) -> list[int]:
    if not (folder / "manifest.json").is_file():
        return [1, 2, 3, 4, 5]
    manifest = read_json(folder / "manifest.json")
    severities = manifest.get("severities") if isinstance(manifest, dict) else None
    if (
        not isinstance(severities, list)
        or not severities
        or not all(type(severity) is int for severity in severities)
    ):
        raise ValueError(f"{folder / 'manifest.json'} lists no severities; make or get the set again")
    return severities
