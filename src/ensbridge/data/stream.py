"""Data that does not fit into memory, read batch by batch as it is trained on."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset

from ensbridge.data.examples import Examples, ExampleSet, ImageSet
from ensbridge.data.loader import Data, _batches, _entries, collect, is_batched
from ensbridge.utils.devices import random_state_kept

MEMORY = "512MB"
UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
PROBED = 8  # examples that are read twice to see whether they are the same

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stream:
    """Examples that are read again in every epoch, with whatever augmentation their own code does.

    `data` is a DataLoader, an IterableDataset, a Dataset or another iterable that can be read again, of
    examples or batches in any form that `compress` takes. `length` is the number of examples in one pass,
    None where nobody knows. With several processes `sharded` says that `data` is this process's part of it
    alone, and `length` that of the part. Unless `labelled`, labels are not looked at.

    >>> stream = Stream([torch.rand(4, 1, 2, 2)] * 3)
    >>> stream.length, stream.sample(5).images.shape
    (12, torch.Size([5, 1, 2, 2]))
    """

    data: Any
    name: str = "data"
    sharded: bool = False
    length: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    say: Say = lambda _: None
    labelled: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.data, Iterator):
            raise ValueError(
                f"{self.name} is a {type(self.data).__name__}, which can be read only once; give what it was "
                "made from, such as a DataLoader or an IterableDataset"
            )
        if self.length is None:
            object.__setattr__(self, "length", _examples_in(self.data, self.name, self.labelled))
        if self.length == 0:
            raise ValueError(f"{self.name} holds 0 images; give at least one")

    @property
    def is_indexed(self) -> bool:
        """Whether examples can be asked for by index, so that any step's batch can be read by itself."""
        return is_map_style(self.data)

    @property
    def kind(self) -> str:
        """What the data is."""
        return type(self.data).__name__

    def to(self, device: torch.device | str) -> Stream:
        """The same stream, whose batches come to a device."""
        return replace(self, device=torch.device(device))

    def sample(self, count: int) -> ExampleSet:
        """The first examples, on the stream's device."""
        with random_from(0):
            rows = _first_rows(self.data, count, self.name, self.labelled)
            return collect(rows, self.name, self.labelled, batched=True).to(self.device)

    def counted(self, advance: Callable[[int], None]) -> Stream:
        """The same stream with its length, by reading it once where it does not say; `advance` follows."""
        if self.length is not None:
            return self
        count = 0
        for images, _ in read_batches(self.data, self.name, self.labelled):
            count += rows_of(images)
            advance(rows_of(images))
        return replace(self, length=count)

    def fingerprint(self) -> str:
        """What a run knows its data by: not its values, which may differ at every reading."""
        return f"{self.kind} of {self.length if self.length is not None else 'unknown'} examples"


def load_or_stream(
    data: Data | Stream, memory: str | float, name: str, say: Say, labelled: bool = True
) -> ExampleSet | Stream:
    """Data in memory, where its size is known and fits and its views are fixed; a stream of it otherwise.

    What is in memory already stays there. An iterator can be read only once, so it has to fit.
    """
    limit = parse_memory(memory)
    if isinstance(data, Stream):
        return replace(data, say=say, labelled=labelled)
    if isinstance(data, Iterator):
        return _read_once(data, limit, memory, name, labelled)
    if not isinstance(data, Iterable) and not is_map_style(data):
        return collect(data, name, labelled)  # which says what is wrong with it
    if _is_in_memory(data):
        return collect(data, name, labelled)
    stream = Stream(data, name, say=say, labelled=labelled)
    size = size_of(stream)
    if size is None:
        say(f"{name} is streamed, as the size of a {stream.kind} is not known before it is read")
    elif size > limit:
        say(f"{name} is streamed, as its {_readable(size)} are more than memory={memory!r}")
    elif views_differ(data, name, labelled):
        say(
            f"{name} is streamed, as its images are not the same when they are read again; without random "
            "augmentation of its own, and with augment=, it would be kept in memory"
        )
    else:
        return collect(data, name, labelled)
    if isinstance(data, DataLoader) and isinstance(data.sampler, SequentialSampler):
        say(f"{name} is read in the DataLoader's order; unless that is random already, give it shuffle=True")
    return stream


def collect_within(data: Data | Stream, memory: str | float, name: str, say: Say) -> ExampleSet:
    """All of the data, or as many of its first examples as fit into memory."""
    limit = parse_memory(memory)
    source: Any = data.data if isinstance(data, Stream) else data
    if _is_in_memory(source) or not (isinstance(source, Iterable) or is_map_style(source)):
        return collect(source, name)
    if is_map_style(source) and _exceeds(source, limit, name):
        # Data may be sorted by class, so that its first examples would be of few.
        count = len(source)  # pyright: ignore[reportArgumentType]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        source = Subset(source, order)  # pyright: ignore[reportArgumentType]
    cut = False

    def fitting() -> Iterator[Any]:
        nonlocal cut
        held = 0
        for batch in read_batches(source, name):
            held += bytes_of(batch)
            cut = held > limit and held > bytes_of(batch)
            if cut:
                return
            yield batch

    whole = collect(fitting(), name, batched=True)
    if cut:
        which = f"{len(whole):,} random" if isinstance(source, Subset) else f"the first {len(whole):,}"
        say(f"{which} images of {name} are used, as no more fit into memory={memory!r}")
    return whole


def _exceeds(data: Any, limit: float, name: str) -> bool:
    return (size_of(Stream(data, name)) or 0) > limit


def read_batches(data: Any, name: str, labelled: bool = True) -> Iterator[tuple[Any, Tensor | None]]:
    """Every entry of data as a batch of inputs, with its labels."""
    return _batches(_entries(data, name), name, labelled, is_batched(data))


def parse_memory(memory: str | float) -> float:
    """A number of bytes, given as one or as text with a unit.

    >>> parse_memory("512MB"), parse_memory("1.5 GiB"), parse_memory(0)
    (512000000.0, 1610612736.0, 0.0)
    >>> parse_memory("much")
    Traceback (most recent call last):
    ValueError: memory is 'much'; give bytes as a number, or text such as '512MB' or '8GB'
    """
    if isinstance(memory, int | float) and not isinstance(memory, bool) and memory >= 0:
        return float(memory)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", memory) if isinstance(memory, str) else None
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"memory is {memory!r}; give bytes as a number, or text such as '512MB' or '8GB'")
    return float(match[1]) * UNITS[match[2].upper()]


def size_of(stream: Stream) -> int | None:
    """The bytes of all examples, by the first of them; None where it is not known how many there are."""
    data = stream.data
    if stream.length is None or isinstance(data, IterableDataset) or _is_iterable_loader(data):
        return None
    if type(data).__module__.startswith("datasets.") and not is_map_style(data):
        return None
    first = next(_first_rows(data, 1, stream.name, stream.labelled))
    return stream.length * bytes_of(first)


def views_differ(data: Any, name: str, labelled: bool = True) -> bool:
    """Whether examples come out otherwise when they are read again, as with random augmentation."""
    items: Any = data.dataset if isinstance(data, DataLoader) else data
    batched = is_batched(data)
    if not (is_map_style(items) or (batched and _has_index(items))):
        return False

    def read(index: int) -> Any:
        return data.collate_fn([items[index]]) if batched else items[index]

    with random_from(0):  # so that several processes see the same
        for index in range(min(PROBED, len(items))):
            one, other = (list(_batches([read(index)], name, labelled, batched)) for _ in range(2))
            if not _equal(one[0][0], other[0][0]):
                return True
    return False


def is_map_style(data: Any) -> bool:
    """Whether data gives examples by index and knows how many it has."""
    return (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, Mapping | str | bytes | IterableDataset | DataLoader)
        and not (isinstance(data, tuple | list))
    )


def _has_index(dataset: Any) -> bool:
    """Whether a DataLoader's dataset gives examples by index, as a list does too."""
    return is_map_style(dataset) or isinstance(dataset, tuple | list)


@contextmanager
def random_from(seed: int) -> Iterator[None]:
    """Where the data's own code draws at random, from a seed; the global states are as before afterwards."""
    with random_state_kept():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - users' code draws from it
        yield


# ------------------------------------------------------------------------------ batches, whatever they hold


def rows_of(batch: Any) -> int:
    """How many examples a batch has: a tensor, or several in a tuple or a dictionary."""
    return len(batch) if isinstance(batch, Tensor) else rows_of(next(iter(_parts(batch))))


def cut_rows(batch: Any, rows: slice) -> Any:
    """Some of a batch's examples."""
    return map_tensors(lambda tensor: tensor[rows], batch)


def join_rows(batches: list[Any], name: str) -> Any:
    """One batch of several."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: join_rows([batch[key] for batch in batches], name) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(
            join_rows([batch[index] for batch in batches], name) for index in range(len(first))
        )
    try:
        return torch.cat(batches)
    except RuntimeError as error:
        raise ValueError(
            f"{name} has batches of examples of different shapes, which cannot be joined; give a loader "
            "whose batches all have batch_size examples, with drop_last=True"
        ) from error


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A batch with a function applied to each of its tensors."""
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(function, part) for part in batch)
    return function(batch) if isinstance(batch, Tensor) else batch


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor of a batch, in one list."""
    if isinstance(batch, Tensor):
        return [batch]
    parts = _parts(batch) if isinstance(batch, Mapping | tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def bytes_of(batch: Any) -> int:
    """The memory that a batch takes."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch.nbytes
    return sum(map(bytes_of, _parts(batch))) if isinstance(batch, Mapping | tuple | list) else 0


def _parts(batch: Any) -> Iterable[Any]:
    return batch.values() if isinstance(batch, Mapping) else batch


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return all(map(_equal, _parts(one), _parts(other)))


# ------------------------------------------------------------------------------ what is known of data


def _is_in_memory(data: Any) -> bool:
    """Whether the values are there already: tensors, arrays, and lists of them."""
    return isinstance(
        data, ImageSet | Examples | Tensor | np.ndarray | tuple | list | Mapping | str | bytes
    ) or (type(data).__name__ == "TensorDataset")


def _is_iterable_loader(data: Any) -> bool:
    return isinstance(data, DataLoader) and not _has_index(data.dataset)


def _examples_in(data: Any, name: str, labelled: bool) -> int | None:
    """How many examples a pass has; None where that is not known."""
    if is_map_style(data):
        return len(data)
    if isinstance(data, DataLoader) and data.batch_size is not None:
        count = _length(data.sampler if is_map_style(data.dataset) else data.dataset)
        return count - count % data.batch_size if count is not None and data.drop_last else count
    count = _length(data)
    if not count:
        return count
    with random_from(0):
        return count * rows_of(next(_first_rows(data, 1, name, labelled, whole=True))[0])


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except Exception:  # each kind has an error of its own for not knowing
        return None


def _first_rows(data: Any, count: int, name: str, labelled: bool, whole: bool = False) -> Iterator[Any]:
    """Batches of the first examples, which may be of the first entry as a whole."""
    entries: Iterable[Any] = _entries(data, name)
    if isinstance(data, DataLoader) and _has_index(data.dataset) and data.batch_size is not None:
        # Without starting its workers.
        entries = (data.collate_fn([data.dataset[index]]) for index in range(len(data.dataset)))  # type: ignore[arg-type]
    left = count
    for images, labels in _batches(entries, name, labelled, is_batched(data)):
        rows = rows_of(images) if whole else min(left, rows_of(images))
        part = slice(0, rows)
        yield cut_rows(images, part), None if labels is None else labels[part]
        left -= rows
        if left <= 0:
            return
    if left == count:
        raise ValueError(f"{name} holds 0 images; give at least one")


def _read_once(
    data: Iterator[Any], limit: float, memory: str | float, name: str, labelled: bool
) -> ExampleSet:
    """What an iterator gives, if it fits."""
    held = 0

    def counted() -> Iterator[Any]:
        nonlocal held
        for batch in read_batches(data, name, labelled):
            held += bytes_of(batch)
            if held > limit:
                raise ValueError(
                    f"{name} is a {type(data).__name__}, which can be read only once, and it holds more than "
                    f"memory={memory!r}; give what it was made from, such as a DataLoader or an "
                    "IterableDataset, which is then streamed"
                )
            yield batch

    return collect(counted(), name, labelled, batched=True)


def _readable(size: float) -> str:
    unit, scale = next(
        ((unit, UNITS[unit]) for unit in ("TB", "GB", "MB") if size >= UNITS[unit]), ("KB", 1e3)
    )
    return f"{size / scale:.3g} {unit}"
