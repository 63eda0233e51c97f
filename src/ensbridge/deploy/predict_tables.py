"""Files of many images, read part by part: parquet, `.npz` and tar shards."""

from __future__ import annotations

import math
import os
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from ensbridge.data.folder import SUFFIXES
from ensbridge.data.image_io import LARGEST_FILE
from ensbridge.data.image_parts import columns_of
from ensbridge.data.npy import Header, read_header
from ensbridge.deploy.batch import Entry, Unreadable, check_pixels
from ensbridge.utils.files import open_regular_file
from ensbridge.utils.text import one_line

LARGEST_ROW_GROUP = 2**30  # bytes of a group of rows in parquet, whose pages are held together
LARGEST_DICTIONARY = 2**26  # bytes of the values that rows of it share
LARGEST_TAR_HEADER = 2**20  # bytes of a member's name or of its other fields
_END = tarfile.EOFHeaderError  # pyright: ignore[reportAttributeAccessIssue] - which its stubs leave out
_HEADERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_HEADERS += (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


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
class Damaged(AbstractInput):
    """A file of many images that cannot be read, which stands as one image without a prediction."""

    path: str
    reason: str

    @property
    def name(self) -> str:
        """The path."""
        return f"{os.path.abspath(self.path)} damaged"

    def __len__(self) -> int:
        return 1

    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """What is wrong with it."""
        return iter([(self.path, Unreadable(self.reason))][start:stop])


@dataclass(frozen=True)
class AbstractTable(AbstractInput):
    """A file of many images; `stamp` is its path from the root, its size and when it was changed."""

    path: str
    stamp: str

    @property
    def label(self) -> str:
        """What the names of its images begin with."""
        return self.path

    @abstractmethod
    def _read(self, start: int, stop: int) -> Iterator[Entry]: ...

    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """The images from `start` to `stop`; from where the file is damaged on, they cannot be read."""
        done, stop, reason = start, min(stop, len(self)), "it ends early"
        try:
            for entry in self._read(start, stop):
                yield entry
                done += 1
                del entry  # before the next is read
        except Exception as error:  # decoders fail in many ways on damaged files
            reason = one_line(error)
        for number in range(done, stop):
            name = f"{self.label}#{number}"
            yield name, Unreadable(f"{name} cannot be read ({reason}); give a whole file")


def _stamp(path: str, file: IO[bytes]) -> str:
    status = os.fstat(file.fileno())
    return f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}"


@dataclass(frozen=True)
class ParquetRows(AbstractTable):
    """The images of a parquet file, named by their rows."""

    column: str
    rows: int

    @classmethod
    def open(cls, path: str) -> ParquetRows:
        """Look at what a file holds."""
        from pyarrow import parquet

        with open_regular_file(Path(path)) as file, parquet.ParquetFile(file) as table:
            groups = (table.metadata.row_group(number) for number in range(table.num_row_groups))
            largest = max((group.total_byte_size for group in groups), default=0)
            if largest > LARGEST_ROW_GROUP:
                raise ValueError(
                    f"{path} has {largest:,} bytes in a group of rows, and at most {LARGEST_ROW_GROUP:,} are "
                    "read; write it with smaller groups"
                )
            column = columns_of(table.schema_arrow, path)[0]
            _check_dictionaries(path, column, file, table.metadata)
            return cls(path, _stamp(path, file), column, table.metadata.num_rows)

    @property
    def name(self) -> str:
        """The file, and how many rows it has."""
        return f"{self.stamp} {self.rows}"

    def __len__(self) -> int:
        return self.rows

    def _read(self, start: int, stop: int) -> Iterator[Entry]:
        """The rows' bytes; groups of rows that hold none of them are not read."""
        from pyarrow import parquet

        with open_regular_file(Path(self.path)) as content, parquet.ParquetFile(content) as file:
            first, groups, begun = 0, [], None
            for number in range(file.num_row_groups):
                count = file.metadata.row_group(number).num_rows
                if first < stop and first + count > start:
                    groups.append(number)
                    begun = first if begun is None else begun
                first += count
            row = begun or 0
            # One row at a time: rows that share one large value would each have a copy of it.
            for batch in file.iter_batches(1, row_groups=groups, columns=[self.column]):
                if row >= stop:
                    return
                if row >= start:
                    yield f"{self.path}#{row}", _image_of(batch.column(0)[0].as_py(), f"{self.path}#{row}")
                row += 1


def _check_dictionaries(path: str, column: str, file: IO[bytes], metadata: Any) -> None:
    """Refuse values that rows share where they are large: Arrow holds several copies of them.

    A page begins with its kind, 2 for a dictionary, and its size, as Thrift's compact protocol has them.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    for chunk in (group.column(number) for group in groups for number in range(metadata.num_columns)):
        if chunk.path_in_schema.split(".")[0] != column:
            continue
        file.seek(max(0, chunk.dictionary_page_offset or chunk.data_page_offset))
        head, size, shift = file.read(8), 0, 0
        for byte in head[3:]:
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if head[:3] == b"\x15\x04\x15" and (size := size >> 1) > LARGEST_DICTIONARY:
            raise ValueError(
                f"{path} has a dictionary of {size:,} bytes, and at most {LARGEST_DICTIONARY:,} are read; "
                "write it without one"
            )


def _image_of(value: Any, name: str) -> Any:
    content = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(content, bytes) and len(content) <= LARGEST_FILE:
        return content
    return Unreadable(f"{name} holds no image's bytes; give some")


@dataclass(frozen=True)
class NpzImages(AbstractTable):
    """The images of an array in an `.npz`, named by their index."""

    array: str
    header: Header

    @classmethod
    def open(cls, path: str) -> list[NpzImages]:
        """The arrays of images in a file: those whose names end with "images"."""
        arrays = []
        with open_regular_file(Path(path)) as file, zipfile.ZipFile(file) as archive:
            stamp = _stamp(path, file)
            for entry in archive.infolist():
                if entry.filename.removesuffix(".npy").endswith("images"):
                    with archive.open(entry) as content:
                        header = read_header(content, entry.file_size)
                    arrays.append(cls(path, stamp, entry.filename, header))
        if not arrays or any(
            len(one.header.shape) not in (3, 4) or one.header.columns_first for one in arrays
        ):
            raise ValueError(f"{path} holds no array of images, such as images (N, H, W, 3); save it so")
        for one in arrays:
            one.check_image()
        return arrays

    def check_image(self) -> None:
        """Refuse images that are too large, or that have no pixels, before one is read."""
        shape, dtype = self.header.shape[1:], self.header.dtype
        try:
            check_pixels(shape)
            if (size := math.prod(shape) * dtype.itemsize) > LARGEST_FILE:
                raise ValueError(f"an image has {size:,} bytes, where at most {LARGEST_FILE:,} are read")
        except ValueError as error:
            raise ValueError(
                f"{self.label} cannot be predicted ({error}); save images (N, H, W, 3) of uint8"
            ) from error

    @property
    def name(self) -> str:
        """The file, the array and its shape."""
        return f"{self.stamp} {self.array} {self.header.shape}"

    @property
    def label(self) -> str:
        """The path and the array."""
        return f"{self.path}:{self.array.removesuffix('.npy')}"

    def __len__(self) -> int:
        return self.header.shape[0]

    def _read(self, start: int, stop: int) -> Iterator[Entry]:
        """The images, one at a time."""
        shape, dtype = self.header.shape[1:], self.header.dtype
        size = math.prod(shape) * dtype.itemsize
        with (
            open_regular_file(Path(self.path)) as content,
            zipfile.ZipFile(content) as archive,
            archive.open(self.array) as file,
        ):
            file.seek(self.header.start + start * size)
            for index in range(start, stop):
                yield f"{self.label}#{index}", np.frombuffer(file.read(size), dtype).reshape(shape)


@dataclass(frozen=True)
class TarImages(AbstractTable):
    """The images of a tar shard, as webdataset has them, named as they are in it."""

    count: int

    @classmethod
    def open(cls, path: str) -> list[AbstractInput]:
        """Count the images of a shard; behind one that has no end, it stands as damaged too."""
        with (
            open_regular_file(Path(path)) as file,
            _Archive.open(fileobj=file, mode="r:*") as archive,
        ):
            images = cls(path, _stamp(path, file), sum(1 for _ in _images_in(archive)))
            if archive.has_ended:
                return [images]
        reason = f"{path} has no end behind its {len(images):,} images, so that others may be missing"
        return [images, Damaged(path, f"{reason}; give a whole file")]

    @property
    def name(self) -> str:
        """The file, and how many images it has."""
        return f"{self.stamp} {self.count}"

    def __len__(self) -> int:
        return self.count

    def _read(self, start: int, stop: int) -> Iterator[Entry]:
        """The members' bytes."""
        with (
            open_regular_file(Path(self.path)) as content,
            _Archive.open(fileobj=content, mode="r:*") as archive,
        ):
            for member in islice(_images_in(archive), start, stop):
                name = f"{self.path}#{member.name}"
                file = archive.extractfile(member) if member.size <= LARGEST_FILE else None
                yield name, Unreadable(f"{name} is too large; take it out") if file is None else file.read()


class _Member(tarfile.TarInfo):
    """A member whose long name or other fields, which are read whole, take little memory."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(tarfile)
        except _END:
            if isinstance(tarfile, _Archive):
                tarfile.has_ended = True
            raise

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if member.type in _HEADERS and member.size > LARGEST_TAR_HEADER:
            raise ValueError(
                f"a member's header has {member.size:,} bytes, and at most {LARGEST_TAR_HEADER:,} are read"
            )
        return member


class _Archive(tarfile.TarFile):
    """An archive that tells whether the zeros at its end were reached.

    Where it was cut between two members, its members end as if they had been.
    """

    tarinfo = _Member
    has_ended = False


def _images_in(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    return (member for member in archive if member.isreg() and member.name.lower().endswith(SUFFIXES))
