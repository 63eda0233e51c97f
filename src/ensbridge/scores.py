"""`scores.json`, the one file from which every table and figure is made: its types, reading, and text.

No torch here, so that reports start without it. `COLUMNS` is the one place where a score becomes text.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.cells import cell_len

Kind = Literal["ensemble", "bridge", "control", "other"]

_REMEDY = "delete it and run again the command that wrote it"


@dataclass(frozen=True)
class Row:
    """One model's scores on the test split."""

    model: str
    members: int  # members that the row uses (DE-k) or aims at (bridges); the control aims at one
    bridges: int
    steps: int
    macs: int
    macs_ratio: float  # against one network, as are the parameters
    params: int
    params_ratio: float
    acc: float  # percent
    nll: float
    brier: float
    ece: float
    cnll: float | None  # None where there was no validation split to calibrate on, as is the temperature
    temperature: float | None
    dee: float | str  # a string such as ">5" beyond the largest measured ensemble
    gap: float | None
    gap_error: float | None

    @property
    def kind(self) -> Kind:
        """What the row is to the comparison: an ensemble, a bridge, its control, or a rival method."""
        if re.fullmatch(r"DE-\d+", self.model):
            return "ensemble"
        if self.bridges > 0:
            return "control" if self.members == 1 else "bridge"
        return "other"


@dataclass(frozen=True)
class Scores:
    """The rows of one evaluation, with the data, the seed and the machine that made them.

    >>> row = Row("DE-1", 1, 0, 0, 400, 1.0, 30, 1.0, 91.5, 0.3166, 0.13, 0.046, None, None, 1.0, None, None)
    >>> print(Scores("cifar10", 0, 10, {"python": "3.12"}, (row,)).table())
    model  MACs ×  params ×    ACC    NLL  Brier    ECE  cNLL   DEE  gap
    ─────  ──────  ────────  ─────  ─────  ─────  ─────  ────  ────  ───
    DE-1     1.00      1.00  91.50  0.317  0.130  0.046     –  1.00    –
    """

    dataset: str
    seed: int
    classes: int
    environment: dict[str, str]
    rows: tuple[Row, ...]

    def table(self) -> str:
        """The rows as plain aligned text, names to the left and numbers to the right."""
        lines = [tuple(column.heading for column in COLUMNS), *map(cells, self.rows)]
        widths = [max(map(cell_len, texts)) for texts in zip(*lines, strict=True)]

        def join(line: tuple[str, ...]) -> str:
            gaps = [" " * (width - cell_len(text)) for text, width in zip(line, widths, strict=True)]
            numbers = (gap + text for gap, text in zip(gaps[1:], line[1:], strict=True))
            return "  ".join([line[0] + gaps[0], *numbers])

        rule = "  ".join("─" * width for width in widths)
        return "\n".join([join(lines[0]), rule, *map(join, lines[1:])])

    def to_json(self) -> str:
        """The text of `scores.json`."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Column:
    """One column: its heading, how it writes a row's cell, and what it means in one line."""

    heading: str
    cell: Callable[[Row], str]
    meaning: str


def _dee(row: Row) -> str:
    return row.dee if isinstance(row.dee, str) else f"{row.dee:.2f}"


def _gap(row: Row) -> str:
    if row.gap is None:
        return "–"
    return f"{row.gap:.2f}" if row.gap_error is None else f"{row.gap:.2f} ± {row.gap_error:.2f}"


COLUMNS: tuple[Column, ...] = (
    Column("model", lambda row: row.model, "What was measured."),
    Column(
        "MACs ×",
        lambda row: f"{row.macs_ratio:.2f}",
        "Multiply-accumulates for one image, as a multiple of one network’s. Lower is cheaper.",
    ),
    Column("params ×", lambda row: f"{row.params_ratio:.2f}", "Parameters, as a multiple of one network’s."),
    Column("ACC", lambda row: f"{row.acc:.2f}", "Accuracy on the test split, in percent. Higher is better."),
    Column(
        "NLL",
        lambda row: f"{row.nll:.3f}",
        "Negative log-likelihood of the true class, in nats, before calibration. Lower is better.",
    ),
    Column(
        "Brier",
        lambda row: f"{row.brier:.3f}",
        "Squared distance between predicted and true probabilities, summed over classes. Lower is better.",
    ),
    Column(
        "ECE",
        lambda row: f"{row.ece:.3f}",
        "Expected calibration error, 15 bins over the whole split: how far confidence is from accuracy."
        " Lower is better.",
    ),
    Column(
        "cNLL",
        lambda row: "–" if row.cnll is None else f"{row.cnll:.3f}",
        "NLL after one temperature fitted on the validation split. Lower is better.",
    ),
    Column(
        "DEE",
        _dee,
        "Deep-ensemble equivalent: how many real members give the same NLL. “>5” is beyond the largest"
        " ensemble measured.",
    ),
    Column(
        "gap",
        _gap,
        "Share of the NLL distance from one network to the target ensemble that is closed, ± one standard"
        " error: 0 is one network, 1 is the ensemble.",
    ),
)


def cells(row: Row) -> tuple[str, ...]:
    """Return the row's text, one string for each of `COLUMNS`."""
    return tuple(column.cell(row) for column in COLUMNS)


def read_scores(path: str | Path) -> Scores:
    """Read a `scores.json`, or the one inside a run folder."""
    path = Path(path)
    if path.is_dir():
        folder, path = path, path / "scores.json"
        if not path.is_file():
            raise ValueError(f"{folder} holds no scores.json; give the folder of a finished run")
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a scores.json or the run folder that holds one")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); {_REMEDY}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error.msg} in line {error.lineno}); {_REMEDY}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    return parse_scores(document, where=str(path))


def parse_scores(document: object, where: str = "scores") -> Scores:
    """Check a decoded `scores.json` and give it its types; `where` names it in errors."""
    top = _Fields(document, where)
    environment = top.value("environment")
    if not isinstance(environment, dict):
        raise top.error("environment", environment, "an object of strings")
    for key, value in environment.items():
        if isinstance(value, dict | list) or not f"{key}{value}".isprintable():
            raise top.error(f"environment.{key}", value, "one line of text")
    rows = top.value("rows")
    if not isinstance(rows, list) or not rows:
        raise top.error("rows", rows, "a list of at least one row")
    return Scores(
        dataset=top.text("dataset"),
        seed=top.integer("seed"),
        classes=top.integer("classes", low=1),
        environment={key: str(value) for key, value in environment.items()},
        rows=tuple(_row(_Fields(row, f"{where}: rows[{i}]")) for i, row in enumerate(rows)),
    )


def _row(fields: "_Fields") -> Row:
    dee = fields.value("dee")
    if not (isinstance(dee, str) and re.fullmatch(r">\d+", dee)):
        dee = fields.number("dee", expected='a number or a string such as ">5"')
    return Row(
        model=fields.text("model"),
        members=fields.integer("members", low=1),
        bridges=fields.integer("bridges", low=0),
        steps=fields.integer("steps", low=0),
        macs=fields.integer("macs", low=1),
        macs_ratio=fields.number("macs_ratio", above=0.0),
        params=fields.integer("params", low=1),
        params_ratio=fields.number("params_ratio", above=0.0),
        acc=fields.number("acc"),
        nll=fields.number("nll"),
        brier=fields.number("brier"),
        ece=fields.number("ece"),
        cnll=fields.number_or_none("cnll"),
        temperature=fields.number_or_none("temperature", above=0.0),
        dee=dee,
        gap=fields.number_or_none("gap"),
        gap_error=fields.number_or_none("gap_error"),
    )


class _Fields:
    """Typed access to one JSON object, whose errors name the place, the value and the remedy."""

    def __init__(self, document: object, where: str) -> None:
        if not isinstance(document, dict):
            raise ValueError(f"{where} is {_short(document)} where an object is expected; {_REMEDY}")
        self._document = document
        self._where = where

    def error(self, key: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{self._where}: {key} is {_short(value)}, expected {expected}; {_REMEDY}")

    def value(self, key: str) -> Any:
        if key not in self._document:
            has = ", ".join(map(str, self._document)) or "nothing"
            raise ValueError(f"{self._where} has no {key!r} (it has: {has}); {_REMEDY}")
        return self._document[key]

    def text(self, key: str) -> str:
        value = self.value(key)
        # Unprintable characters would reach the terminal, where they are commands.
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self.error(key, value, "one line of text")
        return value

    def integer(self, key: str, low: int | None = None) -> int:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
            raise self.error(key, value, "a whole number" + ("" if low is None else f" of at least {low}"))
        return value

    def number(self, key: str, above: float = -math.inf, expected: str = "a finite number") -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, value, expected)
        if value <= above:
            raise self.error(key, value, f"a number above {above:g}")
        return float(value)

    def number_or_none(self, key: str, above: float = -math.inf) -> float | None:
        return None if self.value(key) is None else self.number(key, above, "a finite number or null")


def _short(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
