"""Saved models: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ensbridge.cli.base import app, say


@app.command()
def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder that FastEnsemble.save wrote.")],
    to: Annotated[str, typer.Option(help="onnx, or pt2 (torch.export).")],
    out: Annotated[Path | None, typer.Option(help="The file: model.onnx or model.pt2 in MODEL.")] = None,
    image_shape: Annotated[
        str | None, typer.Option(help="Of one image, such as 3,32,32, where the model's card has none.")
    ] = None,
) -> None:
    """Write a model as one file for other runtimes, once it was run again and gives the same logits.

    Example: ensbridge export runs/model --to onnx --image-shape 3,32,32
    """
    from ensbridge.exporting import export_folder, parse_shape

    shape = None if image_shape is None else parse_shape(image_shape)
    say(str(export_folder(model, to, out, shape)))  # type: ignore[arg-type]
