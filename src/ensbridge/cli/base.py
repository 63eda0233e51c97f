"""What every command shares: the program itself, its errors in one sentence, and how it prints."""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from contextlib import suppress
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from ensbridge import __version__
from ensbridge.cli.options import flag
from ensbridge.utils.extras import extras_of, remedy
from ensbridge.utils.progress import say as tell
from ensbridge.utils.text import one_line, visible

app = typer.Typer(
    help="Ensemble quality for about 1.2 times the cost of one network.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line; errors of the user's making become one sentence and exit code 2."""
    warnings.showwarning = lambda message, *_: tell(str(message))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # a character that its encoding lacks is no error
    code = 0
    try:
        code = _run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # as by `| head`, which has what it wants
        _lost_output()
        raise SystemExit(1) from None
    except (ValueError, OSError) as error:
        fail(_sentence(error), code=2)
    except ImportError as error:
        fail(f"{one_line(error)}; {remedy(*extras_of(error.name or ''))}", code=2)
    except FloatingPointError as error:
        fail(str(error), code=1)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not loaded for its name alone
            raise
        reason = str(error).partition(". ")[0]
        fail(f"{reason}; take smaller batches, fewer members together, or --device cpu", code=2)
    if code == 130:  # what typer makes of an interrupt
        fail("interrupted; run the same command again, what it has saved is kept", code=130)
    raise SystemExit(code)


def _run() -> int:
    """Run the command; what typer says of wrong words is printed here, where nothing can hide in it."""
    try:
        return app(prog_name="ensbridge", standalone_mode=False) or 0
    except Exception as error:
        if not hasattr(error, "format_message"):  # as only typer's have, whose class depends on its version
            raise
        error.message = visible(error.message, lines=True)  # type: ignore[attr-defined]
        error.show()  # type: ignore[attr-defined]
        return error.exit_code  # type: ignore[attr-defined]


_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EFBIG: "files may not be so large here; raise the limit (ulimit -f), or choose another folder",
    errno.EROFS: "the file system is read-only; choose another folder",
}


def _sentence(error: ValueError | OSError) -> str:
    """What an error says; of a disk that takes nothing, which file it was and what to do."""
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return str(error)
    where = "standard output" if _lost_output() else "standard output or a file"
    if error.filename is not None:
        where = os.fsdecode(error.filename)
    return f"{where} cannot be written: {_REMEDIES[error.errno]}"


def _lost_output() -> bool:
    """Whether standard output takes no more; what waits for it is given up, which Python would try again."""
    if sys.stdout is None:
        return False
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def fail(sentence: str, code: int) -> NoReturn:
    """Say one sentence on standard error and exit."""
    with suppress(OSError):  # where that is a full disk too, the exit code is left
        tell(sentence)
    raise SystemExit(code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ensbridge {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, flag("--version", "Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Ensemble quality for about 1.2 times the cost of one network."""


def say(text: str) -> None:
    """Print lines on standard output as they are."""
    Console().print(visible(text, lines=True), highlight=False, markup=False, soft_wrap=True)
