"""Options and arguments that several commands share."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer


def argument(metavar: str, help: str) -> Any:
    """An argument: its name and its help."""
    return typer.Argument(metavar=metavar, help=help)


def option(metavar: str, help: str, *names: str, **settings: Any) -> Any:
    """An option: the name of its value, its help and, where it is not called as its parameter, its names."""
    return typer.Option(*names, metavar=metavar, help=help, **settings)


def flag(name: str, help: str, **settings: Any) -> Any:
    """An option without a value."""
    return typer.Option(name, help=help, **settings)


ROOT = Path("data")
Root = Annotated[Path, option("DIR", "Folder of the data sets.", envvar="ENSBRIDGE_DATA", show_default=True)]
Quiet = Annotated[bool, flag("--quiet", "Show no progress.")]


def _check_seed(seed: int) -> int:
    """A callback in place of `min` and `max`, which help would print in full."""
    if not 0 <= seed < 2**63:
        raise typer.BadParameter(f"{seed} is not a whole number from 0 to {2**63 - 1}")
    return seed


Seed = Annotated[int, option("N", "Random seed; the same seed gives the same result.", callback=_check_seed)]
Device = Annotated[str, option("NAME", "cpu or cuda.")]
Batch = Annotated[int, option("N", "Images per batch.", "--batch-size", "--batch")]
Model = Annotated[
    str,
    argument(
        "MODEL",
        "Folder that FastEnsemble.save wrote, zoo:cifar10 (ships with ensbridge) or hf:user/name (hub).",
    ),
]
Allow = Annotated[
    list[str] | None,
    option(
        "NAME",
        "Code that may be imported to build a source network that is not ensbridge's own: module:name "
        "for one class or function, or a module for all of its network classes. It is called with arguments "
        "from the model's config.json, and is also looked for in the working folder, so name only what you "
        "trust. May be repeated.",
    ),
]
ImageShape = Annotated[
    str | None,
    option("C,H,W", "Shape of one image, such as 3,32,32; by default the one saved with the model."),
]


def allowed(names: list[str] | None) -> list[str]:
    """What may be imported to build a source, also from the working folder."""
    if names and "" not in sys.path:
        sys.path.append("")  # behind all others: no file that lies there takes an installed package's place
    return names or []


def numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    """Numbers as they are typed, with commas."""
    if text is None:
        return None
    with suppress(ValueError):
        numbers = tuple(map(float, text.split(",")))
        if all(map(math.isfinite, numbers)):
            return numbers
    raise ValueError(f"{name} is {text!r}; give numbers with commas, such as 0.49,0.48,0.45")
