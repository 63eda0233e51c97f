"""Data: images in memory, their augmentation, and the sets that recipes use.

Names load on first use, so that the corruptions, which need no torch, start without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensbridge.utils.lazy import lazy_names

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
    from ensbridge.data.loader import as_image_set as as_image_set
    from ensbridge.data.ood import OOD_SETS as OOD_SETS
    from ensbridge.data.ood import ood_images as ood_images
    from ensbridge.data.reading import list_sets as list_sets
    from ensbridge.data.reading import open_splits as open_splits
    from ensbridge.data.stream import Stream as Stream

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "arrays": "read_npz write_npz",
        "augment": "Augment",
        "checks": "checksum",
        "cifar": "corruptions_in read_corrupted",
        "corruptions": "CORRUPTIONS",
        "dataset_info": "CIFAR10_CLASSES CIFAR100_CLASSES DATASETS class_names",
        "digits": "Splits load_digits",
        "download": "fetch_set",
        "examples": "Examples ImageSet",
        "folder": "class_folders",
        "loader": "as_image_set",
        "ood": "OOD_SETS ood_images",
        "reading": "list_sets open_splits",
        "stream": "Stream",
    },
)
