"""From members that are named to a saved model, and how near that comes to them: compress, fidelity."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ensbridge.cli.base import ROOT, Quiet, Root, app, say, tell
from ensbridge.cli.models import Allow, Model, allowed

if TYPE_CHECKING:
    from ensbridge.deploy.members import Overrides

Members = Annotated[
    list[str],
    typer.Argument(
        metavar="MEMBER…",
        help="Classifiers, the source first: timm:NAME@FILE, torchvision:NAME@FILE, hf:USER/NAME or "
        "hf:FOLDER, a saved model, or FILE.pt2. Behind each ,size=32 ,mean=0.5/0.5/0.5 ,std=… or ,crop=1 may "
        "say what it was trained on. A .pt2 is a program that is run: give only those you trust.",
    ),
]
Size = Annotated[
    str | None,
    typer.Option(metavar="N", help="Height and width that all members take, such as 32 or 32x48."),
]
Mean = Annotated[str | None, typer.Option(metavar="NUMBERS", help="Mean of all members' pixels of 0 to 1.")]
Std = Annotated[str | None, typer.Option(metavar="NUMBERS", help="Standard deviation, alike.")]
DATA = (
    "Images: class folders, a folder of images without labels, an .npz, parquet, a saved Hugging Face data "
    "set, or a known set's name."
)


@app.command()
def compress(
    members: Members,
    data: Annotated[str, typer.Option(metavar="DIR", help=f"For training. {DATA}")],
    out: Annotated[Path, typer.Option(metavar="MODEL", help="Folder of the model.")],
    val: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Labelled images that choose and calibrate; else a tenth of --data."
        ),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Images on which the result is compared with the members at the end."
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="×", help="What it may cost, in MACs of the first member.")
    ] = 1.2,
    source: Annotated[
        str, typer.Option(metavar="KIND", help="auto, frozen (the first member as it is) or distilled.")
    ] = "auto",
    minutes: Annotated[
        float | None, typer.Option(metavar="COUNT", help="How long to train; 3 unless --epochs is given.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(metavar="COUNT", help="Passes over the images.")] = None,
    bridges: Annotated[int, typer.Option(metavar="COUNT", help="How many bridges share the budget.")] = 1,
    feature: Annotated[
        str | None, typer.Option(metavar="MODULE", help="What bridges read of the source, such as layer1.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="IMAGES", help="Images in a training batch.")] = 128,
    crop: Annotated[int, typer.Option(metavar="PIXELS", help="Augment by shifts of so many pixels.")] = 0,
    flip: Annotated[bool, typer.Option("--flip", help="Augment by mirror images.")] = False,
    size: Size = None,
    mean: Mean = None,
    std: Std = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu or cuda; by default a GPU where there is one.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keeps the training's state: the same command resumes it."),
    ] = None,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Images of more bytes are streamed from disk, not held.")
    ] = "512MB",
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keeps the members' outputs for another run; without augmentation."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed.")] = 0,
    license: Annotated[
        str | None, typer.Option(metavar="NAME", help="For the model card, such as apache-2.0.")
    ] = None,
    root: Root = ROOT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")] = False,
    quiet: Quiet = False,
) -> None:
    """Make one model of several trained classifiers.

    It keeps the first member, or distils all of them into a copy of it, and trains small bridges beside it;
    labelled validation images choose. The model is written with its card, and needs none of the members.

    Images of files are resized and cropped as the first member wants them, then normalised for each member as
    its library says: what is taken is printed first, and --size, --mean and --std say otherwise.

    Example: ensbridge compress timm:resnet18@a.safetensors timm:resnet18@b.pt --data photos/train --val
    photos/val --out model

    On several GPUs: torchrun --nproc-per-node 4 -m ensbridge compress …
    """
    from ensbridge.data.augment import Augment
    from ensbridge.evaluation.choices import choices_table
    from ensbridge.experiments.named import DataNames, compress_named
    from ensbridge.training.distributed import rank_zero_only

    with rank_zero_only() as speaks:
        fast, fidelity = compress_named(
            members,
            DataNames(data, val, test, root),
            out,
            overrides(size, mean, std),
            license=license,
            say=tell if speaks and not quiet else (lambda _: None),
            writes=speaks,
            budget=budget,
            source=source,
            max_minutes=minutes,
            epochs=epochs,
            bridges=bridges,
            feature=None if feature is None else f"net.{feature.removeprefix('net.')}",
            batch_size=batch,
            augment=Augment(crop=crop, flip=flip) if crop or flip else None,
            device=device,
            run_dir=run_dir,
            memory=memory,
            cache=cache,
            seed=seed,
            quiet=quiet or not speaks,
        )
    if not speaks:
        return
    if as_json:
        choices = [asdict(choice) for choice in fast.choices]
        found = None if fidelity is None else asdict(fidelity)
        print(json.dumps({"model": str(out), "choices": choices, "fidelity": found}, indent=1))
        return
    if fast.choices and (quiet or not sys.stdout.isatty()):  # a terminal has it from the training
        say(choices_table(fast.choices))
    if fidelity is not None:
        say(str(fidelity))
    say(f"{out} is saved; to use it: ensbridge predict {out} IMAGE…")


@app.command()
def fidelity(
    model: Model,
    members: Annotated[
        list[str],
        typer.Option(metavar="MEMBER", help="A member, as compress takes it; once for each, in order."),
    ],
    data: Annotated[str, typer.Option(metavar="DIR", help=f"Test images. {DATA}")],
    size: Size = None,
    mean: Mean = None,
    std: Std = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.")] = "cpu",
    root: Root = ROOT,
    allow: Allow = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare a model with the real ensemble of its members.

    How near it comes (KL, agreement), what both cost, and with labels accuracy, NLL, Brier score and ECE,
    with a verdict: worth it or not, and why.

    Example: ensbridge fidelity model --members timm:resnet18@a.pt --members timm:resnet18@b.pt --data test
    """
    from ensbridge.deploy.saving import load
    from ensbridge.experiments.named import fidelity_named
    from ensbridge.utils.devices import find_device

    fast = load(model, allow=allowed(allow))
    found = fidelity_named(fast, members, data, root, overrides(size, mean, std), find_device(device))
    print(json.dumps(asdict(found), indent=1)) if as_json else say(str(found))


def overrides(size: str | None, mean: str | None, std: str | None) -> Overrides:
    """What options say of the members' input."""
    from ensbridge.deploy.members import Overrides, parse_setting

    given = {"size": size, "mean": mean, "std": std}
    return Overrides(**{key: parse_setting(key, text) for key, text in given.items() if text is not None})
