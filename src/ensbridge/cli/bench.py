"""What a saved model costs beside one member and ensembles: bench."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from ensbridge.cli.base import Quiet, app, say
from ensbridge.cli.models import Allow, ImageShape, Model, allowed
from ensbridge.progress import progress_bars


@app.command()
def bench(
    model: Model,
    runtime: Annotated[
        list[str] | None, typer.Option(help="eager, compiled or onnxruntime; may be repeated. All three.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Images in a batch; may be repeated. 1 and 128.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads, on as many cores: all that this process may use.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each model is timed, 6 or more for ratios.")] = 20,
    seconds: Annotated[
        float, typer.Option(help="No round begins after these, for each runtime and batch size.")
    ] = 180,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    image_shape: ImageShape = None,
    allow: Allow = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    quiet: Quiet = False,
) -> None:
    """Time one member, source + bridge and DE-2 … DE-M in one run, with MACs, parameters and memory.

    Every round times all models, in a new order; ratios to one member are of the same round. A ratio whose
    spread, or 95 % interval, is wider than the difference that it would claim is not printed.

    Example: ensbridge bench runs/model --runtime onnxruntime --threads 2
    """
    from ensbridge.benching import bench_folder
    from ensbridge.benching.words import headline, rich_tables
    from ensbridge.devices import find_device
    from ensbridge.exporting import parse_shape

    with progress_bars(quiet) as bars:
        found = bench_folder(
            model,
            image_shape=None if image_shape is None else parse_shape(image_shape),
            allow=allowed(allow),
            device=str(find_device(device)),
            **({"runtimes": runtime} if runtime else {}),
            **({"batches": batch} if batch else {}),
            threads=threads,
            rounds=rounds,
            seconds=seconds,
            begin=bars.stage,
        )
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
        return
    console = Console()
    for table in rich_tables(found):
        console.print(table)
    say(
        f"{found.machine['device']}, {found.threads} threads; times are of one batch; {found.stand_ins}.\n\n"
        f"{headline(found)}"
    )
