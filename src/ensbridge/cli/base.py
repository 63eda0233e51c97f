"""What every command shares: the program itself, its errors in one sentence, and how it prints."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer
from rich.console import Console

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
    warnings.showwarning = lambda message, *_: print(f"ensbridge: {message}", file=sys.stderr)
    try:
        app()
    except (ValueError, OSError) as error:
        fail(str(error), code=2)
    except ImportError as error:
        fail(f"{error.name} is not installed; pip install 'ensbridge[quickstart]'", code=2)
    except FloatingPointError as error:
        fail(str(error), code=1)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not loaded for its name alone
            raise
        reason = str(error).partition(". ")[0]
        fail(f"{reason}; take smaller batches, fewer members together, or --device cpu", code=2)
    except SystemExit as leaving:
        if leaving.code == 130:  # what typer makes of an interrupt
            fail("interrupted; run the same command again, what it has saved is kept", code=130)
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


Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


def say(text: str) -> None:
    """Print text as it is."""
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
