"""A network with its own preprocessing in front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.models.features import uncompiled
from ensbridge.utils.inputs import call_network, pack

Preprocess = Callable[[Any], Any]  # of a batch of inputs: a tensor, or a tuple or mapping of tensors


class Preprocessed(nn.Module):
    """A network that sees images through a function or module of its own, such as its normalisation.

    >>> import torch
    >>> net = Preprocessed(nn.Flatten(), lambda images: images * 2 - 1)
    >>> net(torch.ones(1, 1, 1, 2)).tolist()
    [[1.0, 1.0]]
    """

    def __init__(self, net: nn.Module, preprocess: Preprocess) -> None:
        super().__init__()
        self.net, self.preprocess = uncompiled(net), _traceable(preprocess)

    def forward(self, *inputs: Any, **named: Tensor) -> object:
        """What the network returns for the preprocessed inputs."""
        return call_network(self.net, self.preprocess(pack(inputs, named)))


class Normalised(nn.Module):
    """(images - mean) / std, channel by channel, in a form that every exporter can trace."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            # No part of the state: it is given anew with the network.
            self.register_buffer(name, torch.tensor(list(values)).float().view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), normalised."""
        return (images - self.mean) / self.std


def _traceable(preprocess: Preprocess) -> Preprocess:
    """torchvision's Normalize looks at the values of its deviations, which no graph can; the same without."""
    mean, std = (getattr(preprocess, name, None) for name in ("mean", "std"))
    if type(preprocess).__name__ == "Normalize" and mean is not None and std is not None:
        return Normalised(mean, std)
    return preprocess


def with_preprocessing(
    members: Sequence[nn.Module], preprocess: Sequence[Preprocess | None] | None
) -> list[nn.Module]:
    """The members behind their own preprocessing, where one is given for them."""
    if preprocess is None:
        return list(members)
    if not isinstance(preprocess, Sequence):
        kind = "one function" if callable(preprocess) else f"a {type(preprocess).__name__}"
        raise ValueError(f"preprocess is {kind}; give a list, with a function or None for each member")
    if len(preprocess) != len(members):
        counts = f"{len(preprocess)} entries for {len(members)} members"
        raise ValueError(f"preprocess has {counts}; give one each, or None")
    for number, function in enumerate(preprocess, 1):
        if function is not None and not callable(function):
            raise ValueError(
                f"preprocess has {function!r} for member {number}; give a function of images, or None"
            )
    pairs = zip(members, preprocess, strict=True)
    return [member if function is None else Preprocessed(member, function) for member, function in pairs]
