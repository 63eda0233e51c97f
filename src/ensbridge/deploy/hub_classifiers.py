"""Image classifiers as the Hugging Face hub has them, in a folder or on it: of transformers and of timm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ensbridge.deploy.saving.description import is_ours
from ensbridge.deploy.saving.folder import HUB
from ensbridge.deploy.saving.hub import download_files
from ensbridge.models.libraries import TRANSFORMERS, import_library, plain_settings
from ensbridge.models.named import ImageInput, NamedNetwork
from ensbridge.models.stored_network import load_weights
from ensbridge.utils.extras import need
from ensbridge.utils.files import read_json
from ensbridge.utils.text import one_line, short

FILES = (
    "config.json",
    "preprocessor_config.json",
    "README.md",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model.bin",
)
_RESAMPLING: dict[object, str] = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # by Pillow's numbers


def open_classifier(
    address: str, overridden: Callable[[ImageInput], ImageInput]
) -> tuple[NamedNetwork, tuple[str, ...] | None, str | None, str | None] | None:
    """The classifier in a folder, or at "hf:user/name@version"; None where it is a model of ensbridge's.

    With its classes' names, its own name on the hub and its licence, as far as they are known. Its input may
    be overridden.
    """
    name = address.removeprefix(HUB)
    local = Path(name).is_dir()
    if not local and name.startswith((".", "/", "~")):
        raise ValueError(
            f"{name} is no folder; give one with a classifier, or a name on the hub, hf:user/name"
        )
    if not local:
        need("hub")
    folder = Path(name) if local else download_files(name, FILES)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{name} holds no config.json; give a folder or a name of an image classifier")
    config = read_json(path)
    if is_ours(config):
        return None
    if not isinstance(config, dict):
        raise ValueError(f"{path} describes no classifier; give one of transformers or timm")
    licence = _licence(folder / "README.md")
    base = None if local else name.partition("@")[0]
    kind = config.get("model_type")
    if "architecture" not in config and not (isinstance(kind, str) and kind in TRANSFORMERS):
        if kind is not None and not isinstance(kind, str):
            raise _not_described(path, TypeError(f"its model_type is {short(kind)}"))
        raise ValueError(
            f"{path} is of the kind {short(kind)}, which is not built by name; those are: "
            f"{', '.join(TRANSFORMERS)}"
        )
    try:
        if "architecture" in config:
            described = config.get("pretrained_cfg") or config
            takes, names = timm_input(described), _names(described.get("label_names"))
        else:
            takes, names = _read_preprocessor(folder, config), _labels(config)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _not_described(path, error) from error
    build = _build_timm if "architecture" in config else _build_transformers
    return build(folder, config, overridden(takes)), names, base, licence


def _not_described(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} describes no classifier ({one_line(error)}); download it again")


def timm_input(config: Mapping[str, Any]) -> ImageInput:
    """What a network of timm takes, by the description of its weights."""
    channels, height, width = config.get("input_size") or (3, 224, 224)
    name = config.get("interpolation") or "bicubic"
    return ImageInput(
        (int(height), int(width)),
        int(channels),
        tuple(config.get("mean") or (0.485, 0.456, 0.406)),
        tuple(config.get("std") or (0.229, 0.224, 0.225)),
        name if name in _RESAMPLING.values() else "bicubic",
        float(config.get("crop_pct") or 0.875),
        config.get("crop_mode") == "squash",
    )


def _build_timm(folder: Path, config: Mapping[str, Any], takes: ImageInput) -> NamedNetwork:
    classes = config.get("num_classes")
    if not isinstance(classes, int) or not isinstance(config["architecture"], str):
        raise ValueError(f"{folder / 'config.json'} says no num_classes or no architecture; write them there")
    net = NamedNetwork.of("timm", config["architecture"], classes, takes)
    files = [folder / name for name in ("model.safetensors", "pytorch_model.bin")]
    there = [path for path in files if path.is_file()]
    if not there:
        raise ValueError(f"{folder} holds no model.safetensors; give a folder with the weights")
    load_weights(net.net, there[0])
    return net


def _build_transformers(folder: Path, config: Mapping[str, Any], takes: ImageInput) -> NamedNetwork:
    """The network, filled by transformers itself, which knows how its names of weights have changed."""
    kind, classes = config["model_type"], _count_labels(config)
    try:
        net = NamedNetwork.of("transformers", kind, classes, takes, plain_settings(kind, config))
    except Exception as error:  # whatever constructors end with
        raise _not_described(folder / "config.json", error) from error
    library = import_library("transformers")
    if not any(folder.glob("*.safetensors")) and not (folder / "pytorch_model.bin").is_file():
        raise ValueError(f"{folder} holds no model.safetensors; give a folder with the weights")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    load: Any = partial(getattr(library, TRANSFORMERS[kind]).from_pretrained, folder, local_files_only=True)
    try:
        # With our own configuration: the folder's may name code.
        filled, report = load(config=net.net.config, output_loading_info=True)
    except Exception as error:  # whatever reading weights ends with
        raise ValueError(
            f"{folder} does not hold the weights of its config.json ({one_line(error)}); download it again"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{folder} lacks weights of the classifier ({', '.join(missing[:3])}); give one that was trained "
            "to classify"
        )
    net.net.load_state_dict(
        {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in filled.state_dict().items()
        }
    )
    return net


def _count_labels(config: Mapping[str, Any]) -> int:
    if isinstance(config.get("id2label"), dict):
        return len(config["id2label"])
    count = config.get("num_labels", 2)  # which is what transformers takes
    return count if isinstance(count, int) else 2


def _labels(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    labels = config.get("id2label")
    if not isinstance(labels, dict):
        return None
    try:
        names = [str(labels[key]) for key in sorted(labels, key=int)]
    except ValueError:
        return None
    made_up = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    return None if made_up else _names(names)


def _names(names: object) -> tuple[str, ...] | None:
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return None


def _read_preprocessor(folder: Path, config: Mapping[str, Any]) -> ImageInput:
    """What `preprocessor_config.json` says, and what transformers takes where it says nothing."""
    path = folder / "preprocessor_config.json"
    said = read_json(path) if path.is_file() else {}
    said = said if isinstance(said, dict) else {}
    channels = config.get("num_channels", 3)
    if not isinstance(channels, int) or not 1 <= channels <= 4:
        raise ValueError(f"its num_channels are {short(channels)}")
    size, crop = said.get("size"), said.get("crop_size")
    default = config.get("image_size", 224)
    default = tuple(default) if isinstance(default, list) else (default, default)
    short_side = (
        size.get("shortest_edge") if isinstance(size, dict) else size if isinstance(size, int) else None
    )
    squash, share = short_side is None, 1.0
    target = _height_width(size) or ((short_side, short_side) if short_side else default)
    if said.get("do_center_crop") and (cut := _height_width(crop)):
        resized = short_side or min(target)
        target, share = cut, min(1.0, min(cut) / max(1, resized))
    elif short_side and isinstance(said.get("crop_pct"), float):  # ConvNeXt's: below 384 it is cropped
        squash, share = short_side >= 384, 1.0 if short_side >= 384 else said["crop_pct"]
    mean, std = said.get("image_mean") or [0.5] * channels, said.get("image_std") or [0.5] * channels
    if said.get("do_normalize") is False:
        mean, std = [0.0] * channels, [1.0] * channels
    resample = _RESAMPLING.get(said.get("resample", 2), "bicubic")
    return ImageInput(tuple(target), channels, tuple(mean), tuple(std), resample, share, squash)  # type: ignore[arg-type]


def _height_width(size: object) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and isinstance(size.get("height"), int) and isinstance(size.get("width"), int):
        return size["height"], size["width"]
    return None


def _licence(card: Path) -> str | None:
    """The licence that a model card states, read as text."""
    if not card.is_file():
        return None
    head = card.read_text(encoding="utf-8", errors="replace")[:10_000].split("---")
    for line in head[1].splitlines() if len(head) > 2 and not head[0].strip() else ():
        key, _, value = line.partition(":")
        if key == "license" and value.strip():
            return value.strip().strip("'\"")[:100]
    return None
