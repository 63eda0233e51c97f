"""Classifiers by name: `timm:resnet18@a.safetensors`, `torchvision:resnet18@b.pth`, `hf:user/model`, `c.pt2`.

Weights are read as data. A `.pt2` is a program, which is run: give only such as you trust.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.deploy.hub_classifiers import open_classifier, timm_input
from ensbridge.deploy.saving import load
from ensbridge.deploy.saving.architecture import Architecture
from ensbridge.deploy.saving.folder import CONFIG, HUB, ZOO
from ensbridge.models.libraries import Library, build_network, import_library
from ensbridge.models.named import ImageInput, NamedNetwork, Normalise
from ensbridge.models.preprocessed import Preprocessed
from ensbridge.models.stored_network import load_weights, read_state, renamed
from ensbridge.utils.text import one_line

NAMES = "timm:NAME@FILE, torchvision:NAME@FILE, hf:USER/NAME, a model's folder or a .pt2"
_SETTING = re.compile(r"(.*),(size|mean|std|crop)=([^,=]*)", re.DOTALL)
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Member:
    """A classifier that was named, as a network of plain pixels from 0 to 1."""

    name: str  # as it was given
    net: nn.Module
    words: str  # what it is, in a line
    takes: ImageInput | None = None  # None where images go to it as they are
    class_names: tuple[str, ...] | None = None
    base_model: str | None = None  # on the hub
    license: str | None = None


@dataclass(frozen=True)
class Overrides:
    """What a user says of a network's input in place of what its library says."""

    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop: float | None = None

    def of(self, takes: ImageInput) -> ImageInput:
        """The input as the user says it is."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        try:
            return replace(takes, **given)
        except ValueError as error:
            raise ValueError(f"{error}; correct size=, mean=, std= or crop=") from error

    def over(self, other: Overrides) -> Overrides:
        """This, and what the other says where this says nothing."""
        return Overrides(**{k: v if v is not None else getattr(other, k) for k, v in vars(self).items()})


def open_member(text: str, overrides: Overrides | None = None, allow: Collection[str] = ()) -> Member:
    """The classifier of that name, on the CPU in evaluation mode.

    Behind the name there may be what its input is, as in `timm:resnet18@a.pt,size=32,mean=0.5,std=0.25`, with
    `mean=0.5/0.4/0.4` for a number a channel; `overrides` has it for a network that says nothing. `allow` is
    for saved models, as `load` takes it.

    >>> open_member("resnet18.safetensors")
    Traceback (most recent call last):
    ValueError: resnet18.safetensors holds weights and does not say of which network; write
    timm:NAME@resnet18.safetensors or torchvision:NAME@resnet18.safetensors
    """
    name, said = parse_settings(text)
    wanted = said.over(overrides or Overrides())
    library, colon, rest = name.partition(":")
    if colon and library in ("timm", "torchvision"):
        member = _from_library(library, rest, text, wanted)  # type: ignore[arg-type]
    elif name.startswith(ZOO):
        member = _from_saved(name, text, allow)
    elif name.startswith(HUB) or (Path(name) / CONFIG).is_file():
        member = _from_classifier(name, text, wanted) or _from_saved(name, text, allow)
    elif Path(name).suffix == ".pt2":
        member = _from_program(Path(name), text, said)  # what holds for all the others may be inside it
    elif Path(name).suffix in WEIGHTS:
        raise ValueError(
            f"{name} holds weights and does not say of which network; write timm:NAME@{name} or "
            f"torchvision:NAME@{name}"
        )
    else:
        raise ValueError(f"{text} is not a known classifier; give {NAMES}")
    member.net.eval()
    return member


def open_members(names: Sequence[str], overrides: Overrides | None = None) -> list[Member]:
    """The classifiers of several names, whose classes must be the same."""
    members = [open_member(name, overrides) for name in names]
    known = [member for member in members if member.class_names is not None]
    for member in known[1:]:
        if member.class_names != known[0].class_names:
            raise ValueError(
                f"{member.name} and {known[0].name} differ in the names of their classes or in their order; "
                "give members of the same classes"
            )
    return members


def check_source(member: Member) -> None:
    """Refuse a first member that could not be the source of a saved model, before anything is trained."""
    if not isinstance(member.net, NamedNetwork):
        raise ValueError(
            f"{member.name} comes first and is {member.words}, whose features no bridge can read; put a "
            "network of timm, torchvision or transformers first, and this one behind it as a teacher"
        )
    if Architecture.of(member.net).build is None:
        raise ValueError(
            f"{member.name} cannot be built without memory, so that no file could describe it safely; put "
            "another network first, and this one behind it as a teacher"
        )


def parse_settings(text: str) -> tuple[str, Overrides]:
    """A name, and what stands behind it of its input.

    >>> parse_settings("c.pt2,size=32,std=0.5")
    ('c.pt2', Overrides(size=(32, 32), mean=None, std=(0.5,), crop=None))
    """
    settings: dict[str, Any] = {}
    while match := _SETTING.fullmatch(text):
        text, key, value = match.groups()
        settings.setdefault(key, parse_setting(key, value))
    return text, Overrides(**settings)


def parse_setting(key: str, value: str) -> Any:
    """A size (32 or 32x48), or numbers with a slash or a comma between them."""
    try:
        if key == "size":
            height, width = (int(part) for part in (value if "x" in value else f"{value}x{value}").split("x"))
            return height, width
        numbers = tuple(float(part) for part in re.split("[/,]", value))
    except ValueError as error:
        example = "32 or 32x48" if key == "size" else "0.5 or 0.49/0.48/0.45"
        raise ValueError(f"{key} is {value!r}; give a value such as {example}") from error
    return numbers[0] if key == "crop" else numbers


# ------------------------------------------------------------------------------ timm and torchvision


def _from_library(library: Library, rest: str, text: str, wanted: Overrides) -> Member:
    name, at, weights = rest.partition("@")
    path = Path(weights)
    if at and path.is_dir() and library == "timm":
        member = _from_classifier(weights, text, wanted)
        if member is None or not isinstance(member.net, NamedNetwork) or member.net.name != name:
            raise ValueError(f"{weights} holds another network than timm's {name}; give hf:{weights}")
        return member
    if at and (path.suffix or path.exists() or library == "timm"):
        takes, _ = library_input(library, name)
        return _with_weights(library, name, path, takes, text, wanted)
    return _pretrained(library, name, weights, text, wanted)


def library_input(library: Library, name: str, weights: str = "") -> tuple[ImageInput, Any]:
    """What a library's network takes, as its pretrained weights do, and these weights' own description."""
    if library == "timm":
        timm = import_library("timm")
        if not timm.is_model(name.partition(".")[0]):
            raise ValueError(f"timm has no network {name!r}; timm.list_models() lists them")
        config = timm.get_pretrained_cfg(name)
        return timm_input({} if config is None else config.to_dict()), config
    models = import_library("torchvision").models
    if name not in models.list_models(module=models):
        raise ValueError(
            f"torchvision has no classifier {name!r}; torchvision.models.list_models() lists networks"
        )
    known = models.get_model_weights(name)
    if weights and weights not in known.__members__:
        there = ", ".join(known.__members__)
        raise ValueError(f"{weights} are no weights of torchvision's {name}; give a file, or one of {there}")
    entry = known[weights] if weights else known.DEFAULT
    made = entry.transforms()
    size = made.crop_size[0]
    takes = ImageInput(
        (size, size),
        mean=tuple(made.mean),
        std=tuple(made.std),
        interpolation=made.interpolation.value,
        crop=min(1.0, size / made.resize_size[0]),
    )
    return takes, entry


def _with_weights(
    library: Library, name: str, path: Path, takes: ImageInput, text: str, wanted: Overrides
) -> Member:
    name = name.partition(".")[0]  # a tag of timm's names pretrained weights, whose input is known by now
    state = read_state(path)
    classes = _size_along(0, "classes", (7, 11), library, name, state)
    if not classes:
        raise ValueError(f"{path} holds no last layer of a {name}, so these are not its weights; give theirs")
    channels = 3
    if library == "timm":
        channels = _size_along(1, "channels", (3, 1), library, name, state) or channels
    if channels != takes.channels:  # such as grey images, of which the library knows no mean
        takes = replace(takes, channels=channels, mean=(0.5,), std=(0.5,))
    net = NamedNetwork.of(library, name, classes, wanted.of(takes))
    load_weights(net.net, path)
    return _named(text, net)


def _pretrained(library: Library, name: str, weights: str, text: str, wanted: Overrides) -> Member:
    """A network with the weights that its library has for it, which it downloads once."""
    takes, entry = library_input(library, name, weights)
    takes = wanted.of(takes)
    if library == "timm" and entry is None:
        raise ValueError(f"timm has no weights for {name}; give a file of weights, timm:{name}@FILE")
    classes = entry.num_classes if library == "timm" else len(entry.meta["categories"])
    net = NamedNetwork.of(library, name.partition(".")[0], classes, takes)
    try:
        if library == "timm":
            there = import_library("timm").create_model(name, pretrained=True)
        else:
            there = import_library("torchvision").models.get_model(name, weights=entry)
    except Exception as error:  # of many HTTP libraries
        raise ValueError(
            f"the weights of {text} cannot be downloaded ({one_line(error)}); give a file, "
            f"{library}:{name}@FILE"
        ) from error
    net.net.load_state_dict(there.state_dict())
    if library == "timm":
        return _named(text, net, None, entry.hf_hub_id, getattr(entry, "license", None))
    return _named(text, net, tuple(entry.meta["categories"]))


def _size_along(
    axis: int, option: str, values: tuple[int, int], library: Library, name: str, state: Mapping[str, Any]
) -> int | None:
    """The size along an axis of the weights in which networks of a name differ, by an option of theirs."""
    size = library_input(library, name)[0].size
    nets = []
    for value in values:
        options: dict[str, Any] = {"classes": 7, "channels": 3, "size": size, "settings": {}, option: value}
        try:
            with torch.device("meta"):
                nets.append(build_network(library, name, **options))
        except (NotImplementedError, RuntimeError):
            nets.append(build_network(library, name, **options))
    shapes = [{key: tensor.shape for key, tensor in net.state_dict().items()} for net in nets]
    tensors = renamed(state, nets[0])
    for key in reversed(shapes[0]):
        weight = tensors.get(key)
        if shapes[0][key] != shapes[1].get(key) and isinstance(weight, Tensor) and weight.ndim > axis:
            return int(weight.shape[axis])
    return None


# ------------------------------------------------------------------------------ the rest


def _from_classifier(address: str, text: str, wanted: Overrides) -> Member | None:
    """A member of what a folder or the hub holds; None where that is a model of ours."""
    classifier = open_classifier(address, wanted.of)
    return None if classifier is None else _named(text, *classifier)


def _named(text: str, net: NamedNetwork, *origin: Any) -> Member:
    words = f"{net.title}, {net.classes} classes, {net.takes.words}"
    return Member(text, net, words, net.takes, *origin)


def _from_saved(name: str, text: str, allow: Collection[str]) -> Member:
    fast = load(name, allow=allow)
    names = None if fast.class_names is None else tuple(fast.class_names)
    base = name.removeprefix(HUB) if name.startswith(HUB) else None
    return Member(text, fast, "a saved model of ensbridge", None, names, base)


def _from_program(path: Path, text: str, wanted: Overrides) -> Member:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a file that torch.export.save wrote")
    try:
        net: nn.Module = _Program(torch.export.load(path).module())
    except Exception as error:  # of many kinds
        raise ValueError(
            f"{path} is no exported program ({one_line(error)}); give what torch.export.save wrote"
        ) from error
    if wanted == Overrides():
        return Member(text, net, "an exported program, of images as they are")
    if wanted.size is None:
        raise ValueError(f"{text} says how images are normalised; say their size too, such as ,size=224")
    count = len(wanted.mean or wanted.std or (0.0,))
    takes = wanted.of(ImageInput(wanted.size, max(count, 3), (0.0,), (1.0,)))
    return Member(text, Preprocessed(net, Normalise(takes)), f"an exported program, {takes.words}", takes)


class _Program(nn.Module):
    """An exported program, which knows no other mode than that of its export."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def train(self, mode: bool = True) -> _Program:
        """Nothing: a program has no modes."""
        return self

    def forward(self, images: Tensor) -> object:
        """What the program returns."""
        try:
            return self.program(images)
        except Exception as error:
            if "Guard failed" in str(error) or "Expected input" in str(error):
                raise ValueError(
                    f"an exported program does not take {len(images)} images of {tuple(images.shape[1:])} "
                    f"({one_line(error)}); export it with a free batch size, and give its size="
                ) from error
            raise
