"""The state of a training run, so that it can be saved, loaded and restored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ensbridge.training.checkpoint import Checkpoint, RunFolder
from ensbridge.training.optimizers import Average, Optimizers
from ensbridge.utils.text import short


class State:
    """Everything that a resumed run needs: weights, their average, the optimisers' memory, the step."""

    def __init__(self, student: torch.nn.Module, optimizers: Optimizers, average: Average) -> None:
        self.student, self.optimizers, self.average = student, optimizers, average
        self.step = 0
        self.reset_losses()

    def reset_losses(self) -> None:
        """Start the means of the losses again."""
        self.sums: dict[str, float] = {}
        self.count = 0

    def add(self, sums: Mapping[str, float], step: int) -> None:
        """Add the losses of the steps up to `step`."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.count, self.step = self.count + step - self.step, step

    def means(self) -> dict[str, float]:
        """The losses' means since they were reset."""
        return {name: value / self.count for name, value in self.sums.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All of it but the counts, under names of its parts."""
        parts = {
            "student": self.student.state_dict(),
            "average": self.average.tensors,
            "optimizer": self.optimizers.tensors(),
        }
        return {
            f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load saved tensors, in place where they exist: a captured step keeps using the same memory."""
        parts = _parts(tensors)
        self.student.load_state_dict(parts["student"])
        self.average.load(parts["average"])
        self.optimizers.load(parts["optimizer"])

    def snapshot(self) -> Callable[[], None]:
        """A function that restores everything to its present values."""
        before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        buffers = [(buffer, buffer.clone()) for buffer in self.student.buffers()]  # also those not saved

        def restore() -> None:
            self.load(before)
            for buffer, then in buffers:
                buffer.copy_(then)

        return restore

    def swap_in_ema(self) -> None:
        """Give the student its averaged weights."""
        self.student.load_state_dict({**self.student.state_dict(), **self.average.tensors})

    def save(self, folder: RunFolder, more: Mapping[str, str] | None = None) -> None:
        """Write a checkpoint, with `more` in its metadata."""
        counts = {"step": self.step, "count": self.count, "sums": self.sums}
        metadata = {name: json.dumps(value) for name, value in counts.items()}
        folder.save(self.step, self.tensors(), {**metadata, **(more or {})})

    def load_counts(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint's counts; one whose counts or tensors are not of this run is refused.

        The tensors are left for `load`, which the steps may have to be prepared for.
        """
        with _refused(checkpoint):
            step, count, sums = _counts(checkpoint.metadata, self.optimizers.total)
            parts = _parts(checkpoint.tensors)
            _check_same("student", parts["student"], self.student.state_dict())
            _check_same("average", parts["average"], self.average.tensors)
            self.optimizers.check(parts["optimizer"], step)
        self.step, self.count, self.sums = step, count, sums


def max_bytes(student: torch.nn.Module, average: Average) -> int:
    """More than a checkpoint of a student can have: two more of each weight for Adam, and a header."""
    tensors = [*student.state_dict().values(), *average.tensors.values()]
    return 3 * sum(tensor.nbytes + 1000 for tensor in tensors) + 2**20


def read_step(checkpoint: Checkpoint, total: int) -> int:
    """The step of a checkpoint of a run of so many steps."""
    with _refused(checkpoint):
        return _counts(checkpoint.metadata, total)[0]


def trained_weights(checkpoint: Checkpoint, student: torch.nn.Module, average: Average) -> dict[str, Tensor]:
    """A student's weights in a checkpoint, averaged where there is an average."""
    with _refused(checkpoint):
        parts = _parts(checkpoint.tensors)
        _check_same("student", parts["student"], student.state_dict())
        _check_same("average", parts["average"], average.tensors)
    return {**parts["student"], **parts["average"]}


@contextmanager
def _refused(checkpoint: Checkpoint) -> Iterator[None]:
    """An error of what a checkpoint holds names its file and what to do."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{checkpoint.path} is whole but not of this run: {error}; move it away and run again, which "
            "resumes from the checkpoint before it"
        ) from error


def _counts(metadata: Mapping[str, str], total: int) -> tuple[int, int, dict[str, float]]:
    """Step, count and sums in a checkpoint's metadata, or ValueError that says what is wrong with them."""
    values: list[Any] = []
    for name in ("step", "count", "sums"):
        try:
            values.append(json.loads(metadata[name]))
        except (KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"its metadata has no {name} that can be read") from error
    step, count, sums = values
    if type(step) is not int or not 0 <= step <= total:
        raise ValueError(f"its step is {short(step)}, expected a whole number from 0 to {total}")
    if type(count) is not int or not 0 <= count <= step:
        raise ValueError(f"its count is {short(count)}, expected a whole number from 0 to its step, {step}")
    numbers = isinstance(sums, dict) and all(type(value) in (int, float) for value in sums.values())
    if not numbers or not all(abs(value) <= 1e300 for value in sums.values()):
        raise ValueError(f"its sums are {short(sums)}, expected finite numbers by name")
    return step, count, {name: float(value) for name, value in sums.items()}


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """A checkpoint's tensors by the part of the state that they belong to."""
    parts: dict[str, dict[str, Tensor]] = {"student": {}, "average": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        if part not in parts:
            raise ValueError(f"it has a tensor {short(name)}")
        parts[part][rest] = tensor
    return parts


def _check_same(part: str, there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other names, types or shapes than those that they are to be copied into."""
    for name in [*here, *there]:
        layouts = [_layout(tensors.get(name)) for tensors in (there, here)]
        if layouts[0] != layouts[1]:
            raise ValueError(f"{part}/{name} is {layouts[0]} there and {layouts[1]} here")


def _layout(tensor: Tensor | None) -> str:
    return (
        "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    )
