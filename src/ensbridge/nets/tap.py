"""A feature by module name from any network, in the same forward pass."""

from __future__ import annotations

import threading

from torch import Tensor, nn


def find_module(net: nn.Module, name: str) -> nn.Module:
    """The submodule called `name`, or an error that lists what there is.

    >>> find_module(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "7")
    Traceback (most recent call last):
    ValueError: feature '7' is not a module of the source; it has: 0, 1
    """
    modules = dict(net.named_modules())
    if name == "" or name not in modules:
        there = [each for each in modules if each and each.count(".") <= name.count(".")]
        listed = ", ".join(there[:30]) + (", …" if len(there) > 30 else "")
        raise ValueError(f"feature {name!r} is not a module of the source; it has: {listed}")
    return modules[name]


def run_tapped(net: nn.Module, feature: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Run `net` once and return its output and the output of its module `feature`.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    >>> logits, h = run_tapped(net, "0", torch.rand(2, 4))
    >>> logits.shape, h.shape
    (torch.Size([2, 3]), torch.Size([2, 8]))
    """
    caught: list[Tensor] = []
    own = threading.get_ident()

    def catch(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        # Another thread that runs the same network meanwhile passes here too; its feature is not ours.
        if threading.get_ident() == own:
            caught.append(output)

    handle = find_module(net, feature).register_forward_hook(catch)
    try:
        logits = net(images)
    finally:
        handle.remove()
    return logits, _only(caught, feature)


def _only(caught: list[Tensor], feature: str) -> Tensor:
    if len(caught) != 1:
        raise ValueError(
            f"feature {feature!r} ran {len(caught)} times in one pass; name a module that runs once"
        )
    return caught[0]


class StandingTap(nn.Module):
    """A network that also returns a feature, through a hook that stands until `close()`.

    `run_tapped` comes and goes with each call, which torch.compile cannot trace; this can be compiled, and
    is for one thread.

    >>> import torch
    >>> tap = StandingTap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), "0")
    >>> [each.shape for each in tap(torch.rand(2, 4))]
    [torch.Size([2, 3]), torch.Size([2, 8])]
    """

    def __init__(self, net: nn.Module, feature: str) -> None:
        super().__init__()
        self.net = net
        self._feature = feature
        self._caught: list[Tensor] = []
        self._handle = find_module(net, feature).register_forward_hook(self._catch)

    def _catch(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self._caught.append(output)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The network's output and the feature."""
        self._caught.clear()
        logits = self.net(images)
        return logits, _only(self._caught, self._feature)

    def close(self) -> None:
        """Take the hook away."""
        self._handle.remove()
