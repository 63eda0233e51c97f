"""A recipe from its start to `scores.json`: `train_recipe` and `evaluate_run`, and both in `run_recipe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from ensbridge.evaluation import Ruler, environment
from ensbridge.fast_ensemble import FastEnsemble
from ensbridge.files import read_json, write_atomically
from ensbridge.methods.diffusion_bridge import Preset
from ensbridge.recipes.digits import digits
from ensbridge.recipes.experiment import Experiment, Models, Unfinished, train_members
from ensbridge.recipes.recipe import Recipe, change, describe
from ensbridge.recipes.stages import STAGES
from ensbridge.recipes.threads import Reporter, Silent, one_thread
from ensbridge.recipes.transitions import find_transitions
from ensbridge.scores import Row, Scores, read_scores
from ensbridge.train.checkpoint import RunFolder

RECIPES: dict[str, Callable[[Preset], Recipe]] = {"digits": digits}
ALL_STAGES = ("members", *STAGES)
TABLE_STAGES = ("members", "distill", "rivals")  # what the quick start trains


@dataclass(frozen=True)
class Plan:
    """A recipe by name, preset and changes, so that a run folder can name it."""

    name: str
    preset: Preset = "default"
    changes: tuple[str, ...] = ()

    def recipe(self) -> Recipe:
        """The recipe itself."""
        if self.name not in RECIPES:
            raise ValueError(f"{self.name!r} is not a recipe; there are: {', '.join(RECIPES)}")
        if self.preset not in get_args(Preset):
            raise ValueError(f"preset is {self.preset!r}; it must be one of {', '.join(get_args(Preset))}")
        recipe = RECIPES[self.name](self.preset)
        for assignment in self.changes:
            recipe = change(recipe, assignment)
        return recipe.check()


def train_recipe(
    plan: Plan | Recipe,
    out: Path | str,
    seed: int = 0,
    stages: Sequence[str] = TABLE_STAGES,
    reporter: Reporter | None = None,
) -> None:
    """Train the stages of a recipe in the folder `out`, or what is left of them; members come first."""
    for stage in stages:
        if stage not in ALL_STAGES:
            raise ValueError(f"{stage!r} is not a stage; there are: {', '.join(ALL_STAGES)}")
    with one_thread():
        run = _open(plan, Path(out), seed, reporter or Silent())
        ensemble = train_members(run)
        for stage in stages:
            if stage in STAGES:
                STAGES[stage](run, ensemble)


def evaluate_run(
    out: Path | str, plan: Plan | Recipe | None = None, reporter: Reporter | None = None
) -> tuple[Scores, list[str]]:
    """Measure what is trained in a run folder and write its `scores.json`; also returns what is missing.

    The folder names its recipe; `plan` is for recipes of one's own, which no name finds.
    """
    out = Path(out)
    if not (out / "config.json").is_file():
        raise ValueError(f"{out} is not the folder of a run: it holds no config.json; give one made by train")
    config = read_json(out / "config.json")
    if not isinstance(config, dict) or not {"recipe", "seed", "plan"} <= set(config):
        raise ValueError(f"{out} is a part of a run, or foreign; give the folder that was --out of train")
    if plan is None:
        plan = Plan(config["plan"]["name"], config["plan"]["preset"], tuple(config["plan"]["changes"]))
    with one_thread():
        run = replace(_open(plan, out, config["seed"], reporter or Silent()), train=False)
        scores, missing = _measure(run, plan)
    write_atomically(out / "scores.json", scores.to_json().encode())
    return scores, missing


def run_recipe(
    plan: Plan | Recipe, out: Path | str, seed: int = 0, reporter: Reporter | None = None
) -> Scores:
    """Train the stages of the table and measure them, or read the scores of a run that is complete."""
    recipe = plan.recipe() if isinstance(plan, Plan) else plan.check()
    RunFolder(out, _description(plan, recipe, seed))
    if (Path(out) / "scores.json").exists():
        return read_scores(out)
    train_recipe(plan, out, seed, TABLE_STAGES, reporter)
    return evaluate_run(out, plan)[0]


def _open(plan: Plan | Recipe, out: Path, seed: int, reporter: Reporter) -> Experiment:
    recipe = plan.recipe() if isinstance(plan, Plan) else plan.check()
    folder = RunFolder(out, _description(plan, recipe, seed)).path
    return Experiment(recipe, folder, seed, recipe.load(), reporter)


def _description(plan: Plan | Recipe, recipe: Recipe, seed: int) -> dict[str, object]:
    named = plan if isinstance(plan, Plan) else Plan(recipe.name, recipe.preset)
    return {
        "plan": {"name": named.name, "preset": named.preset, "changes": list(named.changes)},
        "recipe": describe(recipe),
        "seed": seed,
    }


def _measure(run: Experiment, plan: Plan | Recipe) -> tuple[Scores, list[str]]:
    """Rows of every stage that is finished, in the order of the table; the others by name."""
    recipe = run.recipe
    try:
        ensemble = train_members(run)
    except Unfinished as error:
        raise ValueError(
            f"{run.folder} has no trained members ({error} is not finished); "
            f"ensbridge train {recipe.name} --stage members --out {run.folder}"
        ) from error
    found: dict[str, Models] = {}
    for stage in STAGES:
        try:
            found[stage] = STAGES[stage](run, ensemble)
        except Unfinished:
            continue
    ruler = Ruler(ensemble, run.data.test, run.data.val, recipe.target)
    bridges = found.get("distill") or found.get("bridge", {})
    rows = ruler.measure({f"DE-{k}": ensemble.first(k) for k in range(1, len(ensemble) + 1)})
    rows += _rows(ruler, {**found.get("rivals", {}), **bridges})
    several = bridges.get(f"+1 DBN ({recipe.bridge.num_steps} steps)", (None, None))[0]
    transitions = ()
    if isinstance(several, FastEnsemble):
        transitions = find_transitions(several, ensemble.first(recipe.target), ruler.test)
    changes = ", ".join(plan.changes) if isinstance(plan, Plan) else ""
    scores = Scores(
        dataset=recipe.name,
        seed=run.seed,
        class_names=recipe.class_names,
        environment=environment(ruler.test.images.device),
        rows=rows,
        settings={"recipe": recipe.name, "preset": recipe.preset, "changes": changes or "none"},
        transitions=transitions,
        curves=tuple(run.curves.values()),
        tradeoff=_rows(ruler, found.get("tradeoff", {})),
        capacity=_rows(ruler, found.get("capacity", {})),
    )
    done = set(found) | ({"bridge"} if "distill" in found else set())
    return scores, [stage for stage in STAGES if stage not in done]


def _rows(ruler: Ruler, models: Models) -> tuple[Row, ...]:
    return ruler.measure(
        {name: model for name, (model, _) in models.items()}, {name: aim for name, (_, aim) in models.items()}
    )
