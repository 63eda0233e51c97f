"""Tiny ImageNet in its official layout, `tiny-imagenet-200`.

Classes are numbered in the alphabetical order of their WordNet names. The set's own labelled `val` is the
test set; validation is the last tenth of each class's training images, since files lie class by class.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ensbridge.data.checks import image_set
from ensbridge.data.digits import Splits
from ensbridge.data.image_io import decode
from ensbridge.data.loader import ImageSet
from ensbridge.data.sources import Read
from ensbridge.utils.progress import Stage, silent


@dataclass(frozen=True)
class TinyLayout:
    """How many classes there are, how many images of each, and how many in the set's own `val`."""

    classes: int = 200
    per_class: int = 500
    validation: int = 50  # of each class's
    test: int = 10_000
    size: int = 64


TINY = TinyLayout()


def read_tiny_imagenet(
    read: Read, where: Path | str, stage: Stage = silent, layout: TinyLayout = TINY
) -> Splits:
    """The set in `tiny-imagenet-200`, whose files `read` brings."""
    names = sorted(set(_text(read, "wnids.txt", where).split()))
    if len(names) != layout.classes:
        raise ValueError(f"{where}/wnids.txt names {len(names)} classes; Tiny ImageNet has {layout.classes}")
    if odd := [name for name in names if not re.fullmatch(r"n[0-9]+", name)]:  # one could lead out of the set
        raise ValueError(
            f"{where}/wnids.txt has the class {odd[0][:60]!a}; those of Tiny ImageNet are such as n01443537"
        )
    advance = stage("reading", layout.classes * layout.per_class + layout.test, "images")

    def read_images(files: Sequence[tuple[str, int]]) -> ImageSet:
        images = np.empty((len(files), 3, layout.size, layout.size), np.uint8)
        for number, (name, _) in enumerate(files):
            pixels = decode(read(name), f"{where}/{name}")
            if pixels.shape[:2] != (layout.size, layout.size):
                height, width = pixels.shape[:2]
                raise ValueError(
                    f"{where}/{name} is {width}×{height}; it must be {layout.size}×{layout.size}"
                )
            images[number] = pixels.transpose(2, 0, 1)
            advance(1)
        return image_set(images, [label for _, label in files], str(where), layout.classes)

    first = layout.per_class - layout.validation
    ranges = (range(first), range(first, layout.per_class))
    train, val = (
        [(f"train/{name}/images/{name}_{i}.JPEG", label) for label, name in enumerate(names) for i in numbers]
        for numbers in ranges
    )
    return Splits(read_images(train), read_images(val), read_images(_test(read, names, where, layout)))


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
        raise ValueError(f"{where}/{name} is no text; get the set again") from error
