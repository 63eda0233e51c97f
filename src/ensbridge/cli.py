"""The commands, each a thin call into the package.

Nothing here imports torch before a command needs it. Bad input ends with one sentence and exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ensbridge import __version__

app = typer.Typer(
    help="Ensemble quality for about 1.2 times the cost of one network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line; errors of the user's making become one sentence and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        fail(str(error), code=2)
    except ImportError as error:
        fail(f"{error.name} is not installed; pip install 'ensbridge[quickstart]'", code=2)
    except FloatingPointError as error:
        fail(str(error), code=1)
    except SystemExit as leaving:
        if leaving.code == 130:  # what typer makes of an interrupt
            fail("interrupted; run the same command again to go on", code=130)
        raise


def fail(sentence: str, code: int) -> None:
    """Say one sentence on standard error and exit."""
    print(f"ensbridge: {sentence}", file=sys.stderr)
    raise SystemExit(code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ensbridge {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Ensemble quality for about 1.2 times the cost of one network."""


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder of the run; run again, it goes on.")] = Path(
        "runs/quickstart"
    ),
    seed: Annotated[int, typer.Option(help="Decides every draw; the same seed gives the same scores.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Train five small members and a bridge on embedded digits, and compare them: a table and a page.

    Example: ensbridge quickstart --out runs/quickstart --seed 0
    """
    from ensbridge.recipes import digits, run_recipe
    from ensbridge.report import headline, rich_table, write_page

    with progress_bars(quiet) as reporter:
        scores = run_recipe(digits(), out, seed, reporter)
    page = write_page(scores, out / "report.html")
    console = Console()
    console.print(rich_table(scores))
    console.print(f"\n{headline(scores)}\n", highlight=False, markup=False)
    console.print(f"{out / 'scores.json'}\n{page}", highlight=False, markup=False, soft_wrap=True)


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
