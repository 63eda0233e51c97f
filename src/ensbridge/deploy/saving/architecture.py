"""A network by name and arguments: how it is described, what may be built, and with how much."""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ensbridge.models import (
    MapScore,
    NamedNetwork,
    Preprocessed,
    PyramidScore,
    ResNet,
    ScoreNet,
    Tail,
    TokenScore,
)
from ensbridge.utils.text import one_line, short
from ensbridge.utils.typed_json import JsonReader

REMEDY = "save the model again, or restore the file"
READER = JsonReader(REMEDY)

# All that a file may name without the caller's leave. Looked up, never imported.
OURS: dict[str, type[MapScore | NamedNetwork | PyramidScore | ResNet | ScoreNet | Tail | TokenScore]] = {
    f"ensbridge.nets:{kind.__name__}": kind
    for kind in (MapScore, NamedNetwork, PyramidScore, ResNet, ScoreNet, Tail, TokenScore)
}
_PATH = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)*:[a-z_]\w*", re.ASCII | re.IGNORECASE)
_PRIVATE = re.compile(r"(?:^|[.:])_")
# The part of torch whose classes take numbers and names; some elsewhere in it compile what they are given.
_LAYERS = "torch.nn.modules"

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Architecture:
    """A network's class and, where it can be built again, the import path and arguments that do it.

    >>> Architecture.of(nn.Linear(2, 2))
    Architecture(name='torch.nn.modules.linear.Linear', build=None, arguments=None)
    """

    name: str  # for people, and never imported
    build: str | None = None  # "package.module:class_or_function"
    arguments: dict[str, Any] | None = None  # in JSON's types

    def __post_init__(self) -> None:
        if (self.build is None) != (self.arguments is None):
            raise ValueError("build and arguments go together, one is missing")

    @classmethod
    def of(cls, net: nn.Module) -> Architecture:
        """Describe a network; one of ours that was changed after it was built is known by name alone."""
        name = f"{type(net).__module__}.{type(net).__qualname__}"
        for build, kind in OURS.items():
            if type(net) is kind:
                with suppress(NotImplementedError, RuntimeError):  # another library's may read what it draws
                    with torch.device("meta"):
                        again = kind(**net.arguments)
                    if same_plan(again, net):
                        return cls(name, build, net.arguments)
        return cls(name)

    def builder(self, allow: Collection[str], where: str) -> Build:
        """What builds the network, if a file may name it or the caller allows it; nothing is built yet."""
        assert self.build is not None
        assert self.arguments is not None
        if ours := OURS.get(self.build):
            arguments = READER.read_arguments(ours, self.arguments, f"{where}.arguments")
            if ours is Tail:  # whose source is described by arguments of its own
                plan = arguments.get("source", {})
                arguments["source"] = READER.read_arguments(ResNet, plan, f"{where}.arguments.source")
            # Another library's networks may compute with what they draw.
            around = _same_random_state if ours is NamedNetwork else _Undrawn
            return _careful(ours, arguments, f"{where} ({self.build})", around)
        if _names_device(self.arguments):  # with one, a layer takes memory before anything is compared
            raise ValueError(f"{where}.arguments name a device; leave it out, networks are built on the CPU")
        build = _find(self.build, allow, where)
        return _careful(build, self.arguments, f"{where} ({self.build})", _same_random_state)


def same_plan(one: nn.Module, other: nn.Module) -> bool:
    """Whether two networks have the same modules and the same tensors by name and shape."""
    shapes = [{name: tensor.shape for name, tensor in net.state_dict().items()} for net in (one, other)]
    return str(one) == str(other) and shapes[0] == shapes[1]


def by_recipe(net: nn.Module, build: str, arguments: Mapping[str, Any] | None) -> Architecture:
    """Describe a network by the user's own import path, which is tried before it is believed."""
    name = Architecture.of(net).name
    if not isinstance(build, str):
        raise ValueError(f"build is {build!r}; give its import path as text, such as 'my_nets:Net'")
    try:
        plain = json.loads(json.dumps(dict(arguments or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"arguments cannot be written as JSON ({error}); give numbers, strings, lists and mappings"
        ) from error
    if build.partition(":")[0] == "__main__":
        raise ValueError(f"build is {build!r}, which no other program can import; move it into a module")
    if not _PATH.fullmatch(build):
        raise ValueError(f"build is {short(build)}; give a name such as 'package.module:name'")
    architecture = Architecture(name, build, plain)
    made = on_meta(architecture.builder([build], "the source"), limit=len(net.state_dict()))
    if not same_plan(made, net):
        wrapped = ", and let it return a Preprocessed" if isinstance(net, Preprocessed) else ""
        raise ValueError(
            f"build {build!r} with these arguments does not make the source; check both{wrapped}"
        )
    return architecture


class _Limit(TorchFunctionMode):
    """Refuses the construction of networks with far more tensors than expected.

    A file may ask for a billion layers in ten characters; without memory of their own, they still take time.
    """

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.left = 50 * (tensors + 100)  # ours need about 15 calls of torch a tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # What gives no tensor may be a context's end, such as no_grad's: stopped there, it would never end.
        if isinstance(result, Tensor):
            self.left -= 1
            if self.left < 0:
                raise ValueError("it has far more tensors than there are weights")
        return result


def on_meta(build: Build, limit: int) -> nn.Module:
    """Build without memory for weights, about `limit` tensors at most."""
    with torch.device("meta"), _Limit(limit):
        return build()


def on_cpu(build: Build) -> nn.Module:
    """Build in memory."""
    with torch.device("cpu"):
        return build()


class _Undrawn(TorchDispatchMode):
    """Leaves weights undrawn in this thread: a file replaces them, and the global generator is the caller's.

    For networks of ours, in which nothing else is random.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in _DRAWS else func(*args, **(kwargs or {}))


_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
_RANDOM_STATE = threading.RLock()


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Bring the global random state back, which another's constructor may draw from, or seed.

    One at a time: two threads would each bring back what the other left. A thread that draws meanwhile for
    reasons of its own is not kept from it.
    """
    with _RANDOM_STATE, torch.random.fork_rng(devices=[]):
        yield


def _careful(
    build: Callable[..., object],
    arguments: Mapping[str, Any],
    where: str,
    around: Callable[[], AbstractContextManager[object]],
) -> Build:
    """A builder that works inside a context, and whose every failure is one sentence."""

    def made() -> nn.Module:
        try:
            with around():
                net = build(**arguments)
        except Exception as error:  # whatever a constructor makes of values it was never meant for
            raise ValueError(
                f"{where} cannot be built ({one_line(error)}); give the arguments that built it, or leave "
                "it out and pass the network to load as source="
            ) from error
        if not isinstance(net, nn.Module):
            raise ValueError(f"{where} made a {type(net).__name__} where a network is expected; {REMEDY}")
        return net

    return made


def _names_device(arguments: Mapping[str, Any]) -> bool:
    left: list[Any] = [arguments]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            if "device" in item:
                return True
            left += item.values()
        elif isinstance(item, list):
            left += item
    return False


def _find(build: str, allow: Collection[str], where: str) -> Callable[..., object]:
    """The class or function at an import path, if the caller allows it.

    A function must be allowed by its exact path. A package is allowed for its public network classes alone:
    what a function makes of arguments that a file chose, its annotations do not tell.
    """
    if not _PATH.fullmatch(build):
        raise ValueError(f"{where}.build is {short(build)}, expected such as 'package.module:name'; {REMEDY}")
    module, _, name = build.partition(":")
    exact, said = build in allow, f"{where} is built by {build}"
    remedy = (
        f"if you trust it with the arguments in the file, pass allow=[{build!r}] (--allow {build}), or the "
        "network as source="
    )
    # Loading inside loading would have permissions that the file chose, not the caller.
    ours = f"{said}, which is not allowed: a file may name no part of ensbridge but its networks, such as "
    ours += "'ensbridge.nets:ResNet'; pass the network as source="
    if _inside(module, ["ensbridge"]):
        raise ValueError(ours)
    if not exact and (reason := _path_refused(build, allow)):
        raise ValueError(f"{said}, {reason}; {remedy}")
    try:
        target = getattr(import_module(module), name)
    except Exception as error:  # a module may fail in any way while it is imported
        raise ValueError(
            f"{said}, which cannot be imported ({one_line(error)}); install it, or go where it is"
        ) from error
    if not _is_net(target) and not inspect.isfunction(target):
        raise ValueError(f"{said}, which is no network and no function; pass the network as source=")
    if _inside(target.__module__, ["ensbridge"]):
        raise ValueError(ours)
    if not exact and (reason := _object_refused(target, allow)):
        raise ValueError(f"{said}, {reason}; {remedy}")
    return target


def _path_refused(build: str, allow: Collection[str]) -> str | None:
    """Why no allowed package admits a path, found before anything is imported."""
    module = build.partition(":")[0]
    if not _inside(module, allow):
        return "which is not allowed"
    if _PRIVATE.search(build):  # among them __main__, which is a program
        return "which is private to its package"
    if _inside(module, ["torch"]) and module != "torch.nn" and not _inside(module, [_LAYERS]):
        return "which is none of torch's plain layers"
    return None


def _object_refused(target: Any, allow: Collection[str]) -> str | None:
    """Why no allowed package admits what is at a path."""
    if not _is_net(target):
        return "which is a function, and a package is allowed for its classes alone"
    if not _inside(target.__module__, allow):
        return "which is not of an allowed package"
    bases = [base.__module__ for base in target.__mro__]
    if any(_inside(base, ["torch"]) and not _inside(base, [_LAYERS]) for base in bases):
        return "which has a base in torch that is no plain layer and may run code that it is given"
    return None


def _is_net(target: object) -> bool:
    return inspect.isclass(target) and issubclass(target, nn.Module)


def _inside(module: str | None, packages: Collection[str]) -> bool:
    """Whether a module is one of these or below one; what was made at run time may have none."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)
