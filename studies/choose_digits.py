"""How the quick start's settings were chosen: cross-validation on its training and validation images alone.

    python studies/choose_digits.py task OUT        noise, weight decay and length of the members
    python studies/choose_digits.py bridge OUT      temperature, mixup, noise and length of the bridge
    python studies/choose_digits.py baselines OUT   rate and weight decay of ED, EnD² and the bridge networks
    python studies/choose_digits.py pairs OUT       two bridges that share the members, or each towards all

The 800 images that are not the test split are cut into four folds; everything is trained on three of them and
measured on the fourth, and all folds' predictions are pooled. The test images are never used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import ensbridge as eb
from ensbridge.experiments import Experiment, Job, MethodSpec, Recipe, Run, TableModel
from provenance import plain_parser

FOLDS = 4
Group = tuple[int, ...]  # members by index
BASE = replace(eb.experiments.digits(), members=3)
TASK = [*itertools.product((0.2, 0.3), (0.0, 5e-4, 1e-3), (20, 30))]  # noise, weight decay, epochs
USUAL = {"T": 2.0, "noise": 0.1, "lr": 2e-3, "distil_lr": 2e-4, "epochs": 64, "ema": 0.99, "mixup": 0.4}
BRIDGE = [
    {"lr": 8e-3, "distil_lr": 1e-3},
    {"lr": 4e-3, "distil_lr": 4e-4},
    {},
    {"distil_lr": 1e-3},
    {"epochs": 96},
    {"ema": 0.997},
    {"mixup": 1.0},
    {"noise": 0.2},
    {"T": 2.5},
    *({"T": base, "noise": 0.0} for base in (2.0, 1.5, 3.0, 4.0)),
]
STUDENTS = [*itertools.product((0.03, 0.05, 0.1, 0.2, 0.4), (1e-3, 1e-4)), (0.02, 1e-4)]  # rate, decay
STUDENT_INFO = {"ed": eb.evaluation.ModelInfo("ED", 3), "end2": eb.evaluation.ModelInfo("EnD2", 3)}
NETWORKS = (0.01, 0.03, 0.1, 0.2)  # rates of bridge networks
# Two bridges each, by their members and start; those towards the same members differ in the latter.
PAIRS: dict[str, list[tuple[Group, int]]] = {
    "{1, 2} and {1, 3}": [((0, 1), 0), ((0, 2), 0)],
    "{1, 2, 3} twice": [((0, 1, 2), 0), ((0, 1, 2), 1)],
    "{1, 2, 3} and {1, 4, 5}": [((0, 1, 2), 0), ((0, 3, 4), 0)],
    "{1, 2, 3, 4, 5} twice": [((0, 1, 2, 3, 4), 0), ((0, 1, 2, 3, 4), 1)],
}


def fold(number: int, noise: float | None = None) -> eb.data.Splits:
    """Training images, and a fold of held-out ones in place of the validation and the test images."""
    train, val, _ = eb.data.load_digits() if noise is None else eb.data.load_digits(noise)
    images = torch.cat([train.images, val.images])
    labels = torch.cat([part.labels for part in (train, val) if part.labels is not None])
    held = torch.arange(len(images)) % FOLDS == number
    kept = eb.data.ImageSet(images[held], labels[held])
    return eb.data.Splits(eb.data.ImageSet(images[~held], labels[~held]), kept, kept)


def pooled(
    recipe: Recipe,
    experiment: Callable[[int], Experiment],
    out: Path,
    noise: float | None = None,
    seeds: Iterable[int] = (0,),
) -> dict[str, Tensor]:
    """Each model's NLL on every held-out image, of the experiment for each of the seeds."""
    nlls: dict[str, list[Tensor]] = {}
    for number, seed in itertools.product(range(FOLDS), seeds):
        data = fold(number, noise)
        folder = out / f"fold-{number}-seed-{seed}"
        result = eb.experiments.run_study(experiment(seed), recipe, data, folder, seed=seed, quiet=True)
        for name, values in result.nlls("validation").items():
            nlls.setdefault(name, []).append(values)
    return {name: torch.cat(parts) for name, parts in nlls.items()}


def stage_of(recipe: Recipe, stage: str) -> Callable[[int], Experiment]:
    """One stage of a recipe, for a seed."""
    return lambda seed: eb.experiments.experiment_of(recipe, seed).only([stage])


def line(name: str, nlls: Mapping[str, Tensor]) -> str:
    """NLLs and, in brackets, the share of the distance from DE-1 to DE-3 that is closed."""
    means = {model: values.mean().item() for model, values in nlls.items()}
    one, three = means["DE-1"], means["DE-3"]
    cells = [f"{model} {nll:.4f} ({(one - nll) / (one - three):+.2f})" for model, nll in means.items()]
    return f"{name:<30} " + "  ".join(cells)


def study_task(out: Path, variants: int | None) -> None:
    """Members at other noise, weight decay and length."""
    for noise, decay, epochs in TASK[:variants]:
        recipe = replace(BASE, member_fit=replace(BASE.member_fit, weight_decay=decay, epochs=epochs))
        name = f"noise {noise}, decay {decay:g}, {epochs} epochs"
        print(line(name, pooled(recipe, stage_of(recipe, "members"), out / name, noise)), flush=True)


def bridge_recipe(variant: Mapping[str, float]) -> Recipe:
    """The recipe with a variant of its bridges."""
    values = {**USUAL, **variant}
    inputs = eb.data.Augment(mixup=values["mixup"], noise=values["noise"])
    fit = replace(BASE.bridge_fit, augment=inputs, lr=values["lr"], epochs=values["epochs"])
    short = replace(fit, epochs=BASE.distill_fit.epochs, lr=values["distil_lr"])
    bridge = replace(BASE.bridge, temperature=eb.TemperatureLaw(base=values["T"]), ema=values["ema"])
    fits = {"bridge_fit": fit, "kl_fit": fit, "distill_fit": short}
    return replace(BASE, bridge=bridge, kl_temperature=values["T"], **fits)


def study_bridge(out: Path, variants: int | None) -> None:
    """Bridges, their controls and those with KL."""
    for variant in BRIDGE[:variants]:
        recipe = bridge_recipe(variant)
        name = ", ".join(f"{key} {value:g}" for key, value in variant.items()) or "as usual"
        print(line(name, pooled(recipe, stage_of(recipe, "distill"), out / name)), flush=True)


def study_baselines(out: Path, variants: int | None) -> None:
    """ED and EnD² at every rate and weight decay, and bridge networks, on shared batches and teachers."""
    models: list[TableModel] = []
    specs = {}
    for number, (rate, decay) in enumerate(STUDENTS[:variants]):
        fit = replace(BASE.ed_fit, lr=rate, weight_decay=decay)
        specs |= eb.experiments.student_specs(replace(BASE, ed_fit=fit, end2_fit=fit), 0, 3, f"-{number}")
        for kind, info in STUDENT_INFO.items():
            model = eb.experiments.student_model(info, "students", f"{kind}-{number}")
            models.append(replace(model, name=f"{info.method} {rate:g} {decay:g}"))
    networks = {}
    for number, rate in enumerate(NETWORKS[:variants]):
        recipe = replace(BASE, bn_fit=replace(BASE.bn_fit, lr=rate, warmup_lr=rate / 100))
        names = [f"bn-{number}-{index}" for index in (1, 2)]
        for index, name in enumerate(names, 1):
            networks[name] = eb.experiments.bridge_network_spec(recipe, 0, [index], 1.0, "medium", index)
        model = eb.experiments.network_model(eb.evaluation.ModelInfo("BN", 3, 2, 1), "networks", names)
        models.append(replace(model, name=f"+2 BN medium {rate:g}"))
    jobs = [
        *stage_of(BASE, "members")(0).jobs,
        *eb.experiments.curve_jobs(BASE, 0, 2),
        Job("students", "students", specs, eb.experiments.member_folders(BASE, 3)),
        Job("networks", "networks", networks, eb.experiments.curve_folders(2)),
    ]
    nlls = pooled(BASE, lambda seed: Experiment(tuple(jobs), tuple(models), {}), out)
    for name in (model.name for model in models):
        print(line(name, {key: nlls[key] for key in ("DE-1", "DE-3", name)}), flush=True)


def pair_model(name: str, pair: list[tuple[Group, int]]) -> TableModel:
    """The source with two bridges."""
    members = len({index for group, _ in pair for index in group})
    info = eb.evaluation.ModelInfo("DBN", members, 2, 1, "kl", 2.0)
    names = [bridge_name(*bridge) for bridge in pair]
    return replace(eb.experiments.bridge_model(info, "bridges", names), name=name)


def bridge_name(group: Group, start: int) -> str:
    """A bridge's name in folders."""
    return f"{eb.experiments.slug(group)}-start-{start}"


def bridge_spec(recipe: Recipe, seed: int, group: Group, start: int) -> MethodSpec:
    """A bridge with KL towards a group of five members."""

    def make(run: Run) -> eb.methods.DiffusionBridge:
        ensemble = eb.experiments.trained_ensemble(run, recipe, 5)
        score = run.build(lambda: recipe.score("none"), "score", *group, start)
        return eb.methods.DiffusionBridge(
            ensemble, score, recipe.feature, loss="kl", target=group, config=recipe.bridge
        )

    return MethodSpec("bridge", make, eb.experiments.seeded(recipe.kl_fit, seed, "bridge"))


def study_pairs(out: Path, variants: int | None) -> None:
    """Pairs of bridges with KL towards groups of five members, for two seeds."""
    recipe, chosen = eb.experiments.digits(), dict([*PAIRS.items()][:variants])
    bridges = dict.fromkeys(bridge for pair in chosen.values() for bridge in pair)
    models = tuple(pair_model(*pair) for pair in chosen.items())

    def experiment(seed: int) -> Experiment:
        specs = {bridge_name(*bridge): bridge_spec(recipe, seed, *bridge) for bridge in bridges}
        job = Job("bridges", "bridges", specs, eb.experiments.member_folders(recipe, 5))
        return Experiment((*stage_of(recipe, "members")(seed).jobs, job), models, {})

    nlls = pooled(recipe, experiment, out, seeds=(0, 1))
    for name in chosen:
        print(line(name, {key: nlls[key] for key in ("DE-1", "DE-3", name)}))
    for one, other in (("{1, 2} and {1, 3}", "{1, 2, 3} twice"), [*PAIRS][2:]):
        if {one, other} <= {*nlls}:
            more = nlls[one] - nlls[other]
            print(f"{one} above {other} by {more.mean():.4f} ± {eb.metrics.standard_error(more):.4f}")


def main() -> None:
    """Run one of the studies."""
    studies = {"task": study_task, "bridge": study_bridge, "baselines": study_baselines, "pairs": study_pairs}
    asked = plain_parser(__doc__)
    asked.add_argument("study", choices=[*studies])
    asked.add_argument("out", type=Path, help="the study's folder, in which a killed one resumes")
    asked.add_argument("--variants", type=int, help="only the first so many")
    options = asked.parse_args()
    studies[options.study](options.out, options.variants)


if __name__ == "__main__":
    main()
