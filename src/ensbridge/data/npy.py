"""NumPy's `.npy`: its header is checked against the bytes that are there before memory is taken for it."""

from __future__ import annotations

import io
import math
import os
import warnings
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from ensbridge.utils.files import open_regular_file
from ensbridge.utils.text import one_line

_LONGEST = 2**14  # bytes of a header; NumPy itself refuses more than 10,000
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Header(NamedTuple):
    """What is said of an array before its numbers, which begin at `start` and take `size` bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    columns_first: bool
    start: int
    size: int


def read_header(file: IO[bytes], total: int) -> Header:
    """The header of plain numbers in a file of `total` bytes; ValueError where it does not fit them."""
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
    """The array of an `.npy` file, left on disk until a part of it is used."""
    try:
        with open_regular_file(path) as file:
            header = read_header(file, os.fstat(file.fileno()).st_size)
            order = "F" if header.columns_first else "C"
            return np.memmap(file, header.dtype, "r", header.start, header.shape, order)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; restore it") from error
    except Exception as error:
        raise ValueError(f"{path} is cut short or no array ({one_line(error)}); get it again") from error
