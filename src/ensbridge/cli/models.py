"""Saved models: predict, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ensbridge.cli.base import app, say

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder that FastEnsemble.save wrote.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(help="Package, or package.module:name, that may build a source; imported, so trust it."),
]
ImageShape = Annotated[
    str | None, typer.Option(help="Of one image, such as 3,32,32, where the model does not say.")
]


@app.command()
def predict(
    model: Model,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="PNG, JPEG or another image file.")],
    image_shape: ImageShape = None,
    mean: Annotated[
        str | None, typer.Option(help="Taken from pixels of 0 to 1, one number or one a channel.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="That pixels are then divided by.")] = None,
    allow: Allow = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Print one line of JSON an image: label, probability, the source's own, entropy (nats), disagreement.

    An image of another size is cropped around its middle and resampled. Disagreement is the total variation
    between the source's prediction and the model's: 0 where they are the same, 1 where nothing is shared.

    Example: ensbridge predict runs/model cat.png dog.jpg
    """
    from ensbridge.devices import find_device
    from ensbridge.exporting import image_like, parse_shape
    from ensbridge.predicting import Pixels, predict_files
    from ensbridge.saving import load

    fast = load(model, allow=allowed(allow))
    shape = image_like(fast, model, None if image_shape is None else parse_shape(image_shape)).shape[1:]
    pixels = Pixels.of(fast, _numbers("mean", mean), _numbers("std", std))
    failed = 0
    for path, found in predict_files(fast.to(find_device(device)), images, shape, pixels):
        if isinstance(found, str):
            failed += 1
            print(f"ensbridge: {found}", file=sys.stderr)
        else:
            print(found.to_json(str(path)), flush=True)
    if failed:
        raise typer.Exit(2)


@app.command()
def export(
    model: Model,
    to: Annotated[str, typer.Option(help="onnx, or pt2 (torch.export).")],
    out: Annotated[Path | None, typer.Option(help="The file: model.onnx or model.pt2 in MODEL.")] = None,
    image_shape: ImageShape = None,
    allow: Allow = None,
) -> None:
    """Write a model as one file for other runtimes, once it was run again and gives the same logits.

    Example: ensbridge export runs/model --to onnx --image-shape 3,32,32
    """
    from ensbridge.exporting import export_folder, parse_shape

    shape = None if image_shape is None else parse_shape(image_shape)
    say(str(export_folder(model, to, out, shape, allowed(allow))))  # type: ignore[arg-type]


def allowed(names: list[str] | None) -> list[str]:
    """What may be imported to build a source, also from the working folder, as with `python -m`."""
    if names and "" not in sys.path:
        sys.path.insert(0, "")
    return names or []


def _numbers(name: str, text: str | None) -> list[float] | None:
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
