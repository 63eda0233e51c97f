"""Recipes and runs: quickstart, train, evaluate, report."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from ensbridge.cli.base import app, fail, say, tell
from ensbridge.cli.options import ROOT, Allow, Quiet, Root, Seed, allowed, argument, flag, option
from ensbridge.utils.extras import need
from ensbridge.utils.progress import progress_bars
from ensbridge.utils.text import command

if TYPE_CHECKING:
    from ensbridge.evaluation.scores import Summary

NAMED = ("timm:", "torchvision:", "hf:")  # how classifiers of other libraries begin
Runs = Annotated[list[Path], argument("RUN", "Folders of runs that differ by their seeds.")]


@app.command()
def quickstart(
    out: Annotated[Path, option("DIR", "Folder of the run; the same command resumes it.")] = Path(
        "runs/quickstart"
    ),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Run the whole method on small digits: a table and a page.

    Trains five small members, bridges and every baseline on images that come with scikit-learn, in about
    three minutes on two cores, and measures all of them.

    Example: ensbridge quickstart --out runs/quickstart --seed 0
    """
    need("digits", "report")
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
    say(f"{out / 'scores.json'}\n{page}\n\n{next_steps(out, seed)}")


@app.command()
def train(
    recipe: Annotated[str, argument("RECIPE", "digits, cifar10, cifar100, tiny-imagenet or imagenet64.")],
    changes: Annotated[list[str] | None, argument("FIELD=VALUE", "Fields of the recipe to change.")] = None,
    stage: Annotated[
        list[str] | None,
        option(
            "NAME",
            "members, bridge, distill, baselines, tradeoff, capacity or all; may be repeated. "
            "By default what the table needs: members, distill, baselines.",
        ),
    ] = None,
    preset: Annotated[
        str,
        option(
            "NAME", "Settings of the method: default (ours), paper (as written) or released (as in its code)."
        ),
    ] = "default",
    schedule: Annotated[
        str,
        option(
            "NAME",
            "Epochs, batch size and learning rate: published (of our results) or paper (on CIFAR 800 "
            "epochs at batch size 128).",
        ),
    ] = "published",
    out: Annotated[
        Path | None, option("DIR", "Folder of the run, by default runs/RECIPE; the same command resumes it.")
    ] = None,
    seed: Seed = 0,
    root: Root = ROOT,
    device: Annotated[str, option("NAME", "auto (a GPU where it is faster), cpu or cuda.")] = "auto",
    budget_minutes: Annotated[
        float | None,
        option("COUNT", "Stop at a checkpoint after this time, with exit code 3; the same command resumes."),
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Print what would be trained, and exit.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe, or some of its stages.

    A stage trains the stages it builds on first, and resumes where it was stopped.

    Example: ensbridge train digits --stage baselines --out runs/digits ed_fit.augment.mixup=0

    On several GPUs: torchrun --nproc-per-node 4 -m ensbridge train cifar10
    """
    from ensbridge.experiments import Plan, train_recipe
    from ensbridge.experiments import dry_run as describe_training
    from ensbridge.experiments.table import STAGES, TABLE_STAGES
    from ensbridge.training.distributed import rank_zero_only
    from ensbridge.training.fit import TimeBudgetExceeded

    plan = Plan(recipe, preset, tuple(changes or ()), schedule, root)  # type: ignore[arg-type]
    asked = dict.fromkeys(stage or TABLE_STAGES)
    stages = tuple(dict.fromkeys(s for name in asked for s in (STAGES if name == "all" else [name])))
    folder = out or Path("runs") / recipe
    words = f"{folder} is trained: {', '.join(stages)}. To measure it: {command('evaluate', folder)}"
    try:
        with rank_zero_only() as speaks, progress_bars(quiet or not speaks) as bars:
            lines = describe_training(plan, stages, device, budget_minutes)
            if dry_run:
                words = "\n".join(lines) + f"\n\nNothing was trained. The run would be in {folder}."
            else:
                train_recipe(plan, folder, seed, stages, bars.stage, device, budget_minutes)
        if speaks:
            say(words)
    except TimeBudgetExceeded as error:
        fail(f"{budget_minutes:g} minutes are over, {error}; run the same command again to resume", code=3)


@app.command()
def evaluate(
    runs: Annotated[
        list[str],
        argument(
            "RUN",
            "Folders of runs that differ by their seeds; with --data saved models, or classifiers by "
            "name as compress takes them, such as timm:resnet18@a.pt.",
        ),
    ],
    data: Annotated[
        str | None,
        option(
            "NAME",
            "Measure saved models (a folder, zoo:… or hf:…) and classifiers on this data set, by name "
            "or path; images may be class folders, an .npz, parquet or a saved Hugging Face data set.",
        ),
    ] = None,
    corrupted: Annotated[
        Path | None, option("DIR", "Also measure on corrupted test images: a folder laid out as CIFAR-10-C.")
    ] = None,
    root: Root = ROOT,
    allow: Allow = None,
    device: Annotated[str, option("NAME", "For saved models: auto, cpu or cuda.")] = "auto",
    quiet: Quiet = False,
) -> None:
    """Measure trained runs, or saved models.

    For runs that differ by their seeds it shows mean and standard deviation, and writes scores.json into each
    folder. With --data it measures saved models, each beside its source alone.

    Example: ensbridge evaluate runs/cifar10

    Example: ensbridge evaluate zoo:cifar10 --data cifar10

    Example: ensbridge evaluate timm:resnet18@a.pt model --data photos/test
    """
    if data is not None:
        if corrupted is not None:
            fail("--corrupted is for runs; saved models are measured on --data alone", code=2)
        from ensbridge.experiments import evaluate_saved
        from ensbridge.experiments.named import evaluate_named, needs_names
        from ensbridge.utils.devices import auto_device

        if needs_names(runs, data):
            say(evaluate_named(runs, data, root, auto_device(device), allowed(allow)).table())
            return
        with progress_bars(quiet) as bars:
            for model in runs:
                bars.show(evaluate_saved(model, data, root, bars.stage, device, allowed(allow)).table())
        return
    from ensbridge.evaluation.scores import summarise
    from ensbridge.experiments import check_runs, evaluate_run
    from ensbridge.training.distributed import rank_zero_only

    folders = [Path(run) for run in runs]
    for run in folders:
        if str(run).startswith(("zoo:", *NAMED)) or (run / "model.safetensors").exists():
            fail(f"{run} is a model; say on what to measure it, such as --data cifar10", code=2)
    check_runs(folders)
    scores = []
    with rank_zero_only() as speaks, progress_bars(quiet or not speaks) as bars:
        for run in folders:
            measured, missing = evaluate_run(run, progress=bars.stage, corrupted=corrupted, root=root)
            scores.append(measured)
            if missing and speaks:
                tell(f"{run} was measured without {', '.join(missing)}")
    if speaks:
        show(summarise(scores, list(runs)))
        say("\n".join(str(run / "scores.json") for run in folders))


@app.command()
def report(
    runs: Runs,
    out: Annotated[
        Path | None, option("DIR", "Folder of the report; by default the run's, or report/ for several.")
    ] = None,
    main: Annotated[
        str | None,
        option("ROW", "Row of the bridge in the headline, such as “+1 DBN (KL)”; choose it on validation."),
    ] = None,
) -> None:
    """Make a page of tables and figures from measured runs.

    Example: ensbridge report runs/quickstart
    """
    need("report")
    from ensbridge.evaluation.scores import read_scores, summarise
    from ensbridge.report import write_report

    summary = summarise([read_scores(run) for run in runs], list(map(str, runs)), main)
    folder = runs[0] if runs[0].is_dir() else runs[0].parent
    page = write_report(summary, out or (folder if len(runs) == 1 else Path("report")))
    show(summary)
    say(str(page))


def show(summary: Summary) -> None:
    """Print the table and what it says."""
    from ensbridge.report import control_sentence, corrupted_tables, headline, paper_table, rich_table

    console = Console()
    console.print(rich_table(summary))
    if beside := paper_table(summary):
        console.print("\nThe paper's numbers beside ours:", highlight=False)
        console.print(beside)
    for table in corrupted_tables(summary):
        console.print()
        console.print(table)
    say("\n" + f"{headline(summary)} {control_sentence(summary)}".strip() + "\n")


def next_steps(out: Path, seed: int) -> str:
    """What to do after a quick start, and before it how to reach this command where a shell does not."""
    other, pages = out.parent / f"seed{seed + 1}", out.parent / "report"
    lines = {
        command(f"quickstart --seed {seed + 1} --out", other): "another seed",
        command("report", out, other, "--out", pages): "mean ± sd",
        command("bench zoo:cifar10 --runtime eager"): "a zoo model",
    }
    wide = max(map(len, lines))
    if activate := _activation():
        lines = {activate: "sets PATH"} | lines
    return "\n".join(["What to try next:", *(f"  {line:<{wide}}  # {why}" for line, why in lines.items())])


def _activation() -> str:
    """What puts this virtual environment on a shell's path; nothing where it is there, or there is none."""
    script = Path(sys.prefix) / "bin" / "activate"
    installed = shutil.which("ensbridge")
    here = installed is not None and Path(installed).resolve().parent == script.parent.resolve()
    if here or sys.prefix == sys.base_prefix or not script.is_file():
        return ""
    path = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    return f". {shlex.quote(str(path))}"
