"""ImageNet64: ImageNet at 64×64, in its ten training batches and `val_data`.

The set's own labelled `val_data` is the test set, which nothing may be selected on. Validation is the last 50
training images of each class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ensbridge.data.checks import image_set, whole_numbers
from ensbridge.data.digits import Splits
from ensbridge.data.loader import ImageSet
from ensbridge.data.sources import Read
from ensbridge.data.unpickling import read_batch
from ensbridge.utils.progress import Stage, silent


@dataclass(frozen=True)
class ImageNetLayout:
    """How many images there are of how many classes, and how wide they are."""

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
        start, batch = end, _batch(read, name, where, layout)
        end += len(batch)
        if end <= layout.train and batch.labels is not None:
            images[start:end], labels[start:end] = batch.images.numpy(), batch.labels.numpy()
        advance(1)
    if end != layout.train:
        raise ValueError(f"{where} has {end:,} training images; ImageNet64 has {layout.train:,}")
    first = _move_last_of_each_class_to_the_end(images, labels, layout)
    test = _batch(read, "val_data", where, layout)
    advance(1)
    if len(test) != layout.test:
        raise ValueError(f"{where}/val_data has {len(test):,} images; ImageNet64 has {layout.test:,}")
    train = image_set(images[:first], labels[:first], str(where))
    return Splits(train, image_set(images[first:], labels[first:], str(where)), test)


def _batch(read: Read, name: str, where: Path | str, layout: ImageNetLayout) -> ImageSet:
    path = f"{where}/{name}"
    batch = read_batch(read(name), "labels", 3 * layout.size**2, path, "ImageNet64")
    labels = whole_numbers(batch["labels"], path)
    if not labels.size or labels.min() < 1 or labels.max() > layout.classes:
        least, most = (labels.min(), labels.max()) if labels.size else ("nothing", "nothing")
        raise ValueError(f"{path} has labels from {least} to {most}; ImageNet64's are 1 to {layout.classes}")
    return image_set(batch["data"].reshape(-1, 3, layout.size, layout.size), labels - 1, path)


def _move_last_of_each_class_to_the_end(
    images: np.ndarray, labels: np.ndarray, layout: ImageNetLayout
) -> int:
    """Where validation begins, once its images have changed places with others: a copy would be 16 GB."""
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
