"""A recipe from its start to `scores.json`: `train_recipe` and `evaluate_run`, and both in `run_recipe`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ensbridge._aliases import upgrade_config
from ensbridge.data.examples import ImageSet
from ensbridge.evaluation.evaluate import Evaluator, environment
from ensbridge.evaluation.robustness import CORRUPTED_FILE, add_corrupted, check_corrupted
from ensbridge.evaluation.scores import (
    ModelInfo,
    Row,
    Scores,
    Transition,
    name_by_teachers,
    name_rows,
    read_scores,
    summarise,
)
from ensbridge.experiments.jobs import Table, TableModel, outline
from ensbridge.experiments.parts import trained_ensemble
from ensbridge.experiments.plan import Plan
from ensbridge.experiments.recipe import HEADLINE_FIELDS, Recipe, describe
from ensbridge.experiments.runner import Run, one_thread
from ensbridge.experiments.table import HEADLINE, STAGES, TABLE_STAGES, experiment_of
from ensbridge.experiments.transitions import find_transitions
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.training.checkpoint import RunFolder
from ensbridge.training.distributed import join
from ensbridge.utils.devices import find_device
from ensbridge.utils.files import locked, opened_folder, read_json, write_atomically
from ensbridge.utils.progress import Stage, silent


def train_recipe(
    plan: Plan | Recipe,
    out: Path | str,
    seed: int = 0,
    stages: Sequence[str] = TABLE_STAGES,
    progress: Stage = silent,
    device: str = "auto",
    minutes: float | None = None,
) -> None:
    """Train the stages of a recipe in the folder `out`, or what is left of them; members come first.

    It trains on a GPU where there is one and the recipe is worth it, or on `device`. After so many `minutes`
    it stops at a checkpoint with `TimeBudgetExceeded`, and resumes when it is called again.
    """
    _check_minutes(minutes)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    for stage in stages:
        if stage not in STAGES:
            raise ValueError(f"{stage!r} is not a stage; there are: {', '.join(STAGES)}")
    with _opened(plan, Path(out), seed, progress, True, device) as (run, _):
        run.deadline = deadline
        run.train(run.experiment.of_stages(stages))


def _check_minutes(minutes: float | None) -> None:
    if minutes is not None and not minutes > 0:
        raise ValueError(f"the budget is {minutes:g} minutes; it must be above 0")


def dry_run(
    plan: Plan | Recipe,
    stages: Sequence[str] = TABLE_STAGES,
    device: str = "auto",
    minutes: float | None = None,
) -> list[str]:
    """What `train_recipe` would train, in lines of text.

    >>> print(*dry_run(Plan("digits"), ["bridge"]), sep="\\n")
    members   5 × member                              30 epochs of 600 images, batches of 50: 360 steps
    bridges   4 × bridge (5 steps)                    64 epochs of 600 images, batches of 64: 600 steps
    bridges   4 × bridge (KL)                         72 epochs of 600 images, batches of 64: 675 steps
    """
    recipe = plan.recipe() if isinstance(plan, Plan) else plan.check()
    _check_minutes(minutes)
    choose_device(device, recipe)
    jobs = experiment_of(recipe, seed=0).of_stages(stages)
    images = recipe.train_images
    if not images:
        data = recipe.load()
        recipe.try_networks(data)
        images = len(data.train)
    return outline(jobs, images)


def evaluate_run(
    out: Path | str,
    plan: Plan | Recipe | None = None,
    progress: Stage = silent,
    device: str = "auto",
    corrupted: Path | str | None = None,
    root: Path | None = None,
) -> tuple[Scores, list[str]]:
    """Measure what is trained in a run folder and write its `scores.json`; also returns what is missing.

    The folder names its recipe; `plan` is for recipes of one's own, which no name finds. With a folder of
    `corrupted` test images the models are measured on those too. `root` is where data sets lie; `progress`
    counts every image that a network predicts.
    """
    out = Path(out)
    named, seed = read_plan(out)
    plan = replace(named, root=root) if plan is None else plan
    with _opened(plan, out, seed, progress, False, device) as (run, recipe):
        if corrupted is not None:
            check_corrupted(corrupted, run.data.test)
        scores, missing = _measure(run, recipe, named, corrupted)
        if run.is_first:
            write_atomically(out / "scores.json", scores.to_json().encode())
    return scores, missing


def check_runs(runs: Sequence[Path | str]) -> None:
    """Refuse folders that are no runs, or runs that cannot be averaged, before any of them is measured."""
    empty = []
    for run in runs:
        plan, seed = read_plan(Path(run))
        recipe = plan.recipe()
        settings = _settings(plan, recipe)
        empty.append(
            Scores(recipe.name, seed, recipe.class_names, {}, (), settings=settings, target=recipe.target)
        )
    summarise(empty, list(map(str, runs)))


def run_recipe(plan: Plan | Recipe, out: Path | str, seed: int = 0, progress: Stage = silent) -> Scores:
    """Train the stages of the table and measure them, or what is left of it."""
    train_recipe(plan, out, seed, TABLE_STAGES, progress)
    # Training takes scores away that were measured before it, so these are of all that there is.
    engine, measured = join(), (Path(out) / "scores.json").exists
    if engine.broadcast(measured) if engine else measured():
        return read_scores(out)
    return evaluate_run(out, plan, progress)[0]


def choose_device(name: str, recipe: Recipe) -> torch.device:
    """The device by its name; "auto" is a GPU where there is one and the recipe is worth it."""
    if name == "auto":
        return torch.device("cuda" if recipe.on_gpu and torch.cuda.is_available() else "cpu")
    return find_device(name)


@contextmanager
def _opened(
    plan: Plan | Recipe, out: Path, seed: int, progress: Stage, train: bool, device: str
) -> Iterator[tuple[Run, Recipe]]:
    """A run in its folder, which is kept for this process, or for all processes of the run."""
    engine = join()
    with one_thread(), engine.together() if engine else nullcontext(), ExitStack() as held:
        recipe = plan.recipe() if isinstance(plan, Plan) else plan.check()
        chosen = choose_device(device, recipe)
        chosen = engine.start(chosen) if engine else chosen
        with opened_folder(out) if train else nullcontext():  # before the data is loaded, which takes long
            data = recipe.load()
            recipe.try_networks(data)

        def begin() -> Path:
            folder = _open_folder(plan, recipe, out, seed, train)
            held.enter_context(locked(folder))
            return folder

        folder = engine.broadcast(begin) if engine else begin()
        data = data.to(chosen)
        yield Run(experiment_of(recipe, seed), folder, seed, data, progress, chosen, engine=engine), recipe
        if engine:
            engine.wait()  # for what the first process writes


def _open_folder(plan: Plan | Recipe, recipe: Recipe, out: Path, seed: int, train: bool) -> Path:
    in_words = isinstance(plan, Plan)
    named = plan if in_words else Plan(recipe.name, recipe.preset)
    described = describe(recipe)
    description = {"plan": named.to_json(), "recipe": described, "seed": seed}

    def upgrade(config: dict[str, Any]) -> dict[str, Any]:
        """What a version before wrote; a run that has no headline yet gets today's."""
        config = upgrade_config(config)
        if not isinstance(config.get("recipe"), dict):
            return config
        later = {name: described[name] for name in HEADLINE_FIELDS if name in described}
        kept = config["recipe"] if (out / HEADLINE).exists() else {}
        return config | {"recipe": config["recipe"] | later | kept}

    if isinstance(plan, Plan) and (out / "config.json").is_file():
        _check_schedule(out, plan)
    folder = RunFolder(out, description, ignore=("plan",), upgrade=upgrade)
    if train and in_words:  # the old words may be those of a recipe that has changed since
        folder.describe(description)
    elif train and (there := read_json(out / "config.json")).get("recipe") != described:
        folder.describe(there | {"recipe": described})  # with what an earlier version lacks
    return folder.path


def _check_schedule(out: Path, plan: Plan) -> None:
    """Refuse a folder of another schedule with the option that resumes it; versions before had only one."""
    begun, _ = read_plan(out)
    if (begun.name, begun.preset) == (plan.name, plan.preset) and begun.schedule != plan.schedule:
        raise ValueError(
            f"{out} was begun with the schedule {begun.schedule!r}; give --schedule {begun.schedule} to "
            "resume it, or another --out"
        )


def _measure(run: Run, recipe: Recipe, plan: Plan, corrupted: Path | str | None) -> tuple[Scores, list[str]]:
    """Rows of every model whose jobs are finished, in the order of the table, and what the others lack."""
    experiment = run.experiment
    if why := run.missing(experiment.stages["members"]):
        command = plan.command(run.folder, run.seed, "members")
        raise ValueError(f"{run.folder} has no trained members ({why}); train them: {command}")
    missing = [
        f"{stage} ({why})" for stage, folders in experiment.stages.items() if (why := run.missing(folders))
    ]
    models = [model for model in experiment.models if not run.missing(model.needs)]
    figures = any(model.table != "rows" for model in models)
    ensemble = trained_ensemble(run, recipe, recipe.most_members if figures else recipe.members)
    images = len(run.data.test) + len(run.data.val)
    advance = run.progress("evaluate", (len(ensemble) + len(models)) * images, "images")
    evaluator = Evaluator(
        ensemble,
        run.data.test,
        run.data.val,
        recipe.target,
        engine=run.engine,
        advance=advance,
        seed=run.seed,
    )
    ensembles = ensemble.by_size()
    rows = build_models(run, models, "rows", recipe.target)
    scores = Scores(
        dataset=recipe.name,
        seed=run.seed,
        class_names=recipe.class_names,
        environment=environment(evaluator.test.device),
        rows=evaluator.measure(ensembles) + rows.measure(evaluator),
        settings=_settings(plan, recipe),
        target=recipe.target,
        transitions=_transitions(rows.models.values(), evaluator),
        curves=run.curves(),
        tradeoff=build_models(run, models, "tradeoff").measure(evaluator),
        capacity=build_models(run, models, "capacity").measure(evaluator),
    )
    kept = run.folder / CORRUPTED_FILE
    if corrupted is not None and run.is_first:
        everything, data, stage = {**ensembles, **rows.models}, run.data.test, run.progress
        scores = add_corrupted(scores, everything, corrupted, test=data, keep=kept, stage=stage)
    elif kept.exists():
        missing.append(f"corruptions (--corrupted brings them back from {kept})")
    return scores, missing


def _transitions(models: Iterable[nn.Module], evaluator: Evaluator) -> tuple[Transition, ...]:
    """Examples on the diffusion bridge of the most steps."""
    fast = [
        model
        for model in models
        if isinstance(model, FastEnsemble) and model.bridges and not model.average_source
    ]
    if not fast or not isinstance(evaluator.test, ImageSet):
        return ()
    longest = max(fast, key=lambda model: model.each_bridge()[0].steps)
    source, target = (evaluator.by_size[size - 1].exp() for size in (1, evaluator.target))
    return find_transitions(longest, source, target, evaluator.test)


class NamedModels(NamedTuple):
    """Models, and what they are, by their names in a table."""

    models: dict[str, nn.Module]
    info: dict[str, ModelInfo]
    headline: frozenset[str] = frozenset()  # what the report is about

    def measure(self, evaluator: Evaluator) -> tuple[Row, ...]:
        """Their rows."""
        rows = evaluator.measure(self.models, self.info)
        return tuple(replace(row, headline=row.model in self.headline) for row in rows)


def build_models(
    run: Run, models: Iterable[TableModel], table: Table, target: int | None = None
) -> NamedModels:
    """The models of a table, put together, by their own names or those that tell what they are."""
    chosen = [model for model in models if model.table == table]
    info = [model.info for model in chosen]
    names = name_by_teachers(info) if table == "capacity" else name_rows(info, target)
    names = [model.name or name for model, name in zip(chosen, names, strict=True)]
    built = {name: model.build(run) for name, model in zip(names, chosen, strict=True)}
    main = frozenset(name for name, model in zip(names, chosen, strict=True) if model.headline)
    return NamedModels(built, dict(zip(names, info, strict=True)), main)


def read_plan(out: Path) -> tuple[Plan, int]:
    """The recipe that a run's folder names, and its seed."""
    if not (out / "config.json").is_file():
        raise ValueError(f"{out} is not the folder of a run: it holds no config.json; give one made by train")
    return Plan.from_config(read_json(out / "config.json"), out)


def _settings(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """What runs that are averaged have in common; the digest is of the recipe's whole content."""
    content = json.dumps(describe(recipe), sort_keys=True, default=str).encode()
    return plan.settings() | {"digest": hashlib.sha256(content).hexdigest()[:12]}
