"""The one front door to sets on disk: by name, as an `.npz`, or as a folder whose layout is recognised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ensbridge.data.arrays import read_npz
from ensbridge.data.cifar import CIFAR10, CIFAR100, read_cifar
from ensbridge.data.dataset_info import DATASETS, DatasetInfo, default_root
from ensbridge.data.digits import Splits
from ensbridge.data.folder import read_image_folder
from ensbridge.data.image_io import LARGEST_FILE
from ensbridge.data.imagenet64 import IMAGENET64, LARGEST_BATCH, read_imagenet64
from ensbridge.data.sources import from_folder
from ensbridge.data.svhn import FILES, read_svhn
from ensbridge.data.tiny_imagenet import read_tiny_imagenet
from ensbridge.utils.progress import Stage, silent
from ensbridge.utils.text import one_line


def open_splits(source: Path | str, root: Path | str | None = None, stage: Stage = silent) -> Splits:
    """A set in its three parts, as uint8 images (N, C, H, W) on the CPU.

    `source` is the name of a known set, which lies in `root` (by default the folder that ENSBRIDGE_DATA
    names, or data/), or the path of an `.npz`, of a set in its official layout, or of a folder of images in
    folders named by class. A path that looks like a name is written ./name.

    >>> open_splits("cifar10", root="/nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: cifar10 is not in /nowhere (--root or ENSBRIDGE_DATA names another folder); to get it: ...
    """
    if isinstance(source, str) and source in DATASETS:
        known, folder = DATASETS[source], Path(default_root() if root is None else root)
        path = find(known, folder)
        if path is None:
            elsewhere = "--root or ENSBRIDGE_DATA names another folder"
            raise ValueError(f"{source} is not in {folder} ({elsewhere}); {known.remedy(folder)}")
        splits = open_path(path, stage)
        known.check(splits, path)
        return splits
    if not Path(source).exists():
        names = ", ".join(DATASETS)
        raise ValueError(f"{source} does not exist, nor is it a known set; those are: {names}")
    return open_path(Path(source), stage)


def find(known: DatasetInfo, root: Path) -> Path | None:
    """Where a known set lies in `root`: as an `.npz`, or in its official layout."""
    for path in (root / f"{known.name}.npz", root / known.folder):
        if path.exists():
            return path
    return None


def open_path(path: Path, stage: Stage = silent) -> Splits:
    """The set in a file or folder, by what lies there."""
    try:
        if not path.is_dir():
            if path.suffix != ".npz":
                raise ValueError(f"{path} is not an .npz; give one, or a folder in a known layout")
            return read_npz(path)
        if (layout := layout_of(path)) is not None:
            return layout.read(path, stage)
        return read_image_folder(path, stage)
    except MemoryError as error:
        raise ValueError(
            f"{path} needs more memory than there is ({one_line(error)}); free some, or give a smaller set"
        ) from error


class Layout(NamedTuple):
    """A folder's layout, recognised by any of its files, so that those that are missing can be named."""

    title: str
    marks: tuple[str, ...]
    read: Callable[[Path, Stage], Splits]


def _cifar_10_c(path: Path, stage: Stage) -> Splits:
    raise ValueError(
        f"{path} holds corrupted test images and none for training; ensbridge.data.read_corrupted reads them"
    )


LAYOUTS = (
    Layout("CIFAR-10's batches", CIFAR10.files, lambda path, _: read_cifar(from_folder(path), CIFAR10, path)),
    Layout(
        "Tiny ImageNet's folders",
        ("wnids.txt", "val/val_annotations.txt"),
        lambda path, stage: read_tiny_imagenet(from_folder(path, LARGEST_FILE), path, stage),
    ),
    Layout(
        "ImageNet64's batches",
        IMAGENET64.files,
        lambda path, stage: read_imagenet64(from_folder(path, LARGEST_BATCH), path, stage),
    ),
    Layout(
        "CIFAR-100's files", CIFAR100.files, lambda path, _: read_cifar(from_folder(path), CIFAR100, path)
    ),
    Layout("SVHN's files", FILES, lambda path, _: read_svhn(from_folder(path), path)),
    Layout("CIFAR-10-C's arrays", ("labels.npy",), _cifar_10_c),
)


def layout_of(folder: Path) -> Layout | None:
    """The layout of a folder, or None where it has the files of none."""
    for layout in LAYOUTS:
        if any((folder / mark).is_file() for mark in layout.marks):
            return layout
    return None
