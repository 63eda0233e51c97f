"""The contract that every method keeps: a student, `loss(batch)` and `log_probs(images)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.ensemble import Ensemble, Observation

Teacher = tuple[Ensemble, str]  # an ensemble, and the feature of its source that is read
Observer = Callable[[Tensor], Observation]


@dataclass(frozen=True)
class Batch:
    """A batch of training images with the randomness of its step.

    Teachers' outputs are computed once and shared: methods that are trained together and observe the same
    ensemble at the same feature get the same answer.

    >>> ensemble = Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)])
    >>> batch = Batch(torch.rand(5, 1, 2, 2), None)
    >>> batch.observe(ensemble, "0") is batch.observe(ensemble, "0")
    True
    """

    images: Tensor  # (B, C, H, W)
    labels: Tensor | None  # (B,)
    generator: torch.Generator | None = None
    observers: Mapping[Teacher, Observer] = field(default_factory=dict, repr=False)  # compiled ones, if any
    _observed: dict[Teacher, Observation] = field(default_factory=dict, repr=False)

    def observe(self, ensemble: Ensemble, feature: str) -> Observation:
        """What the ensemble says of these images, and the source's `feature`; without gradients."""
        key = (ensemble, feature)
        if key not in self._observed:
            observer = self.observers.get(key)
            self._observed[key] = (
                observer(self.images) if observer else ensemble.observe(self.images, feature)
            )
        return self._observed[key]


@dataclass(frozen=True)
class EmaRule:
    """How a student's averaged weights follow its weights: average ← decay·average + (1 - decay)·weights.

    With `warmup` the decay is min(decay, (1 + n) / (10 + n)) at step n, so that a short run is not an average
    with its starting point. `swapped` exchanges the two factors as the paper's released code does, which
    makes the average the weights themselves but for a hair.

    >>> EmaRule(0.99).keep(0), EmaRule(0.99).keep(10_000), EmaRule(0.99, warmup=False).keep(0)
    (0.1, 0.99, 0.99)
    """

    decay: float
    warmup: bool = True
    swapped: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"the EMA decay is {self.decay}; it must lie in [0, 1), such as 0.99995")

    def keep(self, step: int) -> float:
        """The share of the old average that stays at step `step`, counted from 0."""
        if self.swapped:
            return 1 - self.decay
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


class AbstractMethod(ABC):
    """A way to make one classifier out of an ensemble.

    `student` holds what is trained, and nothing else: teachers stay outside. After training it carries
    the averaged weights where `ema` asks for them.
    """

    student: nn.Module
    ema: EmaRule | None = None

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The training loss of a batch, a scalar."""

    @abstractmethod
    def log_probs(self, images: Tensor) -> Tensor:
        """Predicted log-probabilities (B, K)."""

    def networks(self) -> Sequence[nn.Module]:
        """The trained networks that the loss calls, which may be compiled."""
        return [self.student]

    def teachers(self) -> Sequence[Teacher]:
        """What the loss observes."""
        return []

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What this method is, in JSON's types; a run folder knows its method by it."""


class Together(AbstractMethod):
    """Several methods trained side by side on the same batches, their teachers' passes shared.

    The loss is the sum. Students share no weights and optimisers act on each weight alone, so that each
    learns what it would alone on these batches. All must follow the same EMA rule.

    >>> from ensbridge.methods import DeepEnsemble
    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)]
    >>> methods = {"a": DeepEnsemble(nets[:1]), "b": DeepEnsemble(nets[1:])}
    >>> batch = Batch(torch.rand(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1]))
    >>> Together(methods).loss(batch).isclose(methods["a"].loss(batch) + methods["b"].loss(batch)).item()
    True
    """

    def __init__(self, methods: Mapping[str, AbstractMethod]) -> None:
        if len({method.ema for method in methods.values()}) != 1:
            raise ValueError(f"methods trained together need one EMA rule; {', '.join(methods)} have several")
        self.methods = dict(methods)
        self.student = nn.ModuleDict({name: method.student for name, method in methods.items()})
        self.ema = next(iter(methods.values())).ema

    def loss(self, batch: Batch) -> Tensor:
        """The sum of the methods' losses."""
        return torch.stack([method.loss(batch) for method in self.methods.values()]).sum()

    def log_probs(self, images: Tensor) -> Tensor:
        """Not defined: several methods make several predictions."""
        raise TypeError(
            f"{', '.join(self.methods)} were trained together; ask one of them for its prediction"
        )

    def networks(self) -> Sequence[nn.Module]:
        """Every method's networks."""
        return [network for method in self.methods.values() for network in method.networks()]

    def teachers(self) -> Sequence[Teacher]:
        """Every method's teachers, each once."""
        return list(
            dict.fromkeys(teacher for method in self.methods.values() for teacher in method.teachers())
        )

    def describe(self) -> dict[str, Any]:
        """Each method's description under its name."""
        return {
            "method": "together",
            "methods": {name: each.describe() for name, each in self.methods.items()},
        }
