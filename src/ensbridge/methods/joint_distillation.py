"""A source distilled from an ensemble and bridges beside it, all trained at the same time.

Shapes: B images, K classes, M members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.bridge.bridge import Bridge
from ensbridge.bridge.sampler import estimate_z0
from ensbridge.methods.base import (
    AbstractMethod,
    Batch,
    EmaRule,
    Teacher,
    check_label_weight,
    kl_loss,
    with_labels,
)
from ensbridge.models.ensemble import Ensemble, at_least_float32, ensemble_logit, weights_digest
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.features import FeatureExtractor, feature_names, joined


class JointDistillation(AbstractMethod):
    """Distils an ensemble into a source network and, in the same steps, into bridges that read it.

    The loss is KL(ensemble ‖ source) plus KL(ensemble ‖ bridge) for each bridge. Unless `end_to_end`, bridges
    send no gradient into the source, which learns what it would learn alone, so that several bridges can be
    tried beside it at once. With a `label_weight` w each KL becomes (1 - w) times it plus w times the
    cross-entropy with the labels; at 1 the ensemble is not run. `source` and `bridges` are parts of the
    student with an optimiser each.

    >>> from ensbridge.models import ResNet, ScoreNet
    >>> members = [ResNet((1,), (8,), 3, stem=8) for _ in range(3)]
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> bridge = Bridge(score).one_step()
    >>> method = JointDistillation(Ensemble(members[1:]), members[0], {"T2": bridge}, "stages.0.0")
    >>> batch = Batch(torch.rand(4, 3, 8, 8), None, torch.Generator().manual_seed(0))
    >>> method.loss(batch).ndim, method.model()(batch.images).shape
    (0, torch.Size([4, 3]))
    """

    parts = ("source", "bridges")

    def __init__(
        self,
        ensemble: Ensemble,
        source: nn.Module,
        bridges: Mapping[str, Bridge],
        feature: str | Sequence[str],
        *,
        end_to_end: bool = False,
        label_weight: float = 0.0,
        ema: EmaRule | None = None,
    ) -> None:
        if not bridges:
            raise ValueError(
                "JointDistillation was given 0 bridges; use EnsembleDistillation for a source alone"
            )
        self.features = feature_names(source, feature or "")
        self.ensemble, self.source, self.bridges = ensemble.eval(), source, dict(bridges)
        self.end_to_end, self.label_weight, self.ema = end_to_end, check_label_weight(label_weight), ema
        self.student = nn.ModuleDict({"source": source, "bridges": nn.ModuleDict(self.bridges)})
        self._extractor = FeatureExtractor(source, *self.features)

    def loss(self, batch: Batch) -> Tensor:
        """The sum of the source's and the bridges' losses: KL from the ensemble, mean over the batch."""
        target = None
        if self.label_weight < 1:
            target = ensemble_logit(batch.member_logits(self.ensemble)).log_softmax(-1)
        logits, *maps = self._extractor(batch.images)
        logits = at_least_float32(logits)
        losses = [self._loss(target, logits, batch)]
        if not self.end_to_end:
            logits, maps = logits.detach(), [h.detach() for h in maps]
        h = joined(maps)
        for bridge in self.bridges.values():
            temperature = bridge.draw_temperature(len(logits), logits.device, batch.generator)
            z1 = bridge.start(logits, temperature)
            z0 = estimate_z0(bridge.epsilon, bridge.schedule, z1, h, z1.new_ones(len(z1)))
            losses.append(self._loss(target, z0, batch))
        return torch.stack(losses).sum()

    def _loss(self, target: Tensor | None, logits: Tensor, batch: Batch) -> Tensor:
        """The loss of one output; there is no target where labels have all the weight."""

        def distill() -> Tensor:
            assert target is not None
            return kl_loss(target, logits)

        return with_labels(distill, logits, batch, self.label_weight)

    def model(self) -> FastEnsemble:
        """The source with all bridges, whose predictions are averaged."""
        return self.with_bridges(*self.bridges)

    def with_bridges(self, *names: str) -> FastEnsemble:
        """The source with the bridges of these names."""
        return FastEnsemble(
            self.source,
            [self.bridges[name] for name in names],
            self.features,
            members=len(self.ensemble),
            source_distilled=True,
        )

    def networks(self) -> Sequence[nn.Module]:
        """The source with its features, and the score networks."""
        return [self._extractor, *(bridge.score for bridge in self.bridges.values())]

    def teachers(self) -> Sequence[Teacher]:
        """The ensemble, unless labels have all the weight."""
        return [(self.ensemble, None)] if self.label_weight < 1 else []

    def describe(self) -> dict[str, Any]:
        """The teachers, the source's architecture and the bridges' switches."""
        return {
            "method": "joint_distillation",
            "end_to_end": self.end_to_end,
            **({"label_weight": self.label_weight} if self.label_weight else {}),
            "feature": self.features[0] if len(self.features) == 1 else list(self.features),
            "teachers": weights_digest(self.ensemble),
            "source": str(self.source),
            "bridges": {
                name: {"config": asdict(bridge.config), "score": str(bridge.score)}
                for name, bridge in self.bridges.items()
            },
            **({"ema": asdict(self.ema)} if self.ema else {}),
        }
