"""Filter response normalisation with its thresholded linear unit (Singh & Krishnan, 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FRN(nn.Module):
    """y = max(γ·x / √(ν² + eps) + β, τ) per channel, where ν² is the mean of x² over the map.

    No batch statistics: what an image gets does not depend on its neighbours, in training or in use.

    >>> FRN(1)(torch.tensor([[[[3.0, -3.0]]]])).round(decimals=3).tolist()
    [[[[1.0, 0.0]]]]
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.tau = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise maps (B, C, H, W); the squares are summed in at least float32."""
        wide = x if x.dtype == torch.float64 else x.float()
        gamma, beta, tau = (each.view(1, -1, 1, 1) for each in (self.gamma, self.beta, self.tau))
        scale = (wide.square().mean((2, 3), keepdim=True) + self.eps).rsqrt() * gamma
        # max(y, τ) as relu(y - τ) + τ, whose backward is one pass instead of the maximum's six.
        return (torch.relu(wide * scale + (beta - tau)) + tau).to(x.dtype)
