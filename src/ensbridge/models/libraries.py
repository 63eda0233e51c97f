"""Networks of timm, torchvision and transformers by name: exactly these builders, and none of their weights.

A saved model may name one of them, so nothing here downloads, reads a file or runs code that a name or a
setting chose: a name is looked up among the library's own classifiers, and settings are plain numbers and
texts that the class of a known configuration declares.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn

from ensbridge.utils.extras import is_installed, need
from ensbridge.utils.text import short

Library = Literal["timm", "torchvision", "transformers"]

# The image classifiers of transformers that are built of plain layers, by their `model_type`. Others take a
# network of another library by name, or text beside images. LeViT's takes time that is
# quadratic in the number of positions.
TRANSFORMERS = {
    "beit": "BeitForImageClassification",
    "bit": "BitForImageClassification",
    "convnext": "ConvNextForImageClassification",
    "convnextv2": "ConvNextV2ForImageClassification",
    "cvt": "CvtForImageClassification",
    "data2vec-vision": "Data2VecVisionForImageClassification",
    "deit": "DeiTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    "efficientnet": "EfficientNetForImageClassification",
    "focalnet": "FocalNetForImageClassification",
    "hiera": "HieraForImageClassification",
    "mobilenet_v1": "MobileNetV1ForImageClassification",
    "mobilenet_v2": "MobileNetV2ForImageClassification",
    "mobilevit": "MobileViTForImageClassification",
    "mobilevitv2": "MobileViTV2ForImageClassification",
    "poolformer": "PoolFormerForImageClassification",
    "pvt": "PvtForImageClassification",
    "pvt_v2": "PvtV2ForImageClassification",
    "regnet": "RegNetForImageClassification",
    "resnet": "ResNetForImageClassification",
    "segformer": "SegformerForImageClassification",
    "swiftformer": "SwiftFormerForImageClassification",
    "swin": "SwinForImageClassification",
    "swinv2": "Swinv2ForImageClassification",
    "vit": "ViTForImageClassification",
    "vit_msn": "ViTMSNForImageClassification",
}
_NAME = re.compile(r"[a-z0-9_-]{1,100}", re.ASCII)
_LARGEST_NUMBER, _MOST_ITEMS = 2**15, 100  # in a setting; constructors loop over what they are given


def import_library(library: Library) -> Any:
    """The library, or ValueError that says how to install it."""
    need(library)
    if library == "torchvision" or is_installed("torchvision"):  # which the other two import
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _import_torchvision()
    return import_module(library)


def build_network(
    library: Library, name: str, classes: int, channels: int, size: Sequence[int], settings: Mapping[str, Any]
) -> nn.Module:
    """A classifier with the weights that its constructor draws."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{short(name)} is not the name of a network of {library}; give one such as 'resnet18'"
        )
    if settings and library != "transformers":
        raise ValueError(f"settings are {short(dict(settings))}; networks of {library} have none")
    if library == "transformers":
        return _from_transformers(name, classes, settings)
    return (_from_timm if library == "timm" else _from_torchvision)(name, classes, channels, size)


def _from_timm(name: str, classes: int, channels: int, size: Sequence[int]) -> nn.Module:
    timm = import_library("timm")
    if not timm.is_model(name):
        raise ValueError(f"timm has no network {name!r}; timm.list_models() lists them")
    config = timm.get_pretrained_cfg(name)
    # The others take images of any size.
    fixed = config is not None and config.fixed_input_size and tuple(config.input_size[1:]) != tuple(size)
    options = {"img_size": tuple(size)} if fixed else {}
    return timm.create_model(name, pretrained=False, num_classes=classes, in_chans=channels, **options)


def _from_torchvision(name: str, classes: int, channels: int, size: Sequence[int]) -> nn.Module:
    models = import_library("torchvision").models
    if name not in models.list_models(module=models):
        raise ValueError(
            f"torchvision has no classifier {name!r}; torchvision.models.list_models() lists networks"
        )
    if channels != 3:
        raise ValueError(f"channels are {channels}; the networks of torchvision take 3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights to be drawn in another way, which are replaced
        return models.get_model(name, weights=None, num_classes=classes)


def _from_transformers(name: str, classes: int, settings: Mapping[str, Any]) -> nn.Module:
    transformers = import_library("transformers")
    if name not in TRANSFORMERS:
        raise ValueError(
            f"{name!r} is not a supported kind of classifier; there are: {', '.join(TRANSFORMERS)}"
        )
    config = transformers.CONFIG_MAPPING[name]
    known = known_settings(config)
    for key, value in settings.items():
        if key not in known or not _is_plain(value):
            raise ValueError(f"settings have {short(key)} as {short(value)}, which {name} does not take")
        if not _is_small(value):
            raise ValueError(
                f"settings have {short(key)} as {short(value)}; give numbers up to {_LARGEST_NUMBER}, "
                f"at most {_MOST_ITEMS} in a list and together up to {2 * _LARGEST_NUMBER}"
            )
    return getattr(transformers, TRANSFORMERS[name])(config(**settings, num_labels=classes))


def known_settings(config: type) -> set[str]:
    """What a class of configurations declares itself, beyond what all of them have."""
    base = import_module("transformers").PretrainedConfig
    added = set(inspect.signature(config).parameters) - set(inspect.signature(base).parameters)
    return {name for name in added if not name.startswith("_") and name not in ("kwargs", "num_labels")}


def plain_settings(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a `config.json` of transformers builds the network."""
    known = known_settings(import_library("transformers").CONFIG_MAPPING[name])
    return {key: value for key, value in config.items() if key in known and _is_plain(value)}


def _is_plain(value: object) -> bool:
    """Whether a setting is a number, a short text, or a list of these or of such lists."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and len(value) < 100)
    )


def _is_small(value: object) -> bool:
    """Whether a plain setting's numbers, those of a list also together, are such as real networks have."""
    items = _flat(value)
    numbers = [abs(item) for item in items if isinstance(item, int | float)]
    within = all(number <= _LARGEST_NUMBER for number in numbers)  # which NaN is not
    return within and len(items) <= _MOST_ITEMS and sum(numbers) <= 2 * _LARGEST_NUMBER


def _flat(value: object) -> list[object]:
    """The items of a list and of the lists in it, or the one value."""
    return [item for part in value for item in _flat(part)] if isinstance(value, list | tuple) else [value]


_DECLARED: list[torch.library.Library] = []  # which undoes what it declared when it is collected


def _import_torchvision() -> None:
    """Import torchvision, also one that was built for another torch, such as one for CUDA beside one without.

    Such a one cannot load its compiled operators, and fails because it describes two of them. No classifier
    uses them, so declared, and never defined, they do.
    """
    try:
        import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error) or _DECLARED:
            raise
        _DECLARED.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in ("nms", "qnms"):
            _DECLARED[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        import_module("torchvision")
