"""What `predict` is given: image files, folders, globs, parquet, `.npz` and tar shards, read part by part.

A model that takes no images has files of rows in their place.
"""

from __future__ import annotations

import glob
import io
import math
import os
import re
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from ensbridge.data.folder import SUFFIXES
from ensbridge.data.image_io import LARGEST_FILE
from ensbridge.data.image_parts import columns_of
from ensbridge.data.npy import Header, read_header
from ensbridge.deploy.batch import Entry, Unreadable, check_pixels
from ensbridge.deploy.predict_rows import LARGEST_ROW_GROUP, ROW_FILES, check_row_file, open_rows
from ensbridge.utils.extras import need
from ensbridge.utils.files import open_regular_file
from ensbridge.utils.input_specs import InputSpec
from ensbridge.utils.text import one_line

TABLES = (".parquet", ".npz", ".tar", ".tar.gz", ".tgz")
MANIFEST = "predictions.json"  # in a folder of predictions
_PART = re.compile(r"part-\d{6,}\.parquet")
LARGEST_DICTIONARY = 2**26  # bytes of the values that rows of it share
LARGEST_TAR_HEADER = 2**20  # bytes of a member's name or of its other fields
_END = tarfile.EOFHeaderError  # pyright: ignore[reportAttributeAccessIssue] - which its stubs leave out
_HEADERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_HEADERS += (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class AbstractInput(ABC):
    """Images in a fixed order, of which any part can be read without the others being held."""

    @abstractmethod
    def identity(self) -> str:
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

    def identity(self) -> str:
        """The files' names, from the root."""
        return "\n".join(map(os.path.abspath, self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """The files, which are opened by whoever decodes them."""
        return ((path, Path(path)) for path in self.paths[start:stop])

    def cut(self, start: int, stop: int) -> tuple[AbstractInput, int, int]:
        """These files' names, of what may be millions."""
        return Files(self.paths[start:stop]), 0, stop - start


@dataclass(frozen=True)
class Damaged(AbstractInput):
    """A file of many images, or of rows, that cannot be read; it stands as one without a prediction."""

    path: str
    reason: str

    def identity(self) -> str:
        """The path."""
        return f"{os.path.abspath(self.path)} damaged"

    def __len__(self) -> int:
        return 1

    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """What is wrong with it."""
        return iter([(self.path, Unreadable(self.reason))][start:stop])


@dataclass(frozen=True)
class Table(AbstractInput):
    """A file of many images, or of rows."""

    label: str  # what the names of its images begin with
    stamp: str  # its path from the root, its size, when it was changed, and what of it is read
    size: int
    entries: Callable[[int, int], Iterator[Entry]]  # from start to stop; a picklable one
    kind: str = "images"  # or "rows"

    def identity(self) -> str:
        """The stamp."""
        return self.stamp

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, stop: int) -> Iterator[Entry]:
        """The images from `start` to `stop`; from where the file is damaged on, they cannot be read."""
        done, stop, reason = start, min(stop, len(self)), "it ends early"
        try:
            for entry in self.entries(start, stop):
                yield entry
                done += 1
                del entry  # before the next is read
        except Exception as error:  # decoders fail in many ways on damaged files
            reason = one_line(error)
        for number in range(done, stop):
            name = f"{self.label}#{number}"
            yield name, Unreadable(f"{name} cannot be read ({reason}); give a whole file")


def open_inputs(
    words: Iterable[str], lines: Iterable[str] = (), specs: tuple[InputSpec, ...] | None = None
) -> list[AbstractInput]:
    """The inputs that words name: files, folders, globs, and "-" for the paths in `lines`.

    `specs` is what a model that takes no images is called with.
    """
    inputs: list[AbstractInput] = []
    files: list[str] = []
    for word in _paths(words, lines, (*SUFFIXES, *TABLES) if specs is None else ROW_FILES):
        if specs is not None:
            inputs += open_table(word, specs)
            continue
        if not word.lower().endswith(TABLES):
            files.append(word)
            continue
        if files:
            inputs.append(Files(files))
            files = []
        inputs += open_table(word)
    return [*inputs, Files(files)] if files else inputs


def _paths(words: Iterable[str], lines: Iterable[str], suffixes: tuple[str, ...]) -> Iterator[str]:
    for word in words:
        if word == "-":
            if isinstance(lines, io.TextIOWrapper):
                lines.reconfigure(errors="surrogateescape")  # names need not be UTF-8
            for line in lines:
                if line.strip():
                    yield from _below(line.rstrip("\n"), suffixes)
        elif glob.has_magic(word) and not os.path.exists(word):
            matched = sorted(glob.glob(word, recursive=True))
            if not matched:
                raise ValueError(f"{word} matches no file; check it")
            for path in matched:
                yield from _below(path, suffixes)
        else:
            yield from _below(word, suffixes)


def _below(path: str, suffixes: tuple[str, ...]) -> Sequence[str]:
    """What a folder holds; a file is itself, and an empty folder is named among what cannot be read."""
    return (sorted(_walk(path, suffixes)) if os.path.isdir(path) else []) or [path]


def _walk(folder: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """The images and tables below a folder, but for hidden ones; links to folders are not followed.

    Parts of predictions are not among them, so that a folder of those may lie there.
    """
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if MANIFEST in names:
            names = [name for name in names if not _PART.fullmatch(name)]
        for name in names:
            if not name.startswith(".") and name.lower().endswith(suffixes):
                yield os.path.join(where, name)


def open_table(path: str, specs: tuple[InputSpec, ...] | None = None) -> Sequence[AbstractInput]:
    """What a file of many images, or of rows, holds; `Damaged` where that cannot be read."""
    kind = path.lower()
    if kind.endswith(".parquet"):
        need("parquet")
    read = _open_npz if kind.endswith(".npz") else _open_parquet if kind.endswith(".parquet") else _open_tar
    try:
        if specs is not None:
            check_row_file(path, specs)
        with open_regular_file(Path(path)) as file:
            status = os.fstat(file.fileno())
            stamp = f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}"
            if specs is None:
                return read(path, stamp, file)
            rows, entries = open_rows(path, specs, file)
            return [Table(path, f"{stamp} {rows} rows", rows, entries, "rows")]
    except Exception as error:  # decoders fail in many ways on damaged files
        if str(error).startswith((path, str(Path(path)))):  # a sentence of ours
            return [Damaged(path, str(error))]
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else one_line(error)
        return [Damaged(path, f"{path} cannot be read ({reason}); give a whole file")]


# ------------------------------------------------------------------------------ parquet


def _open_parquet(path: str, stamp: str, file: IO[bytes]) -> list[AbstractInput]:
    """Its rows, by which its images are named."""
    from pyarrow import parquet

    with parquet.ParquetFile(file) as table:
        groups = (table.metadata.row_group(number) for number in range(table.num_row_groups))
        largest = max((group.total_byte_size for group in groups), default=0)
        if largest > LARGEST_ROW_GROUP:
            raise ValueError(
                f"{path} has {largest:,} bytes in a group of rows, and at most {LARGEST_ROW_GROUP:,} are "
                "read; write it with smaller groups"
            )
        column = columns_of(table.schema_arrow, path)[0]
        _check_dictionaries(path, column, file, table.metadata)
        rows = table.metadata.num_rows
        return [Table(path, f"{stamp} {rows}", rows, partial(_parquet_rows, path, column))]


def _parquet_rows(path: str, column: str, start: int, stop: int) -> Iterator[Entry]:
    """The rows' bytes; groups of rows that hold none of them are not read."""
    from pyarrow import parquet

    with open_regular_file(Path(path)) as content, parquet.ParquetFile(content) as file:
        first, groups, begun = 0, [], None
        for number in range(file.num_row_groups):
            count = file.metadata.row_group(number).num_rows
            if first < stop and first + count > start:
                groups.append(number)
                begun = first if begun is None else begun
            first += count
        # One row at a time: rows that share one large value would each have a copy of it.
        batches = file.iter_batches(1, row_groups=groups, columns=[column])
        for row, batch in islice(enumerate(batches, begun or 0), start - (begun or 0), stop - (begun or 0)):
            yield f"{path}#{row}", _image_of(batch.column(0)[0].as_py(), f"{path}#{row}")


def _image_of(value: Any, name: str) -> bytes | Unreadable:
    content = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(content, bytes) and len(content) <= LARGEST_FILE:
        return content
    return Unreadable(f"{name} holds no image's bytes; give some")


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


# ------------------------------------------------------------------------------ arrays


def _open_npz(path: str, stamp: str, file: IO[bytes]) -> list[AbstractInput]:
    """The arrays of images in a file, those whose names end with "images"; an image is named by its index."""
    headers: dict[str, Header] = {}
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.filename.removesuffix(".npy").endswith("images"):
                with archive.open(entry) as content:
                    headers[entry.filename] = read_header(content, entry.file_size)
    if not headers or any(len(one.shape) not in (3, 4) or one.columns_first for one in headers.values()):
        raise ValueError(f"{path} holds no array of images, such as images (N, H, W, 3); save it so")
    tables: list[AbstractInput] = []
    for array, header in headers.items():
        label = f"{path}:{array.removesuffix('.npy')}"
        try:  # before one is read
            check_pixels(header.shape[1:])
            if (size := math.prod(header.shape[1:]) * header.dtype.itemsize) > LARGEST_FILE:
                raise ValueError(f"an image has {size:,} bytes, where at most {LARGEST_FILE:,} are read")
        except ValueError as error:
            raise ValueError(
                f"{label} cannot be predicted ({error}); save images (N, H, W, 3) of uint8"
            ) from error
        read = partial(_npz_images, path, array, label, header)
        tables.append(Table(label, f"{stamp} {array} {header.shape}", header.shape[0], read))
    return tables


def _npz_images(path: str, array: str, label: str, header: Header, start: int, stop: int) -> Iterator[Entry]:
    shape, dtype = header.shape[1:], header.dtype
    size = math.prod(shape) * dtype.itemsize
    with (
        open_regular_file(Path(path)) as content,
        zipfile.ZipFile(content) as archive,
        archive.open(array) as file,
    ):
        file.seek(header.start + start * size)
        for index in range(start, stop):
            yield f"{label}#{index}", np.frombuffer(file.read(size), dtype).reshape(shape)


# ------------------------------------------------------------------------------ tar


def _open_tar(path: str, stamp: str, file: IO[bytes]) -> list[AbstractInput]:
    """The images of a shard, as webdataset has them; behind one that has no end, it stands as damaged too."""
    with _Archive.open(fileobj=file, mode="r:*") as archive:
        count = sum(1 for _ in _images_in(archive))
        images = Table(path, f"{stamp} {count}", count, partial(_tar_images, path))
        if archive.has_ended:
            return [images]
    reason = f"{path} has no end behind its {count:,} images, so that others may be missing"
    return [images, Damaged(path, f"{reason}; give a whole file")]


def _tar_images(path: str, start: int, stop: int) -> Iterator[Entry]:
    with (
        open_regular_file(Path(path)) as content,
        _Archive.open(fileobj=content, mode="r:*") as archive,
    ):
        for member in islice(_images_in(archive), start, stop):
            name = f"{path}#{member.name}"
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
