"""A recipe from its start to `scores.json`: `train_recipe` and `evaluate_run`, and both in `run_recipe`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ensbridge.data.digits import Splits
from ensbridge.devices import find_device
from ensbridge.ensemble import Ensemble
from ensbridge.evaluation import Ruler, environment
from ensbridge.fast_ensemble import FastEnsemble
from ensbridge.files import locked, open_folder, read_json, write_atomically
from ensbridge.recipes.experiment import Experiment, Models, make_members
from ensbridge.recipes.plan import Plan
from ensbridge.recipes.recipe import Recipe, describe
from ensbridge.recipes.stages import STAGES
from ensbridge.recipes.threads import Reporter, Silent, one_thread
from ensbridge.recipes.transitions import find_transitions
from ensbridge.robustness import KEPT, add_corrupted, check_corrupted
from ensbridge.scores import (
    ModelInfo,
    Row,
    Scores,
    Transition,
    name_by_teachers,
    name_rows,
    read_scores,
    summarise,
)
from ensbridge.train.checkpoint import RunFolder
from ensbridge.train.engine import Engine, join
from ensbridge.train.fit import Unfinished

ALL_STAGES = ("members", *STAGES)
TABLE_STAGES = ("members", "distill", "rivals")  # what the quick start trains


def train_recipe(
    plan: Plan | Recipe,
    out: Path | str,
    seed: int = 0,
    stages: Sequence[str] = TABLE_STAGES,
    reporter: Reporter | None = None,
    device: str = "auto",
    minutes: float | None = None,
) -> None:
    """Train the stages of a recipe in the folder `out`, or what is left of them; members come first.

    It trains on a GPU where there is one and the recipe is worth it, or on `device`. After so many `minutes`
    it stops at a checkpoint with `OutOfTime`, and goes on when it is called again.
    """
    if minutes is not None and not minutes > 0:
        raise ValueError(f"the budget is {minutes:g} minutes; it must be above 0")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    for stage in stages:
        if stage not in ALL_STAGES:
            raise ValueError(f"{stage!r} is not a stage; there are: {', '.join(ALL_STAGES)}")
    with _opened(plan, Path(out), seed, reporter or Silent(), True, device) as run:
        run.deadline = deadline
        ensemble = make_members(run)
        for stage in dict.fromkeys(stages):
            if stage in STAGES:
                STAGES[stage](run, ensemble)


def evaluate_run(
    out: Path | str,
    plan: Plan | Recipe | None = None,
    reporter: Reporter | None = None,
    device: str = "auto",
    corrupted: Path | str | None = None,
) -> tuple[Scores, list[str]]:
    """Measure what is trained in a run folder and write its `scores.json`; also returns what is missing.

    The folder names its recipe; `plan` is for recipes of one's own, which no name finds. With a folder of
    `corrupted` test images the models are measured on those too. The `reporter` hears of every image that a
    network answers.
    """
    out = Path(out)
    named, seed = _read_plan(out)
    plan = named if plan is None else plan
    with _opened(plan, out, seed, Silent(), False, device) as run:
        if corrupted is not None:
            check_corrupted(corrupted, run.data.test)
        scores, missing = _measure(run, named, corrupted, reporter or Silent())
        if run.is_first:
            write_atomically(out / "scores.json", scores.to_json().encode())
    return scores, missing


def check_runs(runs: Sequence[Path | str]) -> None:
    """Refuse folders that are no runs, or runs that cannot be averaged, before any of them is measured."""
    empty = []
    for run in runs:
        plan, seed = _read_plan(Path(run))
        recipe = plan.recipe()
        settings = _settings(plan, recipe)
        empty.append(
            Scores(recipe.name, seed, recipe.class_names, {}, (), settings=settings, target=recipe.target)
        )
    summarise(empty, list(map(str, runs)))


def run_recipe(
    plan: Plan | Recipe, out: Path | str, seed: int = 0, reporter: Reporter | None = None
) -> Scores:
    """Train the stages of the table and measure them, or what is left of it."""
    train_recipe(plan, out, seed, TABLE_STAGES, reporter)
    # Training takes scores away that were measured before it, so these are of all that there is.
    engine, measured = join(), (Path(out) / "scores.json").exists
    if engine.from_first(measured) if engine else measured():
        return read_scores(out)
    return evaluate_run(out, plan, reporter)[0]


def choose_device(name: str, recipe: Recipe) -> torch.device:
    """The device by its name; "auto" is a GPU where there is one and the recipe is worth it."""
    if name == "auto":
        return torch.device("cuda" if recipe.on_gpu and torch.cuda.is_available() else "cpu")
    return find_device(name)


@contextmanager
def _opened(
    plan: Plan | Recipe, out: Path, seed: int, reporter: Reporter, train: bool, device: str
) -> Iterator[Experiment]:
    """A run in its folder, which is kept for this process, or for all processes of the run."""
    engine = join()
    with one_thread(), engine.together() if engine else nullcontext(), ExitStack() as held:
        recipe = plan.recipe() if isinstance(plan, Plan) else plan.check()
        place = choose_device(device, recipe)
        place = engine.start(place) if engine else place
        run = _open(plan, recipe, out, seed, reporter, train, place, engine)

        def lock() -> None:
            held.enter_context(locked(run.folder))

        engine.from_first(lock) if engine else lock()
        yield run
        if engine:
            engine.wait()  # for what the first process writes


def _open(
    plan: Plan | Recipe,
    recipe: Recipe,
    out: Path,
    seed: int,
    reporter: Reporter,
    train: bool,
    place: torch.device,
    engine: Engine | None,
) -> Experiment:
    if train:
        open_folder(out)  # before the data is loaded, which may take long
    data = recipe.load()
    recipe.try_networks(data)
    in_words = isinstance(plan, Plan)
    named = plan if in_words else Plan(recipe.name, recipe.preset)
    description = {"plan": named.to_json(), "recipe": describe(recipe), "seed": seed}

    def begin() -> Path:
        folder = RunFolder(out, description, ignore=("plan",))
        if train and in_words:  # the old words may be those of a recipe that has changed since
            folder.describe(description)
        return folder.path

    folder = engine.from_first(begin) if engine else begin()
    data = Splits(*(part.to(place) for part in data))
    return Experiment(recipe, folder, seed, data, reporter, train, place, engine=engine)


def _measure(
    run: Experiment, plan: Plan, corrupted: Path | str | None, reporter: Reporter
) -> tuple[Scores, list[str]]:
    """Rows of every stage that is finished, in the order of the table, and what the others lack."""
    recipe = run.recipe
    try:
        ensemble = make_members(run)
    except Unfinished as error:
        command = plan.command(run.folder, run.seed, "members")
        raise ValueError(f"{run.folder} has no trained members ({error}); train them: {command}") from error
    found, missing = _stages(run, ensemble)
    if {"tradeoff", "capacity"} & found.keys():
        ensemble = make_members(run, recipe.most_members)  # whose ladder the figures are read off
    networks = len(ensemble) + sum(len(models) for models in found.values())
    advance = reporter.stage("evaluate", networks * (len(run.data.test) + len(run.data.val)))
    ruler = Ruler(
        ensemble,
        run.data.test,
        run.data.val,
        recipe.target,
        engine=run.engine,
        advance=advance,
        seed=run.seed,
    )
    bridges = found.get("distill") or found.get("bridge", [])
    ladder = ensemble.ladder()
    others = _named([*found.get("rivals", []), *bridges], recipe.target)
    scores = Scores(
        dataset=recipe.name,
        seed=run.seed,
        class_names=recipe.class_names,
        environment=environment(ruler.test.images.device),
        rows=ruler.measure(ladder) + others.measure(ruler),
        settings=_settings(plan, recipe),
        target=recipe.target,
        transitions=_transitions(bridges, ruler),
        curves=tuple(run.curves.values()),
        tradeoff=_named(found.get("tradeoff", [])).measure(ruler),
        capacity=_named(found.get("capacity", []), by_teachers=True).measure(ruler),
    )
    kept = run.folder / KEPT
    if corrupted is not None and run.is_first:
        models = {**ladder, **others.models}
        data = run.data.test
        scores = add_corrupted(scores, models, corrupted, test=data, keep=kept, stage=reporter.stage)
    elif kept.exists():
        missing.append(f"corruptions (--corrupted brings them back from {kept})")
    return scores, missing


def _stages(run: Experiment, ensemble: Ensemble) -> tuple[dict[str, Models], list[str]]:
    """The models of each finished stage, and for each of the others why it is not."""
    found: dict[str, Models] = {}
    missing: list[str] = []
    for stage in sorted(STAGES, key=lambda name: name == "bridge"):
        if stage == "bridge" and "distill" in found:
            continue  # it is a part of the other
        try:
            found[stage] = STAGES[stage](run, ensemble)
        except Unfinished as error:
            missing.append(f"{stage} ({error})")
    return found, missing


def _transitions(bridges: Models, ruler: Ruler) -> tuple[Transition, ...]:
    """Examples on the bridge of the most steps."""
    fast = [model for model, _ in bridges if isinstance(model, FastEnsemble)]
    if not fast:
        return ()
    longest = max(fast, key=lambda each: each.each_bridge()[0].steps)
    source, target = (ruler.ladder[size - 1].exp() for size in (1, ruler.target))
    return find_transitions(longest, source, target, ruler.test)


class _Named(NamedTuple):
    """Models, and what they are, by their names in a table."""

    models: dict[str, nn.Module]
    info: dict[str, ModelInfo]

    def measure(self, ruler: Ruler) -> tuple[Row, ...]:
        return ruler.measure(self.models, self.info)


def _named(models: Models, target: int | None = None, by_teachers: bool = False) -> _Named:
    info = [each for _, each in models]
    names = name_by_teachers(info) if by_teachers else name_rows(info, target)
    return _Named(
        dict(zip(names, (model for model, _ in models), strict=True)), dict(zip(names, info, strict=True))
    )


def _read_plan(out: Path) -> tuple[Plan, int]:
    """The recipe that a run's folder names, and its seed."""
    if not (out / "config.json").is_file():
        raise ValueError(f"{out} is not the folder of a run: it holds no config.json; give one made by train")
    return Plan.from_config(read_json(out / "config.json"), out)


def _settings(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """What runs that are averaged have in common."""
    return plan.words() | {"digest": _digest(describe(recipe))}


def _digest(description: dict[str, Any]) -> str:
    """A short name for a recipe's whole content, so that runs of different content are not averaged."""
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()[:12]
