"""Inverted residual blocks (Sandler et al., 2018), the light bricks of the score network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Convolution(nn.Conv2d):
    """A convolution that, where it trains on a GPU, gives a 1×1 kernel its channels in eights.

    Tensor cores take them so. What the first block makes of the paper's 33 channels would go to a kernel
    whose gradient takes ten times as long.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, outputs, H/stride, W/stride)."""
        if self.in_channels % 8 and self._is_plain() and torch.is_grad_enabled() and input.is_cuda:
            return F.conv2d(*in_eights(input, self.weight), stride=self.stride)
        return super().forward(input)

    def _is_plain(self) -> bool:
        """Whether weights are all that there is; folded into it, batch norm leaves a bias."""
        return (
            self.kernel_size == (1, 1) and self.padding == (0, 0) and self.groups == 1 and self.bias is None
        )

    def _get_name(self) -> str:
        return "Conv2d"  # the same weights and results: descriptions need not tell it apart


def in_eights(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Maps (B, C, …) and weights (O, C, …) with channels of zeros up to the next multiple of eight.

    >>> [each.shape[1] for each in in_eights(torch.rand(2, 33, 4, 4), torch.rand(5, 33, 1, 1))]
    [40, 40]
    """
    more = (0, 0, 0, 0, 0, -x.shape[1] % 8)
    return F.pad(x, more), F.pad(weight, more)


def conv_bn(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, relu: bool = True
) -> nn.Sequential:
    """A convolution without bias, batch normalisation and, unless told otherwise, ReLU6."""
    conv = Convolution(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), *([nn.ReLU6()] if relu else []))


class InvertedResidual(nn.Module):
    """1×1 expansion (left out when it is 1), depthwise 3×3, linear 1×1; residual where shapes allow it."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        expand = [conv_bn(inputs, hidden, 1)] if expansion != 1 else []
        self.body = nn.Sequential(
            *expand,
            conv_bn(hidden, hidden, 3, stride, groups=hidden),
            conv_bn(hidden, outputs, 1, relu=False),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, outputs, H/stride, W/stride)."""
        return x + self.body(x) if self.residual else self.body(x)
