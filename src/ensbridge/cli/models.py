"""Saved models: predict, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ensbridge.cli.base import app, say, tell
from ensbridge.utils.extras import need

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
        help="What may build a source that is not ensbridge's own: module:name, a class or function that "
        "may be called with the arguments in its config.json; or a module, for its network classes. It is "
        "imported, also from the working folder, so trust it. May be repeated.",
    ),
]
ImageShape = Annotated[
    str | None,
    typer.Option(
        metavar="C,H,W", help="Shape of one image, such as 3,32,32; by default what the model says."
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu or cuda.")]


@app.command()
def predict(
    model: Model,
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE", help="Image files: PNG, JPEG, BMP, WEBP or PPM.")
    ],
    image_shape: ImageShape = None,
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Subtracted from pixels of 0 to 1: one number, or one a channel such as 0.49,0.48,0.45. "
            "Only for a model whose training images were normalised.",
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="What pixels are then divided by, alike; 0.003921569 for a model of pixels from 0 to 255.",
        ),
    ] = None,
    allow: Allow = None,
    device: Device = "cpu",
) -> None:
    """Say what a model sees in image files.

    One line of JSON an image: the label and its probability, the source's own, the entropy in nats, and the
    disagreement, the total variation between the source's prediction and the model's: 0 where they are the
    same, 1 where nothing is shared.

    An image of another size is cropped around its middle and resampled; grey and colour become what the model
    takes, 16 bits become 8, and transparency is left out. A file that cannot be read is named on standard
    error; the others are predicted all the same, and the exit code is 2.

    Example: ensbridge predict zoo:cifar10 cat.png dog.jpg
    """
    from ensbridge.deploy.batch import Pixels, predict_files
    from ensbridge.deploy.export import image_like, parse_shape
    from ensbridge.deploy.saving import load
    from ensbridge.utils.devices import find_device

    fast = load(model, allow=allowed(allow))
    shape = image_like(fast, model, None if image_shape is None else parse_shape(image_shape)).shape[1:]
    pixels = Pixels.of(fast, numbers("mean", mean), numbers("std", std))
    failed = 0
    for path, found in predict_files(fast.to(find_device(device)), images, shape, pixels):
        if isinstance(found, str):
            failed += 1
            tell(found)
        else:
            print(found.to_json(str(path)), flush=True)
    if failed:
        raise typer.Exit(2)


@app.command()
def export(
    model: Model,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="onnx, pt2 (torch.export) or triton (a model of its repository)."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="What to write; by default model.onnx or model.pt2 in MODEL. For triton a folder.",
        ),
    ] = None,
    image_shape: ImageShape = None,
    allow: Allow = None,
) -> None:
    """Write a model as one file for other runtimes, or as a folder for Triton.

    The file takes batches of any size. It is run again beside the model on many inputs, and kept only if it
    gives the same logits.

    Example: ensbridge export zoo:cifar10 --to onnx --out cifar10.onnx
    """
    from ensbridge.deploy.export import export_folder, image_like, parse_shape

    shape = None if image_shape is None else parse_shape(image_shape)
    if to == "triton":
        need("export")
        from ensbridge.deploy.saving import load
        from ensbridge.deploy.triton import export_triton

        if out is None:
            raise ValueError("triton needs a folder; say where with --out repository/name")
        fast = load(model, allow=allowed(allow))
        say(str(export_triton(fast, out, image_like(fast, model, shape))))
        return
    say(str(export_folder(model, to, out, shape, allowed(allow))))  # type: ignore[arg-type]


def allowed(names: list[str] | None) -> list[str]:
    """What may be imported to build a source, also from the working folder."""
    if names and "" not in sys.path:
        sys.path.append("")  # behind all others: no file that lies there takes an installed package's place
    return names or []


def numbers(name: str, text: str | None) -> list[float] | None:
    """Numbers as they are typed, with commas."""
    if text is None:
        return None
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        numbers = [float("nan")]
    if not all(abs(each) < float("inf") for each in numbers):
        raise ValueError(f"{name} is {text!r}; give numbers with commas, such as 0.49,0.48,0.45")
    return numbers
