"""Filter response normalisation with its thresholded linear unit (Singh & Krishnan, 2020)."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ensbridge.models.frn_op import frn

TRITON = find_spec("triton") is not None


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
        if _is_fused(x):
            return frn(x, None, None, self.gamma, self.beta, self.tau, self.eps, False)[0]
        wide = x if x.dtype == torch.float64 else x.float()
        gamma, beta, tau = (weight.view(1, -1, 1, 1) for weight in (self.gamma, self.beta, self.tau))
        scale = (wide.square().mean((2, 3), keepdim=True) + self.eps).rsqrt() * gamma
        # max(y, τ) as relu(y - τ) + τ, whose backward is one pass instead of the maximum's six.
        return (torch.relu(wide * scale + (beta - tau)) + tau).to(x.dtype)

    def swish_after(self, conv: nn.Conv2d, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Swish(FRN(conv(x)) + residual); on a GPU the bias and all behind the convolution are one kernel.

        >>> norm, conv, x = FRN(4), nn.Conv2d(3, 4, 3), torch.rand(2, 3, 5, 5)
        >>> norm.swish_after(conv, x).equal(F.silu(norm(conv(x))))
        True
        """
        # A hook on either module wants what that module gives.
        if _is_fused(x) and not conv._forward_hooks and not self._forward_hooks:
            maps = F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
            return frn(maps, conv.bias, residual, self.gamma, self.beta, self.tau, self.eps, True)[0]
        y = self(conv(x))
        return F.silu(y if residual is None else y + residual)


def _is_fused(x: Tensor) -> bool:
    """Whether maps are normalised by kernels of their own, which pay where gradients are taken.

    Without gradients Inductor's are as fast, and an exported network must not know of ours.
    """
    # Within torch.compile some releases say that they export.
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return TRITON and x.is_cuda and torch.is_grad_enabled() and x.dtype != torch.float64 and not exporting
