"""The running average of a student's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# pyright: reportPrivateImportUsage=false
import torch
from torch import Tensor, nn

from ensbridge.methods.base import EmaRule

Pair = tuple[Tensor, Tensor]  # an average, and what it follows


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
        self._parts: list[tuple[list[Pair], list[Pair]]] = []  # of each rule: floats, and whole numbers
        for prefix, _ in rules:
            names = [name for name in live if name.startswith(f"{prefix}." if prefix else "")]
            self.tensors |= {name: live[name].detach().clone() for name in names}
            pairs = [(self.tensors[name], live[name]) for name in names]
            floats = [pair for pair in pairs if pair[0].is_floating_point()]
            self._parts.append((floats, [pair for pair in pairs if not pair[0].is_floating_point()]))

    def decays(self, step: int) -> list[float]:
        """The decay at a step, for each rule."""
        return [rule.decay_at(step) for rule in self.rules]

    @torch.no_grad()
    def update(self, decays: Sequence[Tensor | float]) -> None:
        """average ← decay·average + (1 - decay)·student; a decay may live on the device."""
        for decay, (moving, counted) in zip(decays, self._parts, strict=True):
            # All tensors in a few kernels: a captured step would be long with three for each.
            if moving:
                averages, lives = (list(tensors) for tensors in zip(*moving, strict=True))
                changes = torch._foreach_sub(lives, averages)
                torch._foreach_mul_(changes, 1 - decay)
                torch._foreach_add_(averages, changes)
            if counted:
                averages, lives = (list(tensors) for tensors in zip(*counted, strict=True))
                torch._foreach_copy_(averages, lives)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the average of a checkpoint, in place."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
