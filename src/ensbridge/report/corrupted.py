"""Models under corruptions as text: means of all corruptions and without frost, beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ensbridge.evaluation.scores import CorruptedGroup, Summary
from ensbridge.evaluation.scores.columns import number
from ensbridge.report.paper import PaperRow, counterpart, paper_cell, paper_rows
from ensbridge.report.text_table import TextRow, TextTable

FROST = "frost"  # the one corruption that is made of pictures, which differ from set to set
COLUMNS = (("ACC", "acc", 2), ("NLL", "nll", 4), ("cNLL", "cnll", 4))  # with the paper's digits


def tables(summary: Summary) -> tuple[TextTable, ...]:
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
            _table("Severity 1", [group.at(1) for group in groups], theirs if any(paper.values()) else {})
        )
    if severities != (1,):
        shown.append(_table(_severities(severities), groups, {}))
    return tuple(shown)


def notes(summary: Summary) -> tuple[str, ...]:
    """What a reader must know of the numbers: whose images they are of, and what the means are."""
    beside = any(table.has_paper for table in tables(summary))
    said = ["Each corruption counts the same; cNLL is at the temperature that was fitted on clean images."]
    if len(summary.runs) > 1:
        said.append("± is the standard deviation over seeds.")
    made_by = next((run.corrupted_set.made_by for run in summary.runs if run.corrupted_set), None)
    if made_by is not None and made_by.startswith("ensbridge"):
        said.append(
            "The images are ensbridge’s own regeneration of the corruptions from the clean test split, frost"
            " from generated textures: they are not bit-comparable with the published set"
            + (", on which the paper’s numbers are." if beside else ".")
        )
    elif all(run.corrupted_set is None for run in summary.runs):
        said.append("Which set of corrupted images these are is not known.")
    else:
        said.append(
            f"The images were not made by ensbridge ({made_by or 'no manifest is beside them'})"
            + ("; the paper’s numbers are on the published set." if beside else ".")
        )
    return tuple(said)


def _table(heading: str, groups: Sequence[CorruptedGroup], paper: Mapping[str, PaperRow]) -> TextTable:
    names = groups[0].corruptions
    rest = [name for name in names if name != FROST]
    with_frost = 0 < len(rest) < len(names)
    titles = [f"mean of {len(names)}", *([f"mean of {len(rest)} without frost"] if with_frost else [])]
    blank = ("–",) * len(COLUMNS)
    theirs = {
        model: tuple(paper_cell(row, name, digits) for _, name, digits in COLUMNS) + blank * (len(titles) - 1)
        for model, row in paper.items()
    }
    rows: list[TextRow] = []
    for group in groups:
        parts = [group, group.without(FROST)] if with_frost else [group]
        cells = tuple(number(name, digits)(part) for part in parts for _, name, digits in COLUMNS)
        rows.append(TextRow(_name(group), cells))
        rows += [TextRow("paper", theirs.pop(group.model), "theirs")] if group.model in theirs else []
    for model, cells in theirs.items():  # what the paper measured and these runs did not
        rows += [TextRow(model, blank * len(titles)), TextRow("paper", cells, "theirs")]
    headings = tuple(heading for heading, _, _ in COLUMNS)
    return TextTable(heading, tuple((title, headings) for title in titles), tuple(rows))


def _name(group: CorruptedGroup) -> str:
    part = "" if len(group.rows) == group.runs else f" ({len(group.rows)} of {group.runs} runs)"
    return group.model + part


def _severities(severities: Sequence[int]) -> str:
    """A heading for several severities, or for one that is not the first.

    >>> _severities((1, 2, 3, 4, 5)), _severities((1, 3)), _severities((2,))
    ('Mean over severities 1 to 5', 'Mean over severities 1 and 3', 'Severity 2')
    """
    if len(severities) == 1:
        return f"Severity {severities[0]}"
    first, last = severities[0], severities[-1]
    if len(severities) > 2 and last - first == len(severities) - 1:
        return f"Mean over severities {first} to {last}"
    return f"Mean over severities {', '.join(map(str, severities[:-1]))} and {last}"
