"""Saving into a folder, whole or not at all, and loading from one that a stranger may have made."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ensbridge.deploy.saving.architecture import Architecture, by_recipe, on_cpu, on_meta
from ensbridge.deploy.saving.description import Description, Facts, is_ours, read_description
from ensbridge.deploy.saving.weights import (
    COPY_AGAIN,
    GIVE_SAME,
    LARGEST_WEIGHTS,
    check_values,
    compare,
    digest,
    fill,
    follow_dtype,
    layout_of,
    layout_of_file,
    opened,
    pack,
)
from ensbridge.models import Preprocessed
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.files import MOST_JSON, locked, open_folder, read_file, read_json, write_atomically

if TYPE_CHECKING:
    from ensbridge.evaluation.fidelity import Fidelity
    from ensbridge.evaluation.scores import Scores

ZOO, HUB = "zoo:", "hf:"
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
# Where new weights wait for the description that makes them valid.
PENDING = f".{WEIGHTS}.new"
# By its first lines a card of ours is known, so that nobody else's README is ever overwritten.
CARD_START = "---\nlibrary_name: ensbridge\n"
CARD_FOLDER = '"path/to/this/folder"'  # where a card says what to load
EXPORTS = ("model.onnx", "model.pt2")
TRIES = 5  # at loading, while somebody saves


def save(
    fast: FastEnsemble,
    folder: Path | str,
    *,
    build: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    image_shape: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    scores: Scores | Fidelity | Mapping[str, Any] | None = None,
    license: str | None = None,
    base_models: Sequence[str] = (),
    dataset: str | None = None,
) -> None:
    """Write a model; `FastEnsemble.save` says how it is used."""
    if build is None and arguments is not None:
        raise ValueError(
            "arguments were given without build; say what they build, such as 'package.models:net'"
        )
    source = Architecture.of(fast.source) if build is None else by_recipe(fast.source, build, arguments)
    weights, tied = pack(fast)
    facts = Facts.of(fast, image_shape, class_names)
    description = Description.of(fast, source, hashlib.sha256(weights).hexdigest(), tied, facts)
    from ensbridge.deploy.saving.card import write_card  # loading needs none of what a card is made of

    card = write_card(fast, description, scores, license, base_models, dataset)
    path = check_target(folder)  # before the lock, which leaves a file there
    with locked(path):
        _check_ours(path)
        _finish_interrupted(path)
        # config.json names its weights by their digest: the moment it is replaced, so is the model.
        write_atomically(path / PENDING, weights)
        write_atomically(path / CARD, card.encode())
        write_atomically(path / CONFIG, description.to_json().encode())
        os.replace(path / PENDING, path / WEIGHTS)
        for name in EXPORTS:  # of the model that is gone
            (path / name).unlink(missing_ok=True)


def check_target(folder: Path | str) -> Path:
    """The folder that a model can be saved into, made if it is not there; one with other files is refused."""
    path = open_folder(folder)
    _check_ours(path)
    return path


def load(folder: Path | str, source: nn.Module | None = None, *, allow: Collection[str] = ()) -> FastEnsemble:
    """Load what `FastEnsemble.save` wrote, on the CPU and in evaluation mode; nothing of it is executed.

    Args:
        folder: A folder, "zoo:cifar10", a model that ships with ensbridge, or "hf:user/name", one on the
            Hugging Face hub, with "@" and a version behind it.
        source: The source, where it is no network of ensbridge: an instance that the saved weights are put
            into.
        allow: What may be imported and called to build the source that the folder names.
            `"mypackage.models:make_net"` allows this class or function to be called with arguments that the
            folder chooses; `"mypackage"` allows its modules to be imported, and its public `nn.Module`
            classes to be constructed with such arguments.

    >>> import tempfile, torch
    >>> from ensbridge.methods import Bridge
    >>> from ensbridge.models import ResNet, ScoreNet
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> fast = FastEnsemble(ResNet((1,), (8,), 3, stem=8), [Bridge(score)], feature="stages.0.0").eval()
    >>> images = torch.rand(2, 3, 8, 8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fast.save(folder)
    ...     torch.equal(load(folder)(images), fast(images))
    True
    """
    path = find_model(folder)
    allowed = [allow] if isinstance(allow, str) else list(allow)
    for _ in range(TRIES):
        before = _stamps(path)
        try:
            model = _load(path, source, allowed)
        except ValueError:
            if _stamps(path) == before:
                raise
        else:
            if _stamps(path) == before:
                return model
        # Somebody saved in between: what was read may be parts of two models.
    raise ValueError(f"{path} is being written to again and again; load it when that has ended")


def _load(folder: Path, source: nn.Module | None, allowed: Collection[str]) -> FastEnsemble:
    """Load from a folder that nobody writes to meanwhile."""
    config = folder / CONFIG
    if not config.is_file():
        absent = "is a file" if folder.exists() else "does not exist"
        what = "holds no config.json" if folder.is_dir() else absent
        raise ValueError(f"{folder} {what}; give a folder that FastEnsemble.save wrote")
    description = read_description(config)
    if source is not None:
        _check_source(source, description)
    builds = description.networks(source, allowed, config)
    path = _weights_of(folder, description.sha256)
    with opened(path) as file:
        there = layout_of_file(file, str(path))
        # First without memory: a description can ask for terabytes, the file shows what there is.
        nets = [on_meta(build, len(there)) for build in builds]
        remedy = COPY_AGAIN if source is None else GIVE_SAME
        bare = description.assemble(nets[0], nets[1:], config)
        compare(there, layout_of(bare), description.tied, str(path), remedy)
        nets = [on_cpu(build) for build in builds]
        model = description.assemble(nets[0], nets[1:], config)
        compare(there, layout_of(model), description.tied, str(path), remedy)
        tensors = {name: file.get_tensor(name) for name in there}
        check_values(model, tensors, str(path))
        fill(model, tensors, description.tied)
    for net in nets:
        follow_dtype(net)
    return model.eval()


def _stamps(path: Path) -> list[tuple[int, int, int] | None]:
    """By what a replaced file is known, for the files that make a model."""
    stamps: list[tuple[int, int, int] | None] = []
    for name in (CONFIG, WEIGHTS, PENDING):
        try:
            status = (path / name).stat()
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:  # none is there, or none that can be read, as loading will say
            stamps.append(None)
    return stamps


def _check_ours(path: Path) -> None:
    config, card = path / CONFIG, path / CARD
    remedy = "choose another folder"
    if card.exists() and not read_file(card, MOST_JSON, remedy).startswith(CARD_START.encode()):
        raise ValueError(f"{card} is not the card of a saved model; {remedy}")
    if config.exists() and not is_ours(read_json(config)):
        raise ValueError(f"{config} describes no saved model; {remedy}")
    if not config.exists() and (path / WEIGHTS).exists():
        raise ValueError(f"{path} holds a {WEIGHTS} without its {CONFIG}; {remedy}")


def _finish_interrupted(path: Path) -> None:
    """Give weights their name whose description was written before a kill."""
    config, pending = path / CONFIG, path / PENDING
    if config.exists() and pending.is_file() and digest(pending) == read_json(config).get("sha256"):
        os.replace(pending, path / WEIGHTS)


def _weights_of(folder: Path, sha256: str) -> Path:
    weights = folder / WEIGHTS
    for path in (weights, folder / PENDING):
        if path.is_file() and path.stat().st_size <= LARGEST_WEIGHTS and digest(path) == sha256:
            return path
    if not weights.is_file():
        raise ValueError(f"{folder} holds no {WEIGHTS}; {COPY_AGAIN}")
    if weights.stat().st_size > LARGEST_WEIGHTS:
        raise ValueError(f"{weights} has more than {LARGEST_WEIGHTS:,} bytes; {COPY_AGAIN}")
    raise ValueError(
        f"{weights} is not the file that {CONFIG} was written with: truncated, damaged or another "
        f"model's; {COPY_AGAIN}"
    )


def _check_source(source: nn.Module, description: Description) -> None:
    if not isinstance(source, nn.Module):
        raise ValueError(f"source is a {type(source).__name__}; give the network itself, an nn.Module")
    if any(tensor.is_meta for tensor in (*source.parameters(), *source.buffers())):
        raise ValueError("source has tensors on the meta device, which hold nothing; build it on the CPU")
    saved = description.source.name.rpartition(".")[2]
    if saved == Preprocessed.__name__ and not isinstance(source, Preprocessed):
        raise ValueError(
            f"source is a {type(source).__name__}, and the model was compressed with preprocess=; pass "
            "source=ensbridge.models.Preprocessed(net, function)"
        )
    if type(source).__name__ != saved:
        warnings.warn(
            f"the saved source was a {saved}, the given one is a {type(source).__name__}; check that they "
            "compute the same",
            stacklevel=4,
        )


# ------------------------------------------------------------------------------ where a model lies


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
