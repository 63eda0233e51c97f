"""A network with its own preprocessing in front."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ensbridge.nets.tap import uncompiled

Preprocess = Callable[[Tensor], Tensor]


class Preprocessed(nn.Module):
    """A network that sees images through a function or module of its own, such as its normalisation.

    >>> import torch
    >>> net = Preprocessed(nn.Flatten(), lambda images: images * 2 - 1)
    >>> net(torch.ones(1, 1, 1, 2)).tolist()
    [[1.0, 1.0]]
    """

    def __init__(self, net: nn.Module, preprocess: Preprocess) -> None:
        super().__init__()
        self.net, self.preprocess = uncompiled(net), preprocess

    def forward(self, images: Tensor) -> object:
        """What the network returns for the preprocessed images."""
        return self.net(self.preprocess(images))
