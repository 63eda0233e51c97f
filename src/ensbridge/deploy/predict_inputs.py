"""What `predict` is given: image files, folders, globs, parquet, `.npz` and tar shards, read part by part."""

from __future__ import annotations

import glob
import os
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ensbridge.data.folder import SUFFIXES
from ensbridge.data.image_io import LARGEST_FILE
from ensbridge.data.image_parts import columns_of
from ensbridge.data.npy import Header, read_header
from ensbridge.deploy.batch import Entry, Unreadable
from ensbridge.utils.extras import need
from ensbridge.utils.files import open_regular_file
from ensbridge.utils.text import one_line

TABLES = (".parquet", ".npz", ".tar", ".tar.gz", ".tgz")


class AbstractInput(ABC):
    """Images in a fixed order, of which any part can be read without the others being held."""

    @property
    @abstractmethod
    def name(self) -> str:
        """By which a run knows it again."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """The images from `start` to `stop`, each by its name."""

    def cut(self, start: int, stop: int) -> tuple[AbstractInput, int, int]:
        """What is needed for these images alone, and which of its images they are."""
        return self, start, stop


@dataclass(frozen=True)
class Files(AbstractInput):
    """Image files."""

    paths: Sequence[str]

    @property
    def name(self) -> str:
        """The files' names."""
        return "\n".join(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """The files, which are opened by whoever decodes them."""
        return ((path, Path(path)) for path in self.paths[start:stop])

    def cut(self, start: int, stop: int) -> tuple[AbstractInput, int, int]:
        """These files' names, of what may be millions."""
        return Files(self.paths[start:stop]), 0, stop - start


@dataclass(frozen=True)
class ParquetRows(AbstractInput):
    """The images of a parquet file, named by their rows."""

    path: str
    column: str
    rows: int

    @classmethod
    def open(cls, path: str) -> ParquetRows:
        """Look at what a file holds."""
        need("parquet")
        from pyarrow import parquet

        try:
            return cls(
                path, columns_of(parquet.read_schema(path), path)[0], parquet.read_metadata(path).num_rows
            )
        except OSError as error:
            raise _damaged(path, error) from error

    @property
    def name(self) -> str:
        """The path, and how many rows it has."""
        return f"{self.path} {self.rows}"

    def __len__(self) -> int:
        return self.rows

    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """The rows' bytes; groups of rows that hold none of them are not read."""
        from pyarrow import parquet

        with parquet.ParquetFile(self.path) as file:
            first, groups, begun = 0, [], None
            for number in range(file.num_row_groups):
                count = file.metadata.row_group(number).num_rows
                if first < stop and first + count > start:
                    groups.append(number)
                    begun = first if begun is None else begun
                first += count
            row = begun or 0
            for batch in file.iter_batches(16, row_groups=groups, columns=[self.column]):
                for value in batch.column(0):
                    if start <= row < stop:
                        yield f"{self.path}#{row}", _image_of(value.as_py(), f"{self.path}#{row}")
                    row += 1


def _image_of(value: Any, name: str) -> Any:
    content = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(content, bytes) and len(content) <= LARGEST_FILE:
        return content
    return Unreadable(f"{name} holds no image's bytes; give some")


@dataclass(frozen=True)
class NpzImages(AbstractInput):
    """The images of an array in an `.npz`, named by their index."""

    path: str
    array: str
    header: Header

    @classmethod
    def open(cls, path: str) -> list[NpzImages]:
        """The arrays of images in a file: those whose names end with "images"."""
        try:
            with open_regular_file(Path(path)) as file, zipfile.ZipFile(file) as archive:
                found = []
                for entry in archive.infolist():
                    if entry.filename.removesuffix(".npy").endswith("images"):
                        with archive.open(entry) as content:
                            found.append(cls(path, entry.filename, read_header(content, entry.file_size)))
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise _damaged(path, error) from error
        shapes = [one.header.shape for one in found]
        if not found or any(
            len(shape) not in (3, 4) or one.header.columns_first
            for one, shape in zip(found, shapes, strict=True)
        ):
            raise ValueError(f"{path} holds no array of images, such as images (N, H, W, 3); save it so")
        return found

    @property
    def name(self) -> str:
        """The path, the array and its shape."""
        return f"{self.path} {self.array} {self.header.shape}"

    def __len__(self) -> int:
        return self.header.shape[0]

    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """The images, one at a time."""
        shape, dtype = self.header.shape[1:], self.header.dtype
        size = int(np.prod(shape)) * dtype.itemsize
        label = f"{self.path}:{self.array.removesuffix('.npy')}"
        with zipfile.ZipFile(self.path) as archive, archive.open(self.array) as file:
            file.seek(self.header.start + start * size)
            for index in range(start, min(stop, len(self))):
                content = file.read(size)
                yield f"{label}#{index}", np.frombuffer(content, dtype).reshape(shape)


@dataclass(frozen=True)
class TarImages(AbstractInput):
    """The images of a tar shard, as webdataset has them, named as they are in it."""

    path: str
    count: int

    @classmethod
    def open(cls, path: str) -> TarImages:
        """Count the images of a shard."""
        try:
            with tarfile.open(path, "r:*") as archive:
                return cls(path, sum(1 for _ in _images_in(archive)))
        except (OSError, tarfile.TarError, EOFError) as error:
            raise _damaged(path, error) from error

    @property
    def name(self) -> str:
        """The path, and how many images it has."""
        return f"{self.path} {self.count}"

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """The members' bytes."""
        with tarfile.open(self.path, "r:*") as archive:
            for member in islice(_images_in(archive), start, stop):
                name = f"{self.path}#{member.name}"
                file = archive.extractfile(member) if member.size <= LARGEST_FILE else None
                yield name, Unreadable(f"{name} is too large; take it out") if file is None else file.read()


def _images_in(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    return (member for member in archive if member.isreg() and member.name.lower().endswith(SUFFIXES))


def _damaged(path: str, error: Exception) -> ValueError:
    reason = "it does not exist" if isinstance(error, FileNotFoundError) else one_line(error)
    return ValueError(f"{path} cannot be read ({reason}); give a whole file")


# ------------------------------------------------------------------------------ from words to inputs


def open_inputs(words: Iterable[str], lines: Iterable[str] = ()) -> list[AbstractInput]:
    """The inputs that words name: files, folders, globs, and "-" for the paths in `lines`."""
    inputs: list[AbstractInput] = []
    files: list[str] = []
    for word in _paths(words, lines):
        if not word.lower().endswith(TABLES):
            files.append(word)
            continue
        if files:
            inputs.append(Files(files))
            files = []
        inputs += open_table(word)
    return [*inputs, Files(files)] if files else inputs


def open_table(path: str) -> Sequence[AbstractInput]:
    """What a file of many images holds."""
    if path.lower().endswith(".parquet"):
        return [ParquetRows.open(path)]
    return NpzImages.open(path) if path.lower().endswith(".npz") else [TarImages.open(path)]


def _paths(words: Iterable[str], lines: Iterable[str]) -> Iterator[str]:
    for word in words:
        if word == "-":
            yield from _paths((line.rstrip("\n") for line in lines if line.strip()), ())
        elif os.path.isdir(word):
            yield from sorted(_walk(word)) or [word]  # an empty one is named among what cannot be read
        elif glob.has_magic(word) and not os.path.exists(word):
            matched = sorted(glob.glob(word, recursive=True))
            if not matched:
                raise ValueError(f"{word} matches no file; check it")
            yield from _paths(matched, ())
        else:
            yield word


def _walk(folder: str) -> Iterator[str]:
    """The images and tables below a folder, but for hidden ones; links to folders are not followed."""
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and name.lower().endswith((*SUFFIXES, *TABLES)):
                yield os.path.join(where, name)
