"""What a training is made of at a moment, so that it can be saved, taken up and put back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ensbridge.train.checkpoint import RunFolder
from ensbridge.train.ema import Average
from ensbridge.train.optimizers import Optimizers


class State:
    """Everything that a resumed run needs: weights, their average, the optimisers' memory, the step."""

    def __init__(self, student: torch.nn.Module, optimizers: Optimizers, average: Average) -> None:
        self.student, self.optimizers, self.average = student, optimizers, average
        self.step = 0
        self.forget()

    def forget(self) -> None:
        """Begin the losses' means anew."""
        self.sums: dict[str, float] = {}
        self.count = 0

    def add(self, sums: Mapping[str, float], step: int) -> None:
        """Add the losses of the steps up to `step`."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.count, self.step = self.count + step - self.step, step

    def means(self) -> dict[str, float]:
        """The losses' means since they were forgotten."""
        return {name: value / self.count for name, value in self.sums.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All of it but the counts, under names of its parts."""
        parts = {
            "student": self.student.state_dict(),
            "average": self.average.tensors,
            "optimizer": self.optimizers.tensors(),
        }
        return {f"{part}/{name}": each for part, tensors in parts.items() for name, each in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up saved tensors, in place where they exist: a captured step goes on using the same memory."""
        parts: dict[str, dict[str, Tensor]] = {"student": {}, "average": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        self.student.load_state_dict(parts["student"])
        self.average.load(parts["average"])
        self.optimizers.load(parts["optimizer"])

    def put_back(self) -> Callable[[], None]:
        """What brings everything back to how it is now."""
        before = {name: tensor.clone() for name, tensor in self.tensors().items()}
        buffers = [(buffer, buffer.clone()) for buffer in self.student.buffers()]  # also those not saved

        def restore() -> None:
            self.load(before)
            for buffer, then in buffers:
                buffer.copy_(then)

        return restore

    def settle(self) -> None:
        """Leave the student with its averaged weights."""
        self.student.load_state_dict({**self.student.state_dict(), **self.average.tensors})

    def save(self, folder: RunFolder) -> None:
        """Write a checkpoint."""
        counts = {"step": self.step, "count": self.count, "sums": self.sums}
        folder.save(self.step, self.tensors(), {name: json.dumps(value) for name, value in counts.items()})

    def read_metadata(self, metadata: Mapping[str, str]) -> None:
        """Take up the counts beside a checkpoint's tensors."""
        counts = {name: json.loads(metadata[name]) for name in ("step", "count", "sums")}
        self.step, self.count, self.sums = counts["step"], counts["count"], counts["sums"]
