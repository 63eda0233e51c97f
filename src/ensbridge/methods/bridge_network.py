"""BN: a light network that predicts, from the source's feature, what lies between two members.

Bridge networks (Yun et al., 2023): the curve's centre between the source and another member is a good network
of its own; the bridge learns its output. The prediction is the mean of the source's and the bridges'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ensbridge.bridge.bridge import FeatureBridge
from ensbridge.methods.base import AbstractMethod, Batch, Teacher, kl_loss
from ensbridge.models.ensemble import Ensemble, ensemble_logit, weights_digest
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.features import find_module


class BridgeNetwork(AbstractMethod):
    """Training of one bridge from the source's `feature` with KL to the centres of curves.

    `centres` are the networks at the middle of the curves from the source, one for the method as published;
    with several the target is their mean softmax. Labels are never used.

    >>> import torch
    >>> from ensbridge.models import ResNet
    >>> from ensbridge.models.tail import Tail
    >>> source, centre = (ResNet((1, 1), (8, 8), 3, stem=8) for _ in range(2))
    >>> method = BridgeNetwork(source, [centre], Tail(source, "stages.0.0"), "stages.0.0")
    >>> batch = Batch(torch.rand(4, 3, 8, 8), None)
    >>> method.loss(batch).ndim, method.model()(batch.images).shape
    (0, torch.Size([4, 3]))
    """

    average_source = True

    def __init__(self, source: nn.Module, centres: Sequence[nn.Module], net: nn.Module, feature: str) -> None:
        find_module(source, feature)
        self.source, self._source = source, Ensemble([source]).eval()
        self.centres = Ensemble(centres).eval()
        self.feature = feature
        self.bridge = self.student = FeatureBridge(net)

    def loss(self, batch: Batch) -> Tensor:
        """KL(centre ‖ bridge), mean over the batch."""
        outputs = batch.teacher_outputs(self._source, self.feature)
        log_p = ensemble_logit(batch.member_logits(self.centres)).log_softmax(-1)
        return kl_loss(log_p, self.bridge(outputs.feature, outputs.logits[0]))

    def model(self) -> FastEnsemble:
        """The source with the bridge, their softmaxes averaged."""
        return FastEnsemble.of(self)

    def stands_for(self) -> Sequence[nn.Module]:
        """The centres, each for its curve's other end."""
        return list(self.centres.members)

    def networks(self) -> Sequence[nn.Module]:
        """The light network."""
        return [self.bridge.net]

    def teachers(self) -> Sequence[Teacher]:
        """The source at the feature, and the centres."""
        return [(self._source, self.feature), (self.centres, None)]

    def describe(self) -> dict[str, Any]:
        """The feature, the teachers and the light network."""
        return {
            "method": "bridge_network",
            "feature": self.feature,
            "source": weights_digest(self._source),
            "centres": weights_digest(self.centres),
            "bridge": str(self.bridge.net),
        }
