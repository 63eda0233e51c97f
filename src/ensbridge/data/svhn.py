"""SVHN (Street View House Numbers) in its official files `train_32x32.mat` and `test_32x32.mat`.

Of MATLAB's format 5, numeric arrays are read. Validation is the last part of the
training images in their order, as of CIFAR; the digit 0, which the files call 10, has the label 0.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ensbridge.data.checks import check_size, few, hold_out_last, image_set
from ensbridge.data.digits import Splits
from ensbridge.data.examples import ImageSet
from ensbridge.data.sources import Read, damage_named

FILES = ("train_32x32.mat", "test_32x32.mat")
_HEADER, _MATRIX, _COMPRESSED = 128, 14, 15  # bytes; types of an element
_TYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_CHARACTERS = 4  # the class of text; larger ones are numbers, smaller ones hold other arrays


def read_svhn(read: Read, where: Path | str) -> Splits:
    """The set in the two files of 32×32 pixels, which `read` returns."""
    train, test = (_part(read(name), f"{where}/{name}") for name in FILES)
    return Splits(*hold_out_last(train), test)


def _part(content: bytes, where: str) -> ImageSet:
    arrays = read_mat(content, where)
    if missing := [name for name in ("X", "y") if name not in arrays]:
        raise ValueError(f"{where} has no {missing[0]} (it has: {few(arrays)}); it is not a file of SVHN")
    images, labels = arrays["X"], arrays["y"]
    if images.ndim != 4 or images.shape[:3] != (32, 32, 3) or len(labels) == 0:
        raise ValueError(f"{where} has images of shape {images.shape}; those of SVHN are (32, 32, 3, images)")
    if labels.dtype.kind == "f" and (labels == labels.round()).all():
        labels = labels.astype(np.int64)
    part = image_set(images.transpose(3, 2, 0, 1), labels, where, classes=11)
    return ImageSet(part.images, None if part.labels is None else part.labels % 10)


def read_mat(content: bytes, where: str) -> dict[str, np.ndarray]:
    """The numeric arrays in a file of MATLAB's format 5, by name."""
    arrays = {}
    with damage_named(where, "no file of MATLAB"):
        if content[124:128] != b"\x00\x01IM":
            raise ValueError("it does not begin as one of format 5, little-endian, does")
        for kind, data in _elements(memoryview(content)[_HEADER:]):
            if kind == _COMPRESSED:
                ((kind, data),) = _elements(memoryview(_unpacked(data, where)))
            if kind == _MATRIX and (named := _array(data)) is not None:
                arrays[named[0]] = named[1]
    return arrays


def _unpacked(data: memoryview, where: str) -> bytes:
    """A compressed element, whose first bytes are its type and size."""
    stream = zlib.decompressobj()
    start = stream.decompress(bytes(data), 8)
    size = struct.unpack("<2I", start)[1]
    check_size(size, len(data), where)
    return start + stream.decompress(stream.unconsumed_tail, size or 1)


def _elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The elements of a file or of a matrix, each as its type and its bytes."""
    while len(data):
        kind, size = struct.unpack_from("<2I", data)
        start = 8
        if kind >> 16:  # a small element, of at most four bytes
            kind, size, start = kind & 0xFFFF, kind >> 16, 4
        if start + size > len(data):
            raise ValueError(f"{size:,} bytes are announced where {len(data) - start:,} follow")
        yield kind, data[start : start + size]
        data = data[start + size :] if kind == _COMPRESSED else data[-(-(start + size) // 8) * 8 :]


def _array(data: memoryview) -> tuple[str, np.ndarray] | None:
    """The name and the values of a matrix; None where it is not numeric."""
    parts = list(_elements(data))
    if len(parts) < 4 or parts[0][1][0] <= _CHARACTERS or parts[3][0] not in _TYPES:
        return None
    shape = tuple(np.frombuffer(parts[1][1], "<i4").tolist())
    values = np.frombuffer(parts[3][1], _TYPES[parts[3][0]])
    if min(shape, default=0) < 0 or math.prod(shape) != len(values):
        raise ValueError(f"an array of shape {shape} has {len(values):,} values")
    return bytes(parts[2][1]).decode("latin1"), values.reshape(shape, order="F")
