"""JSON that a stranger may have written, checked against types before anything is made of it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

REMEDY = "save the model again, or restore the file"
_MOST = 2**40  # no size, count or switch of a model is larger
_LONGEST = 1000  # characters of a name


def read(hint: Any, value: object, where: str) -> Any:
    """The value as `hint` has it, or ValueError that begins with `where`.

    >>> read(tuple[float, ...], [0, 0.5], "times")
    (0.0, 0.5)
    >>> read(int, True, "members")
    Traceback (most recent call last):
    ValueError: members is true, expected a whole number; save the model again, or restore the file
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if inspect.isclass(hint) and is_dataclass(hint):
        return _dataclass(hint, value, where)
    if origin in (Union, UnionType):
        return _union(inner, value, where)
    if origin is Literal:
        if not any(type(value) is type(each) and value == each for each in inner):
            raise _wrong(where, value, "one of " + ", ".join(map(json.dumps, inner)))
        return value
    if origin in (Sequence, tuple):
        return _sequence(origin, inner, value, where)
    if origin in (Mapping, dict):
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        return {read(str, key, where): read(inner[1], each, f"{where}.{key}") for key, each in value.items()}
    return _plain(hint, value, where)


def read_arguments(build: type, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Arguments for a class of ours, checked against its constructor's types.

    >>> from torch import nn
    >>> read_arguments(nn.Linear, {"in_features": 4, "out_features": "8"}, "net")
    Traceback (most recent call last):
    ValueError: net.out_features is "8", expected a whole number; save the model again, or restore the file
    """
    hints = get_type_hints(build.__init__)
    unknown = [name for name in arguments if name not in hints or name == "return"]
    if unknown:
        raise ValueError(
            f"{where} has an argument {short(unknown[0])} that {build.__name__} has not; {REMEDY}"
        )
    return {name: read(hints[name], value, f"{where}.{name}") for name, value in arguments.items()}


def short(value: object) -> str:
    """A value for an error: on one line, of printable characters, and not long.

    >>> short("a\\nb"), short([1] * 100)
    ('"a\\\\nb"', '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1…')
    """
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits, lists in lists in lists
        return "a value too long to show"
    return text if len(text) <= 60 else text[:59] + "…"


def _dataclass(kind: type, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    names = {field.name for field in fields(kind)}
    for key in value:
        if key not in names:
            raise ValueError(f"{where} has an unknown key {short(key)}; {REMEDY}")
    for field in fields(kind):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where} has no {field.name!r}; {REMEDY}")
    hints = get_type_hints(kind)
    values = {key: read(hints[key], each, f"{where}.{key}") for key, each in value.items()}
    try:
        return kind(**values)
    except ValueError as error:  # what its own rules say
        raise ValueError(f"{where}: {error}") from error


def _union(options: Sequence[Any], value: object, where: str) -> Any:
    if value is None and NoneType in options:
        return None
    # A network among the options can be given in code, never in a file.
    (only,) = (each for each in options if get_origin(each) or each in _PLAIN or is_dataclass(each))
    return read(only, value, where)


def _sequence(origin: Any, inner: Sequence[Any], value: object, where: str) -> Any:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    hints = [inner[0]] * len(value) if origin is Sequence or inner[-1] is ... else list(inner)
    if len(hints) != len(value):
        raise _wrong(where, value, f"a list of {len(hints)}")
    found = [
        read(hint, each, f"{where}[{i}]") for i, (hint, each) in enumerate(zip(hints, value, strict=True))
    ]
    return tuple(found) if origin is tuple else found


_PLAIN = {bool: "true or false", int: "a whole number", float: "a finite number", str: "one line of text"}


def _plain(hint: Any, value: object, where: str) -> Any:
    assert hint in _PLAIN, f"{where} is of a type that files cannot hold: {hint}"
    if hint is float and type(value) in (int, float) and abs(value) <= 1e300:  # pyright: ignore[reportArgumentType]
        return float(value)  # pyright: ignore[reportArgumentType]
    if hint is int and type(value) is int:
        if abs(value) > _MOST:
            raise ValueError(f"{where} is a number beyond 2**40, which no model has; {REMEDY}")
        return value
    # Unprintable characters would reach a terminal, where they are commands.
    if hint is str and isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST:
        return value
    if hint is bool and isinstance(value, bool):
        return value
    raise _wrong(where, value, _PLAIN[hint])


def _wrong(where: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{where} is {short(value)}, expected {expected}; {REMEDY}")
