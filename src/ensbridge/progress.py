"""Progress bars for long work. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bars:
    """Reports stages as progress bars."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        """Begin a bar."""
        task = self.progress.add_task(name, total=total)
        return lambda steps: self.progress.advance(task, steps)


@contextmanager
def progress_bars(quiet: bool) -> Iterator[Bars]:
    """Bars on standard error, shown only on a terminal and unless `quiet`."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        yield Bars(progress)
