"""What a recipe trains and measures, as an experiment: its table and the series of its figures."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from ensbridge.bridge.bridge import Bridge, BridgeConfig
from ensbridge.evaluation.scores import ModelInfo, Width, name_rows
from ensbridge.experiments.jobs import CurveSpec, Experiment, Job, MethodSpec, TableModel, joint_jobs
from ensbridge.experiments.parts import (
    CONTROL,
    bridge_model,
    bridge_network_spec,
    bridge_specs,
    checked,
    curve_folders,
    curve_jobs,
    distillation_jobs,
    groups_for,
    member_folders,
    member_jobs,
    network_model,
    one_step,
    slug,
    student_model,
    student_specs,
    trained_ensemble,
)
from ensbridge.experiments.recipe import Recipe, baseline_sizes
from ensbridge.experiments.runner import Run, seeded
from ensbridge.methods.base import EmaRule
from ensbridge.methods.joint_distillation import JointDistillation
from ensbridge.training.config import FitConfig

STAGES = ("members", "bridge", "distill", "headline", "baselines", "tradeoff", "capacity")
TABLE_STAGES = ("members", "distill", "headline", "baselines")  # what the quick start trains
HEADLINE = "headline"  # the folder of the headline's job


class Part(NamedTuple):
    """What a part of an experiment trains, measures and shows."""

    jobs: list[Job]
    models: list[TableModel]
    curves: Sequence[CurveSpec] = ()

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of its jobs."""
        return tuple(job.folder for job in self.jobs)


def experiment_of(recipe: Recipe, seed: int) -> Experiment:
    """The whole experiment of a recipe.

    >>> from ensbridge.experiments.digits import digits
    >>> experiment = experiment_of(digits(), 0)
    >>> [job.folder for job in experiment.of_stages(["bridge"])][-2:]
    ['bridges', 'bridges-kl']
    """
    first, *others = member_jobs(recipe, seed, recipe.most_members)
    curve = CurveSpec(first.folder, next(iter(first.methods)), "DE-1", ModelInfo("DE"))
    members = Part([first, *others], [], [curve])
    curves = Part(curve_jobs(recipe, seed, recipe.most_members - 1), [])
    parts = {
        "distill": _bridges(recipe, seed),
        "headline": headline(recipe, seed),
        "baselines": _baselines(recipe, seed),
        "tradeoff": tradeoff(recipe, seed),
        "capacity": capacity(recipe, seed),
    }
    bridges, *figures = parts.values()
    trained = [members, bridges, parts["headline"], curves, *figures[1:]]
    measured = [parts["baselines"], bridges, parts["headline"], *figures[2:]]
    return Experiment(
        jobs=tuple(job for part in trained for job in part.jobs),
        models=tuple(model for part in measured for model in part.models),
        stages={
            "members": member_folders(recipe, recipe.members),
            "bridge": ("bridges", "bridges-kl"),
            **{stage: part.folders for stage, part in parts.items()},
        },
        curves=tuple(curve for part in trained for curve in part.curves),
    )


def _bridges(recipe: Recipe, seed: int) -> Part:
    """Bridges towards the target and towards all members, the same trained with KL, and their controls.

    With KL those that are averaged all stand for the target: they differ by their starts.
    """
    members, few = recipe.members, recipe.target
    target, groups = tuple(range(few)), groups_for(recipe, members)
    specs = bridge_specs(recipe, seed, dict.fromkeys([target, *groups]), members)
    specs |= bridge_specs(recipe, seed, groups, members, CONTROL)
    sampled = Job("bridges", "bridges", specs, member_folders(recipe, members))
    specs = bridge_specs(recipe, seed, groups, few, target, "kl")
    specs |= bridge_specs(recipe, seed, groups, few, CONTROL, "kl")
    kl = Job("bridges-kl", "bridges", specs, member_folders(recipe, few))
    distilled = distillation_jobs(recipe, seed, sampled, "distilled")
    last = distilled[-1].folder if distilled else sampled.folder

    one, with_kl = one_step(recipe), one_step(recipe, "kl")
    several = replace(one, steps=recipe.bridge.num_steps)
    name, alike = slug(target), [slug(group, target) for group in groups]
    models = [
        bridge_model(several, sampled.folder, [name]),
        bridge_model(one, last, [name]),
        bridge_model(with_kl, kl.folder, [name]),
    ]
    count = len(groups)
    if count > 1:
        all_members = replace(one, members=members, bridges=count)
        models.append(bridge_model(all_members, last, [slug(group) for group in groups]))
        models.append(bridge_model(replace(with_kl, bridges=count), kl.folder, alike))
    for size in dict.fromkeys((1, count)):
        names = [slug(group, CONTROL) for group in groups[:size]]
        models.append(bridge_model(replace(one, bridges=size).as_control(), last, names))
        models.append(bridge_model(replace(with_kl, bridges=size).as_control(), kl.folder, names))
    if not distilled:  # bridges that are sampled in one step have only the one row
        models = [models[0], *(model for model in models if model.needs != (last,))]
    shown = [
        (sampled.folder, name, several),
        (sampled.folder, slug(groups[0], CONTROL), one.as_control()),
        (kl.folder, name, with_kl),
    ]
    labels = [name_rows([info], recipe.target)[0] for _, _, info in shown]
    curves = [CurveSpec(*spec[:2], label, spec[2]) for spec, label in zip(shown, labels, strict=True)]
    return Part([sampled, kl, *distilled], models, curves)


def _baselines(recipe: Recipe, seed: int) -> Part:
    """ED and EnD² on the members, and bridge networks, small and medium, on the source and its curves.

    Each of the two groups shares its teachers' passes; they have but the source in common, so that they are
    jobs of their own.
    """
    target, sizes = recipe.target, baseline_sizes(recipe)
    models: list[TableModel] = []
    students: dict[str, MethodSpec] = {}
    marks = {teachers: "" if teachers == target else f"-{teachers}" for teachers in sizes}
    for teachers, mark in marks.items():
        students |= student_specs(recipe, seed, teachers, mark)
    distilled = joint_jobs("baselines", "baselines", students, member_folders(recipe, max(sizes)))
    where = {name: job.folder for job in distilled for name in job.methods}
    for teachers, mark in marks.items():
        models.append(student_model(ModelInfo("ED", teachers), where[f"ed{mark}"], f"ed{mark}"))
        models.append(student_model(ModelInfo("EnD2", teachers), where[f"end2{mark}"], f"end2{mark}"))
    # The share of the channels, and how many of each.
    widths: dict[Width, tuple[float, int]] = {"small": (0.5, max(sizes) - 1), "medium": (1.0, target - 1)}
    networks = {
        f"{width}-{index + 1}": bridge_network_spec(recipe, seed, [index + 1], share, width, index)
        for width, (share, count) in widths.items()
        for index in range(count)
    }
    needs = (*member_folders(recipe, 1), *curve_folders(max(sizes) - 1))
    bridged = Job("baselines-bn", "baselines", networks, needs)
    curves = [
        CurveSpec(curve_folders(1)[0], "curve", "Bezier curve", ModelInfo("BN")),
        CurveSpec(where["ed"], "ed", "ED", ModelInfo("ED")),
        CurveSpec(where["end2"], "end2", "EnD²", ModelInfo("EnD2")),
    ]
    for width in widths:
        curves.append(CurveSpec(bridged.folder, f"{width}-1", f"BN {width}", ModelInfo("BN")))
        for members in sizes if width == "small" else (target,):
            info = ModelInfo("BN", members, members - 1, 1, width=width)
            names = [f"{width}-{index + 1}" for index in range(members - 1)]
            models.append(network_model(info, bridged.folder, names))
    return Part([*distilled, bridged], models, curves)


def tradeoff(recipe: Recipe, seed: int) -> Part:
    """As many bridges as 2, 3, … members need: DBN with `target` members each, BN medium with one each."""
    most = recipe.most_members
    groups = {members: groups_for(recipe, members) for members in range(2, most + 1)}
    distinct = dict.fromkeys(group for parts in groups.values() for group in parts)
    bridges = bridge_specs(recipe, seed, distinct, most)
    networks = {
        f"bn-{index}": bridge_network_spec(recipe, seed, [index], 1.0, "medium", index - 1)
        for index in range(1, most)
    }
    jobs, last, where = _jobs(recipe, seed, "tradeoff", bridges, networks)
    models = []
    for members, parts in groups.items():
        info = replace(one_step(recipe), members=members, bridges=len(parts))
        models.append(bridge_model(info, last, [slug(group) for group in parts], "tradeoff"))
    for members in groups:
        names = [f"bn-{index}" for index in range(1, members)]
        info = ModelInfo("BN", members, members - 1, 1)
        models.append(network_model(info, where["bn-1"], names, "tradeoff"))
    return Part(jobs, models)


def capacity(recipe: Recipe, seed: int) -> Part:
    """One network for 2, 3, … teachers: DBN, BN (towards the mean of its curves' centres), ED and EnD²."""
    most = recipe.most_members
    sizes = range(2, most + 1)
    bridges = bridge_specs(recipe, seed, [tuple(range(teachers)) for teachers in sizes], most)
    others: dict[str, MethodSpec] = {}
    for teachers in sizes:
        others |= student_specs(recipe, seed, teachers, f"-{teachers}")
        others[f"bn-{teachers}"] = bridge_network_spec(recipe, seed, range(1, teachers), 1.0, "medium", 0)
    jobs, last, where = _jobs(recipe, seed, "capacity", bridges, others)
    models = []
    for teachers in sizes:
        ed, end2, network = (f"{name}-{teachers}" for name in ("ed", "end2", "bn"))
        info = replace(one_step(recipe), members=teachers)
        models += [
            bridge_model(info, last, [slug(tuple(range(teachers)))], "capacity"),
            network_model(ModelInfo("BN", teachers, 1, 1), where[network], [network], "capacity"),
            student_model(ModelInfo("ED", teachers), where[ed], ed, "capacity"),
            student_model(ModelInfo("EnD2", teachers), where[end2], end2, "capacity"),
        ]
    return Part(jobs, models)


def _jobs(
    recipe: Recipe, seed: int, name: str, bridges: Mapping[str, MethodSpec], others: Mapping[str, MethodSpec]
) -> tuple[list[Job], str, dict[str, str]]:
    """The jobs of a figure, the folder of its distilled bridges, and that of each other method."""
    members = member_folders(recipe, recipe.most_members)
    sampled = Job(f"{name}-bridges", name, bridges, members)
    distilled = distillation_jobs(recipe, seed, sampled, f"{name}-distilled")
    needs = (*members, *curve_folders(recipe.most_members - 1))
    baselines = joint_jobs(f"{name}-baselines", name, others, needs)
    where = {method: job.folder for job in baselines for method in job.methods}
    return [sampled, *distilled, *baselines], (distilled or [sampled])[-1].folder, where


def headline(recipe: Recipe, seed: int) -> Part:
    """The model that a report is about, a source distilled from the ensemble with a bridge beside it.

    It is what `compress` makes of the members where validation prefers it: on digits cross-validation did
    (studies/choose_headline.py), on CIFAR-10 validation images (studies/best_for_cost.py). Its source alone
    and its control are measured too; the control is the same with the first member alone as the teacher.
    Recipes without a `headline_fit` have none.
    """
    if recipe.headline_fit is None:
        return Part([], [])
    teachers = recipe.headline_teachers or recipe.target
    specs = {
        "distilled": _headline_spec(recipe, recipe.headline_fit, seed, teachers),
        "control": _headline_spec(recipe, recipe.headline_fit, seed, 1),
    }
    job = Job(HEADLINE, HEADLINE, specs, member_folders(recipe, teachers))
    base = recipe.headline_temperature
    pair = replace(one_step(recipe, "kl"), members=teachers, source="distilled", source_temperature=base)

    def source(run: Run) -> nn.Module:
        return checked(run.methods(HEADLINE)["distilled"], JointDistillation).source

    models = [
        TableModel(ModelInfo("ED", teachers, tau=1.0), (HEADLINE,), source),
        replace(student_model(pair, HEADLINE, "distilled"), headline=True),
        student_model(pair.as_control(), HEADLINE, "control"),
    ]
    return Part([job], models)


def _headline_spec(recipe: Recipe, distil: FitConfig, seed: int, teachers: int) -> MethodSpec:
    """A copy of the first member, or a new one, that is distilled, and a bridge beside it, as with KL."""
    source_fit = seeded(distil, seed, "bridge")
    bridge_fit = seeded(recipe.headline_bridge_fit or recipe.kl_fit, seed, "bridge")
    bridge_fit = replace(bridge_fit, epochs=distil.epochs, augment=distil.augment)
    law = replace(recipe.bridge.temperature, base=recipe.headline_temperature)
    config = BridgeConfig(beta=recipe.bridge.beta, temperature=law, ema=recipe.bridge.ema)
    features = recipe.headline_features or recipe.feature

    def make(run: Run) -> JointDistillation:
        ensemble = trained_ensemble(run, recipe, teachers)
        source: nn.Module = copy.deepcopy(ensemble.source).requires_grad_()
        if recipe.headline_new:
            source = run.build(recipe.member, "student")
        score = run.build(recipe.headline_score or (lambda: recipe.score(config.z_input)), "score")
        bridges = {"bridge": Bridge(score, config, (0.0, 1.0))}  # type: ignore[arg-type]
        return JointDistillation(ensemble, source, bridges, features, ema=EmaRule(config.ema))

    label = f"distilled source and bridge (T = {recipe.headline_temperature:g})"
    return MethodSpec(label, make, bridge_fit, {"source": source_fit, "bridges": bridge_fit})
