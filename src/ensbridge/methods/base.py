"""The contract that every method keeps: `loss(batch)` trains its student, `model()` is what comes of it.

`fit` trains one method, or several by `JointTraining`; what it asks of both is `AbstractTrainable`. Classes
are abstract or final: what is concrete here is never overridden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ensbridge.models.ensemble import Ensemble
from ensbridge.models.features import forward_with_features
from ensbridge.utils.inputs import Inputs, map_inputs, to_network

Teacher = tuple[Ensemble, str | None]  # an ensemble, and the feature of its source that is read, if any
Runner = Callable[[Inputs], tuple[Tensor, ...]]  # a network's pass: its logits, then its features


class TeacherOutputs(NamedTuple):
    """What an ensemble says of a batch: a feature of its source and every member's logits."""

    feature: Tensor  # the module's output, any shape with B first
    logits: Tensor  # (M, B, K)


@dataclass(frozen=True)
class Batch:
    """A batch of training images with the randomness of its step.

    Each network runs once, whichever methods and ensembles ask for it, and without gradients.
    `feature_names` names the features to keep of each network; `runners` are compiled passes, if any;
    `mixed` has, for mixed images, the labels of those that were mixed in, and each image's own share.

    >>> ensemble = Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)])
    >>> batch = Batch(torch.rand(5, 1, 2, 2), None)
    >>> batch.teacher_outputs(ensemble, "0").logits.equal(batch.member_logits(ensemble))
    True
    """

    images: Inputs  # (B, C, H, W), or whatever else the networks take
    labels: Tensor | None  # (B,)
    generator: torch.Generator | None = None
    feature_names: Mapping[nn.Module, tuple[str, ...]] = field(default_factory=dict, repr=False)
    runners: Mapping[nn.Module, Runner] = field(default_factory=dict, repr=False)
    mixed: tuple[Tensor, Tensor] | None = None  # (B,) each
    _seen: dict[nn.Module, dict[str | None, Tensor]] = field(default_factory=dict, repr=False)

    def teacher_outputs(self, ensemble: Ensemble, feature: str) -> TeacherOutputs:
        """The source's `feature` and every member's logits."""
        output = self.run(ensemble.source, self.images, feature)[1]
        return TeacherOutputs(output, self.member_logits(ensemble))

    def member_logits(self, ensemble: Ensemble) -> Tensor:
        """Every member's logits (M, B, K)."""
        return ensemble.member_logits(self.images, self.run)

    def label_probs(self, classes: int) -> Tensor:
        """The labels as probabilities (B, K); a mixed image has those of both its images, by their shares.

        >>> images, labels = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
        >>> Batch(images, labels, mixed=(labels.roll(1), torch.tensor([1.0, 0.75]))).label_probs(3)
        tensor([[1.0000, 0.0000, 0.0000],
                [0.2500, 0.0000, 0.7500]])
        """
        if self.labels is None:
            raise ValueError("a method learns from labels and the data has none; give (images, labels)")
        check_labels(self.labels, classes)
        ids = torch.arange(classes, device=self.labels.device)
        probs = (self.labels[:, None] == ids).float()
        if self.mixed is not None:
            others, share = self.mixed
            probs = share[:, None] * probs + (1 - share[:, None]) * (others[:, None] == ids)
        # A label of no class that was not looked at makes it nan, so that the step is refused.
        of_a_class = (self.labels >= 0) & (self.labels < classes)
        return torch.where(of_a_class[:, None], probs, torch.nan)

    def run(self, network: nn.Module, images: Inputs, *features: str) -> tuple[Tensor, ...]:
        """What `forward_with_features` gives for the batch's images, from one pass whoever asks."""
        seen = self._seen.setdefault(network, {})  # its logits under None, its features under their names
        if not {None, *features} <= seen.keys():
            names = self.feature_names.get(network, features)
            run = self.runners.get(network)
            with torch.no_grad():
                if run is None:  # on a copy where the weights are: a network may well work in place
                    copied = map_inputs(torch.clone, to_network(images, network))
                    outputs = forward_with_features(network, copied, *names)
                else:
                    outputs = run(images)
            seen.update(zip((None, *names), outputs, strict=True))
        return tuple(seen[name] for name in (None, *features))


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that are no classes; an accelerator's are not looked at, which would stall it."""
    if labels.device.type != "cpu":
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels span {low} to {high}; networks of {classes} classes need 0 to {classes - 1}"
        )


def feature_names_of(teachers: Sequence[Teacher]) -> dict[nn.Module, tuple[str, ...]]:
    """Every network that the teachers run, with the features that are read of it.

    >>> ensemble = Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)])
    >>> list(feature_names_of([(ensemble, "1"), (ensemble, None), (ensemble.first(1), "0")]).values())
    [('1', '0'), ()]
    """
    feature_names: dict[nn.Module, tuple[str, ...]] = {}
    for ensemble, feature in teachers:
        for member in ensemble.members:
            feature_names.setdefault(member, ())
        if feature is not None and feature not in feature_names[ensemble.source]:
            feature_names[ensemble.source] += (feature,)
    return feature_names


def check_label_weight(label_weight: float) -> float:
    """The weight of the labels in a distillation as a float; ValueError where it is not in [0, 1]."""
    known = isinstance(label_weight, Real) and not isinstance(label_weight, bool)
    if not known or not 0 <= label_weight <= 1:
        raise ValueError(
            f"label_weight is {label_weight!r}; it must lie in [0, 1], where 0 learns from the members alone"
        )
    return float(label_weight)


def with_labels(distill: Callable[[], Tensor], logits: Tensor, batch: Batch, label_weight: float) -> Tensor:
    """(1 - w) times a distillation's loss plus w times the cross-entropy of these logits with the labels.

    >>> logits, batch = torch.zeros(2, 3), Batch(torch.rand(2, 1, 2, 2), torch.tensor([0, 2]))
    >>> with_labels(lambda: torch.tensor(1.0), logits, batch, 0.5) == (1 + torch.tensor(3).log()) / 2
    tensor(True)
    """
    if not label_weight:
        return distill()
    of_labels = F.cross_entropy(logits, batch.label_probs(logits.shape[-1]))
    if label_weight == 1:
        return of_labels
    return (1 - label_weight) * distill() + label_weight * of_labels


def kl_loss(log_p: Tensor, logits: Tensor) -> Tensor:
    """KL(p ‖ softmax(logits)), mean over the batch."""
    return (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1).mean()


@dataclass(frozen=True)
class EmaRule:
    """How a student's averaged weights follow its weights: average ← decay·average + (1 - decay)·weights.

    With `warmup` the decay is min(decay, (1 + n) / (10 + n)) at step n, so that a short run is not an average
    with its starting point. `swapped` exchanges the two factors as the paper's released code does, which
    makes the average the weights themselves but for a hair.

    >>> EmaRule(0.99).decay_at(0), EmaRule(0.99).decay_at(10_000), EmaRule(0.99, warmup=False).decay_at(0)
    (0.1, 0.99, 0.99)
    """

    decay: float
    warmup: bool = True
    swapped: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"the EMA decay is {self.decay}; it must lie in [0, 1), such as 0.99995")

    def decay_at(self, step: int) -> float:
        """The decay at step `step`, counted from 0."""
        if self.swapped:
            return 1 - self.decay
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


class AbstractTrainable(ABC):
    """What `fit` trains."""

    student: nn.Module  # holds what is trained, and nothing else: teachers stay outside
    parts: Sequence[str]  # of the student that have an optimiser each, by name ("" is all of it)

    @abstractmethod
    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The losses that are trained on and logged, each of weights of its own."""

    @abstractmethod
    def averages(self) -> Sequence[tuple[str, EmaRule]]:
        """The parts of the student whose weights are averaged, by name ("" is all of it)."""

    @abstractmethod
    def networks(self) -> Sequence[nn.Module]:
        """The trained networks that the loss calls, which may be compiled."""

    @abstractmethod
    def teachers(self) -> Sequence[Teacher]:
        """The ensembles that the loss learns from."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What this is, in JSON's types; a run folder knows its method by it."""


class AbstractMethod(AbstractTrainable):
    """A way to make one classifier out of an ensemble, or the ensemble itself.

    After training the student carries the averaged weights where `ema` asks for them.
    """

    ema: EmaRule | None = None
    parts: Sequence[str] = ("",)

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The training loss of a batch, a scalar."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The classifier: images in, logits (B, K) out."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """The loss."""
        return {"loss": self.loss(batch)}

    def averages(self) -> Sequence[tuple[str, EmaRule]]:
        """The whole student, or nothing."""
        return [("", self.ema)] if self.ema else []


class JointTraining(AbstractTrainable):
    """Several methods trained side by side on the same batches, their teachers' passes shared.

    Students share no weights and optimisers act on each weight alone, so that each learns what it would alone
    on these batches, but for random draws: methods take theirs from one generator, in their order.

    >>> from ensbridge.methods import DeepEnsemble
    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)]
    >>> methods = {"a": DeepEnsemble(nets[:1]), "b": DeepEnsemble(nets[1:])}
    >>> batch = Batch(torch.rand(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1]))
    >>> JointTraining(methods).losses(batch)["b"].equal(methods["b"].loss(batch))
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
        self.parts = [
            f"{name}.{part}".rstrip(".") for name, method in methods.items() for part in method.parts
        ]

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Each method's loss under its name."""
        return {name: method.loss(batch) for name, method in self.methods.items()}

    def averages(self) -> Sequence[tuple[str, EmaRule]]:
        """Each student by its method's rule."""
        return [(name, method.ema) for name, method in self.methods.items() if method.ema]

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
            "methods": {name: method.describe() for name, method in self.methods.items()},
        }
