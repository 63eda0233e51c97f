"""A score network for features that are no maps: vectors (B, C) and tokens (B, N, C)."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from ensbridge.models.score_net import time_embedding

TIME = 32  # size of the time's embedding


class TokenScore(nn.Module):
    """A light network that reads vectors or tokens and the time t, for any source that is not convolutional.

    Each token goes through the same residual layers of `width` channels; tokens are pooled by weights that
    they give themselves. A vector is a single token. Of Z_t it sees nothing.

    >>> import torch
    >>> net = TokenScore(classes=3, channels=8, width=16)
    >>> now = torch.ones(2)
    >>> net(torch.rand(2, 8), torch.rand(2, 3), now).shape, net(torch.rand(2, 5, 8), None, now).shape
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """

    def __init__(self, classes: int, channels: int, width: int, blocks: int = 2) -> None:
        super().__init__()
        self._arguments = {"classes": classes, "channels": channels, "width": width, "blocks": blocks}
        if min(self._arguments.values()) < 1:
            raise ValueError(f"a score network was asked for with {self._arguments}; each must be at least 1")
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

    @property
    def arguments(self) -> dict[str, Any]:
        """What builds this network again, in JSON's types.

        >>> TokenScore(3, 8, width=16).arguments
        {'classes': 3, 'channels': 8, 'width': 16, 'blocks': 2}
        """
        return dict(self._arguments)

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
