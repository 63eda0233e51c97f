"""Saved models: predict, push, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ensbridge.cli.base import app, fail, say, tell
from ensbridge.cli.options import Allow, Device, ImageShape, Model, Quiet, allowed, numbers
from ensbridge.utils.extras import need
from ensbridge.utils.progress import progress_bars

if TYPE_CHECKING:
    from ensbridge.deploy.predict_tables import AbstractInput
    from ensbridge.deploy.predictor import PredictorConfig

FORMATS = ("onnx", "pt2", "triton")


@app.command()
def predict(
    model: Model,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Image files (PNG, JPEG, BMP, WEBP or PPM), folders, quoted globs, parquet, .npz, "
            "webdataset tar shards, or - for paths on standard input, one per line. For a model that takes "
            "no images: CSV, parquet or .npz with a row for each example.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder to write predictions to, part by part; the same command resumes."
        ),
    ] = None,
    format: Annotated[
        str, typer.Option(metavar="NAME", help="File format with --out: jsonl or parquet.")
    ] = "jsonl",
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Also give the K most likely classes.")
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch-size", "--batch", metavar="N", help="Images per batch.")
    ] = 64,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="With --out: local, or ray (Ray Data, also on a cluster).")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Ray worker processes; by default all cores but one.")
    ] = None,
    image_shape: ImageShape = None,
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Subtracted from pixels in 0 … 1: one number, or one per channel such as 0.49,0.48,0.45. "
            "Only for a model that expects normalised images.",
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Pixels are then divided by this; 0.003921569 for a model of pixels in 0 … 255.",
        ),
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

    means, stds = numbers("mean", mean), numbers("std", std)
    config = PredictorConfig(
        model,
        None if image_shape is None else parse_shape(image_shape),
        None if means is None else tuple(means),
        None if stds is None else tuple(stds),
        tuple(allowed(allow)),
        device,
        batch,
        top_k,
    )
    sources = open_inputs(inputs, sys.stdin, rows_of(model, config.image_shape))
    if out is not None:
        _predict_to_folder(config, sources, out, format, engine, workers, quiet)
        return
    if engine != "local" or format != "jsonl":
        fail("--engine and --format are of a run that writes a folder; give --out", code=2)
    failed = 0
    predictor = BatchPredictor.of(config)
    entries = (entry for source in sources for entry in source.read(0, len(source)))
    for name, outcome in predictor.outcomes(entries):
        if isinstance(outcome, str):
            failed += 1
            tell(outcome)
        else:
            print(outcome.to_json(name, predictor.kind), flush=True)
    if failed:
        raise typer.Exit(2)


def _predict_to_folder(
    config: PredictorConfig,
    sources: list[AbstractInput],
    out: Path,
    format: str,
    engine: str,
    workers: int | None,
    quiet: bool,
) -> None:
    """Predict into a folder, and say how many images there were."""
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
    say(f"{out}: {count:,} {kind_of(sources)}, {count - unreadable:,} predicted")
    if unreadable:
        tell(f"{unreadable:,} {kind_of(sources)} could not be read; they are listed in {out / UNREADABLE}")


@app.command()
def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder that FastEnsemble.save wrote.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Repository on the hub, such as user/digits.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
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
        str,
        typer.Option(
            metavar="FORMAT", help="onnx, pt2 (torch.export) or triton (a folder of a model repository)."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="File to write; by default model.onnx or model.pt2 in MODEL. For triton a folder.",
        ),
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
