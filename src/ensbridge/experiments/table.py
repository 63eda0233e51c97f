"""What a recipe trains and measures, as an experiment: its table and the series of its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ensbridge.evaluation.scores import ModelInfo, Width, name_rows
from ensbridge.experiments.figures import capacity, tradeoff
from ensbridge.experiments.headline import headline
from ensbridge.experiments.jobs import CurveSpec, Experiment, Job, TableModel, joint_jobs
from ensbridge.experiments.parts import (
    CONTROL,
    bridge_model,
    bridge_network_spec,
    bridge_specs,
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
)
from ensbridge.experiments.recipe import Recipe, baseline_sizes

STAGES = ("members", "bridge", "distill", "headline", "baselines", "tradeoff", "capacity")
TABLE_STAGES = ("members", "distill", "headline", "baselines")  # what the quick start trains


def experiment_of(recipe: Recipe, seed: int) -> Experiment:
    """The whole experiment of a recipe.

    >>> from ensbridge.experiments.digits import digits
    >>> experiment = experiment_of(digits(), 0)
    >>> [job.folder for job in experiment.of_stages(["bridge"])][-2:]
    ['bridges', 'bridges-kl']
    """
    members = member_jobs(recipe, seed, recipe.most_members)
    curves = curve_jobs(recipe, seed, recipe.most_members - 1)
    bridge_jobs, distilled, bridge_models, bridge_curves = _bridges(recipe, seed)
    headline_jobs, headline_models = headline(recipe, seed)
    baseline_jobs, baseline_models, baseline_curves = _baselines(recipe, seed)
    tradeoff_jobs, tradeoff_models = tradeoff(recipe, seed)
    capacity_jobs, capacity_models = capacity(recipe, seed)
    first = members[0]
    curve = CurveSpec(first.folder, next(iter(first.methods)), "DE-1", ModelInfo("DE"))
    return Experiment(
        jobs=(
            *members,
            *bridge_jobs,
            *distilled,
            *headline_jobs,
            *curves,
            *baseline_jobs,
            *tradeoff_jobs,
            *capacity_jobs,
        ),
        models=(*baseline_models, *bridge_models, *headline_models, *tradeoff_models, *capacity_models),
        stages={
            "members": member_folders(recipe, recipe.members),
            "bridge": _folders(bridge_jobs),
            "distill": _folders([*bridge_jobs, *distilled]),
            "headline": _folders(headline_jobs),
            "baselines": _folders(baseline_jobs),
            "tradeoff": _folders(tradeoff_jobs),
            "capacity": _folders(capacity_jobs),
        },
        curves=(curve, *bridge_curves, *baseline_curves),
    )


def _folders(jobs: Sequence[Job]) -> tuple[str, ...]:
    return tuple(job.folder for job in jobs)


def _bridges(recipe: Recipe, seed: int) -> tuple[list[Job], list[Job], list[TableModel], list[CurveSpec]]:
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
    own, alike = slug(target), [slug(group, target) for group in groups]
    models = [bridge_model(several, sampled.folder, [own])]
    models += [bridge_model(one, last, [own])] if distilled else []
    models.append(bridge_model(with_kl, kl.folder, [own]))
    count = len(groups)
    if count > 1:
        all_members = replace(one, members=members, bridges=count)
        models += [bridge_model(all_members, last, [slug(group) for group in groups])] if distilled else []
        models.append(bridge_model(replace(with_kl, bridges=count), kl.folder, alike))
    for size in dict.fromkeys((1, count)):
        names = [slug(group, CONTROL) for group in groups[:size]]
        if distilled:
            models.append(bridge_model(replace(one, bridges=size).as_control(), last, names))
        models.append(bridge_model(replace(with_kl, bridges=size).as_control(), kl.folder, names))
    shown = [
        (sampled.folder, own, several),
        (sampled.folder, slug(groups[0], CONTROL), one.as_control()),
        (kl.folder, own, with_kl),
    ]
    curves = [CurveSpec(*spec[:2], name_rows([spec[2]], recipe.target)[0], spec[2]) for spec in shown]
    return [sampled, kl], distilled, models, curves


def _baselines(recipe: Recipe, seed: int) -> tuple[list[Job], list[TableModel], list[CurveSpec]]:
    """ED and EnD² on the members, and bridge networks, small and medium, on the source and its curves.

    Each of the two groups shares its teachers' passes; they have but the source in common, so that they are
    jobs of their own.
    """
    target, sizes = recipe.target, baseline_sizes(recipe)
    models: list[TableModel] = []
    students = {}
    for teachers in sizes:
        mark = "" if teachers == target else f"-{teachers}"
        students |= student_specs(recipe, seed, teachers, mark)
    distilled = joint_jobs("baselines", "baselines", students, member_folders(recipe, max(sizes)))
    where = {name: job.folder for job in distilled for name in job.methods}
    for teachers in sizes:
        mark = "" if teachers == target else f"-{teachers}"
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
    return [*distilled, bridged], models, curves
