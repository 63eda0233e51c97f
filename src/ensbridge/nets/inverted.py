"""Inverted residual blocks (Sandler et al., 2018), the light bricks of the score network."""

from __future__ import annotations

from torch import Tensor, nn


def conv_bn(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, relu: bool = True
) -> nn.Sequential:
    """A convolution without bias, batch normalisation and, unless told otherwise, ReLU6."""
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
