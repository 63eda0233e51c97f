"""Tables as text, for the page and the terminal: beside the paper, under corruptions, and uncertainty."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ensbridge.evaluation.scores import CorruptedGroup, Group, ImageScore, Method, Summary, Uncertainty, Width
from ensbridge.evaluation.scores.columns import dee_cell, mean_text, model_text, number


class TextRow(NamedTuple):
    """A row of a table."""

    model: str
    cells: tuple[str, ...]
    css: str = ""  # the row's class on the page; the paper's own rows are "theirs"


@dataclass(frozen=True)
class TextTable:
    """Columns in blocks, and rows of a cell for each column."""

    heading: str
    blocks: tuple[tuple[str, tuple[str, ...]], ...]  # a block's title, empty where it is alone, and columns
    rows: tuple[TextRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of all cells."""
        return tuple(heading for _, headings in self.blocks for heading in headings)

    @property
    def has_paper(self) -> bool:
        """Whether rows of the paper are among them."""
        return any(row.css == "theirs" for row in self.rows)

    def in_order(self, first: tuple[str, ...]) -> TextTable:
        """The same table of one block with the columns `first` before the others.

        >>> table = TextTable("", (("", ("ACC", "NLL")),), (TextRow("DE-1", ("90", "0.3")),))
        >>> table.in_order(("NLL",)).rows[0].cells
        ('0.3', '90')
        """
        ((title, headings),) = self.blocks
        rank = {heading: number for number, heading in enumerate(first)}
        order = sorted(range(len(headings)), key=lambda i: rank.get(headings[i], len(rank)))
        rows = tuple(row._replace(cells=tuple(row.cells[i] for i in order)) for row in self.rows)
        return TextTable(self.heading, ((title, tuple(headings[i] for i in order)),), rows, self.notes)


def seeds_text(summary: Summary) -> str:
    """The seeds in words."""
    return f"seed{'s' if len(summary.seeds) > 1 else ''} {', '.join(map(str, summary.seeds))}"


# ------------------------------------------------------------------------------ the paper's numbers

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


def paper_rows(dataset: str) -> tuple[PaperRow, ...]:
    """Return the paper's rows for a data set, none where it has none.

    >>> [(row.model, row.acc, row.dee) for row in paper_rows("imagenet64")][:2]
    [('DE-1', 66.47, 1.0), ('+1 DBN', 69.79, 2.702)]
    >>> paper_rows("digits")
    ()
    """
    return tuple(PaperRow(**row) for row in _document()["rows"].get(dataset, ()))


def paper_capacity(dataset: str) -> list[dict[str, Any]]:
    """Return members, ACC and DEE of the paper's single DBN by number of teachers, none where it has none."""
    return _document()["capacity"].get(dataset, [])


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


# ------------------------------------------------------------------------------ corruptions

FROST = "frost"  # the one corruption that is made of pictures, which differ from set to set
CORRUPTED_COLUMNS = (("ACC", "acc", 2), ("NLL", "nll", 4), ("cNLL", "cnll", 4))  # with the paper's digits


def corruption_tables(summary: Summary) -> tuple[TextTable, ...]:
    """Severity 1, as the paper has it, and the mean over all severities; none where nothing was measured."""
    groups = summary.corrupted
    if not groups:
        return ()
    severities = groups[0].severities
    shown = []
    if 1 in severities:
        names = {group.model for group in groups}
        ours = [group for group in summary.rows if group.model in names]
        paper = {row: counterpart(row, ours) for row in paper_rows(f"{summary.dataset}-c")}
        theirs = {(row.model if group is None else group.model): row for row, group in paper.items()}
        shown.append(
            _corrupted_table(
                "Severity 1", [group.at(1) for group in groups], theirs if any(paper.values()) else {}
            )
        )
    if severities != (1,):
        shown.append(_corrupted_table(_severity_heading(severities), groups, {}))
    return tuple(shown)


def corruption_notes(summary: Summary) -> tuple[str, ...]:
    """What a reader must know of the numbers: whose images they are of, and what the means are."""
    beside = any(table.has_paper for table in corruption_tables(summary))
    notes = ["Each corruption counts the same; cNLL is at the temperature that was fitted on clean images."]
    if len(summary.runs) > 1:
        notes.append("± is the standard deviation over seeds.")
    made_by = next((run.corrupted_set.made_by for run in summary.runs if run.corrupted_set), None)
    if made_by is not None and made_by.startswith("ensbridge"):
        notes.append(
            "The images are ensbridge’s own regeneration of the corruptions from the clean test split, frost"
            " from generated textures: they are not bit-comparable with the published set"
            + (", on which the paper’s numbers are." if beside else ".")
        )
    elif all(run.corrupted_set is None for run in summary.runs):
        notes.append("Which set of corrupted images these are is not known.")
    else:
        notes.append(
            f"The images were not made by ensbridge ({made_by or 'no manifest is beside them'})"
            + ("; the paper’s numbers are on the published set." if beside else ".")
        )
    return tuple(notes)


def _corrupted_table(
    heading: str, groups: Sequence[CorruptedGroup], paper: Mapping[str, PaperRow]
) -> TextTable:
    names = groups[0].corruptions
    rest = [name for name in names if name != FROST]
    with_frost = 0 < len(rest) < len(names)
    titles = [f"mean of {len(names)}", *([f"mean of {len(rest)} without frost"] if with_frost else [])]
    blank = ("–",) * len(CORRUPTED_COLUMNS)
    theirs = {
        model: tuple(paper_cell(row, name, digits) for _, name, digits in CORRUPTED_COLUMNS)
        + blank * (len(titles) - 1)
        for model, row in paper.items()
    }
    rows: list[TextRow] = []
    for group in groups:
        parts = [group, group.without(FROST)] if with_frost else [group]
        cells = tuple(number(name, digits)(part) for part in parts for _, name, digits in CORRUPTED_COLUMNS)
        rows.append(TextRow(model_text(group), cells))
        rows += [TextRow("paper", theirs.pop(group.model), "theirs")] if group.model in theirs else []
    for model, cells in theirs.items():  # what the paper measured and these runs did not
        rows += [TextRow(model, blank * len(titles)), TextRow("paper", cells, "theirs")]
    headings = tuple(heading for heading, _, _ in CORRUPTED_COLUMNS)
    return TextTable(heading, tuple((title, headings) for title in titles), tuple(rows))


def _severity_heading(severities: Sequence[int]) -> str:
    """A heading for several severities, or for one that is not the first.

    >>> _severity_heading((1, 2, 3, 4, 5)), _severity_heading((1, 3)), _severity_heading((2,))
    ('Mean over severities 1 to 5', 'Mean over severities 1 and 3', 'Severity 2')
    """
    if len(severities) == 1:
        return f"Severity {severities[0]}"
    first, last = severities[0], severities[-1]
    if len(severities) > 2 and last - first == len(severities) - 1:
        return f"Mean over severities {first} to {last}"
    return f"Mean over severities {', '.join(map(str, severities[:-1]))} and {last}"


# ------------------------------------------------------------------------------ uncertainty

SCORE_LABELS: dict[ImageScore, str] = {
    "msp": "MSP",
    "entropy": "entropy",
    "mutual_information": "MI",
    "disagreement": "disagreement",
}


def uncertainty_tables(summary: Summary) -> tuple[TextTable, ...]:
    """Abstaining and prediction sets, then a table for each set of other images; none where not measured."""
    groups = [group for group in summary.rows if _measured(group)]
    if not groups:
        return ()
    names = dict.fromkeys(d.images for group in groups for run in _measured(group) for d in run.ood)
    return (_selective(groups), *(_detection(groups, name) for name in names))


def _measured(group: Group) -> list[Uncertainty]:
    return [row.uncertainty for row in group.rows if row.uncertainty is not None]


def _selective(groups: list[Group]) -> TextTable:
    every = [sets for group in groups for run in _measured(group) for sets in run.sets]
    kinds = dict.fromkeys((sets.method, sets.alpha) for sets in every)
    blocks = [("selective risk, ×1000", ("AURC", "AUGRC"))]
    for method, alpha in kinds:
        blocks.append((f"{method.upper()} sets for {100 * (1 - alpha):g} %", ("coverage", "set size")))
    rows = []
    for group in groups:
        runs = _measured(group)
        cells = [_cell(1000 * getattr(run, name) for run in runs) for name in ("aurc", "augrc")]
        for kind in kinds:
            sets = [s for run in runs for s in run.sets if (s.method, s.alpha) == kind]
            cells += [_cell(100 * s.coverage for s in sets), _cell(s.size for s in sets)]
        rows.append(TextRow(group.model, tuple(cells)))
    return TextTable("Abstaining, and prediction sets", tuple(blocks), tuple(rows))


def _detection(groups: list[Group], images: str) -> TextTable:
    rows = []
    for group in groups:
        cells = []
        for name in ("auroc", "fpr95"):
            for score in SCORE_LABELS:
                every = [d for run in _measured(group) for d in run.ood]
                detections = [d for d in every if (d.images, d.score) == (images, score)]
                error = detections[0].auroc_se if name == "auroc" and len(detections) == 1 else None
                text = _cell(100 * getattr(d, name) for d in detections)
                cells.append(text if error is None else f"{text} ± {100 * error:.2f}")
        rows.append(TextRow(group.model, tuple(cells)))
    names = tuple(SCORE_LABELS.values())
    return TextTable(f"OOD: {images}", (("AUROC", names), ("FPR95", names)), tuple(rows))


def _cell(values: Iterable[float]) -> str:
    return mean_text(list(values), 2)
