"""The score networks ε(h, Z_t, t) that steer the bridge: of maps, and of vectors or tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ensbridge.bridge.bridge import ZInput

TIME = 32  # size of the time's embedding


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

    >>> [tensor.shape[1] for tensor in in_eights(torch.rand(2, 33, 4, 4), torch.rand(5, 33, 1, 1))]
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


def build_stage(inputs: int, expansion: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """Inverted residual blocks of one width, of which the first strides."""
    first = InvertedResidual(inputs, width, expansion, stride)
    return nn.Sequential(first, *(InvertedResidual(width, width, expansion, 1) for _ in range(blocks - 1)))


class ScoreNet(nn.Module):
    """A light network that reads the source's feature map h, the bridge's state Z_t and the time t.

    `z_input` says what it sees of Z_t:
    "dead": three statistics through a 17-parameter MLP that starts at zero and so never learns to look (the
    released code, and the paper's exact parameter count);
    "paper": as the paper words it, normalised, pooled, 2→2→1, and alive;
    "none": a channel of zeros;
    "informative": K channels made from all of Z_t.

    >>> from ensbridge.metrics.cost import count_params
    >>> count_params(ScoreNet.cifar10())
    395543
    >>> net = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1), (2, 16, 1, 2)], last=16)
    >>> net(torch.rand(2, 8, 4, 4), torch.rand(2, 3), torch.ones(2)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        classes: int,
        channels: int,
        stages: Sequence[tuple[int, int, int, int]],
        last: int,
        *,
        z_input: ZInput = "dead",
    ) -> None:
        super().__init__()
        if z_input not in _Z_CHANNELS:
            raise ValueError(f"z_input is {z_input!r}; it must be one of {', '.join(_Z_CHANNELS)}")
        if min(classes, last, *(number for stage in stages for number in stage)) < 1:
            raise ValueError(
                f"classes {classes}, last {last} or stages {list(stages)} has a number below 1; each must be "
                "at least 1"
            )
        if channels < 1 or channels % 8:
            raise ValueError(f"the feature has {channels} channels; the time embedding needs a multiple of 8")
        # What builds this network again, in JSON's types.
        self.arguments: dict[str, Any] = {
            "classes": classes,
            "channels": channels,
            "stages": [list(stage) for stage in stages],
            "last": last,
            "z_input": z_input,
        }
        self.classes, self.channels = classes, channels
        self.z_input: ZInput = z_input
        self.z_embedding = _Z_CHANNELS[z_input](classes)
        self.time = nn.Sequential(nn.Linear(channels // 4, channels // 2), nn.SiLU())
        self.stem = conv_bn(channels, channels, 3)
        self.stages, self.time_shifts = nn.ModuleList(), nn.ModuleList()
        inputs = channels + (classes if z_input == "informative" else 1)
        for stage in stages:
            self.time_shifts.append(nn.Linear(channels // 2, inputs))
            self.stages.append(build_stage(inputs, *stage))
            inputs = stage[1]
        self.tail = conv_bn(inputs, last, 1)
        self.head = nn.Linear(last, classes)
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        """ε of shape (B, classes), from h (B, channels, H, W), z_t (B, classes) and t (B,)."""
        if h.ndim != 4 or h.shape[1] != self.channels:
            raise ValueError(
                f"the feature has shape {tuple(h.shape)}; this score network takes (B, {self.channels}, H, W)"
            )
        x = self.stem(h.contiguous(memory_format=torch.channels_last))
        z_map = self.z_embedding(z_t / 3)[:, :, None, None].expand(-1, -1, *x.shape[2:])
        x = torch.cat([x, z_map.to(x.dtype)], dim=1)
        time = self.time(time_embedding(t, self.channels // 4).to(h.dtype))
        for stage, shift in zip(self.stages, self.time_shifts, strict=True):
            x = stage(x + shift(time)[:, :, None, None])
        return self.head(self.tail(x).mean((2, 3)))

    @classmethod
    def cifar10(cls, *, z_input: ZInput = "dead") -> ScoreNet:
        """The paper's score network for CIFAR-10 (ResNet-32×2, 32×32)."""
        stages = [(1, 32, 1, 1), (3, 48, 2, 2), (3, 64, 3, 2), (3, 96, 2, 1), (3, 128, 2, 1)]
        return cls(10, 32, stages, 128, z_input=z_input)

    @classmethod
    def cifar100(cls, *, z_input: ZInput = "dead") -> ScoreNet:
        """The paper's score network for CIFAR-100 (ResNet-32×4, 32×32)."""
        stages = [(1, 64, 1, 1), (3, 96, 2, 2), (3, 128, 3, 2), (3, 192, 2, 1), (3, 256, 2, 1)]
        return cls(100, 64, stages, 256, z_input=z_input)

    @classmethod
    def tiny_imagenet(cls, *, z_input: ZInput = "dead") -> ScoreNet:
        """The paper's score network for TinyImageNet (ResNet-34, 64×64)."""
        stages = [(1, 64, 1, 1), (4, 96, 2, 2), (4, 128, 3, 2), (4, 192, 4, 1), (4, 256, 3, 2)]
        return cls(200, 64, stages, 256, z_input=z_input)

    @classmethod
    def imagenet64(cls, *, z_input: ZInput = "dead") -> ScoreNet:
        """The paper's score network for ImageNet64 (ResNet-34, 64×64)."""
        stages = [(6, 64, 3, 2), (6, 96, 3, 2), (6, 160, 3, 1), (6, 320, 3, 2), (6, 640, 1, 1)]
        return cls(1000, 64, stages, 1280, z_input=z_input)


def time_embedding(t: Tensor, size: int, period: float = 1e4) -> Tensor:
    """The sinusoidal embedding [cos, sin] of times t (B,), shape (B, size); t is not rescaled."""
    half = size // 2
    frequencies = torch.exp(
        -math.log(period) * torch.arange(half, device=t.device, dtype=torch.float32) / half
    )
    angles = t.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class TokenScore(nn.Module):
    """A light network that reads vectors or tokens and the time t, for any source that is not convolutional.

    Each token goes through the same residual layers of `width` channels; tokens are pooled by weights that
    they give themselves. A vector is a single token. Of Z_t it sees nothing.

    >>> net = TokenScore(classes=3, channels=8, width=16)
    >>> now = torch.ones(2)
    >>> net(torch.rand(2, 8), torch.rand(2, 3), now).shape, net(torch.rand(2, 5, 8), None, now).shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """

    def __init__(self, classes: int, channels: int, width: int, blocks: int = 2) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {
            "classes": classes,
            "channels": channels,
            "width": width,
            "blocks": blocks,
        }
        if min(self.arguments.values()) < 1:
            raise ValueError(f"a score network was asked for with {self.arguments}; each must be at least 1")
        self.classes, self.channels = classes, channels
        self.stem = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, width))
        self.time = nn.Sequential(nn.Linear(TIME, width), nn.SiLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
            )
            for _ in range(blocks)
        )
        self.weight = nn.Linear(width, 1)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, h: Tensor, z_t: Tensor | None, t: Tensor) -> Tensor:
        """ε of shape (B, classes), from h (B, channels) or (B, N, channels) and t (B,)."""
        if h.ndim not in (2, 3) or h.shape[-1] != self.channels:
            raise ValueError(
                f"the feature has shape {tuple(h.shape)}; this score network takes (B, {self.channels}) or "
                f"(B, N, {self.channels})"
            )
        # A source may compute in another type, such as bfloat16.
        tokens = (h[:, None] if h.ndim == 2 else h).to(cast(nn.LayerNorm, self.stem[0]).weight.dtype)
        x = self.stem(tokens) + self.time(time_embedding(t, TIME).to(tokens.dtype))[:, None]
        for block in self.blocks:
            x = x + block(x)
        return self.head((self.weight(x).softmax(1) * x).sum(1))


class _Zeros(nn.Module):
    """One channel of zeros: the network sees nothing of Z_t."""

    def __init__(self, classes: int) -> None:
        super().__init__()

    def forward(self, z: Tensor) -> Tensor:
        return z.new_zeros(z.shape[0], 1)


class _DeadStatistics(nn.Module):
    """Mean, 1/K and population deviation of Z_t through 3→2→2→1 with ReLU6, every weight zero at the start.

    With all weights zero no gradient passes through the two inner layers, so only the last bias ever moves.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3, 2), nn.ReLU6(), nn.Linear(2, 2), nn.ReLU6(), nn.Linear(2, 1))
        for parameter in self.mlp.parameters():
            nn.init.zeros_(parameter)

    def forward(self, z: Tensor) -> Tensor:
        share = torch.full_like(z[:, :1], 1 / z.shape[1])
        spread = z.std(1, correction=0, keepdim=True)
        return self.mlp(torch.cat([z.mean(1, keepdim=True), share, spread], dim=1))


class _PooledNorm(nn.Module):
    """LayerNorm over classes, average pooling to two numbers, 2→2→1 with ReLU6, as the paper words it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(classes), nn.AdaptiveAvgPool1d(2), nn.Linear(2, 2), nn.ReLU6(), nn.Linear(2, 1)
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.mlp(z)


class _Informative(nn.Module):
    """LayerNorm, Linear K→2K, ReLU6, Linear 2K→K: as many channels as classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.LayerNorm(classes),
            nn.Linear(classes, 2 * classes),
            nn.ReLU6(),
            nn.Linear(2 * classes, classes),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.mlp(z)


_Z_CHANNELS: dict[ZInput, type[nn.Module]] = {
    "paper": _PooledNorm,
    "dead": _DeadStatistics,
    "none": _Zeros,
    "informative": _Informative,
}
