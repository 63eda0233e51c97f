"""Reading `scores.json`: every value is checked against its type; errors name the place and the remedy."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ensbridge._aliases import upgrade_row, upgrade_scores
from ensbridge.evaluation.scores.rows import MOST, Bin, CorruptedRow, Curve, Range, Row, Scores
from ensbridge.utils.files import read_json
from ensbridge.utils.text import command

# The file may be anything, a stranger's or a letter: it is never to be deleted on our word.
REMEDY = "give a scores.json as ensbridge evaluate writes it"


def read_scores(path: str | Path) -> Scores:
    """Read a `scores.json`, or the one inside a run folder."""
    path = Path(path)
    if path.is_dir():
        folder, path = path, path / "scores.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no scores.json; give the folder of an evaluated run "
                f"({command('evaluate', folder)})"
            )
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a scores.json or the run folder that holds one")
    try:
        document = read_json(path, REMEDY)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    return parse_scores(document, where=str(path))


def parse_scores(document: object, where: str = "scores") -> Scores:
    """Check a decoded `scores.json` and give it its types; `where` names it in errors."""
    scores: Scores = _dataclass(Scores, upgrade_scores(document), where)
    if not scores.rows:
        raise ValueError(f"{where}: rows is [], expected a list of at least one row; {REMEDY}")
    for name in ("rows", "tradeoff", "capacity"):
        seen: set[tuple[str, int]] = set()
        for row in getattr(scores, name):
            if (row.model, row.members) in seen:
                raise ValueError(
                    f"{where}: {name} has {row.model!r} twice for {row.members} members; {REMEDY}"
                )
            seen.add((row.model, row.members))
    classes = len(scores.class_names)
    for number, each in enumerate(scores.transitions):
        lengths = {len(each.source), len(each.ensemble), *map(len, each.path)}
        if lengths != {classes} or len(each.path) != len(each.times) or each.label >= classes:
            raise ValueError(
                f"{where}: transitions[{number}] does not fit {classes} classes and {len(each.times)} "
                f"times; {REMEDY}"
            )
    for number, curve in enumerate(scores.curves):
        if len(curve.images) != len(curve.loss):
            raise ValueError(
                f"{where}: curves[{number}] has {len(curve.images)} images and {len(curve.loss)} losses; "
                f"{REMEDY}"
            )
    _check_corrupted(scores, where)
    return scores


def parse_corrupted(document: object, where: str = "row") -> CorruptedRow:
    """Check a decoded row of a model under a corruption and give it its types."""
    return _dataclass(CorruptedRow, document, where)


def parse_curve(document: object, where: str = "curve") -> Curve:
    """Check a decoded training curve and give it its types."""
    return _dataclass(Curve, upgrade_row(document), where)


def _check_corrupted(scores: Scores, where: str) -> None:
    """Refuse models under corruptions that were not all measured once on the same images."""
    found: dict[str, dict[tuple[int, str], str]] = {}
    for row in scores.corrupted:
        place = (row.severity, row.corruption)
        if place in found.setdefault(row.model, {}):
            raise ValueError(
                f"{where}: corrupted has {row.model!r} twice under {row.corruption!r} at severity "
                f"{row.severity}; {REMEDY}"
            )
        found[row.model][place] = row.images
    first = next(iter(found), "")
    for model, images in found.items():
        if images != found[first]:
            raise ValueError(f"{where}: corrupted has {first!r} and {model!r} on different images; {REMEDY}")


def _dataclass(kind: type, document: object, where: str) -> Any:
    if not isinstance(document, dict):
        raise ValueError(f"{where} is {_short(document)} where an object is expected; {REMEDY}")
    hints = get_type_hints(kind, include_extras=True)
    values = {}
    for field in fields(kind):
        if field.name in document:
            values[field.name] = _value(hints[field.name], document[field.name], where, field.name)
        elif field.default is MISSING:
            has = (
                ", ".join(key if key.isprintable() else _short(key) for key in map(str, document))
                or "nothing"
            )
            raise ValueError(f"{where} has no {field.name!r} (it has: {_cut(has)}); {REMEDY}")
    found = kind(**values)
    if isinstance(found, Row) and isinstance(found.dee, str) and not _BOUND.fullmatch(found.dee):
        raise _wrong(where, "dee", found.dee, 'a number or a string such as ">5"')
    if isinstance(found, Bin) and found.count and None in (found.confidence, found.accuracy):
        name = "confidence" if found.confidence is None else "accuracy"
        raise _wrong(where, name, None, f"a number from 0 to 1, as its count is {found.count}")
    return found


def _value(hint: Any, value: object, where: str, key: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _number(arguments[0], arguments[1], value, where, key)
    if origin in (Union, UnionType):
        if NoneType in arguments and value is None:
            return None
        options = [each for each in arguments if each is not NoneType]
        if str in options and isinstance(value, str):
            return _value(str, value, where, key)
        return _value(next((each for each in options if each is not str), str), value, where, key)
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
    if hint is bool:
        if not isinstance(value, bool):
            raise _wrong(where, key, value, "true or false")
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, value, f"{where}: {key}")
    assert hint is str, f"{key} is of a type that files cannot hold: {hint}"
    return _text(value, where, key)


def _text(value: object, where: str, key: str) -> str:
    # Unprintable characters would reach the terminal, where they are commands.
    if not isinstance(value, str) or not value.isprintable() or (not value and "." not in key):
        raise _wrong(where, key, value, "one line of text")
    return value


_BOUND = re.compile(r">[1-9][0-9]{0,5}")


def _number(kind: type, allowed: Range, value: object, where: str, key: str) -> float:
    # Comparing is safe for what float() is not: nan, infinities and whole numbers of any length.
    if isinstance(value, (int, float)) and allowed.low <= value <= allowed.high:
        if kind is float and not isinstance(value, bool):
            return float(value)
        if type(value) is int:
            return value
    name = "a whole number" if kind is int else "a number"
    raise _wrong(where, key, value, f"{name} from {_limit(allowed.low)} to {_limit(allowed.high)}")


def _limit(value: float) -> str:
    if abs(value) == MOST:
        return "2**63 - 1" if value > 0 else "-(2**63 - 1)"
    return f"{value:g}".replace("e+0", "e").replace("e+", "e")


def _wrong(where: str, key: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{where}: {key} is {_short(value)}, expected {expected}; {REMEDY}")


def _short(value: object) -> str:
    try:
        return _cut(json.dumps(value, default=repr))
    except (ValueError, RecursionError):  # whole numbers of thousands of digits, lists in lists in lists
        return "a value too long to show"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
