"""Recipes and runs: quickstart, train, evaluate, report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ensbridge.cli.base import Quiet, app, fail, say, tell
from ensbridge.utils.progress import progress_bars
from ensbridge.utils.text import command

if TYPE_CHECKING:
    from ensbridge.evaluation.scores import Summary

Seed = Annotated[
    int,
    typer.Option(min=0, max=2**63 - 1, help="Decides every draw; the same seed gives the same scores."),
]
Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="Folders of runs that differ by their seeds.")
]


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder of the run; run again, it goes on.")] = Path(
        "runs/quickstart"
    ),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Train five small members, bridges and every rival on embedded digits: a table and a page.

    Example: ensbridge quickstart --out runs/quickstart --seed 0
    """
    from ensbridge.evaluation.scores import summarise
    from ensbridge.experiments import Plan, run_recipe
    from ensbridge.report import write_report
    from ensbridge.training.distributed import rank_zero_only

    with rank_zero_only() as speaks, progress_bars(quiet or not speaks) as bars:
        scores = run_recipe(Plan("digits"), out, seed, bars.stage)
    if not speaks:
        return
    summary = summarise([scores])
    page = write_report(summary, out)
    show(summary)
    say(f"{out / 'scores.json'}\n{page}")


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="digits, cifar10, cifar100, tiny-imagenet or imagenet64.")
    ],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="FIELD=VALUE", help="Fields of the recipe to change.")
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="members, bridge, distill, baselines, tradeoff, capacity or all; may be repeated."),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="default (right and fair), paper (as worded) or released (as its code).")
    ] = "default",
    schedule: Annotated[
        str,
        typer.Option(help="Length, batch and rate: published (as our results) or paper (800 epochs at 128)."),
    ] = "published",
    out: Annotated[Path | None, typer.Option(help="Folder of the run; run again, it goes on.")] = None,
    seed: Seed = 0,
    device: Annotated[str, typer.Option(help="auto (a GPU where it is worth it), cpu or cuda.")] = "auto",
    budget_minutes: Annotated[
        float | None,
        typer.Option(help="Stop at a checkpoint after so long, with exit code 3; run again, it goes on."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained, and stop.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train the stages of a recipe; each trains what it builds on, and goes on where it was stopped.

    Example: ensbridge train digits --stage baselines --out runs/digits ed_fit.augment.mixup=0

    On several GPUs: torchrun --nproc-per-node 4 -m ensbridge train cifar10
    """
    from ensbridge.experiments import Plan, train_recipe
    from ensbridge.experiments import dry_run as describe_training
    from ensbridge.experiments.table import STAGES
    from ensbridge.training.distributed import rank_zero_only
    from ensbridge.training.fit import TimeBudgetExceeded

    plan = Plan(recipe, preset, tuple(changes or ()), schedule)  # type: ignore[arg-type]
    asked = dict.fromkeys(stage or ["all"])
    stages = tuple(dict.fromkeys(s for name in asked for s in (STAGES if name == "all" else [name])))
    folder = out or Path("runs") / recipe
    words = f"{folder} is trained: {', '.join(stages)}. To measure it: {command('evaluate', folder)}"
    try:
        with rank_zero_only() as speaks, progress_bars(quiet or not speaks) as bars:
            lines = describe_training(plan, stages)
            if dry_run:
                words = "\n".join(lines) + f"\n\nNothing was trained. The run would be in {folder}."
            else:
                train_recipe(plan, folder, seed, stages, bars.stage, device, budget_minutes)
        if speaks:
            say(words)
    except TimeBudgetExceeded as error:
        fail(f"{budget_minutes:g} minutes are over, {error}; run the same command again to go on", code=3)


@app.command()
def evaluate(
    runs: Runs,
    corrupted: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Measure on corrupted test images too: a folder laid out as CIFAR-10-C is."
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Measure what is trained in run folders, write each one's scores.json, and show mean and spread.

    Example: ensbridge evaluate runs/seed0 runs/seed1 runs/seed2
    """
    from ensbridge.evaluation.scores import summarise
    from ensbridge.experiments import check_runs, evaluate_run
    from ensbridge.training.distributed import rank_zero_only

    check_runs(runs)
    scores = []
    with rank_zero_only() as speaks, progress_bars(quiet or not speaks) as bars:
        for run in runs:
            found, missing = evaluate_run(run, progress=bars.stage, corrupted=corrupted)
            scores.append(found)
            if missing and speaks:
                tell(f"{run} was measured without {', '.join(missing)}")
    if speaks:
        show(summarise(scores, list(map(str, runs))))
        say("\n".join(str(run / "scores.json") for run in runs))


@app.command()
def report(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report: the run's own, or report/ for several.")
    ] = None,
    main: Annotated[
        str | None,
        typer.Option(help="The bridge that the headline is of, as “+1 DBN (KL)”; choose it on validation."),
    ] = None,
) -> None:
    """Make one page with the table and the figures, of one run or of several seeds.

    Example: ensbridge report runs/seed0 runs/seed1 runs/seed2 --out runs/report
    """
    from ensbridge.evaluation.scores import read_scores, summarise
    from ensbridge.report import write_report

    summary = summarise([read_scores(run) for run in runs], list(map(str, runs)), main)
    own = runs[0] if runs[0].is_dir() else runs[0].parent
    page = write_report(summary, out or (own if len(runs) == 1 else Path("report")))
    show(summary)
    say(str(page))


def show(summary: Summary) -> None:
    """Print the table and what it says."""
    from ensbridge.report import corrupted_tables, headline, paper_table, rich_table

    console = Console()
    console.print(rich_table(summary))
    if beside := paper_table(summary):
        console.print("\nThe paper's numbers beside ours:", highlight=False)
        console.print(beside)
    for table in corrupted_tables(summary):
        console.print()
        console.print(table)
    say(f"\n{headline(summary)}\n")
