"""A folder of images in folders named by their classes, with or without train/, val/ and test/ above them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ensbridge.data.checks import check_size, decode_images
from ensbridge.data.digits import Splits
from ensbridge.data.image_io import LARGEST_FILE, decode
from ensbridge.utils.files import read_file
from ensbridge.utils.progress import Stage, silent

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")
_HELD_OUT = 10  # one of so many images is held out for a part that is missing

Files = list[tuple[Path, int]]  # paths and labels


def class_folders(folder: Path | str) -> tuple[str, ...]:
    """The names of the classes of an image folder, in the order of their labels."""
    folder = Path(folder)
    top = folder / "train" if (folder / "train").is_dir() else folder
    return tuple(path.name for path in subfolders(top))


def read_image_folder(folder: Path | str, stage: Stage = silent) -> Splits:
    """The set in `folder/train/<class>/*.png` and so on, or in `folder/<class>/*.png`.

    Classes are numbered in alphabetical order. Where `val` or `test` is missing, it is the last tenth of each
    class's training images by their names. All images must have one size; grey ones become colour.
    """
    folder, classes = Path(folder), class_folders(folder)
    if len(classes) < 2:
        raise ValueError(
            f"{folder} has {len(classes)} folders of images; give one for each class, at least two, or "
            "train/, val/ and test/ with such folders inside"
        )
    parts = {name: folder / name for name in ("train", "val", "test") if (folder / name).is_dir()}
    if parts and "train" not in parts:
        raise ValueError(f"{folder} has {' and '.join(parts)} but no train; give training images in train/")
    files = {"train": list_images(parts.get("train", folder), classes)}
    for name in ("test", "val"):
        if name in parts:
            files[name] = list_images(parts[name], classes)
        else:
            files["train"], files[name] = _hold_out(files["train"], classes)
    return _decode_parts([files["train"], files["val"], files["test"]], folder, stage)


def subfolders(folder: Path) -> list[Path]:
    """The folders of classes, in alphabetical order."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one of images")
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._")


def images_in(folder: Path) -> list[Path]:
    """The image files in a folder, in alphabetical order, without hidden ones."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def list_images(folder: Path, classes: Sequence[str], allow_empty: bool = False) -> Files:
    """The images in the class folders of a folder, with their labels."""
    files: Files = []
    for class_folder in subfolders(folder):
        if class_folder.name not in classes:
            known = ", ".join(classes[:5])
            raise ValueError(f"{class_folder} is a class that the training images do not have: {known}, …")
        inside = images_in(class_folder)
        if not inside and not allow_empty:
            raise ValueError(f"{class_folder} holds no images ({', '.join(SUFFIXES)}); fill or remove it")
        files += [(path, classes.index(class_folder.name)) for path in inside]
    if not files:
        raise ValueError(f"{folder} has no folders with images ({', '.join(SUFFIXES)}); fill them")
    return files


def _hold_out(files: Files, classes: Sequence[str]) -> tuple[Files, Files]:
    """Files without the last tenth of each class, and those."""
    kept: Files = []
    held: Files = []
    for label, name in enumerate(classes):
        of_class = [file for file in files if file[1] == label]
        count = max(1, len(of_class) // _HELD_OUT)
        if len(of_class) <= count:
            raise ValueError(f"class {name} has too few images to hold one out; give more, or val/ and test/")
        kept += of_class[:-count]
        held += of_class[-count:]
    return kept, held


def _decode_parts(parts: Sequence[Files], folder: Path, stage: Stage) -> Splits:
    paths = [path for files in parts for path, _ in files]
    advance = stage("reading", len(paths), "images")
    height, width, _ = decode(_read(paths[0]), str(paths[0])).shape
    stored = sum(path.stat().st_size for path in paths if path.exists())
    check_size(3 * height * width * len(paths), stored, str(folder))
    return Splits(
        *(
            decode_images(
                [(str(path), partial(_read, path), label) for path, label in files],
                (height, width),
                str(folder),
                advance,
            )
            for files in parts
        )
    )


def _read(path: Path) -> bytes:
    try:
        return read_file(path, LARGEST_FILE)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is a broken link; restore or remove it") from error
