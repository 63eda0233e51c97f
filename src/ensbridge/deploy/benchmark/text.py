"""A benchmark as tables, and as sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from ensbridge.deploy.benchmark.bench import Benchmark, Row, Table

COLUMNS = ("model", "ms", "middle half", "ratio (95 % interval)", "memory")
COSTS = ("model", "MACs", "params")


def rich_table(table: Table) -> RichTable | str:
    """The times of one runtime and batch size, or why there are none."""
    if not table.rows:
        return f"{title(table)}: {table.problem}."
    return _rich(title(table), COLUMNS, map(cells, table.rows))


def rich_costs(benchmark: Benchmark) -> RichTable | None:
    """What each model is, wherever it runs; None where nothing could be measured."""
    measured = [table for table in benchmark.tables if table.rows]
    return _rich("one image", COSTS, map(costs, measured[0].rows)) if measured else None


def _rich(name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> RichTable:
    table = RichTable(title=name, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def title(table: Table) -> str:
    """What a table was measured with.

    >>> title(Table("eager", 1, 0, 0, (), "it is not there"))
    'eager, batch 1'
    """
    if not table.rows:
        return f"{table.runtime}, batch {table.batch}"
    rounds, calls = (
        f"{count} {name}{'s' * (count != 1)}"
        for count, name in ((table.rounds, "round"), (table.calls, "call"))
    )
    return f"{table.runtime}, batch {table.batch} ({rounds} of {calls})"


def cells(row: Row) -> tuple[str, ...]:
    """A row in the order of the columns."""
    return (
        row.model,
        f"{1e3 * row.median:.2f}",
        f"{1e3 * row.low:.2f} … {1e3 * row.high:.2f}",
        "×1" if row.ratio is None else str(row.ratio),
        memory(row),
    )


def memory(row: Row) -> str:
    """The memory of a row, a bound, or a dash where nothing is known."""
    if row.memory is not None:
        return f"{short(row.memory)}B"
    return "—" if row.memory_below is None else f"< {short(row.memory_below)}B"


def costs(row: Row) -> tuple[str, ...]:
    """What does not depend on where a model runs."""
    return row.model, short(row.macs), short(row.params)


def headline(benchmark: Benchmark) -> str:
    """A sentence for each table: how long source and bridge take, or why that is not said."""
    sentences = []
    for table in benchmark.tables:
        where = f"with {table.runtime} at batch {table.batch}"
        if table.problem:
            sentences.append(f"Nothing was timed {where}: {table.problem}.")
        for row in table.rows:
            if row.model == benchmark.fast and row.ratio is not None:
                claim = f"takes {row.ratio} the time of one member {where}"
                refusal = f"has no ratio {where}: {row.ratio.reason}"
                rounds = f"half of the rounds gave {row.ratio.low:.2f} … {row.ratio.high:.2f}"
                said = refusal if row.ratio.reason else f"{claim}; {rounds}"
                sentences.append(f"{row.model.capitalize()} {said}.")
    refused = [row for table in benchmark.tables for row in table.rows if row.ratio and row.ratio.reason]
    if any(row.model != benchmark.fast for row in refused):
        sentences.append("Where another ratio is a dash, the same holds of it; --json has its numbers.")
    if refused:
        sentences.append("More --rounds, or a quieter machine, make the intervals narrower.")
    return "\n".join(sentences)


def short(number: int) -> str:
    """A large number in a few characters.

    >>> short(1_860_986), short(277_000_000), short(15), short(1_500)
    ('1.86 M', '277 M', '15', '1.5 k')
    """
    for size, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return str(number)
