"""Progress of long work: bars on a terminal, plain lines elsewhere. No torch here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ensbridge.utils.text import visible

SECONDS = 20.0  # between two lines of a stage


class Stage(Protocol):
    """Begins a stage of so many steps, or of what else they count, as `Bars.stage` does."""

    def __call__(self, name: str, total: int, unit: str = "steps") -> Callable[[int], None]:
        """The answer is called with the number of steps just done."""
        ...


def silent(name: str, total: int, unit: str = "steps") -> Callable[[int], None]:
    """A stage that nobody watches."""
    return lambda steps: None


class Bars:
    """Reports stages as progress bars or, with `lines`, as plain lines."""

    def __init__(self, progress: Progress, lines: bool = False) -> None:
        self.progress, self.lines = progress, lines

    def stage(self, name: str, total: int, unit: str = "steps") -> Callable[[int], None]:
        """Begin a bar, or say that the stage begins."""
        if self.lines:
            return stage_lines(name, total, unit)
        task = self.progress.add_task(name, total=total, unit=unit)
        return lambda steps: self.progress.advance(task, steps)

    def show(self, what: RenderableType) -> None:
        """Print a result on standard output at once; where that is the bars' terminal, above them."""
        out = Console()
        if out.is_terminal and not self.progress.disable:
            out = self.progress.console
        elif not out.is_terminal:
            out.width = max(out.width, 120)  # a file has no edge at which a table would be cut
        out.print(what, markup=False, highlight=False, soft_wrap=isinstance(what, str))


@contextmanager
def progress_bars(quiet: bool) -> Iterator[Bars]:
    """Bars on standard error, or lines where that is no terminal; nothing if `quiet`."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:>9}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        yield Bars(progress, lines=not (quiet or console.is_terminal))


Advance = Callable[[int], None]  # called with the number of steps, or of what else is counted, just done
StepCallback = Callable[[int, int, float], None]
"""Called as callback(step, total_steps, loss), after each training step or, on a GPU, each span of them;
once, with a loss of nan, where an earlier run had done everything."""


def ignore(steps: int) -> None:
    """Advance nothing."""


def count_steps(advance: Advance) -> StepCallback:
    """A callback that advances by the steps since its last call, also over several runs and resumed ones.

    >>> callback = count_steps(print)
    >>> for step in (3, 5, 2):  # the last is of another run
    ...     callback(step, 5, 0.0)
    3
    2
    2
    """
    last = 0

    def callback(step: int, total: int, loss: float) -> None:
        nonlocal last
        advance(step - last if step > last else step)
        last = step

    return callback


def say(line: str) -> None:
    """Print a line on standard error, at once; whatever is in it, it stays one line."""
    print(f"ensbridge: {visible(line)}", file=sys.stderr, flush=True)


def stage_lines(
    name: str,
    total: int,
    unit: str = "steps",
    say: Callable[[str], None] = say,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[int], None]:
    """Say that a stage begins, then how far it is, at most once in 20 seconds.

    >>> now = iter([0, 15, 25, 40, 45])
    >>> advance = stage_lines("members", 8, say=print, clock=lambda: next(now))
    members, 8 steps
    >>> for steps in (1, 2, 1, 3):
    ...     advance(steps)
    members, 3 of 8 steps after 25 s
    members, 7 of 8 steps after 45 s
    """
    begun, done = clock(), 0
    last = begun
    say(f"{name}, {_count(total, unit)}" if total else name)

    def advance(steps: int) -> None:
        nonlocal done, last
        done += steps
        now = clock()
        if now - last >= SECONDS:
            last = now
            said = f"{done} of {_count(total, unit)}" if total else _count(done, unit)
            say(f"{name}, {said} after {now - begun:.0f} s")

    return advance


def _count(count: int, unit: str) -> str:
    return f"1 {unit.removesuffix('s')}" if count == 1 else f"{count} {unit}"
