"""Decoded JSON that a stranger may have written, checked against types before anything is made of it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ensbridge.utils.text import short

_EXPECTED = {bool: "true or false", int: "a whole number", float: "a finite number", str: "one line of text"}


class Range(NamedTuple):
    """The smallest and the largest value that a number may have, or the length of a text."""

    low: float
    high: float


_LIMITS = {int: Range(-(2**40), 2**40), float: Range(-1e300, 1e300), str: Range(0, 1000)}


@dataclass(frozen=True)
class JsonReader:
    """Reads values of the types that dataclasses and constructors declare; errors end with the remedy."""

    remedy: str
    ignore_unknown: bool = False  # keys that a dataclass does not have

    def read(self, hint: Any, value: object, where: str) -> Any:
        """The value as `hint` has it, or ValueError that begins with `where`.

        >>> reader = JsonReader("save it again")
        >>> reader.read(tuple[float, ...], [0, 0.5], "times")
        (0.0, 0.5)
        >>> reader.read(int, True, "members")
        Traceback (most recent call last):
        ValueError: members is true, expected a whole number; save it again
        >>> reader.read(Annotated[int, Range(1, 5)] | None, 6, "severity")
        Traceback (most recent call last):
        ValueError: severity is 6, expected a whole number from 1 to 5; save it again
        """
        origin, inner = get_origin(hint), get_args(hint)
        if hint is Any:
            return value
        if origin is Annotated:
            return self._plain(inner[0], value, where, inner[1])
        if inspect.isclass(hint) and is_dataclass(hint):
            return self._dataclass(hint, value, where)
        if origin in (Union, UnionType):
            return self._union(inner, value, where)
        if origin is Literal:
            if not any(type(value) is type(option) and value == option for option in inner):
                raise self._wrong(where, value, "one of " + ", ".join(map(json.dumps, inner)))
            return value
        if origin in (Sequence, tuple):
            return self._sequence(origin, inner, value, where)
        if origin in (Mapping, dict):
            if not isinstance(value, dict):
                raise self._wrong(where, value, "an object")
            return {
                self.read(str, key, where): self.read(inner[1], item, _inside(where, key))
                for key, item in value.items()
            }
        return self._plain(hint, value, where, _LIMITS.get(hint))

    def read_arguments(self, build: type, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Arguments for a class, checked against its constructor's types.

        >>> JsonReader("save it again").read_arguments(Range, {"middle": 1}, "range")
        Traceback (most recent call last):
        ValueError: range has an argument "middle" that Range has not; save it again
        """
        hints = get_type_hints(build.__init__)
        for name in arguments:
            if name not in hints or name == "return":
                raise ValueError(
                    f"{where} has an argument {short(name)} that {build.__name__} has not; {self.remedy}"
                )
        return {
            name: self.read(hints[name], value, _inside(where, name)) for name, value in arguments.items()
        }

    def _dataclass(self, kind: type, value: object, where: str) -> Any:
        if not isinstance(value, dict):
            raise self._wrong(where, value, "an object")
        names = {field.name for field in fields(kind)}
        for key in value:
            if key not in names and not self.ignore_unknown:
                raise ValueError(f"{where} has an unknown key {short(key)}; {self.remedy}")
        for field in fields(kind):
            if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(
                    f"{where} has no {field.name!r}, only the keys {short(list(value))}; {self.remedy}"
                )
        hints = get_type_hints(kind, include_extras=True)
        values = {
            name: self.read(hints[name], value[name], _inside(where, name)) for name in value if name in names
        }
        try:
            return kind(**values)
        except ValueError as error:  # from its own checks
            raise ValueError(f"{where}: {error}; {self.remedy}") from error

    def _union(self, options: Sequence[Any], value: object, where: str) -> Any:
        if value is None and NoneType in options:
            return None
        # A network among the options can be given in code, never in a file.
        readable = [
            option for option in options if get_origin(option) or option in _EXPECTED or is_dataclass(option)
        ]
        if not readable:
            raise self._wrong(where, value, "null")
        if str in readable and isinstance(value, str):
            return self.read(str, value, where)
        (only,) = readable if len(readable) == 1 else (option for option in readable if option is not str)
        return self.read(only, value, where)

    def _sequence(self, origin: Any, inner: Sequence[Any], value: object, where: str) -> Any:
        if not isinstance(value, list):
            raise self._wrong(where, value, "a list")
        hints = [inner[0]] * len(value) if origin is Sequence or inner[-1] is ... else list(inner)
        if len(hints) != len(value):
            raise self._wrong(where, value, f"a list of {len(hints)}")
        items = [
            self.read(hint, item, f"{where}[{i}]")
            for i, (hint, item) in enumerate(zip(hints, value, strict=True))
        ]
        return tuple(items) if origin is tuple else items

    def _plain(self, hint: Any, value: Any, where: str, limits: Range | None) -> Any:
        assert hint in _EXPECTED, f"{where} is of a type that files cannot hold: {hint}"
        expected = _EXPECTED[hint]
        # Unprintable characters would reach a terminal, where they are commands.
        kinds = (int, float) if hint is float else (hint,)
        fits = type(value) in kinds and (hint is not str or value.isprintable())
        size: Any = len(value) if isinstance(value, str) else value
        # Comparing is safe for what float() is not: nan, infinities and whole numbers of any length.
        if fits and (limits is None or limits.low <= size <= limits.high):
            return hint(value)
        if fits and limits:
            range_ = f"{limits.low:g} to {limits.high:g}"
            expected += f" of {range_} characters" if hint is str else f" from {range_}"
        raise self._wrong(where, value, expected)

    def _wrong(self, where: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{where} is {short(value)}, expected {expected}; {self.remedy}")


def _inside(where: str, key: str) -> str:
    """The path of a value in a document: the document's own name ends with a colon."""
    return f"{where}.{key}" if ": " in where else f"{where}: {key}"
