"""The running average of a student's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ensbridge.methods.method import EmaRule


class Average:
    """Exponential moving averages of parts of a student, weights and running statistics alike.

    `rules` names the parts by prefix ("" is the whole student), each with its own rule.

    >>> student = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    >>> sorted(Average(student, [("a", EmaRule(0.9))]).tensors)
    ['a.bias', 'a.weight']
    """

    def __init__(self, student: nn.Module, rules: Sequence[tuple[str, EmaRule]]) -> None:
        self.rules = [rule for _, rule in rules]
        self.tensors: dict[str, Tensor] = {}
        live = student.state_dict(keep_vars=True)
        self._parts: list[list[tuple[Tensor, Tensor]]] = []  # of each rule: (average, live) pairs
        for prefix, _ in rules:
            names = [name for name in live if name.startswith(f"{prefix}." if prefix else "")]
            self.tensors |= {name: live[name].detach().clone() for name in names}
            self._parts.append([(self.tensors[name], live[name]) for name in names])

    def keeps(self, step: int) -> list[float]:
        """The share of the old average that stays at a step, for each rule."""
        return [rule.keep(step) for rule in self.rules]

    @torch.no_grad()
    def follow(self, keeps: Sequence[Tensor | float]) -> None:
        """average ← keep·average + (1 - keep)·student; a keep may live on the device."""
        for keep, part in zip(keeps, self._parts, strict=True):
            for average, live in part:
                if average.is_floating_point():
                    average += (live - average) * (1 - keep)
                else:
                    average.copy_(live)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up the average of a checkpoint, in place."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
