"""An ensemble of samples: one source, and a sampler whose draws stand for members' logits.

Shapes: S samples, B images, K classes.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ensbridge.models.ensemble import Forward, at_least_float32, ensemble_logit
from ensbridge.models.features import find_module, forward_with_features, uncompiled
from ensbridge.utils.inputs import Inputs, pack


class Sampler(Protocol):
    """What draws members' logits from the source's feature and logits; a module, too."""

    def draw(self, h: Tensor, source_logits: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Draws (S, B, K) of a member's logits."""
        ...


class SampledEnsemble(nn.Module):
    """A source that runs once and a sampler that draws `samples` members' logits from what it computed.

    Its prediction is the mean of the samples' softmax, as a deep ensemble's is of its members'. Draws come
    from `seed` anew at each call, so that a call can be repeated.

    >>> from ensbridge.bridge import Bridge
    >>> from ensbridge.models import ResNet, ScoreNet
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> model = SampledEnsemble(ResNet((1,), (8,), 3, stem=8), Bridge(score), "stages.0.0", samples=4).eval()
    >>> images = torch.rand(2, 3, 8, 8)
    >>> model.member_logits(images).shape, model(images).shape
    (torch.Size([4, 2, 3]), torch.Size([2, 3]))
    """

    def __init__(
        self, source: nn.Module, sampler: Sampler, feature: str, samples: int = 8, seed: int = 0
    ) -> None:
        super().__init__()
        if samples < 1:
            raise ValueError(f"samples is {samples}; it must be at least 1")
        find_module(source, feature)
        self.source, self.sampler = uncompiled(source), sampler
        self.feature, self.samples, self.seed = feature, samples, seed

    def member_logits(self, inputs: Inputs, run: Forward = forward_with_features) -> Tensor:
        """The samples' logits (S, B, K); `run` runs the source, for whoever shares it between models."""
        logits, h = run(self.source, inputs, self.feature)
        logits = at_least_float32(logits)
        generator = torch.Generator(logits.device).manual_seed(self.seed)
        return self.sampler.draw(h, logits, self.samples, generator)

    def forward(self, *inputs: Any, **named: Tensor) -> Tensor:
        """The logits (B, K) of the samples' mean prediction."""
        return ensemble_logit(self.member_logits(pack(inputs, named)))
