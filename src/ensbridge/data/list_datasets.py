"""What lies in a folder of data sets."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ensbridge.data.arrays import shapes_in
from ensbridge.data.checks import checksum
from ensbridge.data.dataset_info import DATASETS, DatasetInfo
from ensbridge.data.digits import Splits
from ensbridge.data.reading import find, layout_of, open_path
from ensbridge.utils.progress import Stage, silent


class ListedSet(NamedTuple):
    """A set, where it lies (None: nowhere), and what can be said of it."""

    name: str
    path: Path | None
    words: str
    sound: bool = True


def list_sets(root: Path | str, check: bool = False, stage: Stage = silent) -> list[ListedSet]:
    """The known sets, there or not, then what else lies in `root`; `check` reads each and verifies it."""
    root = Path(root)
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is a file where a folder is expected; choose another path")
    paths = {known.name: find(known, root) for known in DATASETS.values()}
    sets = [_describe(name, path, root, check, stage) for name, path in paths.items()]
    others = sorted(root.iterdir()) if root.is_dir() else []
    for path in others:
        known = path in paths.values() or path.name.startswith(".")
        if not known and (path.suffix == ".npz" or (path.is_dir() and layout_of(path))):
            sets.append(_describe(path.name, path, root, check, stage))
    return sets


def _describe(name: str, path: Path | None, root: Path, check: bool, stage: Stage) -> ListedSet:
    known = DATASETS.get(name)
    if path is None:
        return ListedSet(name, None, f"not there; {known.remedy(root)}" if known else "not there")
    try:
        return ListedSet(name, path, _checked(known, path, stage) if check else _glance(path))
    except ValueError as error:
        return ListedSet(name, path, str(error), sound=False)


def _glance(path: Path) -> str:
    """What can be said without reading the images."""
    if path.is_dir():
        layout = layout_of(path)
        return layout.title if layout else "a folder of images"
    shapes = shapes_in(path)
    parts = [
        f"{shapes[f'{part}_images'][0]:,} {part}"
        for part in ("train", "val", "test")
        if shapes.get(f"{part}_images")
    ]
    if not parts:
        raise ValueError(f"{path} has no train_images")
    return f"{' + '.join(parts)} images, {path.stat().st_size / 1e6:,.0f} MB"


def _checked(known: DatasetInfo | None, path: Path, stage: Stage) -> str:
    splits = open_path(path, stage)
    if known is None:
        return f"{_counts(splits)}; sha256 {checksum(splits)[:16]}…, in any order"
    known.verify(splits, path)
    return f"{_counts(splits)}; {_verdict(known, splits)}"


def _verdict(known: DatasetInfo, splits: Splits) -> str:
    if not known.checksum:
        return "numbers and shapes are right (no checksum of its pixels is known)"
    if not known.ordered:
        return "checksum right, in whichever order"
    official = checksum(splits, in_order=True) == known.ordered
    return "checksum right, in the official order" if official else "checksum right, in an order of its own"


def _counts(splits: Splits) -> str:
    return "{:,} train + {:,} val + {:,} test images".format(*map(len, splits))
