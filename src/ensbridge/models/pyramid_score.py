"""A score network that reads maps of several depths of the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.bridge.sampler import Features
from ensbridge.models.score_net import build_stage, conv_bn


class PyramidScore(nn.Module):
    """A light network that reads an early map of the source and later ones, of any depth, on its way.

    The first map goes through a 3×3 convolution of `stem` channels, then through stages of inverted residuals
    as in `ScoreNet`. After the stage that `joins` names for it, counted from 0, each later map is added
    through a 1×1 convolution, and must have the size of what it is added to. Features that the source has
    computed anyway come almost for free this way.

    It sees nothing of Z_t and t: for bridges of one step, trained with KL.

    Args:
        classes: Classes.
        channels: Channels of the maps that are read, the first map's first.
        stages: (expansion, channels, blocks, stride) of each stage.
        joins: For each map but the first, the number of the stage whose output it is added to.
        stem: Channels of the first convolution.
        stride: Stride of the first convolution.
        last: Channels of the last 1×1 convolution.

    >>> net = PyramidScore(3, [8, 16], [(1, 8, 1, 1), (2, 16, 1, 2)], joins=[1], stem=8, last=16)
    >>> maps = torch.rand(2, 8, 4, 4), torch.rand(2, 16, 2, 2)
    >>> net(maps, None, None).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        classes: int,
        channels: Sequence[int],
        stages: Sequence[tuple[int, int, int, int]],
        *,
        joins: Sequence[int],
        stem: int,
        stride: int = 1,
        last: int,
    ) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {  # what builds this network again, in JSON's types
            "classes": classes,
            "channels": list(channels),
            "stages": [list(stage) for stage in stages],
            "joins": list(joins),
            "stem": stem,
            "stride": stride,
            "last": last,
        }
        numbers = [classes, stem, stride, last, *channels, *(number for stage in stages for number in stage)]
        if not channels or not stages or min(numbers) < 1:
            raise ValueError(f"a score network was asked for with {self.arguments}; each must be at least 1")
        if len(joins) != len(channels) - 1 or any(join not in range(len(stages)) for join in joins):
            raise ValueError(
                f"joins are {list(joins)} for {len(channels)} maps and {len(stages)} stages; name a "
                "stage for each map but the first"
            )
        self.classes, self.channels, self.joins = classes, tuple(channels), tuple(joins)
        self.stem = conv_bn(channels[0], stem, 3, stride)
        self.stages, inputs = nn.ModuleList(), stem
        for stage in stages:
            self.stages.append(build_stage(inputs, *stage))
            inputs = stage[1]
        widths = [stage[1] for stage in stages]
        self.entries = nn.ModuleList(
            conv_bn(count, widths[join], 1, relu=False)
            for count, join in zip(channels[1:], joins, strict=True)
        )
        self.tail = conv_bn(inputs, last, 1)
        self.head = nn.Linear(last, classes)
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    @classmethod
    def coarse(cls, classes: int, channels: int) -> PyramidScore:
        """For a ResNet of three stages, `channels` in the first; it starts at half the size, to be fast.

        It reads the first block's map and the last maps of the later stages. On ResNet-32×2, whose first map
        has 32 channels, it costs ×0.132 the network's MACs.
        """
        stages = [(2, 16, 1, 1), (3, 24, 3, 2), (3, 32, 2, 1)]
        return cls.scaled(classes, channels, stages, joins=(0, 1), stem=16, stride=2, last=64)

    @classmethod
    def scaled(
        cls,
        classes: int,
        channels: int,
        stages: Sequence[tuple[int, int, int, int]],
        *,
        joins: tuple[int, int],
        stem: int,
        stride: int = 1,
        last: int,
    ) -> PyramidScore:
        """For such a ResNet, with widths in eighths of the first map's channels."""
        eighth = channels // 8
        widened = [(expansion, width * eighth, blocks, step) for expansion, width, blocks, step in stages]
        maps = [channels, 2 * channels, 4 * channels]
        return cls(classes, maps, widened, joins=joins, stem=stem * eighth, stride=stride, last=last * eighth)

    def forward(self, h: Features, z_t: Tensor | None, t: Tensor | None) -> Tensor:
        """ε of shape (B, classes), from the maps (B, channels, H, W)."""
        maps = (h,) if isinstance(h, Tensor) else h
        widths = [feature.shape[1] if feature.ndim == 4 else None for feature in maps]
        if widths != list(self.channels):
            raise ValueError(
                f"the features have shapes {[tuple(feature.shape) for feature in maps]}; this score network "
                "takes " + ", ".join(f"(B, {count}, H, W)" for count in self.channels)
            )
        first, *later = (feature.contiguous(memory_format=torch.channels_last) for feature in maps)
        x = self.stem(first)
        for number, stage in enumerate(self.stages):
            x = stage(x)
            for feature, join, entry in zip(later, self.joins, self.entries, strict=True):
                if join == number:
                    if feature.shape[2:] != x.shape[2:]:  # one of 1×1 would be added everywhere
                        sizes = ["×".join(map(str, tensor.shape[2:])) for tensor in (feature, x)]
                        raise ValueError(
                            f"a map of {sizes[0]} cannot be added to stage {number}'s of {sizes[1]}; join "
                            "it where the sizes are the same"
                        )
                    x = x + entry(feature)
        return self.head(self.tail(x).mean((2, 3)))
