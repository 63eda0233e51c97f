"""Images in files, decoded when they are read: image files, parquet, saved data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ensbridge.data.entries import IMAGE_KEYS, LABEL_KEYS
from ensbridge.data.image_io import LARGEST_FILE
from ensbridge.utils.files import read_file
from ensbridge.utils.text import one_line

Decode = Callable[[bytes], Tensor]  # an image file's content as uint8 (C, H, W), of one shape for all


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
