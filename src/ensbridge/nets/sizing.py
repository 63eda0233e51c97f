"""A score network for a feature of any shape, as large as a cost allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ensbridge.cost import count_macs
from ensbridge.nets.inverted import conv_bn
from ensbridge.nets.score import ScoreNet
from ensbridge.nets.token_score import TokenScore

WIDTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class MapScore(nn.Module):
    """A score network of the paper's kind for a map (B, C, H, W) of any number of channels.

    A 1×1 convolution brings the map to `width` channels first, where it has others. `deep` has the paper's
    eleven blocks, else there are three.

    >>> import torch
    >>> net = MapScore(classes=3, channels=20, width=8, size=8)
    >>> net(torch.rand(2, 20, 8, 8), torch.rand(2, 3), torch.ones(2)).shape
    torch.Size([2, 3])
    """

    def __init__(self, classes: int, channels: int, width: int, size: int, deep: bool = True) -> None:
        super().__init__()
        self._arguments = {"classes": classes, "channels": channels, "width": width, "size": size}
        if min(self._arguments.values()) < 1:
            raise ValueError(f"a score network was asked for with {self._arguments}; each must be at least 1")
        self._arguments["deep"] = deep
        self.classes, self.channels = classes, channels
        self.entry = nn.Identity() if channels == width else conv_bn(channels, width, 1)
        # The paper's proportions; a small map is not halved.
        first, second = (2 if size >= 8 else 1), (2 if size >= 16 else 1)
        stages = [(1, width, 1, 1), (3, 3 * width // 2, 1, first), (3, 2 * width, 1, 1)]
        if deep:
            stages = [(1, width, 1, 1), (3, 3 * width // 2, 2, first), (3, 2 * width, 3, second)]
            stages += [(3, 3 * width, 2, 1), (3, 4 * width, 2, 1)]
        self.score = ScoreNet(classes, width, stages, 4 * width, z_input="none")

    @property
    def arguments(self) -> dict[str, Any]:
        """What builds this network again, in JSON's types.

        >>> MapScore(3, 20, width=8, size=8).arguments
        {'classes': 3, 'channels': 20, 'width': 8, 'size': 8, 'deep': True}
        """
        return dict(self._arguments)

    def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        """ε of shape (B, classes)."""
        if h.ndim != 4 or h.shape[1] != self.channels:
            raise ValueError(
                f"the feature has shape {tuple(h.shape)}; this score network takes (B, {self.channels}, H, W)"
            )
        return self.score(self.entry(h), z_t, t)


def fitting_score(feature: Tensor, classes: int, most_macs: float) -> nn.Module | None:
    """The largest score network for a feature (1, …) that costs at most `most_macs` for one image.

    None where not even one of half the feature's channels, capped at 32, is cheap enough, or where the
    feature is neither a map, nor tokens, nor a vector.

    >>> import torch
    >>> score = fitting_score(torch.rand(1, 16, 8, 8), classes=10, most_macs=4e5)
    >>> type(score).__name__, score.score.channels
    ('MapScore', 16)
    """
    fitting = [(macs, score) for macs, score in priced_scores(feature, classes) if macs <= most_macs]
    return max(fitting, key=lambda each: each[0])[1] if fitting else None


def priced_scores(feature: Tensor, classes: int) -> list[tuple[int, nn.Module]]:
    """Every score network that a feature (1, …) may have, with its MACs; none for an odd shape."""
    state, now = feature.new_zeros(len(feature), classes), feature.new_ones(len(feature))
    return [(count_macs(score, feature, state, now), score) for score in _candidates(feature, classes)]


def _candidates(feature: Tensor, classes: int) -> Iterator[nn.Module]:
    """Score networks of several widths and depths, none wider than the paper's: as wide as the feature."""
    channels = feature.shape[1] if feature.ndim == 4 else feature.shape[-1]
    least = min(32, max(8, channels // 2))
    for width in WIDTHS:
        if not least <= width <= max(channels, least):
            continue
        if feature.ndim == 4:
            size = min(feature.shape[2:])
            yield MapScore(classes, channels, width, size, deep=False)
            yield MapScore(classes, channels, width, size)
        elif feature.ndim in (2, 3):
            yield TokenScore(classes, channels, width)
            yield TokenScore(classes, channels, 2 * width)
