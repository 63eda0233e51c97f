"""The paper's numbers, from the one file that holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ensbridge.evaluation.scores import Group, Method, Summary, Width
from ensbridge.evaluation.scores.columns import dee_cell, number
from ensbridge.report.text_table import TextRow, TextTable

NOTE = (
    "Rows are matched by method, members and bridges; a bridge that was trained with KL alone stands beside"
    " the paper’s. Ratios and DEE are each side’s own: against its own networks and ensembles. ± is a"
    " standard deviation: ours over seeds, the paper’s as it prints it."
)
# Its ECE is in no row here: nobody should compare it by accident.
ECE_NOTE = (
    "The paper’s ECE is left out: it appears to be a mean of per-batch values, which comes out larger than"
    " one over the whole split, so the two cannot be compared."
)
DEE_NOTE = "The paper’s DEE on ImageNet64 is taken on cNLL, ours on NLL."


@dataclass(frozen=True)
class PaperRow:
    """One row of the paper's tables, under the name that the model has here; None where it prints nothing."""

    model: str
    method: Method
    members: int
    bridges: int = 0
    width: Width | None = None
    macs_ratio: float | None = None
    params_ratio: float | None = None
    acc: float | None = None
    nll: float | None = None
    brier: float | None = None
    cnll: float | None = None
    dee: float | str | None = None  # "<1" where the paper prints it
    acc_sd: float | None = None
    nll_sd: float | None = None
    brier_sd: float | None = None


@dataclass(frozen=True)
class PaperCapacity:
    """One DBN of the paper, trained towards so many members."""

    members: int
    acc: float
    dee: float


def paper_rows(dataset: str) -> tuple[PaperRow, ...]:
    """Return the paper's rows for a data set, none where it has none.

    >>> [(row.model, row.acc, row.dee) for row in paper_rows("imagenet64")][:2]
    [('DE-1', 66.47, 1.0), ('+1 DBN', 69.79, 2.702)]
    >>> paper_rows("digits")
    ()
    """
    return tuple(PaperRow(**row) for row in _document()["rows"].get(dataset, ()))


def paper_capacity(dataset: str) -> tuple[PaperCapacity, ...]:
    """Return the paper's single DBN by number of teachers, none where it has none."""
    return tuple(PaperCapacity(**row) for row in _document()["capacity"].get(dataset, ()))


def source() -> str:
    """Where the numbers are from."""
    return _document()["source"]


def comparison(summary: Summary) -> TextTable | None:
    """The paper's rows under ours; None where no row has a counterpart."""
    paper = paper_rows(summary.dataset)
    ours = {row: counterpart(row, summary.rows) for row in paper}
    if not any(ours.values()):
        return None
    used = [column for column in _COLUMNS if any(getattr(row, column[1]) is not None for row in paper)]
    rows = []
    for row, group in ours.items():
        cells = tuple("–" if group is None else _our_cell(group, name, digits) for _, name, digits in used)
        rows.append(TextRow(row.model if group is None else group.model, cells))
        rows.append(TextRow("paper", tuple(paper_cell(row, *column[1:]) for column in used), "theirs"))
    notes = (NOTE, ECE_NOTE, *([DEE_NOTE] if summary.dataset == "imagenet64" else []))
    headings = tuple(heading for heading, _, _ in used)
    return TextTable("Beside the paper", (("", headings),), tuple(rows), notes)


def counterpart(row: PaperRow, ours: Iterable[Group]) -> Group | None:
    """Our model that is the paper's, of one step; a bridge trained with KL where there is no other."""
    same = [
        group
        for group in ours
        if (group.kind, group.first.members, group.first.bridges, group.first.width)
        == (row.method, row.members, row.bridges, row.width)
        and group.first.steps <= 1
    ]
    return min(same, key=lambda group: group.first.loss == "kl", default=None)


_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("MACs ×", "macs_ratio", 2),
    ("params ×", "params_ratio", 2),
    ("ACC", "acc", 2),
    ("NLL", "nll", 4),  # as many digits as the paper prints
    ("Brier", "brier", 4),
    ("cNLL", "cnll", 4),
    ("DEE", "dee", 2),
)


def paper_cell(row: PaperRow, name: str, digits: int) -> str:
    """A score of the paper with its spread where it prints one; a dash where it has none."""
    value, spread = getattr(row, name), getattr(row, f"{name}_sd", None)
    text = f"{value:.{digits}f}" if isinstance(value, float) else value or "–"
    return text if spread is None else f"{text} ± {spread:.{digits}f}"


def _our_cell(group: Group, name: str, digits: int) -> str:
    if name == "dee":
        return dee_cell(group)
    # A cost does not depend on the seed.
    return f"{group.mean(name):.{digits}f}" if name.endswith("_ratio") else number(name, digits)(group)


@cache
def _document() -> dict[str, Any]:
    return json.loads(files("ensbridge.report").joinpath("paper.json").read_text(encoding="utf-8"))
