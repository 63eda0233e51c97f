"""Images by a path, decoded when they are read: class folders, parquet, saved data sets, `.npz`.

Labels are optional. A set has parts (train, val, test), or is one part, "all".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from ensbridge.data.arrays import read_images
from ensbridge.data.dataset_info import DATASETS, class_names
from ensbridge.data.entries import IMAGE_KEYS, LABEL_KEYS
from ensbridge.data.examples import ImageSet
from ensbridge.data.folder import SUFFIXES, images_in, list_images, subfolders
from ensbridge.data.image_io import LARGEST_FILE
from ensbridge.data.loader import collect
from ensbridge.data.reading import layout_of, open_splits
from ensbridge.utils.extras import need
from ensbridge.utils.files import read_file
from ensbridge.utils.text import one_line

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
HELD_OUT = 10  # one of so many images is held out where there is no validation set

ClassNames = tuple[str, ...]
Decode = Callable[[bytes], Tensor]  # an image file's content as uint8 (C, H, W), of one shape for all


@dataclass(frozen=True)
class ImagePart:
    """A part of a set: images in memory, or decoded one by one, with their labels where these are known."""

    images: ImageSet | Dataset[Tensor]
    labels: tuple[int, ...] | None
    class_names: ClassNames | None = None

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    @property
    def data(self) -> ImageSet | Dataset[Any]:
        """The images with their labels, as `compress`, `fidelity` and `evaluate` accept them."""
        if isinstance(self.images, ImageSet):
            labels = None if self.labels is None else torch.tensor(self.labels)
            return ImageSet(self.images.images, labels)
        if self.labels is None:
            return self.images
        kind = _LabelledStream if isinstance(self.images, IterableDataset) else _Labelled
        return kind(self.images, self.labels)

    def subset(self, indices: Sequence[int]) -> ImagePart:
        """The images at indices, which for parquet must be in ascending order."""
        if isinstance(self.images, ImageSet):
            images: Any = self.images.subset(torch.tensor(indices))
        elif isinstance(self.images, ParquetImages):
            images = self.images.subset(indices)
        else:
            images = Subset(self.images, indices)
        labels = None if self.labels is None else tuple(self.labels[index] for index in indices)
        return replace(self, images=images, labels=labels)

    def hold_out(self) -> tuple[ImagePart, ImagePart]:
        """All but every tenth image, and these."""
        held = list(range(HELD_OUT - 1, len(self), HELD_OUT))
        if not held:
            raise ValueError(f"{len(self)} images are too few to hold some out; give validation images")
        rest = [index for index in range(len(self)) if index % HELD_OUT != HELD_OUT - 1]
        return self.subset(rest), self.subset(held)

    def shuffled(self) -> ImagePart:
        """The images in a fixed random order, so that the first images are not all of the first classes.

        Parquet is read in its own order.
        """
        if isinstance(self.images, ParquetImages):
            return self
        return self.subset(torch.randperm(len(self), generator=torch.Generator().manual_seed(0)).tolist())

    def in_memory(self, limit: float) -> ImagePart:
        """The part with the images of parquet in memory, where they fit into `limit` bytes."""
        if not isinstance(self.images, ParquetImages):
            return self
        first = next(iter(self.images.subset([0])))
        return self if first.nbytes * len(self) > limit else replace(self, images=collect(self.images))

    def in_order_of(self, names: Sequence[str] | None) -> ImagePart:
        """The part with its classes, which may be some of `names`, numbered in the order of `names`."""
        if self.labels is None:
            return self
        known = self.class_names or names
        wrong = [label for label in self.labels if known is not None and not 0 <= label < len(known)]
        if known is not None and wrong:
            raise ValueError(
                f"the data has the label {wrong[0]}, and {len(known)} classes; give labels from 0 to "
                f"{len(known) - 1}"
            )
        if self.class_names is None or names is None or tuple(names) == self.class_names:
            return self
        numbers = _numbers_in(self.class_names, names)
        return replace(self, labels=tuple(numbers[label] for label in self.labels), class_names=tuple(names))


def open_parts(source: str, decode: Decode, root: Path | str | None = None) -> dict[str, ImagePart]:
    """The parts of a set, given by its known name (in `root`) or by a path."""
    path = Path(source)
    if source in DATASETS:
        return _of_splits(source, root, class_names(source))
    if not path.exists():
        raise ValueError(f"{source} does not exist, nor is it a known set; those are: {', '.join(DATASETS)}")
    if path.suffix == ".npz":
        whole = read_images(path)
        return _of_splits(source, root) if whole is None else {"all": _of_memory(whole)}
    if path.suffix == ".parquet":
        return {"all": _of_parquet([path], decode)}
    if path.is_dir():
        return _of_folder(path, decode, root)
    raise ValueError(f"{path} is not a set of images; give a folder, an .npz or a .parquet")


def _of_folder(path: Path, decode: Decode, root: Path | str | None) -> dict[str, ImagePart]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _of_saved(path, decode)
    if layout_of(path) is not None:
        return _of_splits(str(path), root)
    by_part: dict[str, list[Path]] = {}
    for file in sorted([*path.glob("*.parquet"), *path.glob("data/*.parquet")]):
        by_part.setdefault(SPLITS.get(file.name.split("-")[0].split(".")[0], "all"), []).append(file)
    if by_part:
        return {part: _of_parquet(files, decode) for part, files in by_part.items()}
    parts = {SPLITS[p.name]: p for p in sorted(path.iterdir()) if p.is_dir() and p.name in SPLITS}
    if not parts:
        return {"all": _of_files(path, None, decode)}
    first = _of_files(parts.get("train", next(iter(parts.values()))), None, decode)
    return {name: _of_files(folder, first.class_names, decode) for name, folder in parts.items()}


def _of_memory(images: ImageSet, names: ClassNames | None = None) -> ImagePart:
    return ImagePart(images, None if images.labels is None else tuple(images.labels.tolist()), names)


def _of_splits(source: str, root: Path | str | None, names: ClassNames | None = None) -> dict[str, ImagePart]:
    splits = open_splits(source, root)
    return {part: _of_memory(images, names) for part, images in splits._asdict().items()}


def _of_files(folder: Path, names: ClassNames | None, decode: Decode) -> ImagePart:
    """Images in folders named by their classes, or without labels in one folder."""
    if classes := subfolders(folder):
        names = tuple(path.name for path in classes) if names is None else names
        files = list_images(folder, names, allow_empty=True)
        labels = tuple(label for _, label in files)
        return ImagePart(FileImages([path for path, _ in files], decode), labels, names)
    if not (paths := images_in(folder)):
        raise ValueError(f"{folder} holds no images ({', '.join(SUFFIXES)}); give a folder that does")
    return ImagePart(FileImages(paths, decode), None)


def _of_parquet(paths: Sequence[Path], decode: Decode) -> ImagePart:
    need("parquet")
    from pyarrow import parquet

    try:
        image, label, names = columns_of(parquet.read_schema(paths[0]), paths[0])
        rows = sum(parquet.read_metadata(path).num_rows for path in paths)
        values = None
        if label is not None:
            columns = [parquet.read_table(path, columns=[label])[label] for path in paths]
            values = [value for column in columns for value in column.to_pylist()]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{paths[0]} cannot be read ({one_line(error)}); give complete parquet files"
        ) from error
    labels, names = _numbered(values, names, paths[0])
    return ImagePart(ParquetImages(paths, image, decode, range(rows)), labels, names)


def _of_saved(path: Path, decode: Decode) -> dict[str, ImagePart]:
    """The parts of a data set that Hugging Face's `datasets` saved to disk."""
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
        values = None if label is None else list(rows[label])
        labels, names = _numbered(values, tuple(names) if names else None, path)
        plain = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        parts[SPLITS.get(str(name), str(name))] = ImagePart(SavedImages(plain, image, decode), labels, names)
    return parts


# ------------------------------------------------------------------------------ stored images


class FileImages(Dataset[Tensor]):
    """Image files, each decoded when it is read."""

    def __init__(self, paths: Sequence[Path], decode: Decode) -> None:
        self.paths, self.decode = list(paths), decode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        path = self.paths[index]
        try:
            return self.decode(read_file(path, LARGEST_FILE))
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{path} cannot be read ({one_line(error)}); restore or remove it") from error


class ParquetImages(IterableDataset[Tensor]):
    """The images of parquet files in their order, of which a few hundred are held at a time."""

    def __init__(self, paths: Sequence[Path], column: str, decode: Decode, rows: Sequence[int]) -> None:
        self.paths, self.column, self.decode, self.rows = list(paths), column, decode, list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def subset(self, indices: Sequence[int]) -> ParquetImages:
        """The images at indices in ascending order."""
        return ParquetImages(self.paths, self.column, self.decode, [self.rows[index] for index in indices])

    def __iter__(self) -> Iterator[Tensor]:
        wanted = iter(self.rows)
        row = next(wanted, None)
        for number, content in enumerate(self._contents()):
            if number == row:
                try:
                    yield self.decode(content)
                except ValueError as error:
                    raise ValueError(
                        f"row {number} of {self.paths[0]} and its successors cannot be read ({error}); "
                        "remove it"
                    ) from error
                row = next(wanted, None)

    def _contents(self) -> Iterator[bytes]:
        from pyarrow import parquet

        for path in self.paths:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(64, columns=[self.column]):
                    for value in batch.column(0).to_pylist():
                        yield image_bytes(value, path)


class SavedImages(Dataset[Tensor]):
    """The images of a data set of Hugging Face's `datasets`."""

    def __init__(self, rows: Any, column: str, decode: Decode) -> None:
        self.rows, self.column, self.decode = rows, column, decode

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        value = self.rows[index][self.column]
        content = value.get("bytes") if isinstance(value, dict) else None
        if content is None and isinstance(value, dict) and value.get("path"):
            content = read_file(Path(value["path"]), LARGEST_FILE)
        return self.decode(image_bytes(content, f"row {index}"))


def image_bytes(value: Any, where: object) -> bytes:
    """The bytes of one entry of a column of images: {"bytes": …, "path": …}, or bytes alone."""
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise ValueError(f"{where} has an entry without the bytes of an image; save the images in it")
    return content


def columns_of(schema: Any, where: object) -> tuple[str, str | None, tuple[str, ...] | None]:
    """The columns of images and of labels in a parquet file, and the classes' names where it has them."""
    names = schema.names
    image, label = (next((key for key in keys if key in names), None) for keys in (IMAGE_KEYS, LABEL_KEYS))
    if image is None:
        raise ValueError(
            f"{where} has the columns {', '.join(names[:8])}; name that of its images one of "
            f"{', '.join(IMAGE_KEYS)}"
        )
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        known = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        known = None
    return image, label, tuple(map(str, known)) if known else None


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


def _numbered(
    values: Sequence[Any] | None, names: ClassNames | None, where: object
) -> tuple[tuple[int, ...] | None, ClassNames | None]:
    """Labels as integers; strings are numbered in alphabetical order."""
    if values is None:
        return None, names
    if all(isinstance(value, int) for value in values):
        return tuple(values), names
    if all(isinstance(value, str) for value in values):
        known = names or tuple(sorted(set(values)))
        return tuple(known.index(value) for value in values), known
    raise ValueError(f"{where} has labels that are neither integers nor strings; give one for each image")


def _numbers_in(classes: Sequence[str], names: Sequence[str]) -> list[int]:
    """The number of each of the data's classes among the model's, matched by name."""

    def normalized(name: str) -> str:
        return " ".join(name.lower().replace("_", " ").split())

    def first(names: Sequence[str]) -> str:
        return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")

    theirs, ours = [normalized(name) for name in names], [normalized(name) for name in classes]
    if ours == theirs:
        return list(range(len(ours)))
    counts = Counter(theirs), Counter(ours)
    numbers = {name: number for number, name in enumerate(theirs)}
    for name, plain in zip(classes, ours, strict=True):
        if any(count[plain] != 1 for count in counts):
            trouble = "is none" if plain not in numbers else "is the name of several"
            raise ValueError(
                f"the data has {len(classes)} classes ({first(classes)}), of which {name!r} {trouble} of "
                f"the model's {len(names)} ({first(names)}); rename the data's classes to match"
            )
    return [numbers[plain] for plain in ours]
