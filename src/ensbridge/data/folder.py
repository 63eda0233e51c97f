"""A folder of images in folders named by their classes, with or without train/, val/ and test/ above them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ensbridge.data.checks import check_size, image_set
from ensbridge.data.digits import Splits
from ensbridge.data.image_io import LARGEST_FILE, decode, pillow
from ensbridge.data.loader import ImageSet
from ensbridge.utils.files import read_file
from ensbridge.utils.progress import Stage, silent

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")
_PARTS = ("train", "val", "test")
_SHARE = 10  # one of so many is held out for a part that is missing

Files = list[tuple[Path, int]]


def class_folders(folder: Path | str) -> tuple[str, ...]:
    """The names of the classes of an image folder, in the order of their labels."""
    folder = Path(folder)
    top = folder / "train" if (folder / "train").is_dir() else folder
    return tuple(path.name for path in _folders(top))


def read_image_folder(folder: Path | str, stage: Stage = silent) -> Splits:
    """The set in `folder/train/<class>/*.png` and so on, or in `folder/<class>/*.png`.

    Classes are numbered in alphabetical order. Where `val` or `test` is missing, it is the last tenth of each
    class's training images by their names. All images must have one size; grey ones become colour.
    """
    folder, classes = Path(folder), class_folders(folder)
    pillow()
    if len(classes) < 2:
        raise ValueError(
            f"{folder} has {len(classes)} folders of images; give one for each class, at least two, or "
            "train/, val/ and test/ with such folders inside"
        )
    parts = {name: folder / name for name in _PARTS if (folder / name).is_dir()}
    if parts and "train" not in parts:
        raise ValueError(
            f"{folder} has {' and '.join(parts)} but no train; name the training images' folder so"
        )
    train = _listed(parts.get("train", folder), classes)
    others: list[Files] = []
    for name in ("test", "val"):
        if name in parts:
            held = _listed(parts[name], classes)
        else:
            train, held = _hold_out(train, classes)
        others.append(held)
    test, val = others
    return Splits(*_decoded((train, val, test), folder, stage))


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one of images")
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._")


def _listed(folder: Path, classes: Sequence[str]) -> Files:
    """The images under a folder of classes."""
    files: Files = []
    for class_folder in _folders(folder):
        if class_folder.name not in classes:
            raise ValueError(
                f"{class_folder} is a class that the training images lack: {', '.join(classes[:5])}, …"
            )
        inside = sorted(path for path in class_folder.iterdir() if path.suffix.lower() in SUFFIXES)
        inside = [path for path in inside if not path.name.startswith(".")]
        if not inside:
            raise ValueError(
                f"{class_folder} holds no images ({', '.join(SUFFIXES)}); fill it, or take it out"
            )
        files += [(path, classes.index(class_folder.name)) for path in inside]
    if not files:
        raise ValueError(f"{folder} has no folders of images; give one for each class")
    return files


def _hold_out(files: Files, classes: Sequence[str]) -> tuple[Files, Files]:
    """Files without the last tenth of each class, and those."""
    kept: Files = []
    held: Files = []
    for label, name in enumerate(classes):
        of_class = [file for file in files if file[1] == label]
        count = max(1, len(of_class) // _SHARE)
        if len(of_class) <= count:
            raise ValueError(f"class {name} has too few images to hold one out; give more, or val/ and test/")
        kept += of_class[:-count]
        held += of_class[-count:]
    return kept, held


def _decoded(parts: Sequence[Files], folder: Path, stage: Stage) -> list[ImageSet]:
    advance = stage("reading", sum(map(len, parts)), "images")
    first = parts[0][0][0]
    height, width, _ = _pixels(first).shape
    paths = [path for files in parts for path, _ in files]
    stored = sum(path.stat().st_size for path in paths if path.exists())
    check_size(3 * height * width * len(paths), stored, str(folder))
    made = []
    for files in parts:
        images = np.empty((len(files), 3, height, width), np.uint8)
        for number, (path, _) in enumerate(files):
            pixels = _pixels(path)
            if pixels.shape[:2] != (height, width):
                size = f"{pixels.shape[1]}×{pixels.shape[0]}"
                raise ValueError(f"{path} is {size}, {first.name} is {width}×{height}; bring all to one size")
            images[number] = pixels.transpose(2, 0, 1)
            advance(1)
        made.append(image_set(images, [label for _, label in files], str(folder)))
    return made


def _pixels(path: Path) -> np.ndarray:
    try:
        return decode(read_file(path, LARGEST_FILE), str(path))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is a link to nothing; restore it, or take it out") from error
