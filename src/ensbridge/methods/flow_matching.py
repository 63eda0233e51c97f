"""Flow matching from Gaussian noise to a random member's logits (EDFM; Park et al., ICML 2025).

Shapes: B images, K classes, M members. X_1 is a member's logit relative to the source's tempered logit, X_0
Gaussian noise, and X_t the straight line between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.methods.base import AbstractMethod, Batch, EmaRule, Teacher
from ensbridge.models.ensemble import Ensemble, SampledEnsemble, centred, random_member, weights_digest
from ensbridge.models.features import find_module


@dataclass(frozen=True)
class FlowConfig:
    """How a flow is trained and sampled: Euler steps, the noise's deviation, the source's temperature."""

    num_steps: int = 5
    noise: float = 1.0
    temperature: float = 2.0
    ema: float = 0.9995

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 1")
        for name in ("noise", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")


class Flow(nn.Module):
    """A velocity network v(h, X_t, t) and the sampling that it steers.

    >>> flow = Flow(lambda h, x, t: h - x, FlowConfig(num_steps=50))  # towards h, from anywhere
    >>> flow.draw(torch.full((1, 2), 8.0), torch.zeros(1, 2), 4, torch.Generator().manual_seed(0)).shape
    torch.Size([4, 1, 2])
    """

    def __init__(self, velocity: Any, config: FlowConfig | None = None) -> None:
        super().__init__()
        self.velocity, self.config = velocity, config or FlowConfig()

    def start(self, source_logits: Tensor) -> Tensor:
        """The source's tempered logits, centred over classes, which members' logits are relative to."""
        return centred(source_logits / self.config.temperature)

    def forward(self, h: Tensor, source_logits: Tensor, generator: torch.Generator) -> Tensor:
        """One draw of a member's logits (B, K), by Euler steps from t = 0 to 1."""
        origin, steps = self.start(source_logits), self.config.num_steps
        x = self.config.noise * torch.randn(
            origin.shape, generator=generator, dtype=origin.dtype, device=origin.device
        )
        for step in range(steps):
            t = x.new_full((len(x),), step / steps)
            x = x + self.velocity(h, x, t).to(x.dtype) / steps
        return origin + x

    def draw(self, h: Tensor, source_logits: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Draws of a member's logits (S, B, K)."""
        return torch.stack([self(h, source_logits, generator) for _ in range(samples)])


class FlowMatching(AbstractMethod):
    """Trains a flow beside an ensemble's first member whose samples stand for the ensemble's members.

    >>> from ensbridge.models import ResNet, ScoreNet
    >>> members = [ResNet((1,), (8,), 3, stem=8) for _ in range(3)]
    >>> velocity = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="informative")
    >>> method = FlowMatching(Ensemble(members), velocity, feature="stages.0.0")
    >>> batch = Batch(torch.rand(4, 3, 8, 8), None, torch.Generator().manual_seed(0))
    >>> method.loss(batch).ndim, method.model()(batch.images).shape
    (0, torch.Size([4, 3]))
    """

    def __init__(
        self, ensemble: Ensemble, velocity: nn.Module, feature: str, config: FlowConfig | None = None
    ) -> None:
        find_module(ensemble.source, feature)
        self.ensemble, self.feature = ensemble.eval(), feature
        self.flow = self.student = Flow(velocity, config)
        self.ema = EmaRule(self.flow.config.ema)

    def loss(self, batch: Batch) -> Tensor:
        """The squared error of the velocity, summed over classes, mean over the batch."""
        outputs, generator = batch.teacher_outputs(self.ensemble, self.feature), batch.generator
        x1 = random_member(outputs.logits, generator) - self.flow.start(outputs.logits[0])
        x0 = self.flow.config.noise * torch.randn(
            x1.shape, generator=generator, dtype=x1.dtype, device=x1.device
        )
        t = torch.rand(len(x1), generator=generator, device=x1.device)
        x_t = x0 + t[:, None] * (x1 - x0)
        velocity = self.flow.velocity(outputs.feature, x_t, t).to(x_t.dtype)
        return (velocity - (x1 - x0)).square().sum(-1).mean()

    def model(self) -> SampledEnsemble:
        """The source and the flow, sampled several times."""
        return SampledEnsemble(self.ensemble.source, self.flow, self.feature)

    def networks(self) -> Sequence[nn.Module]:
        """The velocity network."""
        return [self.flow.velocity]

    def teachers(self) -> Sequence[Teacher]:
        """The ensemble, its source at the feature."""
        return [(self.ensemble, self.feature)]

    def describe(self) -> dict[str, Any]:
        """The flow's settings, the teachers and the velocity network."""
        return {
            "method": "flow_matching",
            "feature": self.feature,
            "teachers": weights_digest(self.ensemble),
            "config": asdict(self.flow.config),
            "velocity": str(self.flow.velocity),
        }
