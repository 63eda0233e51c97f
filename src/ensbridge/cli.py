"""The commands, each a thin call into the package.

Nothing here imports torch before a command needs it. Bad input ends with one sentence and exit code 2.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ensbridge import __version__
from ensbridge.progress import progress_bars

if TYPE_CHECKING:
    from ensbridge.scores import Summary

app = typer.Typer(
    help="Ensemble quality for about 1.2 times the cost of one network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line; errors of the user's making become one sentence and exit code 2."""
    warnings.showwarning = lambda message, *_: print(f"ensbridge: {message}", file=sys.stderr)
    try:
        app()
    except (ValueError, OSError) as error:
        fail(str(error), code=2)
    except ImportError as error:
        fail(f"{error.name} is not installed; pip install 'ensbridge[quickstart]'", code=2)
    except FloatingPointError as error:
        fail(str(error), code=1)
    except SystemExit as leaving:
        if leaving.code == 130:  # what typer makes of an interrupt
            fail("interrupted; run the same command again to go on", code=130)
        raise


def fail(sentence: str, code: int) -> None:
    """Say one sentence on standard error and exit."""
    print(f"ensbridge: {sentence}", file=sys.stderr)
    raise SystemExit(code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ensbridge {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Ensemble quality for about 1.2 times the cost of one network."""


Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]
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
    from ensbridge.recipes import Plan, run_recipe
    from ensbridge.report import write_report
    from ensbridge.scores import summarise

    with progress_bars(quiet) as reporter:
        scores = run_recipe(Plan("digits"), out, seed, reporter)
    summary = summarise([scores])
    page = write_report(summary, out)
    show(summary)
    say(f"{out / 'scores.json'}\n{page}")


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="The recipe's name: digits.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="FIELD=VALUE", help="Fields of the recipe to change.")
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="members, bridge, distill, rivals, tradeoff, capacity or all; may be repeated."),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="default (right and fair), paper (as worded) or released (as its code).")
    ] = "default",
    out: Annotated[Path | None, typer.Option(help="Folder of the run; run again, it goes on.")] = None,
    seed: Seed = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained, and stop.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train the stages of a recipe; each trains what it builds on, and goes on where it was stopped.

    Example: ensbridge train digits --stage rivals --out runs/digits ed_fit.augment.mixup=0
    """
    from ensbridge.recipes import Plan, outline, train_recipe
    from ensbridge.recipes.run import ALL_STAGES

    plan = Plan(recipe, preset, tuple(changes or ()))  # type: ignore[arg-type]
    asked = dict.fromkeys(stage or ["all"])
    stages = tuple(dict.fromkeys(s for name in asked for s in (ALL_STAGES if name == "all" else [name])))
    folder = out or Path("runs") / recipe
    lines = outline(plan.recipe(), stages)
    if dry_run:
        say("\n".join(lines) + f"\n\nNothing was trained. The run would be in {folder}.")
        return
    with progress_bars(quiet) as reporter:
        train_recipe(plan, folder, seed, stages, reporter)
    say(f"{folder} is trained: {', '.join(stages)}. To measure it: ensbridge evaluate {folder}")


@app.command()
def evaluate(runs: Runs, quiet: Quiet = False) -> None:
    """Measure what is trained in run folders, write each one's scores.json, and show mean and spread.

    Example: ensbridge evaluate runs/seed0 runs/seed1 runs/seed2
    """
    from ensbridge.recipes import evaluate_run
    from ensbridge.scores import summarise

    scores = []
    with progress_bars(quiet) as reporter:
        advance = reporter.stage("evaluate", len(runs))
        for run in runs:
            found, missing = evaluate_run(run)
            scores.append(found)
            advance(1)
            if missing:
                print(f"ensbridge: {run} was measured without {', '.join(missing)}", file=sys.stderr)
    show(summarise(scores, list(map(str, runs))))
    say("\n".join(str(run / "scores.json") for run in runs))


@app.command()
def report(
    runs: Runs,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report: the run's own, or report/ for several.")
    ] = None,
) -> None:
    """Make one page with the table and the figures, of one run or of several seeds.

    Example: ensbridge report runs/seed0 runs/seed1 runs/seed2 --out runs/report
    """
    from ensbridge.report import write_report
    from ensbridge.scores import read_scores, summarise

    summary = summarise([read_scores(run) for run in runs], list(map(str, runs)))
    own = runs[0] if runs[0].is_dir() else runs[0].parent
    page = write_report(summary, out or (own if len(runs) == 1 else Path("report")))
    show(summary)
    say(str(page))


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


def show(summary: Summary) -> None:
    """Print the table and what it says."""
    from ensbridge.report import headline, paper_table, rich_table

    console = Console()
    console.print(rich_table(summary))
    if beside := paper_table(summary):
        console.print("\nThe paper's numbers beside ours:", highlight=False)
        console.print(beside)
    say(f"\n{headline(summary)}\n")


def say(text: str) -> None:
    """Print text as it is."""
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
