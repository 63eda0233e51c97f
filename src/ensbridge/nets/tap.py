"""Features by module name from any network, in the same forward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

Hook = Callable[[nn.Module, object, object], None]


def find_module(net: nn.Module, name: str) -> nn.Module:
    """The submodule called `name`, or an error that lists what there is.

    >>> find_module(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "7")
    Traceback (most recent call last):
    ValueError: feature '7' is not a module of the source; it has: 0, 1
    """
    if not isinstance(name, str):
        raise ValueError(f"feature is {name!r}; give the name of a module of the source, such as 'layer1'")
    # A shared module has several names, all of them good; torch.compile's wrappers are left out of them.
    modules = {plain_name(each): module for each, module in net.named_modules(remove_duplicate=False)}
    name = plain_name(name)
    if name == "" or name not in modules:
        there = [each for each in modules if each and each.count(".") <= name.count(".")]
        listed = ", ".join(there[:30]) + (", …" if len(there) > 30 else "")
        raise ValueError(f"feature {name!r} is not a module of the source; it has: {listed}")
    return modules[name]


def plain_name(name: str) -> str:
    """A module's name as it is without torch.compile.

    >>> plain_name("backbone._orig_mod.layer1")
    'backbone.layer1'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def uncompiled(net: nn.Module) -> nn.Module:
    """The network itself where `torch.compile(net)` or `DataParallel(net)` was given; they share weights.

    A tap in the compiled one would have it compiled anew with each call, one in copies of it sees a part of
    the images.

    >>> net = nn.Linear(2, 3)
    >>> uncompiled(DataParallel(net)) is net
    True
    """
    parallel = isinstance(net, DataParallel | DistributedDataParallel)
    inner = net.module if parallel else getattr(net, "_orig_mod", net)
    return net if inner is net else uncompiled(inner)


def read_logits(output: object) -> Tensor:
    """The logits in what a network returned: a tensor, or an object or mapping with `logits`.

    >>> import torch
    >>> read_logits({"logits": torch.zeros(2, 3)}).shape
    torch.Size([2, 3])
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"a network returned a {type(output).__name__}; it must return logits as a tensor, or an object "
            "with .logits"
        )
    return logits


def _read_feature(output: object, feature: str) -> Tensor:
    """A module's output as a tensor of its own: an in-place layer behind the module must not change it."""
    if isinstance(output, tuple | list) and output:
        output = output[0]  # layers of transformers return tuples that begin with their states
    if not isinstance(output, Tensor):
        raise ValueError(
            f"feature {feature!r} returns a {type(output).__name__}; name a module that returns a tensor"
        )
    return output.clone()


def run_tapped(net: nn.Module, images: Tensor, *features: str) -> tuple[Tensor, ...]:
    """Run `net` once and return its output, then the output of each module in `features`.

    A module that runs several times in one pass is refused: which of its outputs is meant, nobody can tell.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    >>> logits, h = run_tapped(net, torch.rand(2, 4), "0")
    >>> logits.shape, h.shape
    (torch.Size([2, 3]), torch.Size([2, 8]))
    """
    net = uncompiled(net) if features else net
    caught: dict[str, list[Tensor]] = {feature: [] for feature in features}
    compiling = torch.compiler.is_compiling()  # which knows of no threads
    own = 0 if compiling else threading.get_ident()

    def catch(feature: str) -> Hook:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            # Another thread that runs the same network meanwhile passes here too; its feature is not ours.
            if compiling or threading.get_ident() == own:
                caught[feature].append(_read_feature(output, feature))

        return hook

    modules = [(feature, find_module(net, feature)) for feature in caught]
    handles = [module.register_forward_hook(catch(feature)) for feature, module in modules]
    try:
        logits = read_logits(net(images))
    finally:
        for handle in handles:
            handle.remove()
    return logits, *(_only(caught[feature], feature) for feature in features)


def _only(caught: list[Tensor], feature: str) -> Tensor:
    if len(caught) != 1:
        raise ValueError(
            f"feature {feature!r} ran {len(caught)} times in one pass; name a module that runs once"
        )
    return caught[0]


class StandingTap(nn.Module):
    """A network that also returns features, through hooks that stand until `close()`.

    `run_tapped` comes and goes with each call, which torch.compile cannot trace; this can be compiled, and
    is for one thread.

    >>> import torch
    >>> tap = StandingTap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), "0")
    >>> [each.shape for each in tap(torch.rand(2, 4))]
    [torch.Size([2, 3]), torch.Size([2, 8])]
    """

    def __init__(self, net: nn.Module, *features: str) -> None:
        super().__init__()
        self.net = net = uncompiled(net)
        self._caught: dict[str, list[Tensor]] = {feature: [] for feature in features}
        self._features = features
        modules = [(feature, find_module(net, feature)) for feature in self._caught]
        self._handles = [module.register_forward_hook(self._catch(feature)) for feature, module in modules]

    def _catch(self, feature: str) -> Hook:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            self._caught[feature].append(_read_feature(output, feature))

        return hook

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """The network's output and the features."""
        for caught in self._caught.values():
            caught.clear()
        logits = read_logits(self.net(images))
        return logits, *(_only(self._caught[feature], feature) for feature in self._features)

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
