"""Experiments as data: the jobs that are trained, in order, and the models that come of them.

Training, loading, the outline of a dry run, resuming and evaluation all follow from these lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import nn

from ensbridge.evaluation.scores import ModelInfo
from ensbridge.methods.base import AbstractMethod
from ensbridge.training.config import FitConfig

if TYPE_CHECKING:
    from ensbridge.experiments.runner import Run

Table = Literal["rows", "tradeoff", "capacity"]  # the part of scores.json that a model's row is in


class MethodSpec(NamedTuple):
    """A method to train: how it is built from what earlier jobs trained, and how it is trained."""

    label: str  # what a dry run calls it
    build: Callable[[Run], AbstractMethod]
    config: FitConfig
    parts: Mapping[str, FitConfig] = MappingProxyType({})  # of its student, where they have their own


@dataclass(frozen=True)
class Job:
    """Methods, by name, that are trained jointly in one folder of the run, on shared batches and teachers."""

    folder: str
    group: str  # of jobs whose progress is shown as one
    methods: Mapping[str, MethodSpec]
    needs: tuple[str, ...] = ()  # folders of the jobs that must be finished first
    labelled: bool = False  # whether the methods learn from labels
    independent: bool = False  # whether one of several processes may train it for all

    @property
    def first_config(self) -> FitConfig:
        """The first method's configuration, with which all agree in what decides the batches."""
        return next(iter(self.methods.values())).config

    def config(self) -> FitConfig | dict[str, FitConfig]:
        """The configuration that `fit` takes: one for all, or one each, of a method or of its parts."""
        configs: dict[str, FitConfig] = {}
        for name, method in self.methods.items():
            of_parts = {f"{name}.{part}": config for part, config in method.parts.items()}
            configs |= of_parts or {name: method.config}
        return next(iter(configs.values())) if len(set(configs.values())) == 1 else configs

    def total_steps(self, images: int) -> int:
        """How many steps it takes on so many images."""
        return self.first_config.total_steps(images)


def joint_jobs(
    folder: str, group: str, methods: Mapping[str, MethodSpec], needs: Sequence[str] = ()
) -> list[Job]:
    """One job for methods on shared batches; those whose configuration makes other batches get their own.

    >>> one, other = (FitConfig(epochs=1, batch_size=size, lr=0.1) for size in (2, 3))
    >>> specs = {name: MethodSpec(name, lambda run: None, config) for name, config in
    ...          {"ed": one, "end2": other, "bn": one}.items()}
    >>> [(job.folder, list(job.methods)) for job in joint_jobs("baselines", "baselines", specs)]
    [('baselines', ['ed', 'bn']), ('baselines-end2', ['end2'])]
    """
    jobs: list[Job] = []
    for name, spec in methods.items():
        for number, job in enumerate(jobs):
            if not spec.config.other_batches(job.first_config):
                jobs[number] = replace(job, methods={**job.methods, name: spec})
                break
        else:
            jobs.append(Job(f"{folder}-{name}" if jobs else folder, group, {name: spec}, tuple(needs)))
    return jobs


@dataclass(frozen=True)
class TableModel:
    """A model to evaluate: what it is, the jobs that it comes of, and how it is put together."""

    info: ModelInfo
    needs: tuple[str, ...]
    build: Callable[[Run], nn.Module]
    table: Table = "rows"
    name: str = ""  # in its table, where what it is does not tell it from others
    headline: bool = False  # whether it is the one that the report is about


class CurveSpec(NamedTuple):
    """A training curve to show: a job's folder and method, and what the figure calls it."""

    folder: str
    method: str
    label: str
    info: ModelInfo


@dataclass(frozen=True)
class Experiment:
    """Jobs in an order in which none needs a later one, and what comes of them.

    `stages` are the names by which jobs are asked for, each with the folders of its jobs.
    """

    jobs: tuple[Job, ...]
    models: tuple[TableModel, ...]
    stages: Mapping[str, tuple[str, ...]]
    curves: tuple[CurveSpec, ...] = ()

    def __post_init__(self) -> None:
        before: set[str] = set()
        for job in self.jobs:
            if job.folder in before:
                raise ValueError(f"two jobs have the folder {job.folder!r}; give each its own")
            if unknown := set(job.needs) - before:
                raise ValueError(
                    f"{job.folder} needs {', '.join(sorted(unknown))}; no job before it has that folder"
                )
            before.add(job.folder)

    def job(self, folder: str) -> Job:
        """The job of a folder."""
        jobs = {job.folder: job for job in self.jobs}
        if folder not in jobs:
            raise ValueError(f"no job has the folder {folder!r}; there are: {', '.join(jobs)}")
        return jobs[folder]

    def needed(self, folders: Iterable[str]) -> list[Job]:
        """The jobs of these folders and all that they need, in order."""
        wanted = set(folders)
        for job in reversed(self.jobs):
            if job.folder in wanted:
                wanted |= set(job.needs)
        return [job for job in self.jobs if job.folder in wanted]

    def of_stages(self, stages: Sequence[str]) -> list[Job]:
        """The jobs that these stages train, members always among them."""
        for stage in stages:
            if stage not in self.stages:
                raise ValueError(f"{stage!r} is not a stage; there are: {', '.join(self.stages)}, all")
        names = dict.fromkeys(["members", *stages])
        return self.needed(folder for name in names for folder in self.stages[name])

    def only(self, stages: Sequence[str]) -> Experiment:
        """The experiment of these stages alone, and of the models that come of them."""
        jobs = self.of_stages(stages)
        trained = {job.folder for job in jobs}
        models = tuple(model for model in self.models if trained.issuperset(model.needs))
        curves = tuple(curve for curve in self.curves if curve.folder in trained)
        kept = {name: folders for name, folders in self.stages.items() if trained.issuperset(folders)}
        return replace(self, jobs=tuple(jobs), models=models, stages=kept, curves=curves)


def outline(jobs: Iterable[Job], images: int) -> list[str]:
    """One line for each kind of method that is trained: how many there are, and how long each is trained.

    >>> config = FitConfig(epochs=30, batch_size=50, lr=0.1)
    >>> spec = MethodSpec("member", lambda run: None, config)
    >>> print(*outline([Job(f"member-{k}", "members", {"member": spec}) for k in (1, 2)], 600))
    members   2 × member                              30 epochs of 600 images, batches of 50: 360 steps
    """
    methods = ((job.group, method.label, method.config) for job in jobs for method in job.methods.values())
    counts = Counter((group, label, fit.epochs, fit.batch_size) for group, label, fit in methods)
    lines = []
    for (group, label, epochs, batch_size), count in counts.items():
        length = f"{epochs:g} epochs of {images:,} images, batches of {batch_size}"
        steps = FitConfig(epochs, batch_size, 1.0).total_steps(images)
        lines.append(f"{group:<9} {f'{count} × {label}':<39} {length}: {steps:,} steps")
    return lines
