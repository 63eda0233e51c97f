"""How the quick start's headline was chosen: a distilled source with a bridge, by cross-validation.

    python studies/choose_headline.py OUT [--seeds 0 1]

As `choose_digits.py`: everything is trained on three of four folds of the 800 images that are not the test
split, and all folds' held-out predictions are pooled. Every variant has as many passes as every baseline, and
each of three methods 48 settings: the pair 16 of its source with three temperatures, distillation the same 16
with three τ (of which τ = 1 is the pair's source alone), and a bridge beside the frozen source as many.
Writes results/headline-choice.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path

from torch import nn

import ensbridge as eb
from choose_digits import line, pooled
from ensbridge.experiments import Experiment, Job, MethodSpec, Recipe, Run, TableModel
from ensbridge.methods import Bridge, EmaRule, EnsembleDistillation, JointDistillation
from provenance import provenance

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
TAUS = (2.0, 4.0)  # beside 1
FROZEN = [*itertools.product((1.5, 2.0, 3.0, 4.0, 6.0, 8.0), (2e-3, 4e-3, 8e-3, 1.6e-2))]  # T and rate


def inputs(mixup: float) -> eb.data.Augment:
    """What every variant is trained on."""
    return eb.data.Augment(noise=0.1, mixup=mixup)


def slug(name: str) -> str:
    """A variant's name in folders."""
    return name.replace(" ", "-").replace(".", "_")


def student(run: Run, recipe: Recipe, ensemble: eb.Ensemble, start: str) -> nn.Module:
    """A copy of the first member, or a network with new weights."""
    fresh = start == "fresh"
    net = run.build(recipe.member, "student") if fresh else copy.deepcopy(ensemble.source)
    return net.requires_grad_()


def spec(recipe: Recipe, seed: int, mixup: float, start: str, rate: float, decay: float) -> MethodSpec:
    """A distillation of the source with bridges at every temperature beside it."""
    fit = eb.experiments.seeded(recipe.kl_fit, seed, "bridge")
    fit = replace(fit, augment=inputs(mixup))
    sgd = replace(fit, optimizer="sgd", lr=rate, weight_decay=decay)

    def make(run: Run) -> JointDistillation:
        ensemble = eb.experiments.trained_ensemble(run, recipe, 3)
        bridges = {
            f"T{base:g}".replace(".", "_"): Bridge(
                run.build(lambda: recipe.score("none"), "score"),  # type: ignore[arg-type]
                replace(recipe.bridge, temperature=eb.TemperatureLaw(base=base)),
                (0.0, 1.0),
            )
            for base in TEMPERATURES
        }
        ema = EmaRule(recipe.bridge.ema)
        source = student(run, recipe, ensemble, start)
        return JointDistillation(ensemble, source, bridges, recipe.feature, ema=ema)

    return MethodSpec("distilled source", make, fit, {"source": sgd, "bridges": fit})


def students(recipe: Recipe, seed: int, mixup: float) -> tuple[Job, list[TableModel]]:
    """Distillation at other τ, with every start, rate and weight decay of the pair's source, and its EMA."""
    folder, specs, rows = slug(f"students {mixup:g}"), {}, []
    base = replace(eb.experiments.seeded(recipe.kl_fit, seed, "bridge"), augment=inputs(mixup))
    for tau, (variant, (start, rate, decay)) in itertools.product(TAUS, STARTS.items()):

        def make(run: Run, tau: float = tau, start: str = start) -> EnsembleDistillation:
            ensemble = eb.experiments.trained_ensemble(run, recipe, 3)
            ema = EmaRule(recipe.bridge.ema)
            return EnsembleDistillation(ensemble, student(run, recipe, ensemble, start), tau=tau, ema=ema)

        name = f"{variant} τ{tau:g}"
        fit = replace(base, optimizer="sgd", lr=rate, weight_decay=decay)
        specs[slug(name)] = MethodSpec("ED", make, fit)
        row = eb.experiments.student_model(eb.evaluation.ModelInfo("ED", 3, tau=tau), folder, slug(name))
        rows.append(replace(row, name=f"ED {variant} α {mixup:g} τ{tau:g}"))
    return Job(folder, "students", specs, eb.experiments.member_folders(recipe, 3)), rows


def frozen(recipe: Recipe, seed: int, mixup: float) -> tuple[Job, list[TableModel]]:
    """Bridges beside the first member as it is, at every temperature and rate."""
    folder, specs, rows = slug(f"frozen {mixup:g}"), {}, []
    for base, rate in FROZEN:
        fit = replace(recipe.kl_fit, lr=rate, augment=inputs(mixup))
        changed = replace(recipe, kl_temperature=base, kl_fit=fit)
        ((_, spec),) = eb.experiments.bridge_specs(changed, seed, [(0, 1, 2)], 3, None, "kl").items()
        name = slug(f"T{base:g} {rate:g}")
        specs[name] = spec
        row = eb.experiments.bridge_model(eb.experiments.one_step(changed, "kl"), folder, [name])
        rows.append(replace(row, name=f"frozen {rate:g} α {mixup:g} T{base:g}"))
    return Job(folder, "frozen", specs, eb.experiments.member_folders(recipe, 3)), rows


def models(folder: str, variant: str, mixup: float) -> list[TableModel]:
    """The distilled source alone, and with each of its bridges."""
    name = slug(variant)

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
    """Members, and every setting of the three methods."""
    whole = eb.experiments.experiment_of(RECIPE, seed)
    jobs, rows = list(whole.only(["members"]).jobs), []
    for mixup in MIXUPS:
        folder = slug(f"distilled {mixup:g}")
        specs = {slug(name): spec(RECIPE, seed, mixup, *start) for name, start in STARTS.items()}
        jobs.append(Job(folder, "distilled", specs, eb.experiments.member_folders(RECIPE, 3)))
        rows += [model for name in STARTS for model in models(folder, name, mixup)]
    for job, models_of_job in (make(RECIPE, seed, mixup) for make in (students, frozen) for mixup in MIXUPS):
        jobs.append(job)
        rows += models_of_job
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
    infos = {model.name: model.info for model in experiment(0).models}
    rows = []
    for name, losses in nlls.items():
        method, teachers = (infos[name].method, 3) if name in infos else ("DE", int(name.removeprefix("DE-")))
        trained = provenance("digits", method, teachers, options.seeds)
        rows.append({"model": name, **trained, "nll": losses.mean().item()})
    document = {"command": "python studies/choose_headline.py OUT", "seeds": options.seeds, "rows": rows}
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (RESULTS / "headline-choice.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
