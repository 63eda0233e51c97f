"""How the quick start's headline was chosen: a distilled source with a bridge, by cross-validation.

    python studies/choose_headline.py OUT [--seeds 0 1]

As `choose_digits.py`: everything is trained on three of four folds of the 800 images that are not the test
split, and all folds' held-out predictions are pooled. Every variant has as many passes as every baseline, and
each of three methods 24 settings, with SGD or Adam and with Muon: the pair 8 of its source with three bridges
beside each, distillation the same 8 with three τ (of which τ = 1 is the pair's source alone), and a bridge
beside the frozen source as many. Writes results/headline-choice.json.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from torch import nn

import ensbridge as eb
from choose_digits import line, pooled
from ensbridge.experiments import Experiment, Job, MethodSpec, Recipe, Run, TableModel
from ensbridge.methods import Bridge, EmaRule, EnsembleDistillation, JointDistillation
from provenance import RESULTS, provenance, study_parser, write_json

RECIPE = replace(eb.experiments.digits(), members=3)
INPUTS = eb.data.Augment(noise=0.1, mixup=0.4)  # what every variant is trained on


class Rule(NamedTuple):
    """How the weights of a part are trained."""

    optimizer: Literal["adam", "sgd", "muon"]
    rate: float
    decay: float = 0.0

    def of(self, fit: eb.FitConfig) -> eb.FitConfig:
        """The configuration with it."""
        return replace(fit, optimizer=self.optimizer, lr=self.rate, weight_decay=self.decay, augment=INPUTS)


ADAM, MUON = Rule("adam", 8e-3), Rule("muon", 0.05, 0.01)
BRIDGES = {"T1.5 muon": (1.5, MUON), "T2 muon": (2.0, MUON), "T2 adam": (2.0, ADAM)}
STARTS = {  # where the source starts, and how it is trained
    f"{start} {rule.optimizer} {rule.rate:g} {rule.decay:g}": (start, rule)
    for start, rule in (
        ("copy", Rule("sgd", 0.05, 5e-4)),
        ("copy", Rule("sgd", 0.1, 1e-3)),
        *(("copy", Rule("muon", rate, 0.01)) for rate in (0.05, 0.1)),
        ("fresh", Rule("sgd", 0.2, 5e-4)),
        *(("fresh", Rule("muon", rate, 0.01)) for rate in (0.05, 0.1, 0.2)),
    )
}
TAUS = (2.0, 4.0)  # beside 1
FROZEN = [  # T, and how the bridge is trained
    *itertools.product(
        (1.5, 2.0, 3.0, 4.0, 6.0, 8.0), (ADAM, Rule("adam", 1.6e-2), MUON, Rule("muon", 0.1, 0.01))
    )
]


def slug(name: str) -> str:
    """A variant's name in folders."""
    return name.replace(" ", "-").replace(".", "_")


def student(run: Run, recipe: Recipe, ensemble: eb.Ensemble, start: str) -> nn.Module:
    """A copy of the first member, or a network with new weights."""
    fresh = start == "fresh"
    net = run.build(recipe.member, "student") if fresh else copy.deepcopy(ensemble.source)
    return net.requires_grad_()


def spec(recipe: Recipe, seed: int, start: str, rule: Rule) -> MethodSpec:
    """A distillation of the source with every bridge beside it, each with an optimiser of its own."""
    fit = eb.experiments.seeded(recipe.kl_fit, seed, "bridge")

    def make(run: Run) -> JointDistillation:
        ensemble = eb.experiments.trained_ensemble(run, recipe, 3)
        bridges = {
            slug(name): Bridge(
                run.build(lambda: recipe.score("none"), "score"),  # type: ignore[arg-type]
                replace(recipe.bridge, temperature=eb.TemperatureLaw(base=base)),
                (0.0, 1.0),
            )
            for name, (base, _) in BRIDGES.items()
        }
        ema = EmaRule(recipe.bridge.ema)
        source = student(run, recipe, ensemble, start)
        method = JointDistillation(ensemble, source, bridges, recipe.feature, ema=ema)
        method.parts = tuple(parts)
        return method

    parts = {"source": rule.of(fit)}
    parts |= {f"bridges.{slug(name)}": how.of(fit) for name, (_, how) in BRIDGES.items()}
    return MethodSpec("distilled source", make, fit, parts)


class Variant(NamedTuple):
    """A model, and the method that it is made of, by its name in the job."""

    model: TableModel
    key: str
    method: MethodSpec


def students(recipe: Recipe, seed: int) -> Iterator[Variant]:
    """Distillation at other τ, with every start and optimiser of the pair's source, and its EMA."""
    base = eb.experiments.seeded(recipe.kl_fit, seed, "bridge")
    for tau, (variant, (start, rule)) in itertools.product(TAUS, STARTS.items()):

        def make(run: Run, tau: float = tau, start: str = start) -> EnsembleDistillation:
            ensemble = eb.experiments.trained_ensemble(run, recipe, 3)
            ema = EmaRule(recipe.bridge.ema)
            return EnsembleDistillation(ensemble, student(run, recipe, ensemble, start), tau=tau, ema=ema)

        key = slug(f"{variant} τ{tau:g}")
        model = eb.experiments.student_model(eb.evaluation.ModelInfo("ED", 3, tau=tau), "students", key)
        named = replace(model, name=f"ED {variant} τ{tau:g}")
        yield Variant(named, key, MethodSpec("ED", make, rule.of(base)))


def frozen(recipe: Recipe, seed: int) -> Iterator[Variant]:
    """Bridges beside the first member as it is, at every temperature, with every optimiser."""
    for base, rule in FROZEN:
        changed = replace(recipe, kl_temperature=base, kl_fit=rule.of(recipe.kl_fit))
        variant = f"{rule.optimizer} {rule.rate:g} T{base:g}"
        (method,) = eb.experiments.bridge_specs(changed, seed, [(0, 1, 2)], 3, None, "kl").values()
        info = eb.experiments.one_step(changed, "kl")
        model = eb.experiments.bridge_model(info, "frozen", [slug(variant)])
        yield Variant(replace(model, name=f"frozen {variant}"), slug(variant), method)


def distilled(recipe: Recipe, seed: int) -> Iterator[Variant]:
    """A distilled source alone, and with each of the bridges."""

    def build(run: Run, key: str, bridges: tuple[str, ...]) -> eb.FastEnsemble:
        method = run.methods("distilled")[key]
        assert isinstance(method, JointDistillation)
        return method.with_bridges(*bridges) if bridges else eb.FastEnsemble(method.source)

    alone = eb.evaluation.ModelInfo("ED", 3, tau=1.0)
    pair = eb.evaluation.ModelInfo("DBN", 3, 1, 1, "kl", 2.0, source="distilled")
    for variant, (start, rule) in STARTS.items():
        key, method = slug(variant), spec(recipe, seed, start, rule)
        for kind in ("alone", *BRIDGES):
            info, bridges = (pair, (slug(kind),)) if kind in BRIDGES else (alone, ())
            make = partial(build, key=key, bridges=bridges)
            yield Variant(TableModel(info, ("distilled",), make, name=f"{variant} {kind}"), key, method)


def every_variant(recipe: Recipe, seed: int) -> list[Variant]:
    """Every setting of the three methods."""
    return [*distilled(recipe, seed), *students(recipe, seed), *frozen(recipe, seed)]


def jobs_of(recipe: Recipe, variants: Iterable[Variant]) -> list[Job]:
    """A job for each of the three, whose settings are trained side by side."""
    methods: dict[str, dict[str, MethodSpec]] = {}
    for variant in variants:
        methods.setdefault(variant.model.needs[0], {})[variant.key] = variant.method
    needs = eb.experiments.member_folders(recipe, 3)
    return [Job(folder, folder, specs, needs) for folder, specs in methods.items()]


def one_variant(recipe: Recipe, seed: int, name: str) -> tuple[Job, TableModel]:
    """One setting by its model's name, trained alone."""
    variants = [variant for variant in every_variant(recipe, seed) if variant.model.name == name]
    return jobs_of(recipe, variants)[0], variants[0].model


def experiment(seed: int) -> Experiment:
    """Members, and every setting of the three methods."""
    variants = every_variant(RECIPE, seed)
    members = eb.experiments.experiment_of(RECIPE, seed).only(["members"]).jobs
    return Experiment(
        (*members, *jobs_of(RECIPE, variants)), tuple(variant.model for variant in variants), {}
    )


def main() -> None:
    """Print NLLs, and the share of the distance from DE-1 to DE-3 that is closed."""
    options = study_parser(__doc__, seeds=[0]).parse_args()
    nlls = pooled(RECIPE, experiment, options.out, seeds=options.seeds)
    for name in nlls:
        print(line(name, {key: nlls[key] for key in ("DE-1", "DE-3", name)}), flush=True)
    infos = {model.name: model.info for model in experiment(0).models}
    infos |= {f"DE-{size}": eb.evaluation.ModelInfo("DE", size) for size in range(1, RECIPE.members + 1)}
    rows = []
    for name, losses in nlls.items():
        trained = provenance("digits", infos[name].method, infos[name].members, options.seeds)
        rows.append({"model": name, **trained, "source": infos[name].source, "nll": losses.mean().item()})
    document = {"command": "python studies/choose_headline.py OUT", "seeds": options.seeds, "rows": rows}
    write_json(RESULTS / "headline-choice.json", document)


if __name__ == "__main__":
    main()
