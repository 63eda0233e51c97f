"""A network that stays on disk and comes into memory only while it runs."""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ensbridge.models.features import plain_name, uncompiled
from ensbridge.utils.files import open_regular_file
from ensbridge.utils.inputs import call_network, pack, tensors_of
from ensbridge.utils.text import visible

Build = Callable[[], nn.Module]

NESTED = ("state_dict", "model_state_dict", "model", "net")  # where trainers keep weights among other things
WRAPPERS = ("module.", "model.", "net.")  # what they put before the name of every weight
COMPRESSED = 2**26  # bytes by which what an archive holds may be more than its file
DEEPEST = 8  # dictionaries in each other: one may hold itself
NAMED = 3  # of the weights that do not fit


def load_weights(net: nn.Module, path: Path) -> nn.Module:
    """Fill a network with the weights in a file, safetensors or a state dictionary that torch saved.

    The dictionary may lie under "state_dict" or "model", as trainers save it, and its names may have what
    torch.compile, DistributedDataParallel or a trainer's module puts before them. Nothing in the file is
    executed: torch's are read with `weights_only`.
    """
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"the function for {path} returned a {type(net).__name__}; it must return a network, nn.Module"
        )
    inner = uncompiled(net)
    state = renamed(read_state(path), inner)
    try:
        inner.load_state_dict(state)
    except Exception as error:  # a network may have ways of its own to take weights
        reason = _difference(state, inner) or " ".join(str(error).split())
        raise ValueError(
            f"{path} does not hold the weights of a {type(inner).__name__} ({reason}); give the function "
            "that builds the network of this file"
        ) from error
    return net


def read_state(path: Path) -> Mapping[str, Any]:
    """The state dictionary in a file, out of whatever a trainer put around it."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a file of weights")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file of weights")
    try:
        with open_regular_file(path) as file:
            if path.suffix == ".safetensors":
                state: Any = load_file(path)  # which maps the file, so that it wants its name
            else:
                _check_size(file)
                state = torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # reading has errors of many kinds, and all mean this
        raise ValueError(
            f"{path} does not hold weights that can be read ({_reason(error)}); give safetensors, or what "
            "torch.save(net.state_dict(), path) wrote"
        ) from error
    if not isinstance(state, Mapping):
        raise ValueError(
            f"{path} holds a {type(state).__name__}; give what torch.save(net.state_dict(), path) wrote"
        )
    for _ in range(DEEPEST):
        inside = [state[name] for name in NESTED if isinstance(state.get(name), Mapping)]
        if not inside:
            return state
        state = inside[0]
    raise ValueError(
        f"{path} holds dictionaries within dictionaries, more than {DEEPEST}; give what "
        "torch.save(net.state_dict(), path) wrote"
    )


def _check_size(file: IO[bytes]) -> None:
    """Refuse an archive that would take far more memory than it has bytes: torch.save does not compress."""
    if file.read(4) == b"PK\x03\x04":
        size = os.fstat(file.fileno()).st_size
        needed = sum(entry.file_size for entry in zipfile.ZipFile(file).infolist())
        if needed > size + COMPRESSED:
            raise ValueError(f"it would take {needed:,} bytes of memory from a file of {size:,}")
    file.seek(0)


def _reason(error: Exception) -> str:
    """Why a file cannot be read, without torch's advice to execute what is in it.

    >>> _reason(RuntimeError("Weights only load failed. … GLOBAL my.Net was not an allowed global. …"))
    'it holds my.Net, which is more than tensors'
    """
    text = str(error)
    if match := re.search(r"GLOBAL (\S+) was not an allowed global", text):
        return f"it holds {visible(match[1][:200])}, which is more than tensors"
    if "TorchScript" in text:
        return "it is a TorchScript archive"
    if "Weights only load failed" in text:
        return "it is no file of torch, or damaged"
    return visible((text.splitlines() or [type(error).__name__])[0][:200])


def renamed(state: Mapping[str, Any], net: nn.Module) -> Mapping[str, Any]:
    """A state with the names that the network has for its weights, where wrappers are all that differs."""
    names = {plain_name(name): name for name in net.state_dict()}
    if set(state) == set(names.values()):
        return state
    tensors = {plain_name(str(name)): value for name, value in state.items()}
    wrappers = [prefix for prefix in WRAPPERS if not any(name.startswith(prefix) for name in names)]
    while tensors and (
        before := [prefix for prefix in wrappers if all(n.startswith(prefix) for n in tensors)]
    ):
        tensors = {name.removeprefix(before[0]): value for name, value in tensors.items()}
    return {names.get(name, name): value for name, value in tensors.items()}


def _difference(state: Mapping[str, Any], net: nn.Module) -> str:
    """In what a state is not that of a network, in words; empty where nothing is found."""
    expected = net.state_dict()
    other = [
        f"{name} is {tuple(value.shape)} there and {tuple(expected[name].shape)} in the network"
        for name, value in state.items()
        if isinstance(value, Tensor) and name in expected and not is_lazy(expected[name])
        if value.shape != expected[name].shape
    ]
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    problems = {"it lacks": missing, "it also holds": unexpected, "of other shapes:": other}
    return "; ".join(f"{words} {_few(names)}" for words, names in problems.items() if names)


def _few(names: Sequence[str]) -> str:
    """The first few of many names.

    >>> _few(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    listed, more = ", ".join(visible(name[:200]) for name in names[:NAMED]), len(names) - NAMED
    return f"{listed} and {more} more" if more > 0 else listed


class StoredNetwork(nn.Module):
    """A classifier whose weights are read from its file at each call and forgotten after it.

    For members that do not fit into memory together: slow, and the same to the bit.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> net = nn.Linear(2, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "net.safetensors"
    ...     save_file(net.state_dict(), path)
    ...     images = torch.rand(4, 2)
    ...     StoredNetwork(path, lambda: nn.Linear(2, 3))(images).equal(net(images))
    True
    """

    digest: Tensor

    def __init__(self, path: Path | str, build: Build) -> None:
        super().__init__()
        self.path, self.build = Path(path), build
        self._loaded()  # what cannot be read says so now
        content = hashlib.sha256()
        with open_regular_file(self.path) as file:
            while block := file.read(2**20):
                content.update(block)
        # By which a run knows its teachers again, as it does by others' weights.
        self.register_buffer("digest", torch.tensor(list(content.digest()), dtype=torch.uint8))

    def forward(self, *inputs: Any, **named: Tensor) -> object:
        """What the network returns."""
        batch = pack(inputs, named)
        with torch.no_grad():
            return call_network(self._loaded().to(tensors_of(batch)[0].device).eval(), batch)

    def _loaded(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # building draws weights that are thrown away
            net = self.build()
        return load_weights(net, self.path)
