"""The series of the trade-off and of the capacity: bridges and baselines for 2, 3, … members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ensbridge.evaluation.scores import ModelInfo
from ensbridge.experiments.jobs import Job, MethodSpec, TableModel, joint_jobs
from ensbridge.experiments.parts import (
    bridge_model,
    bridge_network_spec,
    bridge_specs,
    curve_folders,
    distillation_jobs,
    groups_for,
    member_folders,
    network_model,
    one_step,
    slug,
    student_model,
    student_specs,
)
from ensbridge.experiments.recipe import Recipe


def tradeoff(recipe: Recipe, seed: int) -> tuple[list[Job], list[TableModel]]:
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
    return jobs, models


def capacity(recipe: Recipe, seed: int) -> tuple[list[Job], list[TableModel]]:
    """One network for 2, 3, … teachers: DBN, BN (towards the mean of its curves' centres), ED and EnD²."""
    most = recipe.most_members
    sizes = range(2, most + 1)
    bridges = bridge_specs(recipe, seed, [tuple(range(teachers)) for teachers in sizes], most)
    others: dict[str, MethodSpec] = {}
    for teachers in sizes:
        others |= student_specs(recipe, seed, teachers, f"-{teachers}")
        network = bridge_network_spec(recipe, seed, range(1, teachers), 1.0, "medium", 0)
        others[f"bn-{teachers}"] = network
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
    return jobs, models


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
