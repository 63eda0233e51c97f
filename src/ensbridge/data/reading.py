"""Open and list the sets on disk: by name, as an `.npz`, or as a folder whose layout is recognised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ensbridge.data.arrays import read_npz, shapes_in
from ensbridge.data.checks import checksum
from ensbridge.data.cifar import CIFAR10, CIFAR100, read_cifar
from ensbridge.data.dataset_info import DATASETS, DatasetInfo, default_root
from ensbridge.data.digits import Splits
from ensbridge.data.folder import read_image_folder
from ensbridge.data.image_io import LARGEST_FILE
from ensbridge.data.imagenet import IMAGENET64, LARGEST_BATCH, read_imagenet64, read_tiny_imagenet
from ensbridge.data.sources import from_folder
from ensbridge.data.svhn import FILES, read_svhn
from ensbridge.utils.progress import Stage, silent
from ensbridge.utils.text import one_line


def open_splits(source: Path | str, root: Path | str | None = None, stage: Stage = silent) -> Splits:
    """A set in its three parts, as uint8 images (N, C, H, W) on the CPU.

    `source` is the name of a known set in `root` (by default the folder that ENSBRIDGE_DATA names, or data/),
    or the path of an `.npz`, of a set in its official layout, or of a folder of images in
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
    """The path of a known set in `root`, as an `.npz` or in its official layout; None if it is not there."""
    for path in (root / f"{known.name}.npz", root / known.folder):
        if path.exists():
            return path
    return None


def open_path(path: Path, stage: Stage = silent) -> Splits:
    """The set in an `.npz` or in a folder of any layout."""
    layout = layout_of(path)
    if not path.is_dir() and path.suffix != ".npz":
        raise ValueError(f"{path} is not an .npz; give one, or a folder in a known layout")
    try:
        if not path.is_dir():
            return read_npz(path)
        return read_image_folder(path, stage) if layout is None else layout.read(path, stage)
    except MemoryError as error:
        raise ValueError(
            f"{path} needs more memory than there is ({one_line(error)}); free some, or give a smaller set"
        ) from error


class Layout(NamedTuple):
    """A folder's layout, recognised by any of its files, so that missing ones can be named."""

    title: str
    files: tuple[str, ...]
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
    """The layout of a folder, or None where none matches."""
    for layout in LAYOUTS:
        if any((folder / name).is_file() for name in layout.files):
            return layout
    return None


# ------------------------------------------------------------------------------ listing


class ListedSet(NamedTuple):
    """A set, its path (None if it is not there), and a description or, if it is not valid, the error."""

    name: str
    path: Path | None
    description: str
    valid: bool = True


def list_sets(root: Path | str, check: bool = False, stage: Stage = silent) -> list[ListedSet]:
    """The known sets, present or not, then other sets in `root`; `check` reads and verifies each."""
    root = Path(root)
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is a file where a folder is expected; choose another path")
    paths = {known.name: find(known, root) for known in DATASETS.values()}
    sets = [_describe(name, path, root, check, stage) for name, path in paths.items()]
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        known = path in paths.values() or path.name.startswith(".")
        if not known and (path.suffix == ".npz" or (path.is_dir() and layout_of(path))):
            sets.append(_describe(path.name, path, root, check, stage))
    return sets


def _describe(name: str, path: Path | None, root: Path, check: bool, stage: Stage) -> ListedSet:
    known = DATASETS.get(name)
    if path is None:
        return ListedSet(name, None, f"not there; {known.remedy(root)}" if known else "not there")
    try:
        return ListedSet(name, path, _verified(known, path, stage) if check else _summary(path))
    except ValueError as error:
        return ListedSet(name, path, str(error), valid=False)


def _summary(path: Path) -> str:
    """A description without reading the images."""
    if path.is_dir():
        layout = layout_of(path)
        return layout.title if layout else "a folder of images"
    shapes = shapes_in(path)
    counts = {part: shapes.get(f"{part}_images") for part in ("train", "val", "test")}
    parts = [f"{shape[0]:,} {part}" for part, shape in counts.items() if shape]
    if not parts:
        raise ValueError(f"{path} has no train_images")
    return f"{' + '.join(parts)} images, {path.stat().st_size / 1e6:,.0f} MB"


def _verified(known: DatasetInfo | None, path: Path, stage: Stage) -> str:
    splits = open_path(path, stage)
    counts = "{:,} train + {:,} val + {:,} test images".format(*map(len, splits))
    if known is None:
        return f"{counts}; sha256 {checksum(splits)[:16]}…, in any order"
    known.verify(splits, path)
    if not known.checksum:
        return f"{counts}; numbers and shapes are right (no checksum of its pixels is known)"
    if not known.ordered:
        return f"{counts}; checksum right, in any order"
    official = checksum(splits, in_order=True) == known.ordered
    return f"{counts}; checksum right, in {'the official' if official else 'another'} order"
