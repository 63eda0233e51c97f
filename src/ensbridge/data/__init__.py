"""Data: images in memory, their augmentation, and the sets that recipes use.

Names load on first use, so that the corruptions, which need no torch, start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensbridge.data.arrays import read_npz as read_npz
    from ensbridge.data.arrays import write_npz as write_npz
    from ensbridge.data.augment import Augment as Augment
    from ensbridge.data.checks import checksum as checksum
    from ensbridge.data.cifar import corruptions_in as corruptions_in
    from ensbridge.data.cifar import read_corrupted as read_corrupted
    from ensbridge.data.corruptions import CORRUPTIONS as CORRUPTIONS
    from ensbridge.data.dataset_info import CIFAR10_CLASSES as CIFAR10_CLASSES
    from ensbridge.data.dataset_info import CIFAR100_CLASSES as CIFAR100_CLASSES
    from ensbridge.data.dataset_info import DATASETS as DATASETS
    from ensbridge.data.dataset_info import class_names as class_names
    from ensbridge.data.digits import Splits as Splits
    from ensbridge.data.digits import load_digits as load_digits
    from ensbridge.data.download import fetch_set as fetch_set
    from ensbridge.data.examples import Examples as Examples
    from ensbridge.data.examples import ImageSet as ImageSet
    from ensbridge.data.folder import class_folders as class_folders
    from ensbridge.data.list_datasets import list_sets as list_sets
    from ensbridge.data.loader import as_image_set as as_image_set
    from ensbridge.data.ood import OOD_SETS as OOD_SETS
    from ensbridge.data.ood import ood_images as ood_images
    from ensbridge.data.reading import open_splits as open_splits
    from ensbridge.data.stream import Stream as Stream

_HOMES = {
    "read_npz": "arrays",
    "write_npz": "arrays",
    "Augment": "augment",
    "checksum": "checks",
    "corruptions_in": "cifar",
    "read_corrupted": "cifar",
    "Splits": "digits",
    "load_digits": "digits",
    "fetch_set": "download",
    "class_folders": "folder",
    "CORRUPTIONS": "corruptions",
    "CIFAR10_CLASSES": "dataset_info",
    "CIFAR100_CLASSES": "dataset_info",
    "DATASETS": "dataset_info",
    "class_names": "dataset_info",
    "list_sets": "list_datasets",
    "Examples": "examples",
    "ImageSet": "examples",
    "as_image_set": "loader",
    "OOD_SETS": "ood",
    "ood_images": "ood",
    "open_splits": "reading",
    "Stream": "stream",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(import_module(f"ensbridge.data.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ensbridge.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
