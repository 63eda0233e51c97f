"""Reading `scores.json`: every value is checked against its type; errors name the place and the remedy."""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ensbridge.scores.rows import AtLeast, Scores

_REMEDY = "delete it and run again the command that wrote it"


def read_scores(path: str | Path) -> Scores:
    """Read a `scores.json`, or the one inside a run folder."""
    path = Path(path)
    if path.is_dir():
        folder, path = path, path / "scores.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no scores.json; give the folder of an evaluated run "
                f"(ensbridge evaluate {folder})"
            )
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a scores.json or the run folder that holds one")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); {_REMEDY}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        where = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        what = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ValueError(f"{path} is not JSON ({what}{where}); {_REMEDY}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    return parse_scores(document, where=str(path))


def parse_scores(document: object, where: str = "scores") -> Scores:
    """Check a decoded `scores.json` and give it its types; `where` names it in errors."""
    scores: Scores = _dataclass(Scores, document, where)
    if not scores.rows:
        raise ValueError(f"{where}: rows is [], expected a list of at least one row; {_REMEDY}")
    for name in ("rows", "tradeoff", "capacity"):
        seen: set[tuple[str, int]] = set()
        for row in getattr(scores, name):
            if (row.model, row.members) in seen:
                raise ValueError(
                    f"{where}: {name} has {row.model!r} twice for {row.members} members; {_REMEDY}"
                )
            seen.add((row.model, row.members))
    classes = len(scores.class_names)
    for number, each in enumerate(scores.transitions):
        lengths = {len(each.source), len(each.ensemble), *map(len, each.path)}
        if lengths != {classes} or len(each.path) != len(each.times) or each.label >= classes:
            raise ValueError(
                f"{where}: transitions[{number}] does not fit {classes} classes and {len(each.times)} "
                f"times; {_REMEDY}"
            )
    for number, curve in enumerate(scores.curves):
        if len(curve.images) != len(curve.loss):
            raise ValueError(
                f"{where}: curves[{number}] has {len(curve.images)} images and {len(curve.loss)} losses; "
                f"{_REMEDY}"
            )
    return scores


def _dataclass(kind: type, document: object, where: str) -> Any:
    if not isinstance(document, dict):
        raise ValueError(f"{where} is {_short(document)} where an object is expected; {_REMEDY}")
    hints = get_type_hints(kind, include_extras=True)
    values = {}
    for field in fields(kind):
        if field.name in document:
            values[field.name] = _value(hints[field.name], document[field.name], where, field.name)
        elif field.default is MISSING:
            has = ", ".join(map(str, document)) or "nothing"
            raise ValueError(f"{where} has no {field.name!r} (it has: {_cut(has)}); {_REMEDY}")
    if "dee" in values and isinstance(values["dee"], str) and not re.fullmatch(r">\d+", values["dee"]):
        raise _wrong(where, "dee", values["dee"], 'a number or a string such as ">5"')
    return kind(**values)


def _value(hint: Any, value: object, where: str, key: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        low = next(each.low for each in arguments[1:] if isinstance(each, AtLeast))
        found = _value(arguments[0], value, where, key)
        if found < low:
            least = f" of at least {low:g}" if arguments[0] is int else " above 0"
            raise _wrong(where, key, value, f"{_WORDS[arguments[0]]}{least}")
        return found
    if origin in (Union, UnionType):
        if NoneType in arguments and value is None:
            return None
        options = [each for each in arguments if each is not NoneType]
        if str in options and isinstance(value, str):
            return _value(str, value, where, key)
        return _value(next(each for each in options if each is not str), value, where, key)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, key, value, "a list")
        return tuple(_value(arguments[0], each, where, f"{key}[{i}]") for i, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, key, value, "an object of strings")
        return {k: _value(str, v, where, f"{key}.{_text(k, where, key)}") for k, v in value.items()}
    if origin is Literal:
        if value not in arguments:
            raise _wrong(where, key, value, f"one of {', '.join(arguments)}")
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, value, f"{where}: {key}")
    if hint is str:
        return _text(value, where, key)
    return _number(hint, value, where, key)


def _text(value: object, where: str, key: str) -> str:
    # Unprintable characters would reach the terminal, where they are commands.
    if not isinstance(value, str) or not value.isprintable() or (not value and "." not in key):
        raise _wrong(where, key, value, "one line of text")
    return value


_WORDS: dict[type, str] = {int: "a whole number", float: "a finite number"}


def _number(kind: Any, value: object, where: str, key: str) -> float:
    allowed = int if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value):
        raise _wrong(where, key, value, _WORDS[kind])
    return value if kind is int else float(value)


def _wrong(where: str, key: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{where}: {key} is {_short(value)}, expected {expected}; {_REMEDY}")


def _short(value: object) -> str:
    return _cut(json.dumps(value, default=repr))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
