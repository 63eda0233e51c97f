"""Pickles of public data sets, read as data: arrays, lists, numbers, strings and dictionaries, nothing else.

A pickle is a program. Python's own unpickler is not used: this interpreter supports only the instructions
that build plain data, calls nothing, and knows how NumPy pickles arrays. The result takes as much memory as
the file, and a few hundred MB at most beside it.
"""

from __future__ import annotations

import math
import pickletools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ensbridge.data.checks import few
from ensbridge.data.sources import damage_named

MOST_INSTRUCTIONS = 2 * 10**6  # of one file, each taking at most 200 bytes; official files have < 10**6
_DEEPEST = 4  # a dictionary of lists of strings has 3


class _Refused(Exception):
    """The reason why a pickle is refused, as it follows the file's name."""


def read_pickle(content: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle, its keys as strings; `where` is the file's name in errors.

    >>> import pickle
    >>> read_pickle(pickle.dumps({b"labels": [3, 1], "data": np.zeros((2, 4), np.uint8)}), "test_batch")
    {'labels': [3, 1], 'data': array([[0, 0, 0, 0], [0, 0, 0, 0]], dtype=uint8)}
    >>> read_pickle(pickle.dumps(len), "test_batch")
    Traceback (most recent call last):
    ValueError: test_batch asks for 'builtins.len', so it was not read; get it from its official source
    """
    with damage_named(where):
        try:
            value: Any = _plain(_Machine(content).run())
        except _Refused as error:
            value = error
    if isinstance(value, _Refused):
        raise ValueError(f"{where} {value}, so it was not read; get it from its official source")
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__}, not a dictionary; get it again")
    return {key if isinstance(key, str) else key.decode("latin1"): item for key, item in value.items()}


def read_batch(
    content: bytes, labels: str, width: int, where: str, title: str, count: int | None = None
) -> dict[str, Any]:
    """The dictionary in a pickled batch of `count` images: an array `data`, one row each, and `labels`."""
    batch = read_pickle(content, where)
    for key in ("data", labels):
        if key not in batch:
            raise ValueError(f"{where} has no {key!r} (it has: {few(batch)}); it is not a file of {title}")
    data = batch["data"]
    shape = data.shape if isinstance(data, np.ndarray) else None
    if shape is None or len(shape) != 2 or shape[1] != width or count not in (None, shape[0]):
        what = "data that is not an array" if shape is None else f"data of shape {shape}"
        raise ValueError(f"{where} has {what}; {title} has ({count or 'images'}, {width})")
    return batch


class _Type:
    """A dtype as NumPy pickles it: a code such as u1, then its byte order."""

    __slots__ = ("dtype",)

    def __init__(self, code: object, *_: object) -> None:
        text = _text(code)
        if not re.fullmatch(r"[biuf][1248]", text):
            raise _Refused("holds an array of objects" if text[:1] == "O" else f"has the type {text[:20]!a}")
        self.dtype = np.dtype(text)

    def build(self, state: Sequence[Any]) -> None:
        order = _text(state[1])
        if order not in ("<", ">", "|", "="):
            raise _Refused(f"has bytes in the order {order[:20]!a}")
        self.dtype = self.dtype.newbyteorder(order) if order in "<>" else self.dtype


class _Array:
    """An array as NumPy pickles it: empty at first, then filled."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray | None = None) -> None:
        self.array = array


class _Machine:
    """A pickle machine: a stack, the positions of marks on it, and the memo."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.functions = {name: partial(function, self) for name, function in _ALLOWED.items()}
        self.to_encode = len(content)  # characters: an honest file encodes each string once

    def run(self) -> Any:
        """The value that the instructions leave on the stack."""
        for number, (code, argument, _) in enumerate(pickletools.genops(self.content)):
            if number == MOST_INSTRUCTIONS:
                raise _Refused(f"has more than {MOST_INSTRUCTIONS:,} instructions")
            if code.name == "STOP":
                break
            if code.name in _PUSHED:
                self.stack.append(argument)
            elif (instruction := _INSTRUCTIONS.get(code.name)) is not None:
                instruction(self, argument)
            else:
                raise _Refused(f"has the instruction {code.name}")
        return self.stack.pop()

    def pop(self, count: int) -> list[Any]:
        """Pop the last values of the stack."""
        if count > len(self.stack):
            raise ValueError("values are missing")
        start = len(self.stack) - count
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def pop_mark(self) -> list[Any]:
        """Pop the values since the last mark."""
        return self.pop(max(0, len(self.stack) - self.marks.pop()))

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def memoize(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def dictionary(self) -> None:
        """Replace keys and values by a dictionary."""
        values = self.pop_mark()
        self.push({})
        self.set(values)

    def append(self, values: list[Any]) -> None:
        """Extend the list on top of the stack."""
        if not isinstance(self.stack[-1], list):
            raise _Refused("appends to something that is no list")
        self.stack[-1].extend(values)

    def set(self, values: list[Any]) -> None:
        """Add keys and values to the dictionary on top of the stack."""
        if not isinstance(self.stack[-1], dict):
            raise _Refused("adds keys to something that is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | bytes):  # to hash nested tuples might take forever
                raise _Refused("has a key that is no string")
            self.stack[-1][key] = value

    def name(self, module: object, name: object) -> None:
        """Push an allowed function."""
        asked = f"{module}.{name}"
        known = asked.replace("numpy.core.", "numpy._core.")  # NumPy 1 and 2
        if known not in self.functions:
            raise _Refused(f"asks for {asked[:80]!a}")
        self.push(self.functions[known])

    def call(self) -> None:
        """Replace an allowed function and its arguments by its result."""
        function, arguments = self.pop(2)
        if not isinstance(function, partial) or not isinstance(arguments, tuple):
            raise _Refused("calls something that is no function")
        self.push(function(*arguments))

    def build(self) -> None:
        """Set the state of the dtype or array below it on the stack."""
        value, state = self.pop(2)
        if isinstance(value, _Type):
            value.build(state)
        elif isinstance(value, _Array):
            _, shape, kind, fortran, raw = state
            value.array = self.array(raw, kind, shape, "F" if fortran else "C")
        else:
            raise _Refused("changes a function")
        self.push(value)

    def array(self, raw: object, kind: object, shape: object, order: object) -> np.ndarray:
        """An array of raw bytes, whose number must match the shape."""
        if not isinstance(kind, _Type):
            raise _Refused("has an array without a type")
        if isinstance(raw, str):  # of Python 2
            raw = self.encode(raw)
        if not isinstance(raw, bytes | bytearray):
            raise _Refused("holds an array of objects")
        sizes: tuple[Any, ...] = shape if isinstance(shape, tuple) else (shape,)
        if not all(type(size) is int and 0 <= size < 2**48 for size in sizes) or len(sizes) > 8:
            raise _Refused("has an array of an impossible shape")
        if math.prod(sizes) * kind.dtype.itemsize != len(raw):
            raise _Refused(f"has {len(raw):,} bytes for an array of shape {sizes}")
        return np.frombuffer(raw, kind.dtype).reshape(sizes, order="F" if order == "F" else "C")

    def scalar(self, kind: object, raw: object) -> int | float | bool:
        return self.array(raw, kind, (1,), "C")[0].item()

    def encode(self, text: str, codec: object = "latin1") -> bytes:
        """Text as bytes, within a budget, since each result takes memory of its own."""
        if _text(codec) not in ("latin1", "latin-1"):
            raise _Refused("encodes text")
        self.to_encode -= len(text)
        if self.to_encode < 0:
            raise _Refused("encodes more text than it holds")
        return text.encode("latin1")

    def no_array(self, *_: object) -> None:
        raise _Refused("makes an array in a way of its own")


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value if isinstance(value, str) else type(value).__name__


_VALUES = """INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING
UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"""
_PUSHED = frozenset(_VALUES.split())  # instructions that push their argument
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "DICT": lambda machine, _: machine.dictionary(),
    "LIST": lambda machine, _: machine.push(machine.pop_mark()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "APPEND": lambda machine, _: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop_mark()),
    "SETITEM": lambda machine, _: machine.set(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set(machine.pop_mark()),
    "PUT": lambda machine, number: machine.memoize(number),
    "BINPUT": lambda machine, number: machine.memoize(number),
    "LONG_BINPUT": lambda machine, number: machine.memoize(number),
    "MEMOIZE": lambda machine, _: machine.memoize(len(machine.memo)),
    "GET": lambda machine, number: machine.push(machine.memo[number]),
    "BINGET": lambda machine, number: machine.push(machine.memo[number]),
    "LONG_BINGET": lambda machine, number: machine.push(machine.memo[number]),
    "GLOBAL": lambda machine, name: machine.name(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(*map(_text, machine.pop(2))),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}
_ALLOWED: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": _Machine.no_array,
    "numpy.dtype": lambda _, *arguments: _Type(*arguments),
    "numpy._core.multiarray._reconstruct": lambda _, *arguments: _Array(),
    "numpy._core.multiarray.scalar": _Machine.scalar,
    "numpy._core.numeric._frombuffer": lambda machine, *arguments: _Array(machine.array(*arguments[:4])),
    "_codecs.encode": _Machine.encode,  # how Python 3 writes bytes for Python 2,
    "__builtin__.bytes": lambda _: b"",  # and none
}


def _plain(value: object, seen: dict[int, Any] | None = None, depth: int = 0) -> Any:
    """The value with its arrays in place; anything but plain data is refused."""
    seen = {} if seen is None else seen  # a list that is referenced a million times is visited once
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, _Array) and value.array is not None:
        return value.array
    if depth == _DEEPEST:
        raise _Refused(f"is nested deeper than {_DEEPEST} times")
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, list | tuple):
        made: Any = [_plain(item, seen, depth + 1) for item in value]
    elif isinstance(value, dict):
        made = {key: _plain(item, seen, depth + 1) for key, item in value.items()}
    else:
        raise _Refused("holds something that is no array, list, number or string")
    return seen.setdefault(id(value), made)
