"""Options and arguments that several commands share."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path("data")
Root = Annotated[
    Path,
    typer.Option(envvar="ENSBRIDGE_DATA", metavar="DIR", help="Folder of the data sets.", show_default=True),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def _check_seed(seed: int) -> int:
    """A callback in place of `min` and `max`, which help would print in full."""
    if not 0 <= seed < 2**63:
        raise typer.BadParameter(f"{seed} is not a whole number from 0 to {2**63 - 1}")
    return seed


Seed = Annotated[
    int,
    typer.Option(metavar="N", callback=_check_seed, help="Random seed; the same seed gives the same result."),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.")]
Batch = Annotated[int, typer.Option("--batch-size", "--batch", metavar="N", help="Images per batch.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder that FastEnsemble.save wrote, zoo:cifar10 (ships with ensbridge) or hf:user/name (hub).",
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Code that may be imported to build a source network that is not ensbridge's own: module:name "
        "for one class or function, or a module for all of its network classes. It is called with arguments "
        "from the model's config.json, and is also looked for in the working folder, so name only what you "
        "trust. May be repeated.",
    ),
]
ImageShape = Annotated[
    str | None,
    typer.Option(
        metavar="C,H,W", help="Shape of one image, such as 3,32,32; by default the one saved with the model."
    ),
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
