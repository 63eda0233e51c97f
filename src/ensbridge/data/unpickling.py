"""Pickles of public data sets, read as data: arrays, lists, numbers, strings and dictionaries, nothing else.

A pickle is a program, and unpickling runs it. Here every name that it may call is replaced by a stand-in of
our own: the two ways in which NumPy writes arrays are understood, whatever else it asks for is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ensbridge.words import one_line

_DEEPEST = 4  # a dictionary of lists of strings has 3


class _Refused(Exception):
    """What a pickle wants and does not get, in words that go on from the file's name."""


def read_pickle(content: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle, its keys as strings; `where` is the file's name in errors.

    >>> read_pickle(pickle.dumps({b"labels": [3, 1], "data": np.zeros((2, 4), np.uint8)}), "test_batch")
    {'labels': [3, 1], 'data': array([[0, 0, 0, 0], [0, 0, 0, 0]], dtype=uint8)}
    >>> read_pickle(pickle.dumps(print), "test_batch")
    Traceback (most recent call last):
    ValueError: test_batch asks for 'builtins.print', so it was not read; get it from its official source
    """
    try:
        _look_through(content)
        value = _plain(_Unpickler(io.BytesIO(content), encoding="latin1").load())
    except _Refused as error:
        raise ValueError(f"{where} {error}, so it was not read; get it from its official source") from error
    except MemoryError as error:
        raise ValueError(
            f"{where} needs more memory than there is; free some, or get the file again"
        ) from error
    except Exception as error:  # a damaged stream fails in any way it likes
        raise ValueError(f"{where} is cut short or damaged ({one_line(error)}); get it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__}, not a dictionary; get it again")
    return {key if isinstance(key, str) else key.decode("latin1"): each for key, each in value.items()}


def _look_through(content: bytes) -> None:
    """Refuse a stream that claims more than it holds, before memory is taken for it."""
    for code, argument, _ in pickletools.genops(content):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise _Refused(f"remembers things under the number {argument}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        module = module_name.replace("numpy.core.", "numpy._core.")  # NumPy 1 and 2
        if (found := _ADMITTED.get(f"{module}.{global_name}")) is None:
            raise _Refused(f"asks for {f'{module_name}.{global_name}'[:80]!a}")
        return found


class _Name:
    """A name that pickles may call; that they change it is refused."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)

    def __setstate__(self, state: object) -> None:
        raise _Refused("changes a function")


class _Type:
    """NumPy's dtype as pickles write it: a code such as u1, and the order of bytes afterwards."""

    __slots__ = ("dtype",)

    def __init__(self, code: object, *_: object) -> None:
        text = _text(code)
        if not re.fullmatch(r"[biuf][1248]", text):
            raise _Refused("holds an array of objects" if text[:1] == "O" else f"has the type {text[:20]!a}")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = _text(state[1])
        if order not in ("<", ">", "|", "="):
            raise _Refused(f"has bytes in the order {order[:20]!a}")
        self.dtype = self.dtype.newbyteorder(order) if order in "<>" else self.dtype


class _Array:
    """NumPy's array as pickles write it: empty at first, its content afterwards."""

    __slots__ = ("array",)

    def __init__(self, *_: object) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, raw = state
        self.array = _array(raw, kind, shape, "F" if fortran else "C")


def _array(raw: object, kind: object, shape: object, order: object) -> np.ndarray:
    """The array of raw bytes, whose number must be what the shape says."""
    if not isinstance(kind, _Type):
        raise _Refused("has an array without a type")
    if isinstance(raw, str):
        raw = raw.encode("latin1")  # of Python 2
    if not isinstance(raw, bytes | bytearray):
        raise _Refused("holds an array of objects")
    sizes: tuple[Any, ...] = shape if isinstance(shape, tuple) else (shape,)
    if not all(type(size) is int and size >= 0 for size in sizes) or len(sizes) > 8:
        raise _Refused("has an array of an impossible shape")
    if math.prod(sizes) * kind.dtype.itemsize != len(raw):
        raise _Refused(f"has {len(raw):,} bytes for an array of shape {sizes}")
    return np.frombuffer(raw, kind.dtype).reshape(sizes, order="F" if order == "F" else "C")


def _from_buffer(raw: object, kind: object, shape: object, order: object, *_: object) -> _Array:
    made = _Array()
    made.array = _array(raw, kind, shape, order)
    return made


def _scalar(kind: object, raw: object) -> int | float | bool:
    return _array(raw, kind, (1,), "C")[0].item()


def _encode(text: str, codec: str = "latin1") -> bytes:
    if _text(codec) not in ("latin1", "latin-1"):
        raise _Refused("encodes text")
    return text.encode("latin1")


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


_ADMITTED = {
    "numpy.ndarray": _Name(lambda *_: _nothing()),
    "numpy.dtype": _Name(_Type),
    "numpy._core.multiarray._reconstruct": _Name(_Array),
    "numpy._core.multiarray.scalar": _Name(_scalar),
    "numpy._core.numeric._frombuffer": _Name(_from_buffer),
    "_codecs.encode": _Name(_encode),  # how Python 3 writes bytes for Python 2,
    "__builtin__.bytes": _Name(lambda: b""),  # and none
}


def _nothing() -> None:
    raise _Refused("makes an array in a way of its own")


def _plain(value: object, seen: dict[int, Any] | None = None, depth: int = 0) -> Any:
    """The value with arrays for their stand-ins, once everything in it was seen to be plain data."""
    seen = {} if seen is None else seen  # a list that occurs a million times is looked at once
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, _Array) and value.array is not None:
        return value.array
    if depth == _DEEPEST:
        raise _Refused(f"is nested deeper than {_DEEPEST} times")
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, list | tuple):
        made: Any = [_plain(each, seen, depth + 1) for each in value]
    elif isinstance(value, dict) and all(isinstance(key, str | bytes) for key in value):
        made = {key: _plain(each, seen, depth + 1) for key, each in value.items()}
    else:
        raise _Refused("holds something that is no array, list, number or string")
    return seen.setdefault(id(value), made)
