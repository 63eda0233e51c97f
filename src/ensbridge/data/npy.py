"""NumPy's `.npy`: the header is checked against the size of the file before memory is allocated."""

from __future__ import annotations

import io
import math
import os
import warnings
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from ensbridge.data.sources import damage_named
from ensbridge.utils.files import open_regular_file
from ensbridge.utils.text import one_line

_LONGEST = 2**14  # bytes of a header; NumPy itself refuses more than 10,000
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Header(NamedTuple):
    """The header of an array whose values begin at byte `start` and take `size` bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    columns_first: bool
    start: int
    size: int


def read_header(file: IO[bytes], total: int) -> Header:
    """The header of a numeric array in a file of `total` bytes; ValueError where the two do not match."""
    head = io.BytesIO(file.read(_LONGEST))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NumPy about headers of Python 2
            shape, columns_first, dtype = _READERS[np.lib.format.read_magic(head)](head)
    except Exception as error:  # a header is a Python expression, and fails in as many ways
        raise ValueError(f"its header is damaged: {one_line(error)}") from error
    if dtype.kind not in "biuf":
        raise ValueError(f"it holds {str(dtype)[:40]}, not plain numbers")
    start, size = head.tell(), math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or start + size != total:
        raise ValueError(f"its header claims {size:,} bytes where {total - start:,} are")
    return Header(shape, dtype, columns_first, start, size)


def open_npy(path: Path) -> np.ndarray:
    """The array of an `.npy` file, memory-mapped."""
    if not path.exists():
        raise ValueError(f"{path} is missing; restore it")
    with damage_named(path, "no array"), open_regular_file(path) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size)
        order = "F" if header.columns_first else "C"
        return np.memmap(file, header.dtype, "r", header.start, header.shape, order)
