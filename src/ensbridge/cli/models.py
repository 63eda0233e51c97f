"""Saved models: predict, push, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ensbridge.cli.base import Quiet, app, fail, say, tell
from ensbridge.utils.extras import need
from ensbridge.utils.progress import progress_bars

if TYPE_CHECKING:
    from ensbridge.deploy.predict_tables import AbstractInput
    from ensbridge.deploy.predictor import PredictorConfig

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
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Image files (PNG, JPEG, BMP, WEBP or PPM), folders, globs in quotes, parquet, .npz, tar "
            "shards of webdataset, or - for paths on standard input, one a line.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write the predictions here, part by part; the same command resumes."
        ),
    ] = None,
    format: Annotated[str, typer.Option(metavar="NAME", help="Of --out: jsonl or parquet.")] = "jsonl",
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="The K likeliest classes with their probabilities, too.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="IMAGES", help="Images in a batch.")] = 64,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Of --out: local, or ray (Ray Data, also on a cluster).")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Processes of ray; by default a core is left free.")
    ] = None,
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
    quiet: Quiet = False,
) -> None:
    """Say what a model sees in images.

    One line of JSON an image: the label and its probability, the source's own, the entropy in nats, and the
    disagreement, the total variation between the source's prediction and the model's: 0 where they are the
    same, 1 where nothing is shared.

    An image of another size is cropped around its middle and resampled, as the model's source wants it where
    that is known; grey and colour become what the model takes, 16 bits become 8, and transparency is left
    out. A file that cannot be read is named on standard error; the others are predicted all the same, and the
    exit code is 2.

    With --out, files of any number of images are read and written part by part, in little memory. Each image
    stands once in the parts; one that cannot be read stands there with its error, and in unreadable.jsonl. A
    run that was killed resumes with the same command.

    Example: ensbridge predict zoo:cifar10 cat.png dog.jpg

    Example: ensbridge predict model photos/ --out predictions --format parquet --top-k 5
    """
    from ensbridge.deploy.export import parse_shape
    from ensbridge.deploy.predict_inputs import open_inputs
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
    sources = open_inputs(inputs, sys.stdin)
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
            print(outcome.to_json(name), flush=True)
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
    from ensbridge.deploy.predict_folder import UNREADABLE, predict_to_folder

    with progress_bars(quiet) as bars:
        images, unreadable = predict_to_folder(
            config,
            sources,
            out,
            format=format,  # type: ignore[arg-type]
            engine=engine,  # type: ignore[arg-type]
            workers=workers,
            progress=bars.stage,
        )
    say(f"{out}: {images:,} images, {images - unreadable:,} predicted")
    if unreadable:
        tell(f"{unreadable:,} images could not be read; they are listed in {out / UNREADABLE}")


@app.command()
def push(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder that was saved.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Repository on the hub, such as user/digits.")],
    public: Annotated[bool, typer.Option("--public", help="Let everybody see a new repository.")] = False,
) -> None:
    """Put a saved model on the Hugging Face hub.

    Its three files arrive together in one commit. Log in first, with `hf auth login`.

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
    """Write a model for other runtimes: ONNX, pt2 or Triton.

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
