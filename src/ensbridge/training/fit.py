"""`fit`: one flat loop that can be killed at any step and resumes."""

from __future__ import annotations

import json
import math
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ensbridge.data.examples import ExampleSet
from ensbridge.data.loader import as_examples
from ensbridge.data.stream import Stream
from ensbridge.methods.base import AbstractTrainable, Batch, feature_names_of
from ensbridge.training.batches import AbstractBatches, TrainData, open_batches, total_steps
from ensbridge.training.checkpoint import Checkpoint, RunFolder, checkpoint_path
from ensbridge.training.compiled import StepKind, step_kinds, steps_that_work
from ensbridge.training.config import FitConfig, describe_config
from ensbridge.training.distributed import Engine
from ensbridge.training.optimizers import Average, Configs, Optimizers, shared_config
from ensbridge.training.output_cache import CachedData
from ensbridge.training.state import State, max_bytes, read_step, trained_weights
from ensbridge.training.step import AbstractStep, TimeSplit
from ensbridge.utils.files import CannotLock, locked, open_folder
from ensbridge.utils.progress import StepCallback


class IncompleteRun(ValueError):
    """A run that was to be loaded has not been trained to its end."""


class TimeBudgetExceeded(IncompleteRun):
    """A run that stopped at a checkpoint because its time was up."""


@dataclass(frozen=True)
class FitResult:
    """What a call of `fit` did."""

    steps: int
    resumed_from: int
    loss: float  # mean since the last log line, nan when nothing was left to do


def fit(
    method: AbstractTrainable,
    train: TrainData | Tensor | tuple[Any, Tensor],
    config: Configs,
    run_dir: Path | str | None = None,
    progress: StepCallback | None = None,
    *,
    step: StepKind | None = None,
    deadline: float | None = None,
    engine: Engine | None = None,
    timing: TimeSplit | None = None,
) -> FitResult:
    """Train a method's student in place; a folder that holds a part of the run is resumed.

    Killed at any moment and run again, it ends on the CPU with the same weights to the bit. A checkpoint is
    written as often as the configuration says, and whenever half a minute has passed. The student is left in
    evaluation mode, with its averaged weights where the method asks for an average.

    Args:
        method: The method, or a `JointTraining` of several on the same batches.
        train: Images and labels, or images alone for a method that needs no labels.
        config: How to train. The methods of a `JointTraining` may have one each, by name, which agree in all
            that decides the batches.
        run_dir: A folder for checkpoints, in which the same call resumes.
        progress: Called after each step with the step, the number of steps and the loss.
        step: One kind of step and no other. Without it, data on a GPU is trained with "captured" steps,
            compiled and in a CUDA graph; where that fails, a warning says why and "compiled" ones follow,
            then "eager" ones, which are all there is on the CPU.
        deadline: A moment of `time.monotonic()` at which one more checkpoint is written and
            `TimeBudgetExceeded` raised; the student is then left as at the end of training.
        engine: Makes this process one of several that train the same student: each takes its slice of every
            batch, or its part of a stream, no step is captured, and the first process keeps the folder.
        timing: Told where the time goes.

    >>> from ensbridge.methods import DeepEnsemble
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> images = torch.rand(32, 1, 2, 2)
    >>> data = (images, (images.mean((1, 2, 3)) > 0.5).long())
    >>> fit(DeepEnsemble([net]), data, FitConfig(epochs=4, batch_size=8, lr=0.1)).steps
    16
    """
    data = train if isinstance(train, Stream | CachedData) else as_examples(train)
    shared, device = shared_config(method, config), data.device
    total = total_steps(shared, data)
    _try_teachers(method, data)
    kinds = step_kinds(step, device, engine)
    student = method.student.train()
    described = _describe(method, data, config) if engine or run_dir is not None else {}
    if engine:
        engine.begin(student, described)
    optimizers = Optimizers(method, config, total, captured=device.type == "cuda")
    average = Average(student, method.averages())
    state = State(student, optimizers, average)
    folder: RunFolder | None = None

    def open_run() -> Checkpoint | None:
        nonlocal folder
        if run_dir is None:
            return None
        path = open_folder(run_dir)
        lock = path / ".lock"
        left = lock.exists()
        try:
            held.enter_context(locked(path))  # before anything there is read or written
        except CannotLock as error:
            warnings.warn(f"{error}; nothing keeps a second process from this run", stacklevel=3)
        try:
            folder = RunFolder(path, described)
        except ValueError:
            if not left:  # a folder that is refused stays as it was
                lock.unlink(missing_ok=True)
            raise
        return folder.newest(max_bytes(student, average))

    with ExitStack() as held, torch.enable_grad():  # wherever it is called
        held.callback(student.eval)
        checkpoint = engine.broadcast(open_run) if engine else open_run()
        if checkpoint:
            state.load_counts(checkpoint)
        if folder:
            folder.rewind_log(state.step)
        begun = state.step
        stepper: AbstractStep | None = None
        batches: AbstractBatches | None = None
        if begun < total:
            batches = open_batches(data, shared, begun, _position(checkpoint, engine), engine)
            held.callback(batches.close)
            parts = method, data, shared, optimizers, average, batches, timing, engine
            stepper = steps_that_work(kinds, parts, state.snapshot(), engine)
            held.callback(stepper.close)
        if checkpoint:
            state.load(checkpoint.tensors)
        run = _Run(shared, total, state, folder, run_dir, progress, deadline, engine, batches)
        loss = run.go(stepper)
    if engine:
        engine.wait()  # for the last checkpoint
    state.swap_in_ema()
    return FitResult(total, begun, loss)


@dataclass(frozen=True)
class _Run:
    """A training under way: what is written and said of it between two spans of steps."""

    config: FitConfig
    total: int
    state: State
    folder: RunFolder | None  # of the process that writes
    run_dir: Path | str | None
    progress: StepCallback | None
    deadline: float | None
    engine: Engine | None
    batches: AbstractBatches | None

    def go(self, stepper: AbstractStep | None) -> float:
        """Take all steps that are left; the mean loss since the last log line, nan where there were none."""
        state, loss = self.state, math.nan
        if self.progress and state.step == self.total:
            self.progress(self.total, self.total, loss)
        while stepper and state.step < self.total:
            written = (self.config.log_every, self.config.checkpoint_every)
            marks = (state.step - state.step % every + every for every in written)
            stop = min(state.step + stepper.stride, self.total, *marks)
            state.add(stepper.run(state.step, stop), stop)
            loss = sum(state.means().values())
            self._write(stop, loss)
            if self.progress:
                self.progress(stop, self.total, loss)
        return loss

    def _write(self, stop: int, loss: float) -> None:
        """Write what is due after a step; at the deadline the last, and no more."""
        config, state, last = self.config, self.state, stop == self.total
        if self.run_dir is not None and (last or stop % config.log_every == 0):
            if self.folder:
                line = {"step": stop, "images": stop * config.batch_size, "loss": loss}
                self.folder.log(line | ({"losses": state.means()} if len(state.sums) > 1 else {}))
            state.reset_losses()
        late = self.deadline is not None and not last and time.monotonic() >= self.deadline
        if self.engine and self.deadline is not None:
            late = self.engine.any(late)
        due = (
            late
            or last
            or stop % config.checkpoint_every == 0
            or (self.folder is not None and self.folder.is_due())
        )
        if self.run_dir is not None and (more := self._positions(stop, due)) is not None and self.folder:
            state.save(self.folder, more)
        if late:
            state.swap_in_ema()
            if self.engine:
                self.engine.wait()  # for the checkpoint
            where = "it" if self.run_dir is None else Path(self.run_dir)
            raise TimeBudgetExceeded(f"{where} is at step {stop} of {self.total}")

    def _positions(self, stop: int, due: bool) -> dict[str, str] | None:
        """Where each process is in its stream, if a checkpoint is due; it is the first that knows."""
        position = self.batches.position(stop) if self.batches else None
        if position is None:  # the step says it all
            return {} if due else None
        if self.engine is None:
            return {"stream": json.dumps([position])} if due else None
        due = self.engine.any(due)
        return {"stream": json.dumps(self.engine.gather(position))} if due else None


def load_trained(
    method: AbstractTrainable,
    train: ExampleSet | Tensor | tuple[Any, Tensor],
    config: Configs,
    run_dir: Path | str,
    engine: Engine | None = None,
) -> None:
    """Load the weights that `fit` left in a folder; where it is not finished, raises `IncompleteRun`."""
    data = as_examples(train)
    total = total_steps(shared_config(method, config), data)
    student = method.student
    weights = Average(student, method.averages())

    def read() -> dict[str, Tensor]:
        if not seems_finished(run_dir, shared_config(method, config), len(data)):
            raise IncompleteRun(f"{run_dir} is not finished")
        checkpoint = RunFolder(run_dir, _describe(method, data, config)).newest(max_bytes(student, weights))
        step = 0 if checkpoint is None else read_step(checkpoint, total)
        if checkpoint is None or step < total:
            raise IncompleteRun(f"{run_dir} is at step {step} of {total}")
        return trained_weights(checkpoint, student, weights)

    student.load_state_dict(engine.broadcast(read) if engine else read())
    student.eval()


def seems_finished(run_dir: Path | str, config: FitConfig, images: int) -> bool:
    """Whether a folder holds the last checkpoint of a run on so many images, whole or damaged."""
    return checkpoint_path(Path(run_dir), config.total_steps(images)).exists()


def _position(checkpoint: Checkpoint | None, engine: Engine | None) -> str | None:
    """This process's place in its stream, as a checkpoint has it; without one the pass begins anew."""
    try:
        positions = json.loads(checkpoint.metadata["stream"]) if checkpoint else []
    except (KeyError, ValueError, RecursionError):
        return None
    rank, size = (engine.rank, engine.size) if engine else (0, 1)
    return positions[rank] if isinstance(positions, list) and len(positions) == size else None


def _try_teachers(method: AbstractTrainable, data: TrainData) -> None:
    """Run one image through the teachers: what cannot work says so before anything is written."""
    if isinstance(data, CachedData):
        data.check(list(method.teachers()))
        return
    sample = data.sample(1) if isinstance(data, Stream) else data
    image = sample.batch(torch.zeros(1, dtype=torch.long, device=sample.device))[0]
    feature_names, trained = feature_names_of(method.teachers()), set(method.student.modules())
    for network in feature_names:
        if trained & set(network.modules()):
            raise ValueError("a teacher is part of the student; give the student a network of its own")
        network.eval()
    batch = Batch(image, None, feature_names=feature_names)
    for ensemble, feature in method.teachers():
        batch.member_logits(ensemble) if feature is None else batch.teacher_outputs(ensemble, feature)


def _describe(method: AbstractTrainable, data: TrainData, config: Configs) -> dict[str, object]:
    """What makes a run this run; how often it is saved and logged does not."""
    if isinstance(config, FitConfig):
        fit_config: dict[str, object] = describe_config(config)
    else:
        fit_config = {name: describe_config(part) for name, part in config.items()}
    return {"fit": fit_config, "data": data.fingerprint(), "method": method.describe()}
