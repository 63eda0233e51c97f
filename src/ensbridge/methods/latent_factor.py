"""A Gaussian over members' logits with a low-rank factor, in one pass (DLF, NeurIPS 2025).

Member m's logits, relative to the source's tempered logit, are y_m(x) = μ(x) + Λ(x)·u_m + noise, with one
latent factor u_m ~ N(0, I) of rank R for each member, the same for all images. It is fitted by stochastic EM:
the E-step is the exact posterior of u_m given the batch, the M-step a gradient step of the network.

Shapes: B images, K classes, M members, R latent dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.methods.base import AbstractMethod, Batch, EmaRule, Teacher
from ensbridge.models.ensemble import Ensemble, SampledEnsemble, centred, weights_digest
from ensbridge.models.features import find_module


@dataclass(frozen=True)
class LatentFactorConfig:
    """The rank of the factor, the source's temperature, and the weights' average."""

    rank: int = 2
    temperature: float = 2.0
    ema: float = 0.9995

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.temperature > 0:
            raise ValueError(
                f"rank is {self.rank} and temperature {self.temperature}; rank must be at least 1 and the "
                "temperature above 0"
            )


def factor_posterior(residual_MBK: Tensor, factor_BKR: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (M, R) and covariance (R, R) of each member's latent factor, given its residuals on a batch.

    With y = Λu + noise of variance `noise` and u ~ N(0, I), the precision is I + ΣΛᵀΛ/noise.

    >>> mean, covariance = factor_posterior(torch.ones(1, 1, 1), torch.ones(1, 1, 1), torch.tensor(1.0))
    >>> mean.item(), covariance.item()
    (0.5, 0.5)
    """
    stacked = factor_BKR.flatten(0, 1)  # every image and class is an observation
    identity = torch.eye(stacked.shape[1], dtype=stacked.dtype, device=stacked.device)
    covariance = torch.linalg.inv(identity + stacked.T @ stacked / noise)
    return residual_MBK.flatten(1) @ stacked @ covariance / noise, covariance


def expected_nll(y_MBK: Tensor, mean_BK: Tensor, factor_BKR: Tensor, log_noise: Tensor) -> Tensor:
    """The M-step's loss: -log p(y, u) but for constants, expected over the posterior of u, per image."""
    residual, noise = y_MBK - mean_BK, log_noise.exp()
    with torch.no_grad():
        latent, covariance = factor_posterior(residual, factor_BKR, noise)
    # E‖y - μ - Λu‖² = ‖y - μ - ΛE[u]‖² + tr(Λ Cov[u] Λᵀ)
    fitted = torch.einsum("bkr,mr->mbk", factor_BKR, latent)
    spread = torch.einsum("bkr,rs,bks->b", factor_BKR, covariance, factor_BKR)
    error = (residual - fitted).square().sum(-1).mean(0) + spread
    return 0.5 * (error / noise + mean_BK.shape[-1] * log_noise).mean()


class LatentFactor(nn.Module):
    """A network of h with K·(1 + R) outputs, read as μ and Λ, and the variance of the noise.

    >>> model = LatentFactor(lambda h, z, t: h, classes=2, config=LatentFactorConfig(rank=1))
    >>> mean, factor = model.mean_and_factor(torch.arange(4.0)[None], torch.zeros(1, 2))
    >>> mean.tolist(), factor.tolist()
    ([[0.0, 1.0]], [[[2.0], [3.0]]])
    """

    def __init__(self, net: Any, classes: int, config: LatentFactorConfig | None = None) -> None:
        super().__init__()
        self.net, self.classes, self.config = net, classes, config or LatentFactorConfig()
        self.log_noise = nn.Parameter(torch.zeros(()))

    def mean_and_factor(self, h: Tensor, source_logits: Tensor) -> tuple[Tensor, Tensor]:
        """μ (B, K), relative to the source, and Λ (B, K, R)."""
        now = source_logits.new_ones(len(source_logits))
        output = self.net(h, source_logits, now).to(source_logits.dtype)
        mean, factor = output.split([self.classes, output.shape[1] - self.classes], dim=1)
        return mean, factor.reshape(len(output), self.classes, self.config.rank)

    def start(self, source_logits: Tensor) -> Tensor:
        """The source's tempered logits, centred over classes, which members' logits are relative to."""
        return centred(source_logits / self.config.temperature)

    def draw(self, h: Tensor, source_logits: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Draws of a member's logits (S, B, K), each of one latent factor for all images, in one pass."""
        mean, factor = self.mean_and_factor(h, source_logits)
        latent = torch.randn(
            (samples, self.config.rank), generator=generator, dtype=mean.dtype, device=mean.device
        )
        return self.start(source_logits) + mean + torch.einsum("bkr,sr->sbk", factor, latent)


class LatentFactorDistillation(AbstractMethod):
    """Fits a latent factor model of an ensemble's logits beside its first member.

    >>> from ensbridge.models import ResNet, ScoreNet
    >>> members = [ResNet((1,), (8,), 3, stem=8) for _ in range(3)]
    >>> net = ScoreNet(classes=9, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> method = LatentFactorDistillation(Ensemble(members), net, "stages.0.0", classes=3)
    >>> batch = Batch(torch.rand(4, 3, 8, 8), None, torch.Generator().manual_seed(0))
    >>> method.loss(batch).ndim, method.model()(batch.images).shape
    (0, torch.Size([4, 3]))
    """

    def __init__(
        self,
        ensemble: Ensemble,
        net: nn.Module,
        feature: str,
        classes: int,
        config: LatentFactorConfig | None = None,
    ) -> None:
        find_module(ensemble.source, feature)
        self.ensemble, self.feature = ensemble.eval(), feature
        self.factor_model = self.student = LatentFactor(net, classes, config)
        self.ema = EmaRule(self.factor_model.config.ema)

    def loss(self, batch: Batch) -> Tensor:
        """The expected negative log-likelihood of members' logits under the E-step's posterior, per image."""
        outputs = batch.teacher_outputs(self.ensemble, self.feature)
        relative = centred(outputs.logits) - self.factor_model.start(outputs.logits[0])
        mean, factor = self.factor_model.mean_and_factor(outputs.feature, outputs.logits[0])
        return expected_nll(relative, mean, factor, self.factor_model.log_noise)

    def model(self) -> SampledEnsemble:
        """The source and the factor model, sampled several times."""
        return SampledEnsemble(self.ensemble.source, self.factor_model, self.feature)

    def networks(self) -> Sequence[nn.Module]:
        """The network of μ and Λ."""
        return [self.factor_model.net]

    def teachers(self) -> Sequence[Teacher]:
        """The ensemble, its source at the feature."""
        return [(self.ensemble, self.feature)]

    def describe(self) -> dict[str, Any]:
        """The settings, the teachers and the network."""
        return {
            "method": "latent_factor",
            "feature": self.feature,
            "teachers": weights_digest(self.ensemble),
            "config": asdict(self.factor_model.config),
            "net": str(self.factor_model.net),
        }
