"""One run of a recipe in its folder: parts that are trained, or loaded where they are finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ensbridge.data.digits import Splits
from ensbridge.data.loader import ImageSet
from ensbridge.ensemble import Ensemble, member_groups
from ensbridge.evaluation import Aim
from ensbridge.files import read_file
from ensbridge.methods.bezier import BezierCurve
from ensbridge.methods.deep_ensemble import DeepEnsemble
from ensbridge.methods.diffusion_bridge import DiffusionBridge
from ensbridge.methods.method import AbstractMethod, JointTraining
from ensbridge.recipes.recipe import Recipe, build, members_by_training
from ensbridge.recipes.threads import WORKERS, Job, Reporter, side_by_side
from ensbridge.scores import Curve, Method, parse_curve
from ensbridge.train.config import FitConfig, OwnOrders, derive_seed
from ensbridge.train.distill import distill_together, distillation_grids, stage_name
from ensbridge.train.engine import Engine
from ensbridge.train.fit import OutOfTime, Progress, Unfinished, fit, seems_finished

CPU = torch.device("cpu")
Group = tuple[int, ...]  # members by index
CONTROL: Group = (0,)  # the source alone
Models = dict[str, tuple[nn.Module, Aim]]  # by their names in the table


@dataclass
class Experiment:
    """A recipe's run: its folder, seed and data, and the curves of what was trained so far.

    With `train=False` nothing is trained: a part that is not finished raises `Unfinished`. Training a part
    takes away the scores that were measured without it.
    """

    recipe: Recipe
    folder: Path
    seed: int
    data: Splits
    reporter: Reporter
    train: bool = True
    device: torch.device = CPU
    deadline: float | None = None  # of time.monotonic(), when training stops at a checkpoint
    engine: Engine | None = None  # of several processes that run it together
    curves: dict[str, Curve] = field(default_factory=dict)
    _homes: dict[tuple[str, str], Path] = field(default_factory=dict)  # of each part and name: its folder

    @property
    def is_first(self) -> bool:
        """Whether this is the only process, or the one of several that writes."""
        return self.engine is None or self.engine.first

    def build(self, factory: Callable[[], nn.Module], seed: int) -> nn.Module:
        """A network on the run's device, whose starting weights depend on the seed alone."""
        return build(factory, seed).to(self.device)

    def side_by_side(self, jobs: Sequence[Job], advance: Callable[[int], None]) -> None:
        """Run jobs two at a time, or one after the other on a GPU, which one of them fills.

        So do several processes, which must take the same steps in the same order.
        """
        alone = self.engine is None
        workers = WORKERS if self.device.type == "cpu" and alone else 1
        side_by_side(jobs if alone else [self._here(job) for job in jobs], advance, workers)

    def one_each(
        self, job: Callable[[int, Experiment], Job], count: int, advance: Callable[[int], None]
    ) -> None:
        """Run `count` jobs that know nothing of each other; several processes each take their share.

        Afterwards every process has loaded what the others trained.
        """
        engine = self.engine
        if engine is None:
            self.side_by_side([job(index, self) for index in range(count)], advance)
            return
        own = range(engine.rank, count, engine.size) if self.train else range(0)
        alone = replace(self, engine=None)

        def heard(steps: int) -> None:
            engine.look()
            advance(steps)

        if self.train:
            jobs = [self._here(job(index, alone)) for index in own]
            engine.apart(lambda: side_by_side(jobs, heard, 1), late=OutOfTime)
        for index in range(count):
            told = (lambda *_: None) if index in own else (lambda step, total, loss: advance(step))
            try:
                job(index, replace(self, train=False))(told)
            except Unfinished as error:
                if not self.train:
                    raise
                raise ValueError(
                    f"{error} where another process trained it; give an --out that all machines share"
                ) from error

    def _here(self, job: Job) -> Job:
        """A job that runs on this process's GPU, whichever thread it is in."""

        def run(progress: Progress) -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            job(progress)

        return run

    def fit(
        self,
        part: str,
        methods: Mapping[str, tuple[AbstractMethod, FitConfig]],
        data: ImageSet,
        progress: Progress,
    ) -> None:
        """Train methods, by name, in one process on shared teachers, or load them where they are finished.

        Methods whose configurations make other batches, as ED without mixup does, are trained in a folder of
        their own.
        """
        for where, names in self._batches(part, methods).items():
            self._homes |= {(part, name): self.folder / where for name in names}
            chosen = {name: methods[name][0] for name in names}
            configs = {name: methods[name][1] for name in names}
            first = next(iter(configs.values()))
            self.expect(where, first)
            config = first if len(set(configs.values())) == 1 else configs
            fit(JointTraining(chosen), data, config, self.folder / where, progress, **self.options())

    def options(self) -> dict[str, Any]:
        """How parts are fitted: until the deadline, or only loaded."""
        return {"engine": self.engine} | ({"deadline": self.deadline} if self.train else {"only_load": True})

    def expect(self, where: str, config: FitConfig) -> None:
        """Refuse a part that is not there to be loaded; one that will be trained outdates the scores."""

        def look() -> bool:
            return seems_finished(self.folder / where, config, len(self.data.train))

        if self.engine.from_first(look) if self.engine else look():
            return
        if not self.train:
            raise Unfinished(f"{where} is not finished")
        (self.folder / "scores.json").unlink(missing_ok=True)

    def _batches(
        self, part: str, methods: Mapping[str, tuple[AbstractMethod, FitConfig]]
    ) -> dict[str, list[str]]:
        """The folders of a part, each with the methods that share their batches."""
        folders: dict[str, list[str]] = {}
        for name, (_, config) in methods.items():
            same = (k for k, v in folders.items() if not config.other_batches(methods[v[0]][1]))
            folders.setdefault(next(same, f"{part}-{name}" if folders else part), []).append(name)
        return folders

    def steps(self, *configs: FitConfig) -> int:
        """How many steps these configurations take."""
        return sum(config.total_steps(len(self.data.train)) for config in configs)

    def seeded(self, config: FitConfig, *parts: str | int) -> FitConfig:
        """The configuration with the seed of a part."""
        return replace(config, seed=derive_seed(self.seed, *parts))

    def keep_curve(self, part: str, name: str, label: str, method: Method) -> None:
        """Remember a training curve from a part's log, under the label that figures show."""
        log = self._homes[part, name] / "log.jsonl"
        # A damaged log costs a picture, not the scores.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            lines = [json.loads(line) for line in read_file(log).splitlines()]
            curve = {"name": label, "method": method, "images": [line["images"] for line in lines]}
            curve["loss"] = [line["losses"][name] if "losses" in line else line["loss"] for line in lines]
            self.curves[label] = parse_curve(curve)


def make_members(run: Experiment, count: int | None = None) -> Ensemble:
    """Train every member of the table, or as many as are asked for; a folder has those trained together."""
    recipe, count = run.recipe, run.recipe.members if count is None else count
    advance = run.reporter.stage("members", run.steps(recipe.member_fit) * count)
    seeds = [derive_seed(run.seed, "member", index) for index in range(count)]
    members = [run.build(recipe.member, seed) for seed in seeds]
    groups = members_by_training(recipe, count)

    def job(index: int, run: Experiment) -> Job:
        group = groups[index]
        if len(group) == 1:
            alone = DeepEnsemble([members[group[0]]]), replace(recipe.member_fit, seed=seeds[group[0]])
            return lambda progress: run.fit(members_part(group), {"member": alone}, run.data.train, progress)
        config = OwnOrders.of(recipe.member_fit, [seeds[each] for each in group])
        several: dict[str, tuple[AbstractMethod, FitConfig]] = {
            f"member-{each + 1}": (DeepEnsemble([members[each]], part=(part, len(group))), config)
            for part, each in enumerate(group)
        }
        return lambda progress: run.fit(
            members_part(group),
            several,
            run.data.train,
            lambda step, total, loss: progress(step * len(group), total * len(group), loss),
        )

    run.one_each(job, len(groups), advance)
    run.keep_curve(members_part(groups[0]), "member" if len(groups[0]) == 1 else "member-1", "DE-1", "DE")
    return Ensemble(members).eval()


def members_part(group: Group) -> str:
    """The folder of members that are trained together, which follow each other.

    >>> members_part((0,)), members_part((3, 4))
    ('member-1', 'members-4-to-5')
    """
    first, last = group[0] + 1, group[-1] + 1
    return f"member-{first}" if first == last else f"members-{first}-to-{last}"


def make_curves(run: Experiment, ensemble: Ensemble, others: int) -> list[nn.Module]:
    """Train the curves from the source to the next `others` members; their centres."""
    config = run.recipe.curve_fit
    advance = run.reporter.stage("curves", run.steps(config) * others)
    members = list(ensemble.members)
    curves = [BezierCurve(members[0], member) for member in members[1 : others + 1]]

    def job(index: int, run: Experiment) -> Job:
        own = {"curve": (curves[index], run.seeded(config, "curve", index + 1))}
        return lambda progress: run.fit(f"curve-1-{index + 2}", own, run.data.train, progress)

    run.one_each(job, others, advance)
    run.keep_curve("curve-1-2", "curve", "Bezier curve", "BN")
    return [curve.at(0.5) for curve in curves]


def bridges_for(
    run: Experiment,
    ensemble: Ensemble,
    groups: Iterable[Group],
    towards: Group | None = None,
    loss: Literal["bridge", "kl"] = "bridge",
) -> dict[str, DiffusionBridge]:
    """Untrained bridges from the source to groups of members, by their names in folders.

    With `towards`, all of them have that target and start from the weights that the groups' bridges start
    from: a bridge and its control start alike, bridges that are averaged do not.
    """
    config = run.recipe.bridge
    if loss == "kl":
        law = config.temperature
        config = replace(config, temperature=replace(law, base=law.base * run.recipe.kl_heat))

    def bridge(group: Group) -> DiffusionBridge:
        start = derive_seed(run.seed, "score", *([] if _is_first(group) else group))
        net = run.build(lambda: run.recipe.score(config.z_input), start)
        target = group if towards is None else towards
        return DiffusionBridge(ensemble, net, run.recipe.feature, loss=loss, target=target, config=config)

    return {slug(group, towards): bridge(group) for group in groups}


def make_walk(run: Experiment, part: str, walked: Mapping[str, DiffusionBridge], progress: Progress) -> None:
    """Train bridges of several steps side by side."""
    config = run.seeded(run.recipe.bridge_fit, "bridge")
    methods = {name: (method, config) for name, method in walked.items()}
    run.fit(part, methods, run.data.train.without_labels(), progress)


def make_distillation(
    run: Experiment, part: str, walked: Mapping[str, DiffusionBridge], progress: Progress
) -> dict[str, DiffusionBridge]:
    """Distil bridges to one step side by side, at once or stage by stage as their configuration says."""
    config, steps = run.seeded(run.recipe.distill_fit, "bridge"), run.recipe.bridge.num_steps
    for grid in grids(run.recipe):
        run.expect(f"{part}/{stage_name(steps, grid)}", config)
        steps = len(grid) - 1
    images = run.data.train.without_labels()
    place = run.folder / part
    return distill_together(walked, images, config, place, progress=progress, **run.options())


def grids(recipe: Recipe) -> list[tuple[float, ...]]:
    """The time grids that the recipe's bridges are distilled to, one after the other."""
    return distillation_grids(recipe.bridge.schedule.times().tolist(), recipe.bridge.distillation)


def slug(group: Group, towards: Group | None = None) -> str:
    """A bridge's name in folders and logs.

    >>> slug((0, 3, 4)), slug((0, 1, 2), CONTROL), slug((0, 3, 4), CONTROL), slug((0, 3, 4), (0, 1, 2))
    ('members-1-4-5', 'control', 'control-like-1-4-5', 'members-1-2-3-like-1-4-5')
    """
    target = group if towards is None else towards
    name = "control" if target == CONTROL else f"members-{_numbers(target)}"
    return name if target == group or _is_first(group) else f"{name}-like-{_numbers(group)}"


def _numbers(group: Group) -> str:
    return "-".join(str(index + 1) for index in group)


def _is_first(group: Group) -> bool:
    """Whether it is the first of those that members are dealt to."""
    return 1 in group


def groups_for(recipe: Recipe, members: int) -> list[Group]:
    """The groups of as few bridges as stand for so many members with `target` members each.

    >>> from ensbridge.recipes import digits
    >>> [groups_for(digits(), members) for members in (2, 3, 5)]
    [[(0, 1)], [(0, 1, 2)], [(0, 1, 2), (0, 3, 4)]]
    """
    return member_groups(members, -(-(members - 1) // (recipe.target - 1)))
