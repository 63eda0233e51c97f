"""The running average of a student's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ensbridge.methods.method import EmaRule


class Average:
    """An exponential moving average of a student's state, weights and running statistics alike."""

    def __init__(self, rule: EmaRule, student: nn.Module) -> None:
        self.rule = rule
        self.tensors = {name: tensor.detach().clone() for name, tensor in student.state_dict().items()}
        live = student.state_dict(keep_vars=True)
        floating = [name for name, tensor in self.tensors.items() if tensor.is_floating_point()]
        self._average, self._live = [self.tensors[n] for n in floating], [live[n] for n in floating]
        counters = [name for name in self.tensors if name not in set(floating)]
        self._counters = [(self.tensors[name], live[name]) for name in counters]

    @torch.no_grad()
    def follow(self, keep: Tensor | float) -> None:
        """average ← keep·average + (1 - keep)·student; `keep` may live on the device."""
        for average, live in zip(self._average, self._live, strict=True):
            average += (live - average) * (1 - keep)
        for kept, live in self._counters:
            kept.copy_(live)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take up the average of a checkpoint, in place."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
