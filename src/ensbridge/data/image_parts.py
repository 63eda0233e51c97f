"""Images by a path, decoded when they are asked for: class folders, parquet, saved data sets, `.npz`.

Labels are optional. A set has parts (train, val, test), or is one part, "all".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from ensbridge.data.arrays import read_images
from ensbridge.data.dataset_info import DATASETS, class_names
from ensbridge.data.folder import SUFFIXES
from ensbridge.data.loader import ImageSet, collect
from ensbridge.data.reading import layout_of, open_splits
from ensbridge.data.stored_images import Decode, FileImages, ParquetImages, SavedImages, columns_of
from ensbridge.utils.extras import need
from ensbridge.utils.text import one_line

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
HELD_OUT = 10  # one of so many images is held out where there is no validation set


@dataclass(frozen=True)
class ImagePart:
    """A part of a set: images in memory, or decoded one by one, with their labels where these are known."""

    images: ImageSet | Dataset[Tensor]
    labels: tuple[int, ...] | None
    class_names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    @property
    def data(self) -> ImageSet | Dataset[Any]:
        """What `compress`, `fidelity` and `evaluate` take."""
        if isinstance(self.images, ImageSet):
            labels = None if self.labels is None else torch.tensor(self.labels)
            return ImageSet(self.images.images, labels)
        if self.labels is None:
            return self.images
        kind = _LabelledStream if isinstance(self.images, IterableDataset) else _Labelled
        return kind(self.images, self.labels)

    def subset(self, indices: Sequence[int]) -> ImagePart:
        """The images at indices, which of parquet must be in ascending order."""
        if isinstance(self.images, ImageSet):
            images: Any = self.images.subset(torch.tensor(indices))
        elif isinstance(self.images, ParquetImages):
            images = self.images.subset(indices)
        else:
            images = Subset(self.images, indices)
        return replace(
            self,
            images=images,
            labels=None if self.labels is None else tuple(self.labels[i] for i in indices),
        )

    def hold_out(self) -> tuple[ImagePart, ImagePart]:
        """All but every tenth image, and these."""
        held = list(range(HELD_OUT - 1, len(self), HELD_OUT))
        if not held:
            raise ValueError(f"{len(self)} images are too few to hold some out; give validation images")
        rest = [index for index in range(len(self)) if index % HELD_OUT != HELD_OUT - 1]
        return self.subset(rest), self.subset(held)

    def shuffled(self) -> ImagePart:
        """The images in an order that tells nothing of their classes, always the same one.

        Whoever takes the first of class folders would have images of the first classes alone. Parquet is read
        in its own order.
        """
        if isinstance(self.images, ParquetImages):
            return self
        return self.subset(torch.randperm(len(self), generator=torch.Generator().manual_seed(0)).tolist())

    def in_memory(self, limit: float) -> ImagePart:
        """The part with its images in memory where a stream of parquet fits into so many bytes."""
        if not isinstance(self.images, ParquetImages):
            return self
        first = next(iter(self.images.subset([0])))
        if first.nbytes * len(self) > limit:
            return self
        return replace(self, images=collect(self.images))

    def in_order_of(self, names: Sequence[str] | None) -> ImagePart:
        """The part with its classes, which may be some of `names`, numbered as `names` has them."""
        if self.labels is None:
            return self
        known = self.class_names or names
        if known is not None:
            _check_labels(self.labels, len(known))
        if self.class_names is None or names is None or tuple(names) == self.class_names:
            return self
        numbers = _numbers_in(self.class_names, names)
        return replace(self, labels=tuple(numbers[label] for label in self.labels), class_names=tuple(names))


def open_parts(source: str, decode: Decode, root: Path | str | None = None) -> dict[str, ImagePart]:
    """The parts of a set: that of a known name in `root`, or what a path leads to."""
    path = Path(source)
    if source in DATASETS:
        return _of_splits(source, root, class_names(source))
    if not path.exists():
        raise ValueError(f"{source} does not exist, nor is it a known set; those are: {', '.join(DATASETS)}")
    if path.suffix == ".npz":
        whole = read_images(path)
        return _of_splits(source, root, None) if whole is None else {"all": _in_memory(whole, None)}
    if path.suffix == ".parquet":
        return {"all": _parquet([path], decode)}
    if path.is_dir():
        return _of_folder(path, decode, root)
    raise ValueError(f"{path} is no set of images; give a folder, an .npz or a .parquet")


def _of_folder(path: Path, decode: Decode, root: Path | str | None) -> dict[str, ImagePart]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved_sets(path, decode)
    if layout_of(path) is not None:
        return _of_splits(str(path), root, None)
    files = sorted([*path.glob("*.parquet"), *path.glob("data/*.parquet")])
    if files:
        by_part: dict[str, list[Path]] = {}
        for file in files:
            by_part.setdefault(SPLITS.get(file.name.split("-")[0].split(".")[0], "all"), []).append(file)
        return {part: _parquet(some, decode) for part, some in by_part.items()}
    parts = {
        SPLITS[child.name]: child
        for child in sorted(path.iterdir())
        if child.is_dir() and child.name in SPLITS
    }
    if not parts:
        return {"all": _files(path, None, decode)}
    first = _files(parts.get("train", next(iter(parts.values()))), None, decode)
    return {name: _files(folder, first.class_names, decode) for name, folder in parts.items()}


def _in_memory(images: ImageSet, names: tuple[str, ...] | None) -> ImagePart:
    labels = None if images.labels is None else tuple(images.labels.tolist())
    return ImagePart(images, labels, names)


def _of_splits(source: str, root: Path | str | None, names: Sequence[str] | None) -> dict[str, ImagePart]:
    splits = open_splits(source, root)
    known = None if names is None else tuple(names)
    return {
        part: _in_memory(images, known) for part, images in zip(("train", "val", "test"), splits, strict=True)
    }


def _files(folder: Path, names: tuple[str, ...] | None, decode: Decode) -> ImagePart:
    """Images in folders named by their classes, or without labels in one folder."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._")
    if not classes:
        paths = _images_in(folder)
        if not paths:
            raise ValueError(f"{folder} holds no images ({', '.join(SUFFIXES)}); give a folder that does")
        return ImagePart(FileImages(paths, decode), None)
    known = tuple(path.name for path in classes) if names is None else names
    paths, labels = [], []
    for path in classes:
        if path.name not in known:
            raise ValueError(
                f"{path} is a class that the training images have not: {', '.join(known[:5])}, …"
            )
        inside = _images_in(path)
        paths += inside
        labels += [known.index(path.name)] * len(inside)
    if not paths:
        raise ValueError(f"{folder} has folders without images ({', '.join(SUFFIXES)}); fill them")
    return ImagePart(FileImages(paths, decode), tuple(labels), known)


def _images_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def _parquet(paths: Sequence[Path], decode: Decode) -> ImagePart:
    need("parquet")
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(paths[0])
        image, label, names = columns_of(schema, paths[0])
        rows = sum(parquet.read_metadata(path).num_rows for path in paths)
        values = None
        if label is not None:
            values = [
                value
                for path in paths
                for value in parquet.read_table(path, columns=[label])[label].to_pylist()
            ]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{paths[0]} cannot be read ({one_line(error)}); give whole parquet files"
        ) from error
    labels, names = _numbered(values, names, paths[0])
    return ImagePart(ParquetImages(paths, image, decode, range(rows)), labels, names)


def _saved_sets(path: Path, decode: Decode) -> dict[str, ImagePart]:
    need("datasets")
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # of many kinds
        raise ValueError(f"{path} cannot be opened by datasets ({one_line(error)}); save it again") from error
    sets = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"all": saved}
    parts = {}
    for name, rows in sets.items():
        image, label, _ = columns_of(rows.features.arrow_schema, path)
        names = getattr(rows.features[label], "names", None) if label else None
        labels, names = _numbered(
            None if label is None else list(rows[label]), tuple(names) if names else None, path
        )
        plain = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        parts[SPLITS.get(str(name), str(name))] = ImagePart(SavedImages(plain, image, decode), labels, names)
    return parts


def _numbered(
    values: Sequence[Any] | None, names: tuple[str, ...] | None, where: object
) -> tuple[tuple[int, ...] | None, tuple[str, ...] | None]:
    """Labels as whole numbers; texts are numbered in their order."""
    if values is None:
        return None, names
    if all(isinstance(value, int) for value in values):
        return tuple(values), names
    if all(isinstance(value, str) for value in values):
        known = names or tuple(sorted(set(values)))
        return tuple(known.index(value) for value in values), known
    raise ValueError(f"{where} has labels that are neither whole numbers nor texts; give an image one each")


# ------------------------------------------------------------------------------ labels


class _Labelled(Dataset[tuple[Tensor, int]]):
    def __init__(self, images: Any, labels: Sequence[int]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.images[index], self.labels[index]


class _LabelledStream(IterableDataset[tuple[Tensor, int]]):
    def __init__(self, images: Any, labels: Sequence[int]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return zip(self.images, self.labels, strict=True)


def _check_labels(labels: Sequence[int], classes: int) -> None:
    wrong = next((label for label in labels if not 0 <= label < classes), None)
    if wrong is not None:
        raise ValueError(
            f"the data has the label {wrong}, and {classes} classes; give labels from 0 to {classes - 1}"
        )


def _numbers_in(classes: Sequence[str], names: Sequence[str]) -> list[int]:
    """The number of each of the data's classes among the model's, by its name alone."""
    theirs, ours = [_plain(name) for name in names], [_plain(name) for name in classes]
    if ours == theirs:
        return list(range(len(ours)))
    counts = Counter(theirs), Counter(ours)
    numbers = {plain: number for number, plain in enumerate(theirs)}
    for name, plain in zip(classes, ours, strict=True):
        if any(count[plain] != 1 for count in counts):
            trouble = "is none" if plain not in numbers else "is the name of several"
            raise ValueError(
                f"the data has {len(classes)} classes ({_first(classes)}), of which {name!r} {trouble} of "
                f"the model's {len(names)} ({_first(names)}); call the data's classes as the model does"
            )
    return [numbers[plain] for plain in ours]


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _plain(name: str) -> str:
    """A class's name as it is compared: without case, with one kind of space."""
    return " ".join(name.lower().replace("_", " ").split())
