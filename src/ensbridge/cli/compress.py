"""From members that are named to a saved model, and how near that comes to them: compress, fidelity."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ensbridge.cli.base import app, say, tell
from ensbridge.cli.options import (
    ROOT,
    Allow,
    Batch,
    Device,
    Model,
    Quiet,
    Root,
    Seed,
    allowed,
    argument,
    flag,
    option,
)

if TYPE_CHECKING:
    from ensbridge.deploy.members import Overrides

Members = Annotated[
    list[str],
    argument(
        "MEMBER…",
        "Classifiers, the source first: timm:NAME@FILE, torchvision:NAME@FILE, hf:USER/NAME or "
        "hf:FOLDER, a saved model, or FILE.pt2. Append ,size=32 ,mean=0.5/0.5/0.5 ,std=… or ,crop=1 where "
        "one expects other input than its library says. A .pt2 is a program that is run: give only those you "
        "trust.",
    ),
]
Size = Annotated[str | None, option("N", "Input size of all members, such as 32, or 32x48 (height x width).")]
Mean = Annotated[str | None, option("NUMBERS", "Mean that all members normalise pixels of 0 … 1 with.")]
Std = Annotated[str | None, option("NUMBERS", "Standard deviation of the same.")]
DATA = (
    "A folder with one subfolder per class, a folder of images without labels, an .npz, parquet, a saved "
    "Hugging Face data set, or a known set's name."
)


@app.command()
def compress(
    members: Members,
    data: Annotated[str, option("DIR", f"Training images. {DATA}")],
    out: Annotated[Path, option("MODEL", "Folder to save the model to.")],
    val: Annotated[
        str | None,
        option("DIR", "Labelled validation images, to choose and calibrate; by default a tenth of --data."),
    ] = None,
    test: Annotated[
        str | None, option("DIR", "Test images, to compare the result with the ensemble at the end.")
    ] = None,
    budget: Annotated[float, option("RATIO", "Inference cost allowed, in MACs of the first member.")] = 1.2,
    source: Annotated[str, option("KIND", "auto, frozen (the first member as it is) or distilled.")] = "auto",
    minutes: Annotated[float | None, option("COUNT", "Training time; 3 unless --epochs is given.")] = None,
    epochs: Annotated[
        float | None, option("COUNT", "Passes over the training images, in place of --minutes.")
    ] = None,
    bridges: Annotated[int, option("COUNT", "How many bridges share the budget.")] = 1,
    feature: Annotated[
        str | None, option("MODULE", "Module of the source that bridges read, such as layer1.")
    ] = None,
    batch: Batch = 128,
    crop: Annotated[int, option("PIXELS", "Augment by random crops with this much padding.")] = 0,
    flip: Annotated[bool, flag("--flip", "Augment by random horizontal flips.")] = False,
    label_weight: Annotated[
        float, option("SHARE", "Share of the training labels in the loss, 0 to 1; members have the rest.")
    ] = 0.0,
    size: Size = None,
    mean: Mean = None,
    std: Std = None,
    device: Annotated[str | None, option("NAME", "cpu or cuda; by default a GPU where there is one.")] = None,
    run_dir: Annotated[
        Path | None, option("DIR", "Folder for checkpoints; the same command resumes from it.")
    ] = None,
    memory: Annotated[str, option("SIZE", "Data larger than this is streamed from disk.")] = "512MB",
    cache: Annotated[
        Path | None, option("DIR", "Folder to cache the members' outputs in; not with augmentation.")
    ] = None,
    seed: Seed = 0,
    license: Annotated[str | None, option("NAME", "License on the model card, such as apache-2.0.")] = None,
    root: Root = ROOT,
    as_json: Annotated[bool, flag("--json", "Print one JSON document at the end.")] = False,
    quiet: Quiet = False,
) -> None:
    """Compress several trained classifiers into one model.

    It keeps the first member, or distils all of them into a copy of it, and trains small bridges beside it;
    labelled validation images decide. The model is saved with its card, and needs none of the members.

    Images are resized and cropped as the first member expects, then normalised for each member as its library
    says. The settings are printed first; --size, --mean and --std override them.

    Example: ensbridge compress timm:resnet18@a.safetensors timm:resnet18@b.pt --data photos/train --val
    photos/val --out model

    On several GPUs: torchrun --nproc-per-node 4 -m ensbridge compress …
    """
    from ensbridge.data.augment import Augment
    from ensbridge.evaluation.choices import choices_table
    from ensbridge.experiments.named import compress_named
    from ensbridge.training.distributed import rank_zero_only

    with rank_zero_only() as speaks:
        fast, fidelity = compress_named(
            members,
            data,
            out,
            overrides(size, mean, std),
            val=val,
            test=test,
            root=root,
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
            label_weight=label_weight,
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
        figures = None if fidelity is None else asdict(fidelity)
        print(json.dumps({"model": str(out), "choices": choices, "fidelity": figures}, indent=1))
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
        list[str], option("MEMBER", "A member, as compress takes it; once for each, in order.")
    ],
    data: Annotated[str, option("DIR", f"Test images. {DATA}")],
    size: Size = None,
    mean: Mean = None,
    std: Std = None,
    device: Device = "cpu",
    root: Root = ROOT,
    allow: Allow = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON document.")] = False,
) -> None:
    """Compare a model with the real ensemble of its members.

    It prints KL, agreement and cost, with labels also accuracy, NLL, Brier score and ECE, and a verdict:
    worth it or not, and why.

    Example: ensbridge fidelity model --members timm:resnet18@a.pt --members timm:resnet18@b.pt --data test
    """
    from ensbridge.deploy.saving import load
    from ensbridge.experiments.named import fidelity_named
    from ensbridge.utils.devices import find_device

    fast = load(model, allow=allowed(allow))
    measured = fidelity_named(fast, members, data, root, overrides(size, mean, std), find_device(device))
    print(json.dumps(asdict(measured), indent=1)) if as_json else say(str(measured))


def overrides(size: str | None, mean: str | None, std: str | None) -> Overrides:
    """What options say of the members' input."""
    from ensbridge.deploy.members import Overrides, parse_setting

    given = {"size": size, "mean": mean, "std": std}
    return Overrides(**{key: parse_setting(key, text) for key, text in given.items() if text is not None})
