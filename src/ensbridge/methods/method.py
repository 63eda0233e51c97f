"""The contract that every method keeps: a student, `loss(batch)` and `log_probs(images)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.ensemble import Ensemble, Observation, stack_logits
from ensbridge.nets.features import forward_with_features

Teacher = tuple[Ensemble, str | None]  # an ensemble, and the feature of its source that is read, if any
Runner = Callable[[Tensor], tuple[Tensor, ...]]  # a network's pass: its logits, then its features


@dataclass(frozen=True)
class Batch:
    """A batch of training images with the randomness of its step.

    Each teacher network runs once, whichever methods and ensembles ask for it, and without gradients.
    `taps` names the features to keep of each network; `runners` are compiled passes, if any.

    >>> ensemble = Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)])
    >>> batch = Batch(torch.rand(5, 1, 2, 2), None)
    >>> batch.observe(ensemble, "0").logits.equal(batch.member_logits(ensemble))
    True
    """

    images: Tensor  # (B, C, H, W)
    labels: Tensor | None  # (B,)
    generator: torch.Generator | None = None
    taps: Mapping[nn.Module, tuple[str, ...]] = field(default_factory=dict, repr=False)
    runners: Mapping[nn.Module, Runner] = field(default_factory=dict, repr=False)
    _seen: dict[nn.Module, dict[str | None, Tensor]] = field(default_factory=dict, repr=False)

    def observe(self, ensemble: Ensemble, feature: str) -> Observation:
        """What the ensemble says of these images, and the source's `feature`."""
        output = self._run(ensemble.source, feature)[feature]
        return Observation(output, self.member_logits(ensemble))

    def member_logits(self, ensemble: Ensemble) -> Tensor:
        """Every member's logits (M, B, K)."""
        return stack_logits([self._run(member)[None] for member in ensemble.members])

    def _run(self, network: nn.Module, feature: str | None = None) -> dict[str | None, Tensor]:
        """A network's outputs: its logits under None, its features under their names."""
        if feature not in self._seen.get(network, {}):
            features = self.taps.get(network, () if feature is None else (feature,))
            runner = self.runners.get(network)
            with torch.no_grad():
                known = runner is not None
                outputs = (
                    runner(self.images) if known else forward_with_features(network, self.images, *features)
                )
            self._seen.setdefault(network, {}).update(zip((None, *features), outputs, strict=True))
        return self._seen[network]


def taps_of(teachers: Sequence[Teacher]) -> dict[nn.Module, tuple[str, ...]]:
    """Every network that the teachers run, with the features that are read of it.

    >>> ensemble = Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)])
    >>> list(taps_of([(ensemble, "1"), (ensemble, None), (ensemble.first(1), "0")]).values())
    [('1', '0'), ()]
    """
    taps: dict[nn.Module, tuple[str, ...]] = {}
    for ensemble, feature in teachers:
        for member in ensemble.members:
            taps.setdefault(member, ())
        if feature is not None and feature not in taps[ensemble.source]:
            taps[ensemble.source] += (feature,)
    return taps


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

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The losses that are trained on and logged, each of weights of its own."""
        return {"loss": self.loss(batch)}

    def averages(self) -> Sequence[tuple[str, EmaRule]]:
        """The parts of the student whose weights are averaged, by name ("" is all of it)."""
        return [("", self.ema)] if self.ema else []

    def parts(self) -> Sequence[str]:
        """The parts of the student that have an optimiser each, by name ("" is all of it)."""
        return [""]

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

    Students share no weights and optimisers act on each weight alone, so that each learns what it would alone
    on these batches, but for random draws: methods take theirs from one generator, in their order.

    >>> from ensbridge.methods import DeepEnsemble
    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)]
    >>> methods = {"a": DeepEnsemble(nets[:1]), "b": DeepEnsemble(nets[1:])}
    >>> batch = Batch(torch.rand(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1]))
    >>> Together(methods).loss(batch).isclose(methods["a"].loss(batch) + methods["b"].loss(batch)).item()
    True
    """

    def __init__(self, methods: Mapping[str, AbstractMethod]) -> None:
        if not methods:
            raise ValueError("there are 0 methods to train together; give at least 1")
        for name in methods:
            if not name or "." in name:
                raise ValueError(f"a method is called {name!r}; names must not be empty or hold a dot")
        self.methods = dict(methods)
        self.student = nn.ModuleDict({name: method.student for name, method in methods.items()})

    def loss(self, batch: Batch) -> Tensor:
        """The sum of the methods' losses."""
        return torch.stack(list(self.losses(batch).values())).sum()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Each method's loss under its name."""
        return {name: method.loss(batch) for name, method in self.methods.items()}

    def averages(self) -> Sequence[tuple[str, EmaRule]]:
        """Each method's own."""
        return [
            (f"{name}.{part}".rstrip("."), rule)
            for name, method in self.methods.items()
            for part, rule in method.averages()
        ]

    def parts(self) -> Sequence[str]:
        """Each method's own."""
        return [
            f"{name}.{part}".rstrip(".") for name, method in self.methods.items() for part in method.parts()
        ]

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
