"""A network that stays on disk and comes into memory only while it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Build = Callable[[], nn.Module]


def load_weights(net: nn.Module, path: Path) -> nn.Module:
    """Fill a network with the weights in a file, safetensors or a state dictionary that torch saved.

    Nothing in the file is executed: torch's are read with `weights_only`.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a file of weights")
    try:
        safe = path.suffix == ".safetensors"
        net.load_state_dict(load_file(path) if safe else torch.load(path, "cpu", weights_only=True))
    except Exception as error:  # reading has errors of many kinds, and all mean this
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{path} does not hold the weights of a {type(net).__name__} ({reason}); give safetensors or a "
            "state dictionary, and the function that builds its network"
        ) from error
    return net


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
        content = hashlib.sha256(self.path.read_bytes()).digest()
        # By which a run knows its teachers again, as it does by others' weights.
        self.register_buffer("digest", torch.tensor(list(content), dtype=torch.uint8))

    def forward(self, images: Tensor) -> object:
        """What the network returns."""
        with torch.no_grad():
            return self._loaded().to(images.device).eval()(images)

    def _loaded(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # building draws weights that are thrown away
            net = self.build()
        return load_weights(net, self.path)
