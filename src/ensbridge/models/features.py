"""Features by module name from any network, in the same forward pass.

A forward hook on a network is state that everything sees which runs or copies the network meanwhile: other
threads, graphs that torch.compile makes, a deepcopy or a pickle. So a call runs on a copy of its own, and its
hooks are on that copy alone. Only the modules whose outputs are read, and those that contain them, are
copied, and these shallowly, as DataParallel copies networks; parameters, buffers and all other modules are
the network's own. Hence

- nothing is shared that a call writes to: threads, calls inside calls, two models of one source and errors
  half-way leave each other alone;
- the network never has a hook that could end up in a copy of it, or that must be removed;
- the copy is made anew with each call, so that whatever was done to the network is honoured: other weights,
  another device or mode, other layers, `fast.source = other`;
- torch.compile traces the making of the copy, which is no more than dictionaries, and finds the same network
  each time: one graph without a break, that is compiled once.

As with DataParallel, what `forward` of such a module assigns to `self` goes with the copy.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ensbridge.bridge.sampler import Features
from ensbridge.utils.inputs import Inputs, call_network
from ensbridge.utils.text import short

Hook = Callable[[nn.Module, object, object], None]


def find_module(net: nn.Module, name: str) -> nn.Module:
    """The submodule called `name`, or an error that lists what there is.

    >>> find_module(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "7")
    Traceback (most recent call last):
    ValueError: feature '7' is not a module of the source; it has: 0, 1
    """
    if not isinstance(name, str):
        raise ValueError(f"feature is {name!r}; give the name of a module of the source, such as 'layer1'")
    module = _without_compiler(net)
    for part in plain_name(name).split("."):
        child = dict(module._modules.items()).get(part)  # a scripted module has them in no dictionary
        if child is None:
            raise ValueError(_unknown_feature(net, name))
        module = _without_compiler(child)
    return module


def feature_names(net: nn.Module, feature: str | Sequence[str]) -> tuple[str, ...]:
    """The names of what is read of `net`, one or several; each must be one of its modules, and named once.

    >>> feature_names(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), ["0", "1"])
    ('0', '1')
    """
    if isinstance(feature, str) or not isinstance(feature, Sequence):
        feature = (feature,)  # a number, say, is refused by find_module
    names = tuple(feature)
    modules = [find_module(net, name) for name in names]
    if len(set(modules)) < len(names):
        raise ValueError(f"feature is {short(names)}, which has a module twice; name each once")
    return names


def joined(maps: Sequence[Tensor]) -> Features:
    """What was read of a network as bridges take it: one tensor as it is, several as a tuple."""
    return maps[0] if len(maps) == 1 else tuple(maps)


def _unknown_feature(net: nn.Module, name: str) -> str:
    name = plain_name(name)
    # A shared module has several names, all of them good.
    names = dict.fromkeys(plain_name(other) for other, _ in net.named_modules(remove_duplicate=False))
    there = [other for other in names if other and other.count(".") <= name.count(".")]
    listed = ", ".join(there[:30]) + (", …" if len(there) > 30 else "")
    return f"feature {name!r} is not a module of the source; it has: {listed}"


def _without_compiler(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given, where this is its wrapper."""
    while "_orig_mod" in module._modules:
        module = module.get_submodule("_orig_mod")
    return module


def plain_name(name: str) -> str:
    """A module's name as it is without torch.compile.

    >>> plain_name("backbone._orig_mod.layer1")
    'backbone.layer1'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def uncompiled(net: nn.Module) -> nn.Module:
    """The network itself where `torch.compile(net)` or `DataParallel(net)` was given; they share weights.

    What the compiled one has compiled knows nothing of features, and each replica sees a part of the images.

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


def forward_with_features(net: nn.Module, inputs: Inputs, *features: str) -> tuple[Tensor, ...]:
    """Run `net` once and return its logits, then the output of each module in `features`.

    A module that runs several times in one pass is refused: which of its outputs is meant, nobody can tell.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    >>> logits, h = forward_with_features(net, torch.rand(2, 4), "0")
    >>> logits.shape, h.shape
    (torch.Size([2, 3]), torch.Size([2, 8]))
    """
    if not features:
        return (read_logits(call_network(net, inputs)),)
    net = uncompiled(net)
    outputs: dict[str, list[Tensor]] = {feature: [] for feature in features}
    hooks: dict[nn.Module, list[Hook]] = {}
    for feature in outputs:
        hooks.setdefault(find_module(net, feature), []).append(_recorder(feature, outputs[feature]))
    logits = read_logits(run_with_hooks(net, inputs, hooks))
    read: dict[str, Tensor] = {}
    for feature, seen in outputs.items():
        if len(seen) != 1:
            raise ValueError(
                f"feature {feature!r} ran {len(seen)} times in one pass; name a module that runs once"
            )
        read[feature] = seen.pop()  # so that it lives no longer than its user wants
    return logits, *(read[feature] for feature in features)


def _recorder(feature: str, outputs: list[Tensor]) -> Hook:
    def record(_module: nn.Module, _inputs: object, output: object) -> None:
        outputs.append(_read_feature(output, feature))

    return record


def run_with_hooks(net: nn.Module, inputs: Inputs, hooks: Mapping[nn.Module, Sequence[Hook]]) -> object:
    """`net(inputs)` with forward hooks on some of its modules that no other call sees.

    >>> import torch
    >>> net, seen = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), []
    >>> _ = run_with_hooks(net, torch.rand(2, 4), {net[0]: [lambda *call: seen.append(call[2].shape)]})
    >>> seen, len(net[0]._forward_hooks)
    ([torch.Size([2, 8])], 0)
    """
    if not _is_exported():
        return call_network(_copy_with_hooks(net, hooks, {}), inputs)
    handles = [
        module.register_forward_hook(hook) for module, registered in hooks.items() for hook in registered
    ]
    try:
        return call_network(net, inputs)
    finally:
        for handle in handles:
            handle.remove()


def _is_exported() -> bool:
    """Whether torch.export is running this call to record its operations.

    It names operations by the modules that ran them, which must be the network's own; and no other call can
    use the network meanwhile, in which export has put placeholders in place of the weights.
    """
    if torch.compiler.is_dynamo_compiling() or not torch.compiler.is_exporting():
        return False
    return get_proxy_mode() is not None  # of this thread, while the flag is the process's


def _copy_with_hooks(
    module: nn.Module, hooks: Mapping[nn.Module, Sequence[Hook]], copies: dict[nn.Module, nn.Module]
) -> nn.Module:
    """A shallow copy with hooks in it, or the module itself where there are none; `copies` has those made."""
    if module in copies:
        return copies[module]
    copies[module] = module
    children: dict[str, nn.Module | None] = {}
    changed = module in hooks
    for name, child in module._modules.items():
        children[name] = None if child is None else _copy_with_hooks(child, hooks, copies)
        changed = changed or children[name] is not child
    if not changed:
        return module
    # torch.compile's wrapper would run the module that it was given: the copy takes the wrapper's place.
    inner = children.get("_orig_mod")
    copies[module] = _shallow_copy(module, children, hooks.get(module, ())) if inner is None else inner
    return copies[module]


def _shallow_copy(
    module: nn.Module, children: dict[str, nn.Module | None], hooks: Sequence[Hook]
) -> nn.Module:
    copied = object.__new__(type(module))
    attributes = copied.__dict__
    attributes.update(module.__dict__)
    attributes["_modules"] = children
    attributes["_compiled_call_impl"] = None
    if hooks:
        # Behind the user's own, whose keys are numbers.
        first = len(module._forward_hooks)
        added = {f"feature {first + number}": hook for number, hook in enumerate(hooks)}
        attributes["_forward_hooks"] = {**module._forward_hooks, **added}
    for name in ("forward", "_old_forward"):  # as users replace it, and accelerate
        if name in attributes:
            attributes[name] = _bound_to(copied, attributes[name], module)
    return copied


def _bound_to(copied: nn.Module, function: object, module: nn.Module) -> object:
    """A method of a module as one of its copy."""
    if isinstance(function, types.MethodType) and function.__self__ is module:
        return functools.partial(function.__func__, copied)
    if isinstance(function, functools.partial):
        arguments = [copied if argument is module else argument for argument in function.args]
        return functools.partial(function.func, *arguments, **function.keywords)
    return function


class FeatureExtractor(nn.Module):
    """A network that also returns features, as a module: for torch.compile and torch.export.

    >>> import torch
    >>> extract = FeatureExtractor(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), "0")
    >>> [tensor.shape for tensor in extract(torch.rand(2, 4))]
    [torch.Size([2, 3]), torch.Size([2, 8])]
    """

    def __init__(self, net: nn.Module, *features: str) -> None:
        super().__init__()
        self.net, self.features = uncompiled(net), features

    def forward(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The network's logits and the features; several inputs come as one tuple or mapping."""
        return forward_with_features(self.net, inputs, *self.features)
