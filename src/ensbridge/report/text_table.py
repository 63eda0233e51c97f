"""A table as text: the one form in which the page and the terminal get every table but the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
