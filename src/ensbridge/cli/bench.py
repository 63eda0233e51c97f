"""What a saved model costs beside one member and ensembles: bench."""

from __future__ import annotations

import json
from typing import Annotated

from rich.console import Console

from ensbridge.cli.base import app, say
from ensbridge.cli.options import Allow, Device, ImageShape, Model, Quiet, allowed, flag, option
from ensbridge.utils.extras import need
from ensbridge.utils.progress import progress_bars


@app.command()
def bench(
    model: Model,
    runtime: Annotated[
        list[str] | None,
        option("NAME", "eager, compiled or onnxruntime; may be repeated. By default all three."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        option("N", "Images per batch; may be repeated. By default 1 and 128.", "--batch-size", "--batch"),
    ] = None,
    threads: Annotated[
        int | None, option("COUNT", "Threads, each on a core; by default one per core.")
    ] = None,
    rounds: Annotated[int, option("COUNT", "Times that each model is timed; ratios need 6 or more.")] = 20,
    seconds: Annotated[
        float, option("SECONDS", "Time limit for each runtime and batch size; no new round starts after it.")
    ] = 180,
    device: Device = "cpu",
    image_shape: ImageShape = None,
    allow: Allow = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON document at the end instead of tables.")] = False,
    quiet: Quiet = False,
) -> None:
    """Time a model beside one network and deep ensembles.

    MACs, parameters and memory are measured too. "One member" is the model's source alone, DE-2 … DE-M are
    ensembles of copies of it, M being the number of members that the model stands for, at most 10. Each table
    is printed as soon as it is measured. Compiling may take minutes per model; --runtime eager --runtime
    onnxruntime skips it.

    Every round times all models in a new order; ratios to one member are taken within a round. A ratio is not
    printed where its spread, or its 95 % interval, is wider than the difference it would claim. Memory is the
    weights and what a call needs beside them; on the CPU it is the growth of the process, too coarse below
    2 MB.

    Example: ensbridge bench zoo:cifar10 --runtime onnxruntime --threads 2
    """
    if "onnxruntime" in (runtime or ()):
        need("export")
    from ensbridge.deploy.benchmark import bench_folder
    from ensbridge.deploy.benchmark.text import headline, rich_costs, rich_table
    from ensbridge.deploy.export import parse_shape
    from ensbridge.utils.devices import find_device

    with progress_bars(quiet) as bars:
        benchmark = bench_folder(
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
            **({} if as_json else {"tell": lambda table: bars.show(rich_table(table))}),
        )
    if as_json:
        print(json.dumps(benchmark.to_json(), indent=1))
        return
    if costs := rich_costs(benchmark):
        Console().print(costs)
    say(
        f"{benchmark.machine['device']}, {benchmark.threads} threads; times are of one batch; "
        f"{benchmark.stand_ins}; {benchmark.memory_means}.\n\n{headline(benchmark)}"
    )
