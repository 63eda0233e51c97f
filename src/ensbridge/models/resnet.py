"""The members: FRN-Swish ResNets of the paper, and any scaled-down sister of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.models.frn import FRN

# One normalisation for every data set, as in the paper's experiments; images come in as floats in [0, 1].
MEAN, STD = (0.49, 0.48, 0.44), (0.2, 0.2, 0.2)


class BasicBlock(nn.Module):
    """conv3×3 – FRN – Swish – conv3×3 – FRN, plus shortcut, Swish."""

    def __init__(self, inputs: int, outputs: int, stride: int, bias: bool) -> None:
        super().__init__()
        self.inputs, self.outputs, self.stride, self.bias = inputs, outputs, stride, bias
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)
        self.norm1 = FRN(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias)
        self.norm2 = FRN(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=bias), FRN(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, inputs, H, W) to (B, outputs, H/stride, W/stride)."""
        y = self.norm1.swish_after(self.conv1, x)
        return self.norm2.swish_after(self.conv2, y, self.shortcut(x))


class ResNet(nn.Module):
    """A residual network with filter response normalisation, Swish and its own input normalisation.

    `blocks` and `widths` describe the stages; each stage after the first halves the map unless `strides`
    says otherwise. Images (B, C, H, W) are floats in [0, 1] with C = len(mean). `stages.0.0`, the first
    residual block, is the feature that the paper's bridges read.

    >>> from ensbridge.metrics.cost import count_params
    >>> count_params(ResNet.resnet32x2(10))
    1860986
    >>> ResNet((1, 1), (8, 16), classes=3, stem=8)(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 3])
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        blocks: Sequence[int],
        widths: Sequence[int],
        classes: int,
        *,
        stem: int = 16,
        strides: Sequence[int] | None = None,
        bias: bool = True,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
    ) -> None:
        super().__init__()
        strides = [1] + [2] * (len(blocks) - 1) if strides is None else strides
        if not len(blocks) == len(widths) == len(strides) > 0:
            raise ValueError(
                f"blocks, widths and strides have {len(blocks)}, {len(widths)} and {len(strides)} entries; "
                "each stage needs one of each"
            )
        if min(*blocks, *widths, *strides, stem) < 1:
            raise ValueError(
                f"blocks {list(blocks)}, widths {list(widths)}, strides {list(strides)} or stem {stem} has a "
                "number below 1; each must be at least 1"
            )
        if len(mean) != len(std):
            raise ValueError(
                f"mean has {len(mean)} channels and std {len(std)}; give one of each per channel"
            )
        if classes < 2:
            raise ValueError(f"classes is {classes}; a classifier needs at least 2")
        mean, std = ([float(value) for value in values] for values in (mean, std))
        self._arguments = {
            "blocks": list(blocks),
            "widths": list(widths),
            "classes": classes,
            "stem": stem,
            "strides": list(strides),
            "bias": bias,
            "mean": mean,
            "std": std,
        }
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)
        self.stem = nn.Sequential(nn.Conv2d(len(mean), stem, 3, padding=1, bias=bias), FRN(stem), nn.SiLU())
        stages, inputs = [], stem
        for count, width, stride in zip(blocks, widths, strides, strict=True):
            first = BasicBlock(inputs, width, stride, bias)
            stages.append(
                nn.Sequential(first, *(BasicBlock(width, width, 1, bias) for _ in range(count - 1)))
            )
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)
        self.apply(initialise)
        # Channels last is faster on CPUs and GPUs alike; forward lays the images out to match.
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    @property
    def arguments(self) -> dict[str, Any]:
        """What builds this network again, in JSON's types.

        >>> net = ResNet((1, 1), (8, 16), classes=3, stem=8)
        >>> ResNet(**net.arguments).arguments == net.arguments, net.arguments["widths"]
        (True, [8, 16])
        """
        if self.mean.is_meta:
            return dict(self._arguments)
        # As they are now: they are no weights, so a file of weights would not have what was set by hand.
        mean, std = (buffer.flatten().tolist() for buffer in (self.mean, self.std))
        return {**self._arguments, "mean": mean, "std": std}

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W) with values in [0, 1]."""
        channels = self.mean.shape[1]
        if images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(
                f"images have shape {tuple(images.shape)}; this network takes (B, {channels}, H, W)"
            )
        images = images.contiguous(memory_format=torch.channels_last)
        x = self.stages(self.stem((images - self.mean) / self.std))
        return self.head(x.mean((2, 3)))

    def blocks(self) -> dict[str, BasicBlock]:
        """The residual blocks in their order, by name.

        >>> list(ResNet((2, 1), (8, 16), classes=3, stem=8).blocks())
        ['stages.0.0', 'stages.0.1', 'stages.1.0']
        """
        return {name: module for name, module in self.named_modules() if isinstance(module, BasicBlock)}

    def block_at(self, share: float = 0.8) -> str:
        """The name of the block at a share of the depth, at least one block from the end.

        >>> ResNet.resnet32x2(10).block_at(0.8), ResNet.resnet34(200).block_at(0.8)
        ('stages.2.1', 'stages.2.5')
        """
        names = list(self.blocks())
        if len(names) < 2 or not 0 < share < 1:
            raise ValueError(
                f"the block at {share} of {len(names)} was asked for; give a share between 0 and 1 of at "
                "least 2 blocks"
            )
        return names[min(max(round(share * len(names)), 1), len(names) - 1) - 1]

    @classmethod
    def resnet32x2(cls, classes: int) -> ResNet:
        """ResNet-32×2, the paper's member for CIFAR-10.

        >>> ResNet.resnet32x2(10).head.in_features
        128
        """
        return cls((5, 5, 5), (32, 64, 128), classes)

    @classmethod
    def resnet32x4(cls, classes: int) -> ResNet:
        """ResNet-32×4, the paper's member for CIFAR-100.

        >>> ResNet.resnet32x4(100).head.in_features
        256
        """
        return cls((5, 5, 5), (64, 128, 256), classes)

    @classmethod
    def resnet34(cls, classes: int, bias: bool = True) -> ResNet:
        """ResNet-34 for 64×64 images: TinyImageNet with convolution biases, ImageNet64 without.

        >>> ResNet.resnet34(200).head.in_features, ResNet.resnet34(1000, bias=False).stem[0].bias is None
        (512, True)
        """
        return cls((3, 4, 6, 3), (64, 128, 256, 512), classes, stem=64, bias=bias)


def initialise(module: nn.Module) -> None:
    """He-normal weights and zero biases."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
