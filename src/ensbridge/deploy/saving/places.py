"""Where a model lies: a folder, one that ships with ensbridge, or a repository of the Hugging Face hub."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

ZOO, HUB = "zoo:", "hf:"


def find_model(name: Path | str) -> Path:
    """The folder of a model: its own, "zoo:name" from the package, or "hf:user/name" from the hub.

    Where a folder of the hub's name lies here, as "hf:./model" does, it is taken.

    >>> find_model("zoo:nothing")
    Traceback (most recent call last):
    ValueError: zoo:nothing is not in the zoo; there are: zoo:cifar10, zoo:cifar10-2, zoo:cifar10-distilled
    """
    if isinstance(name, str) and name.startswith(ZOO):
        names = zoo_names()
        if name.removeprefix(ZOO) not in names:
            known = ", ".join(f"{ZOO}{known}" for known in names) or "none in this installation"
            raise ValueError(f"{name} is not in the zoo; there are: {known}")
        return _zoo() / name.removeprefix(ZOO)
    if isinstance(name, str) and name.startswith(HUB):
        if (local := Path(name.removeprefix(HUB))).is_dir():
            return local
        from ensbridge.deploy.saving.hub import fetch

        return fetch(name)
    return Path(name)


def zoo_names() -> list[str]:
    """What ships with the package."""
    return sorted(folder.name for folder in _zoo().iterdir() if (folder / "config.json").is_file())


def _zoo() -> Path:
    """The folder of the zoo, which is installed as files."""
    return Path(str(files("ensbridge"))) / "zoo"
