"""Images and labels from files: validation of their content, hold-out splits and checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ensbridge.data.digits import Splits
from ensbridge.data.examples import ImageSet
from ensbridge.data.image_io import decode
from ensbridge.utils.progress import Advance

CIFAR_VALIDATION = 9_040 / 50_000
LARGEST_SET = 2**35  # bytes of all images in memory, twice ImageNet64
UNPACKED = 2**30  # bytes that a compressed set may take in memory however small its files are;
RATIO = 100  # beyond them, at most so many times as many as its files have


def image_set(images: Any, labels: Any, where: str, classes: int | None = None) -> ImageSet:
    """A set of uint8 images (N, C, H, W) and their labels, or ValueError that begins with `where`.

    >>> len(image_set(np.zeros((2, 3, 4, 4), np.uint8), [0, 1], "test_batch", classes=2))
    2
    >>> image_set(np.zeros((2, 3, 4, 4), np.uint8), [0, 2], "test_batch", classes=2)
    Traceback (most recent call last):
    ValueError: test_batch has the label 2; 2 classes have labels from 0 to 1
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        kind = images.dtype if isinstance(images, np.ndarray) else f"a {type(images).__name__}"
        raise ValueError(f"{where} has images that are {kind}; they must be uint8, from 0 to 255")
    numbers = as_int64_labels(labels, where)
    if len(numbers) != len(images):
        raise ValueError(
            f"{where} has {len(images):,} images and {len(numbers):,} labels; each image needs one"
        )
    for label in (numbers.min(initial=0), numbers.max(initial=0)):
        if label < 0 or (classes is not None and label >= classes):
            most = "…" if classes is None else classes - 1
            of = "" if classes is None else f"{classes} "
            raise ValueError(f"{where} has the label {label}; {of}classes have labels from 0 to {most}")
    # A copy where the array is a view of a file's bytes, which torch may not write into.
    array = np.ascontiguousarray(images)
    array = array if array.flags.writeable else array.copy()
    return ImageSet(torch.from_numpy(array), torch.from_numpy(numbers))


def decode_images(
    files: Sequence[tuple[str, Callable[[], bytes], int]],
    size: tuple[int, int],
    where: str,
    advance: Advance,
    classes: int | None = None,
) -> ImageSet:
    """A set of image files, each with its name, a function that reads it, and its label, all of one size."""
    height, width = size
    images = np.empty((len(files), 3, height, width), np.uint8)
    for index, (name, read, _) in enumerate(files):
        pixels = decode(read(), name)
        if pixels.shape[:2] != size:
            found = f"{pixels.shape[1]}×{pixels.shape[0]}"
            raise ValueError(f"{name} is {found}; it must be {width}×{height}, as all images of {where}")
        images[index] = pixels.transpose(2, 0, 1)
        advance(1)
    return image_set(images, [label for _, _, label in files], where, classes)


def as_int64_labels(labels: Any, where: str) -> np.ndarray:
    """Labels (N,) as int64, from a list or an array, which may have one column."""
    if not isinstance(labels, list | np.ndarray):
        raise ValueError(f"{where} has labels of type {type(labels).__name__}; they must be a list")
    # One by one: as an array, a list or a string that is referenced a million times would fill memory.
    for label in labels if isinstance(labels, list) else ():
        if not isinstance(label, int | np.integer):
            kind = type(label).__name__
            raise ValueError(f"{where} has a {kind} among its labels; they must be integers")
    array = np.asarray(labels)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{where} has labels that are {array.dtype}; they must be integers")
    if array.ndim != 1 and array.shape != (array.size, 1):
        raise ValueError(f"{where} has labels of shape {array.shape}; they must be one row")
    return array.reshape(-1).astype(np.int64)


def check_size(needed: int, stored: int, where: str) -> None:
    """Refuse a set that would take too much memory, or far more than its files have bytes.

    >>> check_size(6_400_000_000, 6_300_000, "set.npz")
    Traceback (most recent call last):
    ValueError: set.npz would take 6,400,000,000 bytes of memory from 6,300,000 in its files; at most 100
    times as many are read, so save it by np.savez, without compression
    """
    if needed > LARGEST_SET:
        raise ValueError(
            f"{where} would take {needed:,} bytes of memory; at most {LARGEST_SET:,} are read, so give a "
            "smaller set"
        )
    if needed > UNPACKED and needed > RATIO * stored:
        raise ValueError(
            f"{where} would take {needed:,} bytes of memory from {stored:,} in its files; at most {RATIO} "
            "times as many are read, so save it by np.savez, without compression"
        )


def few(names: Iterable[str]) -> str:
    """The first names of what a file holds, for an error message.

    >>> few(["b", "a"]), few([])
    ('a, b', 'nothing')
    """
    shown = [
        "".join(character for character in name[:40] if character.isprintable()) for name in sorted(names)
    ]
    return ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "") or "nothing"


def channels_first(images: Any, where: str) -> Any:
    """Images as (N, C, H, W), whether their channels, one or three, come first or last.

    >>> channels_first(np.zeros((5, 32, 32, 3), np.uint8), "set.npz").shape
    (5, 3, 32, 32)
    """
    shape = np.shape(images)
    first, last = (len(shape) == 4 and shape[axis] in (1, 3) for axis in (1, 3))
    if first == last:
        raise ValueError(
            f"{where} has images of shape {shape}; they must be (images, height, width, channels) with 1 or "
            "3 channels, or with the channels before the height"
        )
    return images if first else images.transpose(0, 3, 1, 2)


def hold_out_last(whole: ImageSet, share: float = CIFAR_VALIDATION) -> tuple[ImageSet, ImageSet]:
    """Training and validation: the last ones are held out, 9,040 of 50,000 as in CIFAR's usual split."""
    first = len(whole) - max(1, round(len(whole) * share))
    if first < 1:
        raise ValueError(f"{len(whole)} training image is too few for training and validation; give more")
    assert whole.labels is not None
    return (
        ImageSet(whole.images[:first], whole.labels[:first]),
        ImageSet(whole.images[first:], whole.labels[first:]),
    )


def join(parts: Sequence[ImageSet]) -> ImageSet:
    """Sets concatenated."""
    labels = [part.labels for part in parts if part.labels is not None]
    return ImageSet(torch.cat([part.images for part in parts]), torch.cat(labels))


def checksum(splits: Splits, in_order: bool = False) -> str:
    """The sha256 of a set's pixels and labels, wherever training and validation are split.

    It does not depend on the order of the images unless `in_order`: it hashes the sorted sha256 of each image
    with its label, training and validation together, then test.

    >>> part = ImageSet(torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2), torch.tensor([0, 1]))
    >>> turned = part.subset(torch.tensor([1, 0]))
    >>> checksum(Splits(part, part, part)) == checksum(Splits(turned, part, turned))
    True
    """
    whole = hashlib.sha256()
    for parts in ((splits.train, splits.val), (splits.test,)):
        digests = [digest for part in parts for digest in _digests(part)]
        whole.update(f"{len(digests)} images {tuple(parts[0].images.shape[1:])}:".encode())
        whole.update(b"".join(digests if in_order else sorted(digests)))
    return whole.hexdigest()


def _digests(part: ImageSet) -> Iterable[bytes]:
    """The sha256 of each image's bytes, channels first, and its label in eight bytes."""
    assert part.labels is not None
    images, labels = part.images.contiguous().numpy(), part.labels.tolist()
    for image, label in zip(images, labels, strict=True):
        yield hashlib.sha256(image.tobytes() + label.to_bytes(8, "little")).digest()
