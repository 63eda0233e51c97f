"""One run of an experiment in its folder: jobs are trained there, or loaded where they are finished.

On a CPU two jobs are trained side by side, in a thread each: small networks are trained faster by one thread
each than by two threads each, and nothing is left behind when the process is killed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from ensbridge._aliases import find_folder
from ensbridge.data.digits import Splits
from ensbridge.data.loader import ImageSet
from ensbridge.evaluation.scores import Curve, parse_curve
from ensbridge.experiments.jobs import CurveSpec, Experiment, Job
from ensbridge.experiments.recipe import build
from ensbridge.methods.base import AbstractMethod, JointTraining
from ensbridge.models.ensemble import Ensemble
from ensbridge.training.config import FitConfig, derive_seed
from ensbridge.training.distributed import Engine
from ensbridge.training.fit import IncompleteRun, TimeBudgetExceeded, fit, load_trained, seems_finished
from ensbridge.utils.files import read_file
from ensbridge.utils.progress import Advance, Stage, StepCallback, count_steps, silent

CPU = torch.device("cpu")
Network = TypeVar("Network", bound=nn.Module)


@dataclass
class Run:
    """An experiment's run: its folder, seed and data, and the methods that were trained or loaded so far."""

    experiment: Experiment
    folder: Path
    seed: int
    data: Splits
    progress: Stage = silent
    device: torch.device = CPU
    deadline: float | None = None  # of time.monotonic(), when training stops at a checkpoint
    engine: Engine | None = None  # of several processes that run it together
    members: Ensemble | None = None  # where they are given and no job trains them
    _finished: dict[str, Mapping[str, AbstractMethod]] = field(default_factory=dict)  # methods by job
    _shared: dict[str, nn.Module] = field(default_factory=dict)  # networks that several methods read
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def is_first(self) -> bool:
        """Whether this is the only process, or the one of several that writes."""
        return self.engine is None or self.engine.first

    # ------------------------------------------------------------------ what methods are built of

    def build(self, factory: Callable[[], nn.Module], *parts: str | int) -> nn.Module:
        """A network on the run's device, whose starting weights depend on the run's seed and `parts`."""
        return build(factory, derive_seed(self.seed, *parts)).to(self.device)

    def once(self, name: str, make: Callable[[], Network]) -> Network:
        """A network that is made the first time it is asked for, so that methods share its passes."""
        with self._lock:
            if name not in self._shared:
                self._shared[name] = make()
            return self._shared[name]  # type: ignore[return-value]

    def methods(self, folder: str) -> Mapping[str, AbstractMethod]:
        """The trained methods of a job, by name; where the job is not finished, raises `IncompleteRun`."""
        with self._lock:
            if folder not in self._finished:
                self._load(self.experiment.job(folder))
            return self._finished[folder]

    # ------------------------------------------------------------------ jobs

    def path(self, folder: str) -> Path:
        """Where a job's folder lies."""
        return find_folder(self.folder, folder)

    def is_finished(self, job: Job) -> bool:
        """Whether a job's last checkpoint is there."""

        def check() -> bool:
            return seems_finished(self.path(job.folder), job.first_config, len(self.data.train))

        return self.engine.broadcast(check) if self.engine else check()

    def missing(self, folders: Sequence[str]) -> str | None:
        """What of these jobs, and of all that they need, cannot be loaded; None where everything can."""
        for job in self.experiment.needed(folders):
            try:
                self.methods(job.folder)
            except IncompleteRun as error:
                return str(error)
        return None

    def train(self, jobs: Sequence[Job]) -> None:
        """Train jobs that follow each other's needs, or what is left of them."""
        for name, of_group in groupby(jobs, key=lambda job: job.group):  # whose progress is shown as one
            group = list(of_group)
            steps = sum(job.total_steps(len(self.data.train)) for job in group)
            advance = self.progress(name, steps)
            if self.engine and all(job.independent for job in group):
                self._train_independently(group, advance)
                continue
            # One method fills a GPU; several processes must take the same steps in the same order.
            workers = WORKERS if self.device.type == "cpu" and self.engine is None else 1
            side_by_side([self._work(chain) for chain in _chains(group)], advance, workers)

    def _work(self, chain: Sequence[Job]) -> Work:
        """Work of a thread: jobs one after the other."""

        def work(progress: StepCallback) -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device.index or 0)  # of this thread
            for job in chain:
                self._train(job, progress)

        return work

    def _train(self, job: Job, progress: StepCallback) -> None:
        if not self.is_finished(job):
            (self.folder / "scores.json").unlink(missing_ok=True)  # which were measured without it
        methods = self._built(job)
        fit(
            JointTraining(methods),
            self._images(job),
            job.config(),
            self.path(job.folder),
            progress,
            deadline=self.deadline,
            engine=self.engine,
        )
        with self._lock:
            self._finished[job.folder] = methods

    def _train_independently(self, jobs: Sequence[Job], advance: Advance) -> None:
        """Train jobs that know nothing of each other, each process its share; then load the others'."""
        engine = self.engine
        assert engine
        jobs_here = jobs[engine.rank :: engine.size]
        alone = replace(self, engine=None)

        def advance_and_check(steps: int) -> None:
            engine.check_peers()
            advance(steps)

        engine.run_independently(
            lambda: side_by_side([alone._work([job]) for job in jobs_here], advance_and_check, 1),
            late=TimeBudgetExceeded,
        )
        for job in jobs:
            self._finished.pop(job.folder, None)  # the dictionary is shared with `alone`
            try:
                self._load(job)
            except IncompleteRun as error:
                raise ValueError(
                    f"{error} where another process trained it; give an --out that all machines share"
                ) from error
            if job not in jobs_here:
                advance(job.total_steps(len(self.data.train)))

    def _load(self, job: Job) -> None:
        if not self.is_finished(job):
            raise IncompleteRun(f"{job.folder} is not finished")
        methods = self._built(job)
        load_trained(
            JointTraining(methods), self._images(job), job.config(), self.path(job.folder), self.engine
        )
        self._finished[job.folder] = methods

    def _built(self, job: Job) -> dict[str, AbstractMethod]:
        with self._lock:
            return {name: method.build(self) for name, method in job.methods.items()}

    def _images(self, job: Job) -> ImageSet:
        return self.data.train if job.labelled else self.data.train.without_labels()

    # ------------------------------------------------------------------ what was logged

    def curves(self) -> tuple[Curve, ...]:
        """The training curves of what is finished."""
        curves = []
        for spec in self.experiment.curves:
            if self.is_finished(self.experiment.job(spec.folder)):
                # A damaged log costs a picture, not the scores.
                with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                    curves.append(self._read_curve(spec))
        return tuple(curves)

    def _read_curve(self, spec: CurveSpec) -> Curve:
        lines = [json.loads(line) for line in read_file(self.path(spec.folder) / "log.jsonl").splitlines()]
        losses = [line["losses"][spec.method] if "losses" in line else line["loss"] for line in lines]
        return parse_curve(
            {
                "name": spec.label,
                "method": spec.info.method,
                "control": spec.info.control,
                "images": [line["images"] for line in lines],
                "loss": losses,
            }
        )


def _chains(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs by what can be trained side by side: one that needs another of them follows it."""
    chains: list[list[Job]] = []
    for job in jobs:
        before = [chain for chain in chains if any(other.folder in job.needs for other in chain)]
        chains = [chain for chain in chains if chain not in before]
        chains.append([*(other for chain in before for other in chain), job])
    return chains


def seeded(config: FitConfig, seed: int, *parts: str | int) -> FitConfig:
    """A configuration with the seed of a part of a run."""
    return replace(config, seed=derive_seed(seed, *parts))


WORKERS = 2
Work = Callable[[StepCallback], None]  # work that reports its steps


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread each, so that numbers do not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Stopped(InterruptedError):
    """Ends a job because of another's error, or of an interrupt."""


def side_by_side(jobs: Sequence[Work], advance: Advance, workers: int = WORKERS) -> None:
    """Run jobs, so many at a time; the first error, or an interrupt, stops them all."""
    stop = threading.Event()

    def checked_advance(steps: int) -> None:
        if stop.is_set():
            raise _Stopped("another part of the run stopped")
        advance(steps)

    def run(job: Work) -> None:
        if stop.is_set():  # a worker is free before the others stop
            return
        torch.set_num_threads(1)  # OpenMP counts threads for each calling thread
        try:
            job(count_steps(checked_advance))
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = [pool.submit(run, job) for job in jobs]
            wait(futures)  # an error ends all of them
            errors = [error for future in futures if (error := future.exception())]
            for error in errors:  # in the order of their jobs
                if not isinstance(error, _Stopped):
                    raise error
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
