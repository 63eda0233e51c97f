"""Saved models: predict, push, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ensbridge.cli.base import app, fail, say, tell
from ensbridge.cli.options import (
    Allow,
    Batch,
    Device,
    ImageShape,
    Model,
    Quiet,
    allowed,
    argument,
    flag,
    numbers,
    option,
)
from ensbridge.utils.extras import need
from ensbridge.utils.progress import progress_bars

FORMATS = ("onnx", "pt2", "triton")


@app.command()
def predict(
    model: Model,
    inputs: Annotated[
        list[str],
        argument(
            "INPUT",
            "Image files (PNG, JPEG, BMP, WEBP or PPM), folders, quoted globs, parquet, .npz, "
            "webdataset tar shards, or - for paths on standard input, one per line. For a model that takes "
            "no images: CSV, parquet or .npz with a row for each example.",
        ),
    ],
    out: Annotated[
        Path | None, option("DIR", "Folder to write predictions to, part by part; the same command resumes.")
    ] = None,
    format: Annotated[str, option("NAME", "File format with --out: jsonl or parquet.")] = "jsonl",
    top_k: Annotated[int | None, option("K", "Also give the K most likely classes.")] = None,
    batch: Batch = 64,
    engine: Annotated[
        str, option("NAME", "With --out: local, or ray (Ray Data, also on a cluster).")
    ] = "local",
    workers: Annotated[
        int | None, option("COUNT", "Ray worker processes; by default all cores but one.")
    ] = None,
    image_shape: ImageShape = None,
    mean: Annotated[
        str | None,
        option(
            "NUMBERS",
            "Subtracted from pixels in 0 … 1: one number, or one per channel such as 0.49,0.48,0.45. "
            "Only for a model that expects normalised images.",
        ),
    ] = None,
    std: Annotated[
        str | None,
        option("NUMBERS", "Pixels are then divided by this; 0.003921569 for a model of pixels in 0 … 255."),
    ] = None,
    allow: Allow = None,
    device: Device = "cpu",
    quiet: Quiet = False,
) -> None:
    """Predict the classes of images, or of the rows of tables.

    One line of JSON per image: the label and its probability, the same of the source alone, the entropy in
    nats, and the disagreement, the total variation distance between the source's prediction and the model's,
    from 0 (the same) to 1.

    An image of another size is center-cropped and resized, as the model's source expects where that is known;
    it is converted to grey or RGB as the model needs, 16 bits to 8, and an alpha channel is dropped. A file
    that cannot be read is named on standard error; the others are still predicted, and the exit code is 2.

    With --out, any number of images is read and written part by part, in little memory. Each image appears
    once; one that cannot be read has its error in place of a prediction, and is listed in unreadable.jsonl. A
    killed run resumes with the same command.

    Example: ensbridge predict zoo:cifar10 cat.png dog.jpg

    Example: ensbridge predict model photos/ --out predictions --format parquet --top-k 5
    """
    from ensbridge.deploy.export import parse_shape
    from ensbridge.deploy.predict_inputs import open_inputs
    from ensbridge.deploy.predict_rows import rows_of
    from ensbridge.deploy.predictor import BatchPredictor, PredictorConfig

    config = PredictorConfig(
        model,
        None if image_shape is None else parse_shape(image_shape),
        numbers("mean", mean),
        numbers("std", std),
        tuple(allowed(allow)),
        device,
        batch,
        top_k,
    )
    sources = open_inputs(inputs, sys.stdin, rows_of(model, config.image_shape))
    if out is not None:
        from ensbridge.deploy.predict_folder import UNREADABLE, kind_of, predict_to_folder

        with progress_bars(quiet) as bars:
            count, unreadable = predict_to_folder(
                config,
                sources,
                out,
                format=format,  # type: ignore[arg-type]
                engine=engine,  # type: ignore[arg-type]
                workers=workers,
                progress=bars.stage,
            )
        kind = kind_of(sources)
        say(f"{out}: {count:,} {kind}, {count - unreadable:,} predicted")
        if unreadable:
            tell(f"{unreadable:,} {kind} could not be read; they are listed in {out / UNREADABLE}")
        return
    if engine != "local" or format != "jsonl":
        fail("--engine and --format are of a run that writes a folder; give --out", code=2)
    failed = False
    predictor = BatchPredictor.of(config)
    entries = (entry for source in sources for entry in source.read(0, len(source)))
    for name, outcome in predictor.outcomes(entries):
        if isinstance(outcome, str):
            failed = True
            tell(outcome)
        else:
            print(outcome.to_json(name, predictor.kind), flush=True)
    if failed:
        raise typer.Exit(2)


@app.command()
def push(
    model: Annotated[Path, argument("MODEL", "Folder that FastEnsemble.save wrote.")],
    name: Annotated[str, argument("NAME", "Repository on the hub, such as user/digits.")],
    public: Annotated[bool, flag("--public", "Make a new repository public.")] = False,
) -> None:
    """Push a saved model to the Hugging Face hub.

    Its three files are pushed in one commit. Log in first, with `hf auth login`.

    Example: ensbridge push model user/digits
    """
    from ensbridge.deploy.saving import push as push_model

    say(push_model(model, name, private=not public))


@app.command()
def export(
    model: Model,
    to: Annotated[
        str, option("FORMAT", "onnx, pt2 (torch.export) or triton (a folder of a model repository).")
    ],
    out: Annotated[
        Path | None,
        option("PATH", "File to write; by default model.onnx or model.pt2 in MODEL. For triton a folder."),
    ] = None,
    image_shape: ImageShape = None,
    allow: Allow = None,
) -> None:
    """Export a model to ONNX, torch.export (pt2) or Triton.

    The file takes batches of any size. It is run beside the model on many inputs, and kept only if it gives
    the same logits.

    Example: ensbridge export zoo:cifar10 --to onnx --out cifar10.onnx
    """
    from ensbridge.deploy.export import export_folder, image_like, parse_shape

    if to not in FORMATS:
        raise ValueError(f"--to is {to!r}; it must be one of {', '.join(FORMATS)}")
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
