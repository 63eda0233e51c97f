"""What `predict` is given for a model that takes no images: CSV, parquet or `.npz` with a row an example."""

from __future__ import annotations

import csv
import io
import math
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ensbridge.data.entries import LABEL_KEYS
from ensbridge.data.npy import Header, read_header
from ensbridge.deploy.batch import Entry, Prediction, Row, Unreadable, as_text, predictions
from ensbridge.deploy.predict_tables import AbstractTable, check_row_groups, stamp_of
from ensbridge.deploy.saving.description import read_description
from ensbridge.deploy.saving.places import find_model
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.extras import need
from ensbridge.utils.files import open_regular_file
from ensbridge.utils.input_specs import DType, InputSpec
from ensbridge.utils.inputs import Inputs
from ensbridge.utils.text import one_line

ROW_FILES = (".csv", ".parquet", ".npz")
LONGEST_LINE = 2**24  # characters of a row of CSV
READ_TOGETHER = 64  # rows of parquet
LARGEST_ROW = 2**26  # bytes of an example's part of an array
Specs = tuple[InputSpec, ...]


def row_specs(
    image_shape: Sequence[int] | None, input_specs: Specs | None, dtype: torch.dtype = torch.float32
) -> Specs | None:
    """What a model that takes no images is called with, as far as its description tells; else None.

    >>> row_specs((3, 32, 32), None), row_specs((13,), None)
    (None, (InputSpec(shape=(13,), dtype='float32', name=None, low=0, high=0),))
    """
    if image_shape is None:
        return input_specs
    name = cast(DType, str(dtype).removeprefix("torch."))
    return (InputSpec(tuple(image_shape), name),) if len(image_shape) < 3 else None


def rows_of(model: str, image_shape: Sequence[int] | None) -> Specs | None:
    """What a saved model that takes no images is called with, by its description; else None."""
    path = find_model(model) / "config.json"
    if not path.is_file():
        return None  # as loading will say
    facts = read_description(path).facts
    return row_specs(facts.image_shape if image_shape is None else image_shape, facts.input_specs)


def open_rows(path: str, specs: Specs) -> AbstractTable:
    """The rows of a file; ValueError says what is wrong with it."""
    kind = path.lower()
    if kind.endswith(".csv"):
        return CsvRows.open(path, specs)
    if kind.endswith(".npz"):
        return NpzRows.open(path, specs)
    if not kind.endswith(".parquet"):
        raise ValueError(
            f"{path} is no CSV, parquet or .npz; the model takes {_words(specs)}, in rows of these"
        )
    need("parquet")
    return ParquetColumns.open(path, specs)


def predict_rows(
    fast: FastEnsemble, entries: Iterable[Entry], specs: Specs, *, batch: int, top_k: int | None = None
) -> Iterator[tuple[str, Prediction | str]]:
    """For each named row its prediction, or the sentence that says why there is none, in their order."""
    left = iter(entries)
    while some := list(islice(left, batch)):
        read = [(as_text(name), _example(name, content, specs)) for name, content in some]
        # Sequences of one length go together.
        for _, group in groupby(read, key=lambda row: _sizes(row[1])):
            yield from _predict_alike(fast, list(group), specs, top_k)


def _sizes(example: list[Tensor] | str) -> list[torch.Size] | None:
    return None if isinstance(example, str) else [part.shape for part in example]


def _predict_alike(
    fast: FastEnsemble, rows: Sequence[tuple[str, list[Tensor] | str]], specs: Specs, top_k: int | None
) -> Iterator[tuple[str, Prediction | str]]:
    """Predictions for rows of the same sizes; of those that fail together each is tried alone."""
    examples = [example for _, example in rows if not isinstance(example, str)]
    if not examples:
        yield from ((name, example) for name, example in rows if isinstance(example, str))
        return
    parts = [torch.stack(tensors) for tensors in zip(*examples, strict=True)]
    inputs: Inputs = parts[0] if len(parts) == 1 else tuple(parts)
    if specs[0].name is not None:
        inputs = {str(spec.name): part for spec, part in zip(specs, parts, strict=True)}
    try:
        made = predictions(fast, inputs, top_k)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # such as a token that has no number
        if len(rows) > 1:
            for row in rows:
                yield from _predict_alike(fast, [row], specs, top_k)
            return
        name = rows[0][0]
        yield name, f"the model cannot take {name} ({one_line(error)}); it takes {_words(specs)}"
        return
    for (name, _), prediction in zip(rows, made, strict=True):
        yield name, prediction or f"the model has no finite prediction for {name}; check its numbers"


def _example(name: str, content: Any, specs: Specs) -> list[Tensor] | str:
    """A row's numbers as the model is called with them, or what is wrong with it."""
    if isinstance(content, Unreadable):
        return as_text(content.reason)
    try:
        if not isinstance(content, tuple):
            raise ValueError("it is an image")
        return [_tensor(part, spec) for part, spec in zip(content, specs, strict=True)]
    except (ValueError, TypeError, OverflowError) as error:
        return f"{as_text(name)} cannot be predicted ({one_line(error)}); give {_words(specs)}"


def _tensor(part: np.ndarray, spec: InputSpec) -> Tensor:
    """Numbers in a model's type; sizes that a network may take otherwise than in training are left to it."""
    array = np.asarray(part)
    if array.dtype.kind not in "biuf":
        raise ValueError("it does not consist of numbers")
    if array.ndim == 0 and spec.shape == (1,):
        array = array[None]
    dtype = getattr(torch, spec.dtype)
    fixed = array.shape[-1:] == spec.shape[-1:] or not dtype.is_floating_point
    if array.ndim != len(spec.shape) or not fixed:
        raise ValueError(f"it has the shape {array.shape}, where the model takes {spec.shape}")
    if dtype.is_floating_point:
        return torch.from_numpy(np.array(array, np.float64)).to(dtype)
    whole = np.array(array).astype(np.int64)
    if not (whole == array).all():
        raise ValueError("it has numbers that are not whole")
    return torch.from_numpy(whole).to(dtype)


def _words(specs: Specs) -> str:
    return "; ".join(map(str, specs))


# ------------------------------------------------------------------------------------------ files


def _columns(path: str, names: Sequence[str], specs: Specs) -> tuple[str, ...]:
    """The columns, or arrays, that a model is called with: one for each input, or several for a single one.

    Inputs are known by their names, and without such as input_0, input_1 and so on; a single one may have any
    name, labels aside.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has several columns of one name; give each its own")
    wanted = input_names(specs)
    if not wanted:
        chosen = tuple(name for name in names if name.lower() not in LABEL_KEYS)
        if len(chosen) in (1, *specs[0].shape[:1]):
            return chosen
        raise ValueError(
            f"{path} has {len(chosen)} columns beside labels, and the model takes {_words(specs)}; leave out "
            "the others"
        )
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(
            f"{path} has no {', '.join(missing)}, and the model takes {_words(specs)}; name its columns so"
        )
    return wanted


def input_names(specs: Specs) -> tuple[str, ...]:
    """The names of a model's inputs, as its exports have them; none for a single one without a name."""
    if len(specs) == 1 and specs[0].name is None:
        return ()
    return tuple(f"input_{number}" if spec.name is None else spec.name for number, spec in enumerate(specs))


def _joined(values: Sequence[Any], specs: Specs) -> Row | Unreadable:
    """A row's columns as one array for each input."""
    if len(values) == len(specs):
        return tuple(np.asarray(value) for value in values)
    return (np.array(values),)


@dataclass(frozen=True)
class AbstractRows(AbstractTable):
    """A file with a row for each example."""

    specs: Specs
    columns: tuple[str, ...]
    rows: int

    kind = "rows"

    @property
    def name(self) -> str:
        """The file, and how many rows it has."""
        return f"{self.stamp} {self.rows} rows"

    def __len__(self) -> int:
        return self.rows


@dataclass(frozen=True)
class CsvRows(AbstractRows):
    """Rows of numbers with commas between them, below names of columns or without these."""

    indices: tuple[int, ...]
    header: bool

    @classmethod
    def open(cls, path: str, specs: Specs) -> CsvRows:
        """Look at a file's first line, and count the others."""
        with _csv(path) as lines:
            first = next(lines, None)
            if first is None:
                raise ValueError(f"{path} is empty; give a row of numbers for each example")
            header = not all(map(_is_number, first))
            names = [cell.strip() for cell in first] if header else [f"column {n}" for n in range(len(first))]
            columns = _columns(path, names, specs)
            rows = sum(1 for _ in lines) + (not header)
            with open_regular_file(Path(path)) as file:
                stamp = stamp_of(path, file)
        return cls(path, stamp, specs, columns, rows, tuple(map(names.index, columns)), header)

    def _read(self, start: int, stop: int) -> Iterator[Entry]:
        with _csv(self.path) as lines:
            chosen = islice(lines, start + self.header, stop + self.header)
            for number, cells in enumerate(chosen, start):
                name = f"{self.path}#{number}"
                try:
                    yield name, _joined([float(cells[index]) for index in self.indices], self.specs)
                except (ValueError, IndexError) as error:
                    reason = "it has too few columns" if isinstance(error, IndexError) else one_line(error)
                    yield name, Unreadable(f"{name} cannot be read ({reason}); give numbers alone")


@contextmanager
def _csv(path: str) -> Iterator[Iterator[list[str]]]:
    """The rows of a CSV file as text; empty lines are none."""
    with open_regular_file(Path(path)) as file, io.TextIOWrapper(file, "utf-8-sig") as text:
        yield (cells for cells in csv.reader(_lines(path, text)) if cells)


def _lines(path: str, text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise ValueError(f"{path} has a line of {LONGEST_LINE:,} characters or more; give shorter ones")
        yield line


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class ParquetColumns(AbstractRows):
    """Columns of numbers, or of lists of them."""

    @classmethod
    def open(cls, path: str, specs: Specs) -> ParquetColumns:
        """Look at what a file holds."""
        from pyarrow import parquet

        with open_regular_file(Path(path)) as file, parquet.ParquetFile(file) as table:
            check_row_groups(path, table.metadata)
            columns = _columns(path, table.schema_arrow.names, specs)
            return cls(path, stamp_of(path, file), specs, columns, table.metadata.num_rows)

    def _read(self, start: int, stop: int) -> Iterator[Entry]:
        from pyarrow import parquet

        with open_regular_file(Path(self.path)) as content, parquet.ParquetFile(content) as file:
            row = 0
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if row < stop and row + count > start:
                    columns, first = list(self.columns), row
                    for batch in file.iter_batches(READ_TOGETHER, row_groups=[group], columns=columns):
                        for number in range(max(start - first, 0), min(stop - first, batch.num_rows)):
                            values = [batch.column(name)[number].as_py() for name in columns]
                            yield self._entry(first + number, values)
                        first += batch.num_rows
                row += count

    def _entry(self, number: int, values: Sequence[Any]) -> Entry:
        name = f"{self.path}#{number}"
        if any(value is None for value in values):
            return name, Unreadable(f"{name} cannot be read (a number is missing); give all of them")
        return name, _joined(values, self.specs)


@dataclass(frozen=True)
class NpzRows(AbstractRows):
    """Arrays whose first dimension counts examples."""

    headers: tuple[Header, ...]

    @classmethod
    def open(cls, path: str, specs: Specs) -> NpzRows:
        """Look at the arrays of a file."""
        with open_regular_file(Path(path)) as file, zipfile.ZipFile(file) as archive:
            sizes = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            columns, headers = _columns(path, list(sizes), specs), []
            for name in columns:
                with archive.open(sizes[name]) as content:
                    headers.append(read_header(content, sizes[name].file_size))
            stamp = stamp_of(path, file)
        rows = {header.shape[:1] for header in headers}
        if len(rows) > 1 or () in rows or any(header.columns_first for header in headers):
            raise ValueError(f"{path} has no arrays of one row an example; save such, of as many rows each")
        if max(math.prod(header.shape[1:]) * header.dtype.itemsize for header in headers) > LARGEST_ROW:
            raise ValueError(f"{path} has rows of more than {LARGEST_ROW:,} bytes; save smaller ones")
        return cls(path, stamp, specs, columns, rows.pop()[0], tuple(headers))

    def _read(self, start: int, stop: int) -> Iterator[Entry]:
        with ExitStack() as opened:
            content = opened.enter_context(open_regular_file(Path(self.path)))
            archive = opened.enter_context(zipfile.ZipFile(content))
            arrays = []
            for name, header in zip(self.columns, self.headers, strict=True):
                file = opened.enter_context(archive.open(f"{name}.npy"))
                shape, dtype = header.shape[1:], header.dtype
                size = math.prod(shape) * dtype.itemsize
                file.seek(header.start + start * size)
                arrays.append((file, shape, dtype, size))
            for number in range(start, stop):
                values = [
                    np.frombuffer(file.read(size), dtype).reshape(shape)
                    for file, shape, dtype, size in arrays
                ]
                yield f"{self.path}#{number}", _joined(values, self.specs)
