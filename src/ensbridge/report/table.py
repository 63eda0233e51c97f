"""The rows as a table for the terminal."""

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ensbridge.scores import COLUMNS, Scores, cells


def rich_table(scores: Scores) -> Table:
    """Return the rows as a table for the terminal, tight enough for 80 columns; bridges stand out."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for i, column in enumerate(COLUMNS):
        # Headings may break over two lines, numbers may not.
        widest = max(cell_len(column.cell(row)) for row in scores.rows)
        table.add_column(
            column.heading, justify="right" if i else "left", min_width=widest, vertical="bottom"
        )
    styles = {"bridge": "bold", "control": "dim"}
    for row in scores.rows:
        # `Text`, because a string would be read as markup: a model may be called "[red]".
        table.add_row(*map(Text, cells(row)), style=styles.get(row.kind))
    return table
