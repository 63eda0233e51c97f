"""Inverted residual blocks (Sandler et al., 2018), the light bricks of the score network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pointwise(nn.Conv2d):
    """A 1×1 convolution that has its channels in eights where it trains on a GPU.

    Tensor cores take them so. What the first block makes of the paper's 33 channels would go to a kernel
    whose gradient takes ten times as long.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 1, stride, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, outputs, H/stride, W/stride)."""
        if self.in_channels % 8 and torch.is_grad_enabled() and input.is_cuda:
            # Folded into it, batch norm leaves a bias.
            return F.conv2d(*in_eights(input, self.weight), self.bias, self.stride)
        return super().forward(input)

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
    if kernel == groups == 1:
        conv = Pointwise(inputs, outputs, stride)
    else:
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
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
