"""CIFAR-10 or -100: the best model at ×1.00, ×1.17 and ×1.33, and what a reviewer would put beside it.

    python studies/best_for_cost.py cifar10 OUT --seeds 0 1 2 --epochs 130 --final
    python studies/best_for_cost.py cifar10 OUT --methods self wider end2 --seeds 0 1 2 --epochs 130 --final
    python studies/best_for_cost.py cifar10 OUT --methods labels --seeds 0 1 2 --epochs 130 --final
    python studies/best_for_cost.py cifar100 OUT --recipe cifar100 --seeds 0 --final

Everything is trained side by side on the same batches, for as many passes, towards the members' prediction on
the augmented image; labels are used by `labels` and `labelled` alone, mixed as the images are. A seed decides
the first weights, the first seed the batches. Of --methods:

    distilled    a new network distilled from all members at τ = 1, and two bridges at T = 2 that read three
                 of its maps and send no gradient into it, one of them at half the resolution
    end-to-end   the same with one bridge, whose gradient goes into the network too
    wider        a wider network of the cost of one bridge, distilled alike
    self         the control of `distilled` with the second bridge: the first member alone as the teacher
    three        `distilled` with three teachers
    end2         a new network by EnD² at τ = 1
    labels       a new network on labels, without any teacher
    labelled     `distilled` with the second bridge and labels beside the teachers, at --label-weight

A whole model of each method and seed is left in OUT/…/models, and measured again from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

import ensbridge as eb
from common import EMA, at_temperature, begin, fit_config, parser
from ensbridge.evaluation import ModelInfo
from ensbridge.experiments import Experiment, Job, MethodSpec, Recipe, Run, TableModel
from ensbridge.methods import (
    AbstractMethod,
    Bridge,
    DirichletClassifier,
    EmaRule,
    EnsembleDistillation,
    JointDistillation,
    ProxyEnD2,
)
from ensbridge.models import PyramidScore

METHODS = ("distilled", "end-to-end", "wider", "self", "three", "end2", "labels", "labelled")
ALONE = ("wider", "end2", "labels")  # networks without bridges
TEACHERS = {"self": 1, "three": 3}  # others have all
BRIDGES = {"self": ("coarse",), "labelled": ("coarse",), "end-to-end": ("fine",)}  # others have both
CHANNELS = {"cifar10": 32, "cifar100": 64}  # of the first map
WIDER = (35, 68, 138)  # channels: ×1.161 the MACs of (32, 64, 128); twice as many on CIFAR-100
FEATURES = ("stages.0.0", "stages.1.4", "stages.2.4")  # h₁ and the last maps of the later stages


def fine(classes: int, channels: int) -> PyramidScore:
    """The paper's score network with the source's later maps added: ×0.162 the MACs of the source."""
    stages = [(1, 8, 1, 1), (3, 12, 2, 2), (3, 16, 3, 2), (3, 24, 2, 1), (3, 32, 2, 1)]
    return PyramidScore.scaled(classes, channels, stages, joins=(1, 2), stem=8, last=32)


SCORES: dict[str, Callable[[int, int], PyramidScore]] = {"fine": fine, "coarse": PyramidScore.coarse}


def bridges_of(name: str) -> tuple[str, ...]:
    """The bridges of a method."""
    return () if name in ALONE else BRIDGES.get(name, tuple(SCORES))


def student_of(name: str, recipe: Recipe, teachers: eb.Ensemble, run: Run, seed: int) -> AbstractMethod:
    """A network without bridges, which learns from the teachers or, of `labels`, from labels."""
    classes, channels = len(recipe.class_names), CHANNELS[recipe.name]
    if name == "wider":
        widths = [width * channels // 32 for width in WIDER]
        wider = run.build(lambda: eb.nets.ResNet((5, 5, 5), widths, classes), "wider", seed)
        return EnsembleDistillation(teachers, wider, tau=1.0, ema=EmaRule(EMA))
    student = run.build(recipe.member, "student", seed)
    if name == "labels":
        return EnsembleDistillation(teachers, student, tau=1.0, label_weight=1.0, ema=EmaRule(EMA))
    method = ProxyEnD2(teachers, student, tau=1.0)
    method.ema = EmaRule(EMA)
    return method


def spec(recipe: Recipe, name: str, seed: int, fit: eb.FitConfig, label_weight: float) -> MethodSpec:
    """A network and its bridges."""

    def make(run: Run) -> AbstractMethod:
        assert run.members is not None
        teachers = run.members.first(TEACHERS.get(name, len(run.members)))
        if name in ALONE:
            return student_of(name, recipe, teachers, run, seed)
        classes, channels = len(recipe.class_names), CHANNELS[recipe.name]
        source = run.build(recipe.member, "student", seed)
        bridges = {
            label: Bridge(
                run.build(lambda label=label: SCORES[label](classes, channels), "score", label, seed),
                at_temperature(2.0),
                (0.0, 1.0),
            )
            for label in bridges_of(name)
        }
        return JointDistillation(
            teachers,
            source,
            bridges,
            FEATURES,
            end_to_end=name == "end-to-end",
            label_weight=label_weight if name == "labelled" else 0.0,
            ema=EmaRule(EMA),
        )

    return MethodSpec(name, make, fit)


def whole_model(run: Run, name: str, saved: Path) -> eb.FastEnsemble:
    """A method's network with all its bridges: the saved one, or the one that was just trained."""
    if (saved / name).exists():
        return eb.load(saved / name).to(run.device)
    model = run.methods("all")[name].model()
    if not isinstance(model, eb.FastEnsemble):
        model = eb.FastEnsemble(model.net if isinstance(model, DirichletClassifier) else model)
    model.save(saved / name, image_shape=(3, 32, 32))
    return model


def models_of(name: str, seed: int, members: int, saved: Path) -> list[TableModel]:
    """A network alone, with each bridge, and with both."""
    teachers, bridges = TEACHERS.get(name, members), bridges_of(name)

    def built(chosen: tuple[str, ...]) -> Callable[[Run], nn.Module]:
        def build(run: Run) -> nn.Module:
            whole = run.once(f"{name}-{seed}", lambda: whole_model(run, f"{name}-{seed}", saved))
            if name == "end2":
                return DirichletClassifier(whole.source, tau=1.0)
            crossed = [whole.each_bridge()[bridges.index(label)] for label in chosen]
            return eb.FastEnsemble(whole.source, crossed, whole.features)

        return build

    models = []
    for chosen in ((), *((label,) for label in bridges), *([bridges] if len(bridges) > 1 else [])):
        if chosen:
            info = ModelInfo("DBN", teachers, len(chosen), 1, "kl", 2.0)
        elif name == "labels":
            info = ModelInfo("other")
        else:
            info = ModelInfo("EnD2" if name == "end2" else "ED", teachers)
        label = " + ".join((f"{name} {seed}", *chosen))
        models.append(TableModel(info, ("all",), built(chosen), name=label))
    return models


def main() -> None:
    """Train, measure on the validation images and, with --final, on the test images."""
    asked = parser(__doc__, epochs=320)
    asked.add_argument("--methods", nargs="+", choices=METHODS, default=["distilled"])
    asked.add_argument("--seeds", type=int, nargs="+", default=[0])
    asked.add_argument("--label-weight", type=float, default=0.5, help="of `labelled`")
    asked.set_defaults(mixup=1.0, lr=0.1)
    options, recipe, data, members = begin(asked)
    fit = replace(
        fit_config(options, options.seeds[0]), optimizer="muon", weight_decay=0.01, warmup_steps=200
    )
    which = [(name, seed) for name in options.methods for seed in options.seeds]
    out = options.out / f"{'-'.join(options.methods)}-{'-'.join(map(str, options.seeds))}"
    saved = out / "models"
    specs = {f"{name}-{seed}": spec(recipe, name, seed, fit, options.label_weight) for name, seed in which}
    models = [model for name, seed in which for model in models_of(name, seed, len(members), saved)]
    trained = all((saved / name).exists() for name in specs)
    labelled = any(name.startswith("label") for name in options.methods)
    jobs = [Job("all", "all", specs, labelled=labelled)]
    if trained:
        jobs, models = [], [replace(model, needs=()) for model in models]
    recipe = replace(recipe, members=len(members))
    experiment = Experiment(tuple(jobs), tuple(models), {})
    result = eb.experiments.run_study(
        experiment, recipe, data, out, members, seed=options.seeds[0], final=options.final
    )
    for part, scores in result.scores.items():
        print(f"{part}\n{scores.table()}", flush=True)


if __name__ == "__main__":
    main()
