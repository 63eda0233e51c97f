"""Tiny ImageNet (`tiny-imagenet-200`) and ImageNet64, in their official layouts.

The test set is the labelled validation set of each. Validation is the last training images of each class: a
tenth in Tiny ImageNet, 50 in ImageNet64. Tiny ImageNet's classes are sorted by their WordNet names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ensbridge.data.checks import as_int64_labels, decode_images, image_set
from ensbridge.data.digits import Splits
from ensbridge.data.examples import ImageSet
from ensbridge.data.sources import Read
from ensbridge.data.unpickling import read_batch
from ensbridge.utils.progress import Stage, silent


@dataclass(frozen=True)
class TinyLayout:
    """The numbers of classes, of images per class, and of images in the set's own `val`."""

    classes: int = 200
    per_class: int = 500
    validation: int = 50  # of each class's
    test: int = 10_000
    size: int = 64


TINY = TinyLayout()


def read_tiny_imagenet(
    read: Read, where: Path | str, stage: Stage = silent, layout: TinyLayout = TINY
) -> Splits:
    """The set in `tiny-imagenet-200`, whose files `read` returns."""
    names = sorted(set(_text(read, "wnids.txt", where).split()))
    if len(names) != layout.classes:
        raise ValueError(f"{where}/wnids.txt names {len(names)} classes; Tiny ImageNet has {layout.classes}")
    if odd := [name for name in names if not re.fullmatch(r"n[0-9]+", name)]:  # one could lead out of the set
        raise ValueError(
            f"{where}/wnids.txt has the class {odd[0][:60]!a}; those of Tiny ImageNet are such as n01443537"
        )
    advance = stage("reading", layout.classes * layout.per_class + layout.test, "images")

    size = (layout.size, layout.size)

    def read_part(files: Sequence[tuple[str, int]]) -> ImageSet:
        named = [(f"{where}/{name}", partial(read, name), label) for name, label in files]
        return decode_images(named, size, str(where), advance, layout.classes)

    first = layout.per_class - layout.validation
    ranges = (range(first), range(first, layout.per_class))
    train, val = (
        [(f"train/{name}/images/{name}_{i}.JPEG", label) for label, name in enumerate(names) for i in numbers]
        for numbers in ranges
    )
    return Splits(read_part(train), read_part(val), read_part(_test(read, names, where, layout)))


def _test(read: Read, names: Sequence[str], where: Path | str, layout: TinyLayout) -> list[tuple[str, int]]:
    """The files of the labelled `val`, as its annotations name them."""
    path, label = f"{where}/val/val_annotations.txt", {name: i for i, name in enumerate(names)}
    labelled = []
    for line in _text(read, "val/val_annotations.txt", where).splitlines():
        file, name = (*line.split("\t"), "", "")[:2]
        if name not in label or "/" in file or not file.endswith(".JPEG"):
            raise ValueError(f"{path} has the line {line[:60]!r}; it must begin with a file and a class")
        labelled.append((f"val/images/{file}", label[name]))
    if len(labelled) != layout.test:
        raise ValueError(f"{path} names {len(labelled):,} images; Tiny ImageNet has {layout.test:,}")
    return labelled


def _text(read: Read, name: str, where: Path | str) -> str:
    try:
        return read(name).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}/{name} is not text; get the set again") from error


@dataclass(frozen=True)
class ImageNetLayout:
    """The numbers of images and classes, and the side of an image."""

    train: int = 1_281_167
    test: int = 50_000
    classes: int = 1000
    validation: int = 50  # of each class
    size: int = 64
    batches: tuple[str, ...] = tuple(f"train_data_batch_{number}" for number in range(1, 11))

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all files."""
        return (*self.batches, "val_data")


IMAGENET64 = ImageNetLayout()
LARGEST_BATCH = 2**31  # bytes of one file: the official ones have 1.6 billion


def read_imagenet64(
    read: Read, where: Path | str, stage: Stage = silent, layout: ImageNetLayout = IMAGENET64
) -> Splits:
    """The set in a folder of `train_data_batch_1` … `train_data_batch_10` and `val_data`.

    All of it takes 16 GB of memory, and reading it 5 GB more.
    """
    advance = stage("reading", len(layout.files), "files")
    images = np.empty((layout.train, 3, layout.size, layout.size), np.uint8)
    labels = np.empty(layout.train, np.int64)
    end = 0
    for name in layout.batches:
        start, batch = end, _read_batch(read, name, where, layout)
        end += len(batch)
        if end <= layout.train and batch.labels is not None:
            images[start:end], labels[start:end] = batch.images.numpy(), batch.labels.numpy()
        advance(1)
    if end != layout.train:
        raise ValueError(f"{where} has {end:,} training images; ImageNet64 has {layout.train:,}")
    first = _move_validation_to_the_end(images, labels, layout)
    test = _read_batch(read, "val_data", where, layout)
    advance(1)
    if len(test) != layout.test:
        raise ValueError(f"{where}/val_data has {len(test):,} images; ImageNet64 has {layout.test:,}")
    train = image_set(images[:first], labels[:first], str(where))
    return Splits(train, image_set(images[first:], labels[first:], str(where)), test)


def _read_batch(read: Read, name: str, where: Path | str, layout: ImageNetLayout) -> ImageSet:
    path = f"{where}/{name}"
    batch = read_batch(read(name), "labels", 3 * layout.size**2, path, "ImageNet64")
    labels = as_int64_labels(batch["labels"], path)
    if not labels.size or labels.min() < 1 or labels.max() > layout.classes:
        least, most = (labels.min(), labels.max()) if labels.size else ("nothing", "nothing")
        raise ValueError(f"{path} has labels from {least} to {most}; ImageNet64's are 1 to {layout.classes}")
    return image_set(batch["data"].reshape(-1, 3, layout.size, layout.size), labels - 1, path)


def _move_validation_to_the_end(images: np.ndarray, labels: np.ndarray, layout: ImageNetLayout) -> int:
    """Swap the last images of each class to the end, in place (a copy would be 16 GB); where they begin."""
    held = np.concatenate(list(_last_of_each_class(labels, layout)))
    first = len(labels) - len(held)
    outside = held[held < first]
    inside = np.setdiff1d(np.arange(first, len(labels)), held)
    for array in (images, labels):
        array[outside], array[inside] = array[inside], array[outside]
    return first


def _last_of_each_class(labels: np.ndarray, layout: ImageNetLayout) -> Iterator[np.ndarray]:
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(layout.classes + 1))
    for label in range(layout.classes):
        if starts[label + 1] - starts[label] <= layout.validation:
            raise ValueError(f"class {label + 1} has too few training images; ImageNet64 has more than 700")
        yield order[starts[label + 1] - layout.validation : starts[label + 1]]
