"""The trained parts that tables and figures share: members, bridges, their distillation, students."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from torch import nn

from ensbridge.evaluation.scores import Loss, ModelInfo
from ensbridge.experiments.jobs import Job, MethodSpec, Table, TableModel
from ensbridge.experiments.recipe import Recipe, build
from ensbridge.experiments.runner import Run, seeded
from ensbridge.methods.base import AbstractMethod
from ensbridge.methods.bezier import BezierCurve
from ensbridge.methods.bridge_network import BridgeNetwork
from ensbridge.methods.deep_ensemble import DeepEnsemble
from ensbridge.methods.diffusion_bridge import DiffusionBridge
from ensbridge.methods.end2 import ProxyEnD2
from ensbridge.methods.ensemble_distillation import EnsembleDistillation
from ensbridge.methods.step_distillation import StepDistillation
from ensbridge.models.ensemble import Ensemble, member_groups
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.training.config import PerMemberShuffle, derive_seed
from ensbridge.training.distill import distillation_grids, stage_name

Group = tuple[int, ...]  # members by index
CONTROL: Group = (0,)  # the source alone
MethodType = TypeVar("MethodType", bound=AbstractMethod)


# ------------------------------------------------------------------------------ members


def member_jobs(recipe: Recipe, seed: int, count: int) -> list[Job]:
    """Jobs of the first `count` members, those that are trained side by side in one."""
    return [_member_job(recipe, seed, group) for group in members_by_training(recipe, count)]


def _member_job(recipe: Recipe, seed: int, group: Group) -> Job:
    seeds = [derive_seed(seed, "member", index) for index in group]
    if len(group) == 1:
        config, names, label = replace(recipe.member_fit, seed=seeds[0]), ["member"], "member"
    else:
        config = PerMemberShuffle.of(recipe.member_fit, seeds)
        names = [f"member-{index + 1}" for index in group]
        label = f"member, {len(group)} at a time"

    def method(part: int) -> MethodSpec:
        def make(run: Run) -> DeepEnsemble:
            net = build(recipe.member, seeds[part]).to(run.device)
            return DeepEnsemble([net], part=(part, len(group)) if len(group) > 1 else None)

        return MethodSpec(label, make, config)

    methods = {name: method(part) for part, name in enumerate(names)}
    return Job(member_folder(group), "members", methods, labelled=True, independent=True)


def member_folder(group: Group) -> str:
    """The folder of members that are trained side by side, which follow each other.

    >>> member_folder((0,)), member_folder((3, 4))
    ('member-1', 'members-4-to-5')
    """
    first, last = group[0] + 1, group[-1] + 1
    return f"member-{first}" if first == last else f"members-{first}-to-{last}"


def members_by_training(recipe: Recipe, count: int) -> list[Group]:
    """The first so many members by those that are trained side by side, the table's apart from others.

    >>> from ensbridge.experiments.digits import digits
    >>> members_by_training(replace(digits(), members_together=2), 7)
    [(0, 1), (2, 3), (4,), (5, 6)]
    """
    ends = [*range(0, min(recipe.members, count), recipe.members_together)]
    ends += [*range(recipe.members, count, recipe.members_together), count]
    return [tuple(range(start, stop)) for start, stop in pairwise(ends)]


def member_folders(recipe: Recipe, count: int) -> tuple[str, ...]:
    """The folders of the jobs that train the first so many members."""
    groups = members_by_training(recipe, recipe.most_members)
    return tuple(member_folder(group) for group in groups if group[0] < count)


def trained_ensemble(run: Run, recipe: Recipe, count: int) -> Ensemble:
    """The first so many members, trained or given."""

    def gather() -> Ensemble:
        if run.members is not None:
            return run.members.first(count).eval()
        methods = [run.methods(folder) for folder in member_folders(recipe, count)]
        members = [
            checked(method, DeepEnsemble).ensemble.source for named in methods for method in named.values()
        ]
        return Ensemble(members[:count]).eval()

    return run.once(f"ensemble of {count}", gather)


# ------------------------------------------------------------------------------ diffusion bridges


def bridge_specs(
    recipe: Recipe,
    seed: int,
    groups: Iterable[Group],
    members: int,
    towards: Group | None = None,
    loss: Loss = "bridge",
) -> dict[str, MethodSpec]:
    """Bridges from the source to groups of the first `members` members, by their names in folders.

    With `towards`, all of them have that target and start from the weights that the groups' bridges start
    from: a bridge and its control start alike, bridges that are averaged do not.
    """
    config = recipe.bridge_config(loss)
    fit = seeded(recipe.kl_fit if loss == "kl" else recipe.bridge_fit, seed, "bridge")
    label = "KL" if loss == "kl" else f"{recipe.bridge.num_steps} steps"
    if config.temperature != recipe.bridge.temperature:
        label += f", T = {config.temperature.base:g}"

    def spec(group: Group) -> MethodSpec:
        def make(run: Run) -> DiffusionBridge:
            net = run.build(
                lambda: recipe.score(config.z_input), "score", *([] if _is_first(group) else group)
            )
            ensemble = trained_ensemble(run, recipe, members)
            target = group if towards is None else towards
            return DiffusionBridge(ensemble, net, recipe.feature, loss=loss, target=target, config=config)

        return MethodSpec(f"bridge ({label})", make, fit)

    return {slug(group, towards): spec(group) for group in groups}


def distillation_jobs(recipe: Recipe, seed: int, bridges: Job, folder: str) -> list[Job]:
    """The jobs that distil a job's bridges to one step, at once or stage by stage."""
    jobs: list[Job] = []
    config = seeded(recipe.distill_fit, seed, "bridge")
    before, steps = bridges, recipe.bridge.num_steps

    def spec(teachers: str, name: str, times: Sequence[float], label: str) -> MethodSpec:
        def make(run: Run) -> StepDistillation:
            teacher = checked(trained_bridge(run, teachers, name), DiffusionBridge)
            return StepDistillation(teacher, times, mode=recipe.bridge.distillation)

        return MethodSpec(label, make, config)

    for times in distillation_grids(recipe.bridge.schedule.times().tolist(), recipe.bridge.distillation):
        label = f"bridge, distilled {steps} → {len(times) - 1} steps"
        methods = {name: spec(before.folder, name, times, label) for name in bridges.methods}
        before = Job(f"{folder}/{stage_name(steps, times)}", bridges.group, methods, (before.folder,))
        steps = len(times) - 1
        jobs.append(before)
    return jobs


def trained_bridge(run: Run, folder: str, name: str) -> DiffusionBridge | BridgeNetwork:
    """A bridge that a job trained, or that one of distillation made."""
    method = run.methods(folder)[name]
    if isinstance(method, StepDistillation):
        return method.distilled
    assert isinstance(method, DiffusionBridge | BridgeNetwork), type(method)
    return method


def one_step(recipe: Recipe, loss: Loss = "bridge") -> ModelInfo:
    """What one bridge of one step towards the recipe's target is."""
    return ModelInfo("DBN", recipe.target, 1, 1, loss, recipe.bridge_config(loss).temperature.base)


def slug(group: Group, towards: Group | None = None) -> str:
    """A bridge's name in folders and logs.

    >>> slug((0, 3, 4)), slug((0, 1, 2), CONTROL), slug((0, 3, 4), CONTROL), slug((0, 3, 4), (0, 1, 2))
    ('members-1-4-5', 'control', 'control-like-1-4-5', 'members-1-2-3-like-1-4-5')
    """
    target = group if towards is None else towards
    target_numbers, numbers = ("-".join(str(index + 1) for index in part) for part in (target, group))
    name = "control" if target == CONTROL else f"members-{target_numbers}"
    return name if target == group or _is_first(group) else f"{name}-like-{numbers}"


def _is_first(group: Group) -> bool:
    """Whether it is the first of those that members are partitioned into."""
    return 1 in group


def groups_for(recipe: Recipe, members: int) -> list[Group]:
    """The groups of as few bridges as stand for so many members with `target` members each.

    >>> from ensbridge.experiments.digits import digits
    >>> [groups_for(digits(), members) for members in (2, 3, 5)]
    [[(0, 1)], [(0, 1, 2)], [(0, 1, 2), (0, 3, 4)]]
    """
    return member_groups(members, -(-(members - 1) // (recipe.target - 1)))


# ------------------------------------------------------------------------------ baselines


def curve_jobs(recipe: Recipe, seed: int, others: int) -> list[Job]:
    """Jobs of the Bezier curves from the source to each of the next `others` members."""

    def job(index: int) -> Job:
        def make(run: Run) -> BezierCurve:
            members = trained_ensemble(run, recipe, index + 1).members
            return BezierCurve(members[0], members[index])

        spec = MethodSpec("Bezier curve", make, seeded(recipe.curve_fit, seed, "curve", index))
        needs = member_folders(recipe, index + 1)
        methods = {"curve": spec}
        return Job(curve_folder(index), "curves", methods, needs, labelled=True, independent=True)

    return [job(index) for index in range(1, others + 1)]


def curve_folder(index: int) -> str:
    """The folder of the curve from the source to the member of an index."""
    return f"curve-1-{index + 1}"


def curve_folders(others: int) -> tuple[str, ...]:
    """The folders of the first so many curves."""
    return tuple(curve_folder(index) for index in range(1, others + 1))


def student_specs(recipe: Recipe, seed: int, teachers: int, mark: str) -> dict[str, MethodSpec]:
    """ED and EnD² of the first so many members, which start alike; `mark` ends their names in folders."""

    def student(run: Run) -> tuple[Ensemble, nn.Module]:
        return trained_ensemble(run, recipe, teachers), run.build(recipe.member, "student")

    def ed(run: Run) -> EnsembleDistillation:
        return EnsembleDistillation(*student(run), tau=recipe.ed_tau)

    def end2(run: Run) -> ProxyEnD2:
        predict, divisor = recipe.end2_predict, recipe.end2_divisor
        return ProxyEnD2(*student(run), tau=recipe.end2_tau, predict=predict, divisor=divisor)

    return {
        f"ed{mark}": MethodSpec("ED", ed, seeded(recipe.ed_fit, seed, "bridge")),
        f"end2{mark}": MethodSpec("EnD²", end2, seeded(recipe.end2_fit, seed, "bridge")),
    }


def bridge_network_spec(
    recipe: Recipe, seed: int, centres: Sequence[int], share: float, width: str, start: int
) -> MethodSpec:
    """A bridge network towards the centres of the curves to these members; `share` is that of channels."""

    def centre(run: Run, index: int) -> nn.Module:
        curve = checked(run.methods(curve_folder(index))["curve"], BezierCurve)
        return run.once(f"centre of {index}", lambda: curve.at(0.5))

    def make(run: Run) -> BridgeNetwork:
        source = trained_ensemble(run, recipe, 1).source
        net = run.build(lambda: recipe.tail(source, recipe.tail_feature, share), "tail", width, start)
        return BridgeNetwork(source, [centre(run, index) for index in centres], net, recipe.tail_feature)

    return MethodSpec(f"bridge network, {width}", make, seeded(recipe.bn_fit, seed, "bridge"))


# ------------------------------------------------------------------------------ models


def bridge_model(info: ModelInfo, folder: str, names: Sequence[str], table: Table = "rows") -> TableModel:
    """The source with the bridges of these names, whose predictions are averaged; networks' with its own."""

    def make(run: Run) -> nn.Module:
        return FastEnsemble.of(*(trained_bridge(run, folder, name) for name in names))

    return TableModel(info, (folder,), make, table)


network_model = bridge_model


def student_model(info: ModelInfo, folder: str, name: str, table: Table = "rows") -> TableModel:
    """A student that stands for the ensemble by itself."""
    return TableModel(info, (folder,), lambda run: run.methods(folder)[name].model(), table)


def checked(method: AbstractMethod, kind: type[MethodType]) -> MethodType:
    """A method that is of the kind that it must be."""
    assert isinstance(method, kind), f"{type(method).__name__} is no {kind.__name__}"
    return method
