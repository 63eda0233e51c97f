"""A score network for a feature of any shape, as large as a cost allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ensbridge.metrics.cost import count_macs
from ensbridge.models.score_net import ScoreNet, TokenScore, conv_bn
from ensbridge.utils.inputs import Inputs, tensors_of

WIDTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class MapScore(nn.Module):
    """A score network of the paper's kind for a map (B, C, H, W) of any number of channels.

    A 1×1 convolution brings the map to `width` channels first, where it has others. `deep` has the paper's
    eleven blocks, else there are three. With `channels_last` the map is (B, H, W, C), as some transformers
    have it.

    >>> import torch
    >>> net = MapScore(classes=3, channels=20, width=8, size=8)
    >>> net(torch.rand(2, 20, 8, 8), torch.rand(2, 3), torch.ones(2)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        classes: int,
        channels: int,
        width: int,
        size: int,
        deep: bool = True,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        # What builds this network again, in JSON's types.
        self.arguments: dict[str, Any] = {
            "classes": classes,
            "channels": channels,
            "width": width,
            "size": size,
        }
        if min(self.arguments.values()) < 1:
            raise ValueError(f"a score network was asked for with {self.arguments}; each must be at least 1")
        self.arguments |= {"deep": deep, "channels_last": channels_last}
        self.classes, self.channels, self.channels_last = classes, channels, channels_last
        self.entry = nn.Identity() if channels == width else conv_bn(channels, width, 1)
        # The paper's proportions; a small map is not halved.
        first, second = (2 if size >= 8 else 1), (2 if size >= 16 else 1)
        stages = [(1, width, 1, 1), (3, 3 * width // 2, 1, first), (3, 2 * width, 1, 1)]
        if deep:
            stages = [(1, width, 1, 1), (3, 3 * width // 2, 2, first), (3, 2 * width, 3, second)]
            stages += [(3, 3 * width, 2, 1), (3, 4 * width, 2, 1)]
        self.score = ScoreNet(classes, width, stages, 4 * width, z_input="none")

    def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        """ε of shape (B, classes)."""
        if h.ndim != 4 or h.shape[-1 if self.channels_last else 1] != self.channels:
            takes = f"H, W, {self.channels}" if self.channels_last else f"{self.channels}, H, W"
            raise ValueError(f"the feature has shape {tuple(h.shape)}; this score network takes (B, {takes})")
        if self.channels_last:
            h = h.movedim(-1, 1)
        # A source may compute in another type, such as bfloat16.
        return self.score(self.entry(h.to(self.score.head.weight.dtype)), z_t, t)


def has_channels_last(feature: Tensor, inputs: Inputs) -> bool:
    """Whether a map lies as (B, H, W, C): that way, and not as (B, C, H, W), it has the images' proportions.

    >>> import torch
    >>> images = torch.rand(1, 3, 32, 32)
    >>> has_channels_last(torch.rand(1, 8, 8, 24), images), has_channels_last(torch.rand(1, 24, 8, 8), images)
    (True, False)
    """
    images = next((tensor for tensor in tensors_of(inputs) if tensor.ndim == 4), None)
    if feature.ndim != 4 or images is None:
        return False
    height, width = images.shape[2:]
    first, second, third = feature.shape[1:]

    def alike(h: int, w: int) -> bool:
        return abs(h * width - w * height) < max(height, width)  # where sizes were halved, they were rounded

    return alike(first, second) and not alike(second, third)


Score: TypeAlias = MapScore | TokenScore
Build: TypeAlias = Callable[[], Score]


def fitting_score(
    feature: Tensor, classes: int, most_macs: float, channels_last: bool = False
) -> tuple[int, Score] | None:
    """The MACs for one image, and the largest score network for a feature (1, …) with at most `most_macs`.

    None where not even one of half the feature's channels, capped at 32, is cheap enough, or where the
    feature is neither a map, nor tokens, nor a vector.

    >>> import torch
    >>> macs, score = fitting_score(torch.rand(1, 16, 8, 8), classes=10, most_macs=4e5)
    >>> type(score).__name__, score.score.channels, macs
    ('MapScore', 16, 357928)
    """
    fitting: list[tuple[int, Build]] = []
    for pair in _priced(feature, classes, channels_last):
        cheap = [(macs, build) for macs, build in pair if macs <= most_macs]
        if not cheap:
            break  # wider ones are dearer still
        fitting += cheap
    if not fitting:
        return None
    macs, build = max(fitting, key=lambda priced: priced[0])
    return macs, build()


def cheapest_macs(feature: Tensor, classes: int, channels_last: bool = False) -> float:
    """What the cheapest score network for a feature (1, …) costs; infinity for an odd shape.

    >>> import torch
    >>> cheapest_macs(torch.rand(1, 16), classes=10), cheapest_macs(torch.rand(1, 16, 8, 8, 8), classes=10)
    (984.0, inf)
    """
    narrowest = next(_priced(feature, classes, channels_last), [])
    return min((float(macs) for macs, _ in narrowest), default=math.inf)


def _priced(feature: Tensor, classes: int, channels_last: bool) -> Iterator[list[tuple[int, Build]]]:
    """What builds the two score networks of each width that a feature may have, with their MACs.

    These are counted on the device "meta", where shapes are all there is: a wide map would take seconds.
    """
    for pair in _candidates(feature.shape, classes, channels_last):
        with torch.device("meta"):
            blank, now = torch.zeros(feature.shape), torch.ones(len(feature))
            state = torch.zeros(len(feature), classes)
            priced = [(count_macs(build(), blank, state, now), build) for build in pair]
        yield priced


def _candidates(shape: Sequence[int], classes: int, channels_last: bool) -> Iterator[list[Build]]:
    """Score networks of several widths, two of each, none wider than the paper's: as wide as the feature."""
    channels = shape[1] if len(shape) == 4 and not channels_last else shape[-1]
    least = min(32, max(8, channels // 2))
    for width in WIDTHS:
        if not least <= width <= max(channels, least):
            continue
        if len(shape) == 4:
            size = min(shape[1:3] if channels_last else shape[2:])
            yield [
                partial(MapScore, classes, channels, width, size, deep, channels_last)
                for deep in (False, True)
            ]
        elif len(shape) in (2, 3):
            yield [partial(TokenScore, classes, channels, wide) for wide in (width, 2 * width)]
