"""Filter response normalisation with its thresholded linear unit (Singh & Krishnan, 2020).

`frn` makes one operation of it with a bias before and a residual and Swish behind, v = x + bias,
s = 1/√(mean v² + eps), u = max(γ·s·v + β, τ) + residual, y = u or Swish(u), and has a gradient. On a GPU each
direction is one Triton kernel that reads the maps once and writes them once; elsewhere, or where Triton does
not work, it is written out in PyTorch. torch.compile takes the operation as it is.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAST = torch.channels_last
TRITON = find_spec("triton") is not None


@torch.library.custom_op("ensbridge::frn", mutates_args=())
def frn(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    tau: Tensor,
    eps: float,
    swish: bool,
) -> tuple[Tensor, Tensor]:
    """y (B, C, H, W), and s (B, C) for the gradient."""
    x = x.contiguous(memory_format=LAST)
    y, scale = _outputs(x, residual)
    residual = None if residual is None else residual.contiguous(memory_format=LAST)
    if _kernels_run(x, "forward", x, bias, residual, gamma, beta, tau, y, scale, eps, swish):
        return y, scale
    v = _biased(x, bias)
    scale.copy_((v.square().mean((2, 3)) + eps).rsqrt())
    u = torch.maximum(v * _wide(scale * gamma) + _wide(beta), _wide(tau))
    u = u if residual is None else u + residual
    y.copy_(torch.nn.functional.silu(u) if swish else u)
    return y, scale


@frn.register_fake
def _(x, bias, residual, gamma, beta, tau, eps, swish):  # type: ignore[no-untyped-def]
    return _outputs(x, residual)


@torch.library.custom_op("ensbridge::frn_gradient", mutates_args=())
def frn_gradient(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    tau: Tensor,
    scale: Tensor,
    swish: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and residual (empty without one), and of bias, γ, β, τ for each image (4, B, C)."""
    grad, x = grad.contiguous(memory_format=LAST), x.contiguous(memory_format=LAST)
    grad_x, grad_residual, sums = _gradients(x, residual)
    residual = None if residual is None else residual.contiguous(memory_format=LAST)
    arguments = (grad, x, bias, residual, gamma, beta, tau, scale, grad_x, grad_residual, sums, swish)
    if _kernels_run(x, "backward", *arguments):
        return grad_x, grad_residual, sums
    v, g, slope = _biased(x, bias), grad.float(), scale * gamma
    out = v * _wide(slope) + _wide(beta)
    passes = out > _wide(tau)
    if swish:
        u = torch.where(passes, out, _wide(tau)) + (0 if residual is None else residual)
        share = u.sigmoid()
        g = g * share * (1 + u * (1 - share))
    passed = torch.where(passes, g, 0)
    sum_g, sum_gv = passed.sum((2, 3)), (passed * v).sum((2, 3))
    pull = slope * scale.square() * sum_gv / (x.shape[2] * x.shape[3])
    dv = passed * _wide(slope) - v * _wide(pull)
    grad_x.copy_(dv)
    if residual is not None:
        grad_residual.copy_(g)
    torch.stack([dv.sum((2, 3)), scale * sum_gv, sum_g, g.sum((2, 3)) - sum_g], out=sums)
    return grad_x, grad_residual, sums


@frn_gradient.register_fake
def _(grad, x, bias, residual, gamma, beta, tau, scale, swish):  # type: ignore[no-untyped-def]
    return _gradients(x, residual)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, bias, residual, gamma, beta, tau, _, ctx.swish = inputs
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.save_for_backward(x, bias, residual, gamma, beta, tau, output[1])


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]
    grad_x, grad_residual, sums = frn_gradient(grad, *ctx.saved_tensors, ctx.swish)
    bias, gamma, beta, tau = sums.sum(1)
    residual = grad_residual if ctx.has_residual else None
    return grad_x, bias if ctx.has_bias else None, residual, gamma, beta, tau, None, None


frn.register_autograd(_differentiate, setup_context=_keep)


def _outputs(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    kind = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    scale = x.new_empty(x.shape[:2], dtype=torch.float32)
    return torch.empty_like(x, dtype=kind, memory_format=LAST), scale


def _gradients(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    none = x.new_empty(0)
    grad_residual = none if residual is None else torch.empty_like(residual, memory_format=LAST)
    sums = x.new_empty((4, *x.shape[:2]), dtype=torch.float32)
    return torch.empty_like(x, memory_format=LAST), grad_residual, sums


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.float() if bias is None else x.float() + _wide(bias)


def _wide(channels: Tensor) -> Tensor:
    """Numbers (C,) or (B, C) beside maps (B, C, H, W)."""
    return channels.float()[..., None, None]


_broken = False


def _kernels_run(x: Tensor, name: str, *arguments: object) -> bool:
    """Whether a Triton kernel did the work; where one fails, none is tried again."""
    global _broken
    if _broken or not x.is_cuda:
        return False
    try:
        from ensbridge.models import frn_triton

        getattr(frn_triton, name)(*arguments)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        _broken = True
        warnings.warn(f"Triton kernels do not run here ({error}); PyTorch normalises, slower", stacklevel=2)
    return not _broken


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
