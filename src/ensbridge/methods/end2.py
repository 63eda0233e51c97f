"""Proxy-EnD²: a Dirichlet over predictions, fitted to the ensemble's spread (Ryabinin et al., 2021).

Shapes: B images, K classes, M members. α are a Dirichlet's concentrations, α₀ their sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from ensbridge.methods.base import AbstractMethod, Batch, Teacher
from ensbridge.models.ensemble import Ensemble, at_least_float32, weights_digest
from ensbridge.utils.inputs import call_network

# Members that agree exactly have an infinite s; beyond this, s changes nothing that float32 can see.
S_MAX = 1e6


def proxy_precision(log_pi_MBK: Tensor) -> Tensor:
    """s (B,), the precision of the Dirichlet that stands for the members' log-probabilities.

    s = (K-1) / (2 Σ_k π̄_k (log π̄_k - mean_m log π_mk)), where members that agree are guarded.

    >>> import torch
    >>> agreeing = torch.tensor([[[0.5, 0.5]]]).log().expand(2, 1, 2)
    >>> proxy_precision(agreeing).tolist()
    [1000000.0]
    """
    log_mean_BK = log_pi_MBK.logsumexp(0) - math.log(len(log_pi_MBK))
    # Σ_k π̄_k (log π̄_k - mean_m log π_mk) ≥ 0 by Jensen; rounding may leave it a hair below.
    spread_B = (log_mean_BK.exp() * (log_mean_BK - log_pi_MBK.mean(0))).sum(-1)
    classes = log_pi_MBK.shape[-1]
    return (classes - 1) / (2 * spread_B).clamp(min=(classes - 1) / S_MAX)


def kl_to_flat(alpha_BK: Tensor) -> Tensor:
    """KL(Dir(α) ‖ Dir(1)) (B,)."""
    total_B = alpha_BK.sum(-1)
    normalisers = total_B.lgamma() - alpha_BK.lgamma().sum(-1) - math.lgamma(alpha_BK.shape[-1])
    return normalisers + ((alpha_BK - 1) * (alpha_BK.digamma() - total_B.digamma()[:, None])).sum(-1)


def expected_log(alpha_BK: Tensor) -> Tensor:
    """E[log p_k] under Dir(α), which is ψ(α_k) - ψ(α₀)."""
    return alpha_BK.digamma() - alpha_BK.sum(-1, keepdim=True).digamma()


def end2_loss(
    logits_BK: Tensor, teachers_MBK: Tensor, tau: float, divisor: Literal["beta0", "s"] = "beta0"
) -> Tensor:
    """-Σ_k π̄_k E[log p_k] + KL(Dir(α) ‖ Dir(1)) / β₀, mean over images, with α = 1 + exp(z/τ), β₀ = K + s.

    With divisor="s" it is 1/s times the reverse KL to Dir(1 + s·π̄), up to a constant.
    """
    # In float64: the Dirichlet's normalisers are large and nearly cancel where the student is sure.
    dtype, logits_BK = logits_BK.dtype, logits_BK.double()
    log_pi_MBK = (teachers_MBK.double() / tau).log_softmax(-1)
    mean_BK, s_B = log_pi_MBK.exp().mean(0), proxy_precision(log_pi_MBK)
    alpha_BK = concentrations(logits_BK, tau)
    weight_B = s_B + (logits_BK.shape[-1] if divisor == "beta0" else 0)
    return (-(mean_BK * expected_log(alpha_BK)).sum(-1) + kl_to_flat(alpha_BK) / weight_B).mean().to(dtype)


def concentrations(logits_BK: Tensor, tau: float) -> Tensor:
    """α = 1 + exp(z/τ), held at e²⁵, beyond which its lgamma loses its digits; gradients pass through."""
    scaled_BK = logits_BK / tau
    return 1 + (scaled_BK + (scaled_BK.clamp(max=25.0) - scaled_BK).detach()).exp()


class DirichletClassifier(nn.Module):
    """A network read as a Dirichlet; called on images it returns logits (B, K) of its prediction.

    `predict="dirichlet"` is the Dirichlet's mean α/α₀; "softmax" is softmax(z), as the released code of the
    paper did, which makes it far too sure.

    >>> import torch
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> DirichletClassifier(net)(torch.rand(2, 1, 2, 2)).exp().sum(1).allclose(torch.ones(2))
    True
    """

    def __init__(
        self, net: nn.Module, tau: float = 2.0, predict: Literal["dirichlet", "softmax"] = "dirichlet"
    ) -> None:
        super().__init__()
        if predict not in ("dirichlet", "softmax"):
            raise ValueError(f"predict is {predict!r}; it must be 'dirichlet' or 'softmax'")
        if not tau > 0:
            raise ValueError(f"tau is {tau}; it must be above 0, such as 2")
        self.net, self.tau, self.predict = net, tau, predict

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K)."""
        logits = at_least_float32(self.net(images))
        if self.predict == "softmax":
            return logits
        alpha = concentrations(logits, self.tau)
        return (alpha / alpha.sum(-1, keepdim=True)).log()


class ProxyEnD2(AbstractMethod):
    """A student of a single network's cost whose Dirichlet carries the members' mean and their spread.

    `divisor="beta0"` weighs the prior as the paper and its released code do; "s" is the exact reverse KL.

    >>> import torch
    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(3)]
    >>> method = ProxyEnD2(Ensemble(nets[:2]), nets[2])
    >>> method.loss(Batch(torch.rand(5, 1, 2, 2), None)).ndim, method.model().predict
    (0, 'dirichlet')
    """

    def __init__(
        self,
        ensemble: Ensemble,
        student: nn.Module,
        *,
        tau: float = 2.0,
        predict: Literal["dirichlet", "softmax"] = "dirichlet",
        divisor: Literal["beta0", "s"] = "beta0",
    ) -> None:
        if divisor not in ("beta0", "s"):
            raise ValueError(f"divisor is {divisor!r}; it must be 'beta0' or 's'")
        if len(ensemble) < 2:
            raise ValueError("EnD² was given an ensemble of 1 member; a spread needs at least 2")
        self.ensemble = ensemble.eval()
        self.student = self.classifier = DirichletClassifier(student, tau, predict)
        self.tau = tau
        self.divisor: Literal["beta0", "s"] = divisor

    def loss(self, batch: Batch) -> Tensor:
        """The Dirichlet's loss against the proxy of the members."""
        logits = at_least_float32(call_network(self.classifier.net, batch.images))
        return end2_loss(logits, batch.member_logits(self.ensemble), self.tau, self.divisor)

    def model(self) -> DirichletClassifier:
        """The Dirichlet, which predicts as `predict` asks for."""
        return self.classifier

    def networks(self) -> Sequence[nn.Module]:
        """The network inside the Dirichlet."""
        return [self.classifier.net]

    def teachers(self) -> Sequence[Teacher]:
        """The ensemble."""
        return [(self.ensemble, None)]

    def describe(self) -> dict[str, Any]:
        """The switches, the teachers and the student's architecture."""
        return {
            "method": "proxy_end2",
            "tau": self.tau,
            "predict": self.classifier.predict,
            "divisor": self.divisor,
            "teachers": weights_digest(self.ensemble),
            "student": str(self.student),
        }
