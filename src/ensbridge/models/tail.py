"""The end of a ResNet as a light network of its own, which reads an inner feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.models.resnet import BasicBlock, ResNet, initialise


class Tail(nn.Module):
    """The blocks of a ResNet that follow the block `feature`, with new weights, and a head.

    `source` is the ResNet, or its `arguments`, of which only the plan is read.
    `width` scales their channels: the bridge networks of Yun et al. (2023) are 1 (medium) or 0.5 (small).

    >>> from ensbridge.metrics.cost import count_params
    >>> source = ResNet.resnet32x2(10)
    >>> count_params(Tail(source, "stages.2.1")), count_params(Tail(source, "stages.2.1", width=0.5))
    (889098, 268682)
    >>> tail = Tail(ResNet((1, 1), (8, 16), classes=3, stem=8), "stages.0.0")
    >>> str(Tail(**tail.arguments)) == str(tail)
    True
    """

    def __init__(self, source: ResNet | Mapping[str, Any], feature: str, width: float = 1.0) -> None:
        super().__init__()
        if not isinstance(source, ResNet):
            with torch.device("meta"):  # no memory: a small tail may be that of a large network
                source = ResNet(**source)
        # What builds this network again, in JSON's types.
        self.arguments: dict[str, Any] = {"source": source.arguments, "feature": feature, "width": width}
        blocks = source.blocks()
        if feature not in blocks:
            raise ValueError(f"feature {feature!r} is not a block of the source; it has: {', '.join(blocks)}")
        after = list(blocks.values())[list(blocks).index(feature) + 1 :]
        if not after or width <= 0:
            raise ValueError(
                f"a tail of {len(after)} blocks and width {width} was asked for; name a block before the "
                "last, and a width above 0"
            )
        inputs, built = blocks[feature].outputs, []
        for block in after:
            outputs = max(1, round(width * block.outputs))
            built.append(BasicBlock(inputs, outputs, block.stride, block.bias))
            inputs = outputs
        self.blocks = nn.Sequential(*built)
        self.head = nn.Linear(inputs, source.head.out_features)
        self.apply(initialise)
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, feature: Tensor) -> Tensor:
        """Logits (B, classes) of the feature (B, C, H, W)."""
        return self.head(self.blocks(feature).mean((2, 3)))
