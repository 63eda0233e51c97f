"""What `predict` is given for a model that takes no images: CSV, parquet or `.npz` with a row an example."""

from __future__ import annotations

import csv
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from ensbridge.data.entries import LABEL_KEYS
from ensbridge.data.npy import Header, read_header
from ensbridge.deploy.batch import Entry, Prediction, Row, Unreadable, as_text, each_prediction
from ensbridge.deploy.saving.description import read_description
from ensbridge.deploy.saving.folder import find_model
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.files import open_regular_file
from ensbridge.utils.input_specs import DType, InputSpec
from ensbridge.utils.inputs import Inputs
from ensbridge.utils.text import one_line

ROW_FILES = (".csv", ".parquet", ".npz")
LONGEST_LINE = 2**24  # characters of a row of CSV
READ_TOGETHER = 64  # rows of parquet
LARGEST_ROW_GROUP = 2**30  # bytes of a group of rows in parquet, whose pages are held together
MARK_EVERY = 4096  # rows of CSV, whose places in the file are kept
BROKEN = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))  # not a row's
LARGEST_ROW = 2**26  # bytes of an example's part of an array
Specs = tuple[InputSpec, ...]
Rows = Callable[[int, int], Iterator[Entry]]  # from start to stop; a picklable function


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
        made = each_prediction(fast, inputs, top_k)
    except BROKEN:
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
    with np.errstate(invalid="ignore"):
        whole = torch.from_numpy(np.array(array).astype(np.int64)).to(dtype)
    if not (whole.numpy() == array).all():
        raise ValueError(f"it has numbers that are not whole, or too large for {spec.dtype}")
    return whole


def _words(specs: Specs) -> str:
    return "; ".join(map(str, specs))


# ------------------------------------------------------------------------------------------ files


def _columns(path: str, names: Sequence[str], specs: Specs) -> tuple[str, ...]:
    """The columns, or arrays, that a model is called with: one for each input, or several for a single one.

    Inputs are known by their names, and without such as input_0, input_1 and so on; a single one may have any
    name, labels aside, or a column for each of its numbers.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has several columns of one name; give each its own")
    wanted = input_names(specs)
    if not wanted or (len(specs) == 1 and wanted[0] not in names):
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


def check_row_file(path: str, specs: Specs) -> None:
    """Refuse a file of another kind, whether it exists or not."""
    if not path.lower().endswith(ROW_FILES):
        raise ValueError(f"{path} is no CSV, parquet or .npz; the model takes rows of {_words(specs)}")


def open_rows(path: str, specs: Specs, file: IO[bytes]) -> tuple[int, Rows]:
    """How many rows a file has, and what reads some of them; ValueError says what is wrong with it."""
    kind = path.lower()
    read = _csv_file if kind.endswith(".csv") else _npz_file if kind.endswith(".npz") else _parquet_file
    return read(path, specs, file)


def _csv_file(path: str, specs: Specs, file: IO[bytes]) -> tuple[int, Rows]:
    """Rows of numbers with commas between them, below names of columns or without these."""
    lines = _csv_lines(path, file)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{path} is empty; give a row of numbers for each example")
    cells = [cell.strip() for cell in _cells(first[1])]
    header = _is_header(cells)
    names = cells if header else [f"column {number}" for number in range(len(cells))]
    chosen = _columns(path, names, specs)
    if len(specs) == len(chosen) == 1 and math.prod(specs[0].shape) != 1:
        raise ValueError(
            f"{path} has one column, and the model takes {_words(specs)}; put commas between numbers"
        )
    rows, marks = 0, []
    for place, _ in lines if header else chain([first], lines):
        if rows % MARK_EVERY == 0:
            marks.append(place)
        rows += 1
    if not rows:
        raise ValueError(f"{path} has names of columns and no rows; give one for each example")
    columns = tuple(map(names.index, chosen))
    return rows, partial(_csv_rows, path, specs, columns, len(names), tuple(marks))


def _csv_rows(
    path: str,
    specs: Specs,
    columns: Sequence[int],
    count: int,
    marks: Sequence[int],
    start: int,
    stop: int,
) -> Iterator[Entry]:
    with open_regular_file(Path(path)) as file:
        mark = start // MARK_EVERY
        file.seek(marks[mark])
        lines = islice(_csv_lines(path, file), start - mark * MARK_EVERY, stop - mark * MARK_EVERY)
        for number, (_, line) in enumerate(lines, start):
            name = f"{path}#{number}"
            try:
                cells = _cells(line)
                if len(cells) != count:
                    raise ValueError(f"it has {len(cells)} columns, where the first line has {count}")
                yield name, _joined([float(cells[index]) for index in columns], specs)
            except (ValueError, csv.Error) as error:
                yield name, Unreadable(f"{name} cannot be read ({one_line(error)}); give numbers alone")


def _csv_lines(path: str, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with where they begin; a row is a line, whatever its quotes, and empty lines are none."""
    place = file.tell()
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise ValueError(f"{path} has a line of {LONGEST_LINE:,} bytes or more; give shorter ones")
        if line.strip():
            yield place, line
        place += len(line)


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode("utf-8-sig")], strict=True))


def _is_header(cells: Sequence[str]) -> bool:
    """Whether a first line has names: no numbers, or 0, 1, 2, …, as data frames without names have them.

    >>> [_is_header(line.split(",")) for line in ("a,b,label", "0,1,2", "0.5,NA,1", "0,1,label")]
    [True, True, False, True]
    """
    names = [cell for cell in cells if cell.lower() not in LABEL_KEYS]
    numbered = len(names) > 1 and names == [str(number) for number in range(len(names))]
    return numbered or not any(map(_is_number, names))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _parquet_file(path: str, specs: Specs, file: IO[bytes]) -> tuple[int, Rows]:
    """Columns of numbers, or of lists of them."""
    from pyarrow import parquet

    with parquet.ParquetFile(file) as table:
        columns = _columns(path, table.schema_arrow.names, specs)
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            chunks = [group.column(index) for index in range(group.num_columns)]
            # Numbers that are alike take few bytes in the file, and all of them in memory.
            numbers = sum(
                chunk.num_values for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns
            )
            if max(group.total_byte_size, 8 * numbers) > LARGEST_ROW_GROUP:
                raise ValueError(
                    f"{path} has a group of rows of more than {LARGEST_ROW_GROUP:,} bytes; write smaller ones"
                )
        return table.metadata.num_rows, partial(_parquet_rows, path, specs, columns)


def _parquet_rows(path: str, specs: Specs, columns: Sequence[str], start: int, stop: int) -> Iterator[Entry]:
    from pyarrow import parquet

    with open_regular_file(Path(path)) as content, parquet.ParquetFile(content) as file:
        first = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if first < stop and first + count > start:
                at = first
                for batch in file.iter_batches(READ_TOGETHER, row_groups=[group], columns=list(columns)):
                    if at >= stop:
                        return
                    for number in range(max(start, at), min(stop, at + batch.num_rows)):
                        values = [batch.column(name)[number - at] for name in columns]
                        yield _parquet_entry(f"{path}#{number}", values, specs)
                    at += batch.num_rows
            first += count


def _parquet_entry(name: str, values: Sequence[Any], specs: Specs) -> Entry:
    if not all(value.is_valid for value in values):
        return name, Unreadable(f"{name} cannot be read (a number is missing); give all of them")
    return name, _joined([_numbers(value) for value in values], specs)


def _numbers(value: Any) -> Any:
    """A number of Arrow's, or a list of them, which as an array takes a fraction of a list's memory."""
    from pyarrow import types

    inner = getattr(value, "values", None)
    return value.as_py() if inner is None or types.is_nested(inner.type) else np.asarray(inner)


def _npz_file(path: str, specs: Specs, file: IO[bytes]) -> tuple[int, Rows]:
    """Arrays whose first dimension counts examples."""
    with zipfile.ZipFile(file) as archive:
        arrays = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
        sizes = {entry.filename.removesuffix(".npy"): entry for entry in arrays}
        headers: dict[str, Header] = {}
        for name in _columns(path, list(sizes), specs):
            with archive.open(sizes[name]) as content:
                headers[name] = read_header(content, sizes[name].file_size)
    rows = {header.shape[:1] for header in headers.values()}
    if any(header.columns_first for header in headers.values()):
        raise ValueError(f"{path} has an array in Fortran's order; save it through np.ascontiguousarray")
    if len(rows) > 1 or () in rows:
        raise ValueError(f"{path} has no arrays of one row an example; save such, of as many rows each")
    if max(math.prod(header.shape[1:]) * header.dtype.itemsize for header in headers.values()) > LARGEST_ROW:
        raise ValueError(f"{path} has rows of more than {LARGEST_ROW:,} bytes; save smaller ones")
    return rows.pop()[0], partial(_npz_rows, path, specs, headers)


def _npz_rows(
    path: str, specs: Specs, headers: Mapping[str, Header], start: int, stop: int
) -> Iterator[Entry]:
    with ExitStack() as opened:
        content = opened.enter_context(open_regular_file(Path(path)))
        archive = opened.enter_context(zipfile.ZipFile(content))
        files = {name: opened.enter_context(archive.open(f"{name}.npy")) for name in headers}

        def row(name: str) -> np.ndarray:
            shape, dtype = headers[name].shape[1:], headers[name].dtype
            return np.frombuffer(files[name].read(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)

        for name, header in headers.items():
            files[name].seek(header.start + start * math.prod(header.shape[1:]) * header.dtype.itemsize)
        for number in range(start, stop):
            yield f"{path}#{number}", _joined([row(name) for name in headers], specs)
