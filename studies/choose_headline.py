"""How the quick start's headline was chosen: a distilled source with a bridge, by cross-validation.

    python studies/choose_headline.py OUT [--seeds 0 1]

As `choose_digits.py`: everything is trained on three of four folds of the 800 images that are not the test
split, and all folds' held-out predictions are pooled. Every variant has as many passes as every baseline.
Writes results/headline-choice.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path

import ensbridge as eb
from choose_digits import line, pooled
from ensbridge.experiments import Experiment, Job, MethodSpec, Recipe, Run, TableModel
from ensbridge.methods import Bridge, EmaRule, JointDistillation

RESULTS = Path(__file__).parent.parent / "results"
RECIPE = replace(eb.experiments.digits(), members=3)
TEMPERATURES = (1.5, 2.0, 3.0)
STARTS = {  # where the source starts, its rate and weight decay
    f"{start} {rate:g} {decay:g}": (start, rate, decay)
    for start, rate, decay in (
        *itertools.product(("copy",), (0.02, 0.05, 0.1), (5e-4,)),
        ("copy", 0.1, 1e-3),
        *itertools.product(("fresh",), (0.1, 0.2), (5e-4, 1e-3)),
    )
}
MIXUPS = (0.4, 1.0)


def spec(recipe: Recipe, seed: int, mixup: float, start: str, rate: float, decay: float) -> MethodSpec:
    """A distillation of the source with bridges at every temperature beside it."""
    fit = eb.experiments.seeded(recipe.kl_fit, seed, "bridge")
    fit = replace(fit, augment=eb.data.Augment(noise=0.1, mixup=mixup))
    sgd = replace(fit, optimizer="sgd", lr=rate, weight_decay=decay)

    def make(run: Run) -> JointDistillation:
        ensemble = eb.experiments.trained_ensemble(run, recipe, 3)
        fresh = start == "fresh"
        source = run.build(recipe.member, "student") if fresh else copy.deepcopy(ensemble.source)
        bridges = {
            f"T{base:g}".replace(".", "_"): Bridge(
                run.build(lambda: recipe.score("none"), "score"),  # type: ignore[arg-type]
                replace(recipe.bridge, temperature=eb.TemperatureLaw(base=base)),
                (0.0, 1.0),
            )
            for base in TEMPERATURES
        }
        ema = EmaRule(recipe.bridge.ema)
        return JointDistillation(ensemble, source.requires_grad_(), bridges, recipe.feature, ema=ema)

    return MethodSpec("distilled source", make, fit, {"source": sgd, "bridges": fit})


def models(folder: str, variant: str, mixup: float) -> list[TableModel]:
    """The distilled source alone, and with each of its bridges."""
    name = variant.replace(" ", "-").replace(".", "_")

    def build(bridges: tuple[str, ...], run: Run) -> eb.FastEnsemble:
        method = run.methods(folder)[name]
        assert isinstance(method, JointDistillation)
        return method.with_bridges(*bridges) if bridges else eb.FastEnsemble(method.source)

    info = eb.evaluation.ModelInfo("DBN", 3, 1, 1, "kl", 2.0)
    kinds = {"alone": (), **{f"T{base:g}": (f"T{base:g}".replace(".", "_"),) for base in TEMPERATURES}}
    return [
        TableModel(
            info,
            (folder,),
            lambda run, bridges=bridges: build(bridges, run),
            name=f"{variant} α {mixup:g} {kind}",
        )
        for kind, bridges in kinds.items()
    ]


def experiment(seed: int) -> Experiment:
    """Members, every variant, and the recipe's own bridges with KL and baselines."""
    whole = eb.experiments.experiment_of(RECIPE, seed)
    jobs, rows = list(whole.only(["members"]).jobs), []
    for mixup in MIXUPS:
        folder = f"distilled-{mixup:g}".replace(".", "_")
        specs = {
            name.replace(" ", "-").replace(".", "_"): spec(RECIPE, seed, mixup, *start)
            for name, start in STARTS.items()
        }
        jobs.append(Job(folder, "distilled", specs, eb.experiments.member_folders(RECIPE, 3)))
        rows += [model for name in STARTS for model in models(folder, name, mixup)]
    students = eb.experiments.student_specs(RECIPE, seed, 3, "")
    jobs.append(
        Job("baselines", "baselines", {"ed": students["ed"]}, eb.experiments.member_folders(RECIPE, 3))
    )
    rows.append(eb.experiments.student_model(eb.evaluation.ModelInfo("ED", 3), "baselines", "ed"))
    for base in (2.0, 4.0):
        recipe = replace(RECIPE, kl_temperature=base)
        folder = f"frozen-{base:g}"
        specs = eb.experiments.bridge_specs(recipe, seed, [(0, 1, 2)], 3, None, "kl")
        jobs.append(Job(folder, "frozen", specs, eb.experiments.member_folders(RECIPE, 3)))
        row = eb.experiments.bridge_model(eb.experiments.one_step(recipe, "kl"), folder, list(specs))
        rows.append(replace(row, name=f"frozen T{base:g}"))
    return Experiment(tuple(jobs), tuple(rows), {})


def main() -> None:
    """Print NLLs, and the share of the distance from DE-1 to DE-3 that is closed."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("out", type=Path, help="the study's folder, in which a killed one resumes")
    asked.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = asked.parse_args()
    nlls = pooled(RECIPE, experiment, options.out, seeds=options.seeds)
    for name in nlls:
        print(line(name, {key: nlls[key] for key in ("DE-1", "DE-3", name)}), flush=True)
    rows = [{"model": name, "nll": losses.mean().item()} for name, losses in nlls.items()]
    document = {"command": "python studies/choose_headline.py OUT", "seeds": options.seeds, "rows": rows}
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (RESULTS / "headline-choice.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
