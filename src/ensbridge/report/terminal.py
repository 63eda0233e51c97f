"""The rows as tables for the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ensbridge.evaluation.scores import COLUMNS, Summary, cells
from ensbridge.report import tables
from ensbridge.report.tables import TextTable, comparison

_STYLES = {"DBN": "bold", "control": "dim"}
_NAME = 16  # what a name may take of 80 columns beside means and spreads


class _Spread:
    """A cell “mean ± sd” that puts the spread under the mean where the terminal is narrow."""

    def __init__(self, text: str) -> None:
        self.whole = text
        self.broken = text.replace(" ± ", "\n±")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        least = max(map(cell_len, self.broken.splitlines()))
        return Measurement(least, cell_len(self.whole)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fits = cell_len(self.whole) <= options.max_width
        yield Text(self.whole if fits else self.broken, justify="right", no_wrap=True)


class _Rows:
    """The rows as wide as the terminal allows: spreads behind their means, or else under them."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = _table(self.summary, narrow=False)
        needed = console.measure(whole, options=options.update(max_width=1000)).maximum
        yield _table(self.summary, narrow=True) if needed > options.max_width else whole


def rich_table(summary: Summary) -> ConsoleRenderable:
    """Return the rows as a table for the terminal, tight enough for 80 columns; bridges stand out."""
    return _Rows(summary)


def _table(summary: Summary, narrow: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    texts = [cells(group) for group in summary.rows]
    broken = narrow and len(summary.runs) > 1
    for i, column in enumerate(COLUMNS):
        parts = [part for row in texts for part in _parts(row[i], broken)]
        widest = max(map(cell_len, parts))
        # Headings may break over two lines, numbers may not, nor may names of the usual length. Widths of
        # several runs are said, since rich would rather cut the last column than break a cell.
        needed = min(widest, _NAME) if narrow and i == 0 else widest
        least = max(needed, *map(cell_len, column.heading.split()))
        table.add_column(
            column.heading,
            justify="right" if i else "left",
            min_width=None if broken else needed,
            width=least if broken else None,
            no_wrap=not narrow,
            vertical="bottom",
        )
    for group, row in zip(summary.rows, texts, strict=True):
        # `Text`, because a string would be read as markup: a model may be called "[red]".
        shown = [Text("\n".join(_parts(text, broken and i > 0))) for i, text in enumerate(row)]
        table.add_row(*shown, style=_STYLES.get(group.kind))
    return table


def paper_table(summary: Summary) -> Table | None:
    """Return our numbers with the paper's under them, None where the paper has no such data set."""
    table = comparison(summary)
    title = "the paper’s ECE is left out: it appears to be a mean of per-batch values"
    return table and _plain(table, title, tight=True)


def corrupted_tables(summary: Summary) -> list[Table]:
    """Return models under corruptions, the paper's under ours; none where they were not measured."""
    shown = []
    for table in tables.corruption_tables(summary):
        blocks = ", ".join(title for title, _ in table.blocks)
        shown.append(_plain(table, f"Under corruptions, {table.heading.lower()}: {blocks}"))
    if shown:
        shown[-1].caption = Text("\n" + " ".join(tables.corruption_notes(summary)))
    return shown


def _plain(table: TextTable, title: str, tight: bool = False) -> Table:
    """A table for the terminal: with `tight`, of “mean±sd” cells that are never broken."""
    shown = Table(
        title=Text(title),
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0 if tight else (0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("model")
    for block, headings in table.blocks:
        of = f"\n{block.removeprefix('mean ').removesuffix(' without frost')}" if block else ""
        for heading in headings:
            shown.add_column(Text(f"{heading}{of}"), justify="right")
    for name, texts, css in table.rows:
        row = [Text(text.replace(" ± ", "±"), no_wrap=True) if tight else _Spread(text) for text in texts]
        shown.add_row(Text(f"  {name}" if css else name), *row, style="dim" if css else None)
    return shown


def _parts(text: str, broken: bool) -> list[str]:
    mean, _, spread = text.partition(" ± ")
    return [mean, f"±{spread}"] if broken and spread else [text]
