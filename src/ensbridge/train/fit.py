"""`fit`: one flat loop that can be killed at any step and goes on when run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ensbridge.data.loader import ImageSet, as_image_set
from ensbridge.methods.method import AbstractMethod
from ensbridge.train.checkpoint import RunFolder
from ensbridge.train.config import FitConfig
from ensbridge.train.ema import Average
from ensbridge.train.step import CapturedStep, EagerStep, make_optimizer

Progress = Callable[[int, int, float], None]
"""Called as progress(step, total_steps, loss), after each step or, on a GPU, each span of them."""


@dataclass(frozen=True)
class FitResult:
    """What a call of `fit` did."""

    steps: int
    resumed_from: int
    loss: float  # mean since the last log line, nan when nothing was left to do


def fit(
    method: AbstractMethod,
    train: ImageSet | Tensor | tuple[Tensor, Tensor],
    config: FitConfig,
    run_dir: Path | str | None = None,
    progress: Progress | None = None,
) -> FitResult:
    """Train a method's student in place; on a folder that holds a part of the run, go on from there.

    Killed at any moment and run again, it ends on the CPU with the same weights to the bit. The student is
    left in evaluation mode, with its averaged weights where the method asks for an average. Data on a GPU
    is trained with compiled steps in a CUDA graph.

    >>> from ensbridge.methods import DeepEnsemble
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> images = torch.rand(32, 1, 2, 2)
    >>> data = (images, (images.mean((1, 2, 3)) > 0.5).long())
    >>> fit(DeepEnsemble([net]), data, FitConfig(epochs=4, batch_size=8, lr=0.1)).steps
    16
    """
    data = as_image_set(train)
    total = config.total_steps(len(data))
    for ensemble, feature in method.teachers():
        # One image through the teachers: what cannot work says so before anything is written.
        ensemble.observe(data.batch(torch.zeros(1, dtype=torch.long, device=data.images.device))[0], feature)
    student = method.student.train()
    captured = data.images.is_cuda
    optimizer = make_optimizer(config, student, captured)
    average = Average(method.ema, student) if method.ema else None
    state = _State(student, optimizer, average)
    folder = None if run_dir is None else RunFolder(run_dir, _describe(method, data, config))
    found = folder.newest() if folder else None
    if found:
        state.read_metadata(found[1])
    if folder:
        folder.rewind_log(state.step)
    begun, loss = state.step, math.nan
    if begun < total and captured:
        before = {name: tensor.clone() for name, tensor in state.tensors().items()}
        stepper = CapturedStep(method, data, config, optimizer, average)
        stepper.capture()
        state.load(before)
    else:
        stepper = EagerStep(method, data, config, optimizer, average)
    if found:
        state.load(found[0])

    try:
        while state.step < total:
            stop = min(state.step + stepper.stride, total, *_next_marks(config, state.step))
            loss_sum = stepper.run(state.step, stop)
            state.loss_sum, state.loss_count = state.loss_sum + loss_sum, state.loss_count + stop - state.step
            state.step, loss = stop, state.loss_sum / state.loss_count
            if folder and (stop == total or stop % config.log_every == 0):
                folder.log({"step": stop, "images": stop * config.batch_size, "loss": loss})
                state.loss_sum, state.loss_count = 0.0, 0
            if folder and (stop == total or stop % config.checkpoint_every == 0):
                state.save(folder)
            if progress:
                progress(stop, total, loss)
    finally:
        stepper.close()
        student.eval()
    if average:
        student.load_state_dict(average.tensors)
    return FitResult(total, begun, loss)


def _next_marks(config: FitConfig, step: int) -> tuple[int, ...]:
    """The next steps at which something is written."""
    return tuple(step - step % every + every for every in (config.log_every, config.checkpoint_every))


def _describe(method: AbstractMethod, data: ImageSet, config: FitConfig) -> dict[str, object]:
    """What makes a run this run; how often it is saved and logged does not."""
    fit_config = {k: v for k, v in asdict(config).items() if k not in ("checkpoint_every", "log_every")}
    return {"fit": fit_config, "data": data.fingerprint(), "method": method.describe()}


class _State:
    """Everything that a resumed run needs: weights, their average, the optimiser's memory, the step."""

    def __init__(
        self, student: torch.nn.Module, optimizer: torch.optim.Optimizer, average: Average | None
    ) -> None:
        self.student, self.optimizer, self.average = student, optimizer, average
        self.step, self.loss_sum, self.loss_count = 0, 0.0, 0

    def tensors(self) -> dict[str, Tensor]:
        """All of it but the counts, under names of its parts."""
        tensors = {f"student/{name}": tensor for name, tensor in self.student.state_dict().items()}
        if self.average:
            tensors |= {f"average/{name}": tensor for name, tensor in self.average.tensors.items()}
        for index, memory in self.optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer/{index}/{key}": value for key, value in memory.items() if value is not None
            }
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up saved tensors, in place where they exist: a captured step goes on using the same memory."""
        parts: dict[str, dict[str, Tensor]] = {"student": {}, "average": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        self.student.load_state_dict(parts["student"])
        if self.average:
            self.average.load(parts["average"])
        memory: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimizer"].items():
            index, _, key = name.partition("/")
            memory.setdefault(int(index), {})[key] = tensor
        description = self.optimizer.state_dict()
        if not description["state"]:
            self.optimizer.load_state_dict({"state": memory, "param_groups": description["param_groups"]})
        for index, there in description["state"].items():
            for key, tensor in there.items():
                saved = memory.get(index, {}).get(key)
                if isinstance(tensor, Tensor):
                    tensor.zero_() if saved is None else tensor.copy_(saved)

    def save(self, folder: RunFolder) -> None:
        counts = {"step": self.step, "loss_sum": self.loss_sum, "loss_count": self.loss_count}
        folder.save(self.step, self.tensors(), {name: repr(value) for name, value in counts.items()})

    def read_metadata(self, metadata: Mapping[str, str]) -> None:
        self.step, self.loss_count = int(metadata["step"]), int(metadata["loss_count"])
        self.loss_sum = float(metadata["loss_sum"])
