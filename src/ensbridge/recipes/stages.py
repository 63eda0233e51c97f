"""The stages of a recipe: each trains what it needs and is not finished, and returns its models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ensbridge.ensemble import Ensemble
from ensbridge.evaluation import Aim
from ensbridge.fast_ensemble import FastEnsemble
from ensbridge.methods.bridge_network import BridgeNetwork
from ensbridge.methods.diffusion_bridge import DiffusionBridge
from ensbridge.methods.distillation import EnsembleDistillation
from ensbridge.methods.end2 import ProxyEnD2
from ensbridge.methods.method import AbstractMethod
from ensbridge.recipes.experiment import (
    CONTROL,
    Experiment,
    Group,
    Models,
    bridges_for,
    grids,
    groups_for,
    make_curves,
    make_distillation,
    make_members,
    make_walk,
    slug,
)
from ensbridge.recipes.recipe import rival_sizes
from ensbridge.recipes.threads import Job
from ensbridge.train.config import FitConfig, derive_seed
from ensbridge.train.fit import Progress

Trainee = tuple[AbstractMethod, FitConfig]


def make_bridges(run: Experiment, ensemble: Ensemble, distill: bool = True) -> Models:
    """Bridges towards the target and towards all members, the same straight with KL, and their controls.

    With KL those that are averaged all stand for the target: they differ by their starts.
    """
    recipe = run.recipe
    target, places = tuple(range(recipe.target)), groups_for(recipe, recipe.members)
    groups = dict.fromkeys([target, *places])
    walked = bridges_for(run, ensemble, groups) | bridges_for(run, ensemble, places, CONTROL)
    few = ensemble.first(recipe.target)
    straight = bridges_for(run, few, places, target, "kl") | bridges_for(run, few, places, CONTROL, "kl")
    fits = [recipe.bridge_fit, recipe.kl_fit, *([recipe.distill_fit] * len(grids(recipe)) if distill else [])]
    advance = run.reporter.stage("bridges", run.steps(*fits))
    one_step: dict[str, DiffusionBridge] = {}

    def long_way(progress: Progress) -> None:
        make_walk(run, "bridges", walked, progress)
        if distill:
            one_step.update(make_distillation(run, "distilled", walked, progress))

    def short_way(progress: Progress) -> None:
        config = run.seeded(recipe.kl_fit, "bridge")
        methods = {name: (method, config) for name, method in straight.items()}
        run.fit("bridges-kl", methods, run.data.train.without_labels(), progress)

    run.side_by_side([long_way, short_way], advance)
    several = f"+1 DBN ({recipe.bridge.num_steps} steps)"
    own, control = slug(target), slug(places[0], CONTROL)
    run.keep_curve("bridges", own, several, "DBN")
    run.keep_curve("bridges", control, "control", "control")
    run.keep_curve("bridges-kl", own, "+1 DBN (KL)", "DBN")
    towards_target, alone = Aim("DBN", recipe.target), Aim("control", 1)
    models: Models = {several: (FastEnsemble.of(walked[own]), towards_target)}
    if one_step:
        models["+1 DBN"] = FastEnsemble.of(one_step[own]), towards_target
    models["+1 DBN (KL)"] = FastEnsemble.of(straight[own]), towards_target
    if len(places) > 1:
        if one_step:
            models |= [_several(recipe.members, one_step, places)]
        averaged = FastEnsemble.of(*(straight[slug(place, target)] for place in places))
        models[f"+{len(places)} DBN (KL)"] = averaged, towards_target
    for count in dict.fromkeys((1, len(places))):
        for mark, bridges in (("", one_step), (" (KL)", straight)):
            if bridges:
                averaged = FastEnsemble.of(*(bridges[slug(place, CONTROL)] for place in places[:count]))
                models[f"+{count} control{mark}".removeprefix("+1 ")] = averaged, alone
    return models


def _several(
    members: int, bridges: dict[str, DiffusionBridge], groups: Sequence[Group]
) -> tuple[str, tuple[nn.Module, Aim]]:
    fast = FastEnsemble.of(*(bridges[slug(group)] for group in groups))
    return f"+{len(groups)} DBN (DE-{members})", (fast, Aim("DBN", members))


def make_rivals(run: Experiment, ensemble: Ensemble) -> Models:
    """ED and EnD² on the members, and the bridge networks, small and medium, on the source and its curves.

    Each of the two groups shares its teachers' passes; they have but the source in common, so that they run
    side by side in two threads of one process.
    """
    recipe = run.recipe
    target, sizes = recipe.target, rival_sizes(recipe)
    centres = make_curves(run, ensemble, max(sizes) - 1)
    students = {members: _distilled(run, ensemble.first(members)) for members in sizes}
    widths = {"small": (0.5, max(sizes) - 1), "medium": (1.0, target - 1)}  # and how many of each
    networks = {
        (size, index): _bridge_network(run, ensemble, [centres[index]], width, size, index)
        for size, (width, count) in widths.items()
        for index in range(count)
    }
    distilled: dict[str, Trainee] = {}
    for members, (ed, end2) in students.items():
        mark = "" if members == target else f"-{members}"
        distilled[f"ed{mark}"] = ed, run.seeded(recipe.ed_fit, "bridge")
        distilled[f"end2{mark}"] = end2, run.seeded(recipe.end2_fit, "bridge")
    bn_fit = run.seeded(recipe.bn_fit, "bridge")
    bridged: dict[str, Trainee] = {
        f"{size}-{index + 1}": (each, bn_fit) for (size, index), each in networks.items()
    }
    _fit_side_by_side(run, "rivals", {"rivals": distilled, "rivals-bn": bridged})
    run.keep_curve("rivals", "ed", "ED", "ED")
    run.keep_curve("rivals", "end2", "EnD²", "EnD2")
    models: Models = {}
    for members, (ed, end2) in students.items():
        mark = "" if members == target else f" (DE-{members})"
        models[f"ED{mark}"] = ed.model(), Aim("ED", members)
        models[f"EnD²{mark}"] = end2.model(), Aim("EnD2", members)
    for size in widths:
        run.keep_curve("rivals-bn", f"{size}-1", f"BN {size}", "BN")
        for members in sizes if size == "small" else (target,):
            fast = FastEnsemble.of(*(networks[size, index] for index in range(members - 1)))
            models[f"+{members - 1} BN {size}"] = fast, Aim("BN", members)
    return models


def make_tradeoff(run: Experiment, ensemble: Ensemble) -> Models:
    """As many bridges as 2, 3, … members need: DBN with `target` members each, BN medium with one each."""
    recipe, most = run.recipe, run.recipe.most_members
    ensemble = _of_figures(run, ensemble)
    sizes = range(2, most + 1)
    dealt = {members: groups_for(recipe, members) for members in sizes}
    walked = bridges_for(run, ensemble, dict.fromkeys(group for groups in dealt.values() for group in groups))
    centres = make_curves(run, ensemble, most - 1)
    networks = [
        _bridge_network(run, ensemble, [centre], 1.0, "medium", index) for index, centre in enumerate(centres)
    ]
    bn_fit = run.seeded(recipe.bn_fit, "bridge")
    trainees: dict[str, Trainee] = {f"bn-{index + 1}": (each, bn_fit) for index, each in enumerate(networks)}
    one_step = _walk_and_rivals(run, "tradeoff", walked, trainees)
    models: Models = dict(_several(members, one_step, dealt[members]) for members in sizes)
    for members in sizes:
        fast = FastEnsemble.of(*networks[: members - 1])
        models[f"+{members - 1} BN (DE-{members})"] = fast, Aim("BN", members)
    return models


def make_capacity(run: Experiment, ensemble: Ensemble) -> Models:
    """One network for 2, 3, … teachers: DBN, BN (towards the mean of its curves' centres), ED and EnD²."""
    recipe, most = run.recipe, run.recipe.most_members
    ensemble = _of_figures(run, ensemble)
    sizes = range(2, most + 1)
    walked = bridges_for(run, ensemble, [tuple(range(teachers)) for teachers in sizes])
    centres = make_curves(run, ensemble, most - 1)
    trainees: dict[str, Trainee] = {}
    bn_fit = run.seeded(recipe.bn_fit, "bridge")
    kept: dict[int, tuple[EnsembleDistillation, ProxyEnD2, BridgeNetwork]] = {}
    for teachers in sizes:
        ed, end2 = _distilled(run, ensemble.first(teachers))
        network = _bridge_network(run, ensemble, centres[: teachers - 1], 1.0, "medium", 0)
        kept[teachers] = ed, end2, network
        trainees[f"ed-{teachers}"] = ed, run.seeded(recipe.ed_fit, "bridge")
        trainees[f"end2-{teachers}"] = end2, run.seeded(recipe.end2_fit, "bridge")
        trainees[f"bn-{teachers}"] = network, bn_fit
    one_step = _walk_and_rivals(run, "capacity", walked, trainees)
    models: Models = {}
    for teachers, (ed, end2, network) in kept.items():
        words = f"{teachers} teachers"
        bridge = one_step[slug(tuple(range(teachers)))]
        models[f"DBN, {words}"] = FastEnsemble.of(bridge), Aim("DBN", teachers)
        models[f"BN, {words}"] = FastEnsemble.of(network), Aim("BN", teachers)
        models[f"ED, {words}"] = ed.model(), Aim("ED", teachers)
        models[f"EnD², {words}"] = end2.model(), Aim("EnD2", teachers)
    return models


def _of_figures(run: Experiment, ensemble: Ensemble) -> Ensemble:
    """As many members as the figures need, the table's first."""
    most = run.recipe.most_members
    return ensemble if most == len(ensemble) else make_members(run, most)


STAGES: dict[str, Callable[[Experiment, Ensemble], Models]] = {
    "bridge": lambda run, ensemble: make_bridges(run, ensemble, distill=False),
    "distill": make_bridges,
    "rivals": make_rivals,
    "tradeoff": make_tradeoff,
    "capacity": make_capacity,
}


def _walk_and_rivals(
    run: Experiment, part: str, walked: dict[str, DiffusionBridge], trainees: dict[str, Trainee]
) -> dict[str, DiffusionBridge]:
    """Train bridges, and distil them, beside other methods."""
    recipe = run.recipe
    fits = [config for _, config in trainees.values()]
    steps = run.steps(recipe.bridge_fit, *[recipe.distill_fit] * len(grids(recipe)), *_distinct(fits))
    one_step: dict[str, DiffusionBridge] = {}

    def bridges(progress: Progress) -> None:
        make_walk(run, f"{part}-bridges", walked, progress)
        one_step.update(make_distillation(run, f"{part}-distilled", walked, progress))

    def rivals(progress: Progress) -> None:
        run.fit(f"{part}-rivals", trainees, run.data.train.without_labels(), progress)

    run.side_by_side([bridges, rivals], run.reporter.stage(part, steps))
    return one_step


def _fit_side_by_side(run: Experiment, stage: str, parts: dict[str, dict[str, Trainee]]) -> None:
    """Fit several parts, each with its own teachers, in threads of their own."""
    fits = [fit for part in parts.values() for fit in _distinct([config for _, config in part.values()])]
    advance = run.reporter.stage(stage, run.steps(*fits))
    images = run.data.train.without_labels()

    def job(part: str) -> Job:
        return lambda progress: run.fit(part, parts[part], images, progress)

    run.side_by_side([job(part) for part in parts], advance)


def _distinct(configs: Sequence[FitConfig]) -> list[FitConfig]:
    """One configuration of each kind of batches."""
    kept: list[FitConfig] = []
    for config in configs:
        if all(config.other_batches(each) for each in kept):
            kept.append(config)
    return kept


def _distilled(run: Experiment, ensemble: Ensemble) -> tuple[EnsembleDistillation, ProxyEnD2]:
    """Untrained ED and EnD², which start alike."""
    recipe = run.recipe
    ed, end2 = (run.build(recipe.member, derive_seed(run.seed, "student")) for _ in range(2))
    predict, divisor = recipe.end2_predict, recipe.end2_divisor
    return (
        EnsembleDistillation(ensemble, ed, tau=recipe.ed_tau),
        ProxyEnD2(ensemble, end2, tau=recipe.end2_tau, predict=predict, divisor=divisor),
    )


def _bridge_network(
    run: Experiment, ensemble: Ensemble, centres: Sequence[nn.Module], width: float, size: str, index: int
) -> BridgeNetwork:
    source = ensemble.source
    net = run.build(
        lambda: run.recipe.tail(source, run.recipe.tail_feature, width),
        derive_seed(run.seed, "tail", size, index),
    )
    return BridgeNetwork(source, centres, net, run.recipe.tail_feature)
