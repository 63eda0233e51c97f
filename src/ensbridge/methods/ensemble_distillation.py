"""ED: one network that learns the members' softened predictions (Hinton et al., 2015).

Shapes: B images, K classes, M members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ensbridge.methods.base import (
    AbstractMethod,
    Batch,
    EmaRule,
    Teacher,
    check_label_weight,
    with_labels,
)
from ensbridge.models.ensemble import Ensemble, at_least_float32, weights_digest
from ensbridge.models.features import read_logits
from ensbridge.utils.inputs import call_network


def distillation_loss(logits_BK: Tensor, teachers_MBK: Tensor, tau: float) -> Tensor:
    """τ² times the mean over members and images of CE(softmax(z_m/τ), softmax(z/τ)).

    >>> import torch
    >>> logits = torch.tensor([[0.0, 4.0]])
    >>> round(distillation_loss(logits, logits[None], tau=4.0).item(), 4)  # 16 times an entropy
    9.3152
    """
    # The mean over members can be taken first, as cross-entropy is linear in its target.
    target_BK = (teachers_MBK / tau).softmax(-1).mean(0)
    return tau**2 * F.cross_entropy(logits_BK / tau, target_BK)


class EnsembleDistillation(AbstractMethod):
    """A student of a single network's cost, distilled from the ensemble, by default without labels.

    At `tau=1.0` the target is the mean of the members' predictions, and the gradient that of the KL
    divergence from it. With a `label_weight` w the loss is (1 - w) times this plus w times the cross-entropy
    with the labels; at 1 the ensemble is not run. With `ema` the student ends with averaged weights.

    >>> import torch
    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(3)]
    >>> method = EnsembleDistillation(Ensemble(nets[:2]), nets[2])
    >>> method.loss(Batch(torch.rand(5, 1, 2, 2), None)).ndim, method.model() is nets[2]
    (0, True)
    """

    def __init__(
        self,
        ensemble: Ensemble,
        student: nn.Module,
        *,
        tau: float = 4.0,
        label_weight: float = 0.0,
        ema: EmaRule | None = None,
    ) -> None:
        if not tau > 0:
            raise ValueError(f"tau is {tau}; the temperature of the distillation must be above 0, such as 4")
        self.ensemble = ensemble.eval()
        self.student = student
        self.tau, self.label_weight, self.ema = tau, check_label_weight(label_weight), ema

    def loss(self, batch: Batch) -> Tensor:
        """The softened cross-entropy with every member, and with the labels if they have a weight."""
        logits = at_least_float32(read_logits(call_network(self.student, batch.images)))

        def distill() -> Tensor:
            return distillation_loss(logits, batch.member_logits(self.ensemble), self.tau)

        return with_labels(distill, logits, batch, self.label_weight)

    def model(self) -> nn.Module:
        """The student, at temperature 1."""
        return self.student

    def networks(self) -> Sequence[nn.Module]:
        """The student."""
        return [self.student]

    def teachers(self) -> Sequence[Teacher]:
        """The ensemble, unless labels have all the weight."""
        return [(self.ensemble, None)] if self.label_weight < 1 else []

    def describe(self) -> dict[str, Any]:
        """The temperature, the teachers and the student's architecture."""
        return {
            "method": "ensemble_distillation",
            "tau": self.tau,
            "teachers": weights_digest(self.ensemble),
            "student": str(self.student),
            **({"label_weight": self.label_weight} if self.label_weight else {}),
            **({"ema": asdict(self.ema)} if self.ema else {}),
        }
