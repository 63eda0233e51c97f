"""Data that does not fit into memory, read batch by batch during training."""

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
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset

from ensbridge.data.examples import Examples, ExampleSet, ImageSet
from ensbridge.data.loader import Batch, Data, as_batches, collect, is_batched, iterate_entries
from ensbridge.utils.devices import random_state_kept
from ensbridge.utils.inputs import count_rows, map_inputs, tensors_of

MEMORY = "512MB"
UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
PROBED = 8  # examples that are read twice to detect random augmentation

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stream:
    """Examples that are read again in every epoch, with whatever augmentation their own code does.

    `data` is a DataLoader, an IterableDataset, a Dataset or another iterable that can be read again, of
    examples or batches in any form that `compress` accepts. `length` is the number of examples in one pass,
    None where it is unknown. With several processes `sharded` says that `data` is only this process's shard,
    and `length` that of the shard. Unless `labelled`, labels are ignored.

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
            object.__setattr__(self, "length", self._known_length())
        if self.length == 0:
            raise ValueError(f"{self.name} holds 0 images; give at least one")

    @property
    def is_indexed(self) -> bool:
        """Whether examples can be read by index, so that any step's batch can be read on its own."""
        return is_map_style(self.data)

    @property
    def kind(self) -> str:
        """The name of the data's class."""
        return type(self.data).__name__

    def to(self, device: torch.device | str) -> Stream:
        """The same stream, whose batches are moved to a device."""
        return replace(self, device=torch.device(device))

    def sample(self, count: int) -> ExampleSet:
        """The first examples, on the stream's device."""

        def first() -> Iterator[Batch]:
            left = count
            for batch in self._probe():
                yield cut(batch, slice(0, left))
                left -= count_rows(batch[0])
                if left <= 0:
                    return

        with random_from(0):
            return collect(first(), self.name, self.labelled, batched=True).to(self.device)

    def counted(self, advance: Callable[[int], None]) -> Stream:
        """The same stream with its length, read once to count where it is unknown."""
        if self.length is not None:
            return self
        count = 0
        for inputs, _ in read_batches(self.data, self.name, self.labelled):
            count += count_rows(inputs)
            advance(count_rows(inputs))
        return replace(self, length=count)

    def fingerprint(self) -> str:
        """Identifies the data of a run, without its values, which may differ at every reading."""
        return f"{self.kind} of {self.length if self.length is not None else 'unknown'} examples"

    def _known_length(self) -> int | None:
        data = self.data
        if self.is_indexed:
            return len(data)
        if is_batched(data):
            count = _length(data.sampler if is_map_style(data.dataset) else data.dataset)
            return count - count % data.batch_size if count is not None and data.drop_last else count
        count = _length(data)
        if not count:
            return count
        with random_from(0):
            return count * count_rows(self._first_batch()[0])

    def _first_batch(self) -> Batch:
        """The first entry as a batch; of a DataLoader, its first example."""
        for batch in self._probe():
            return batch
        raise ValueError(f"{self.name} holds 0 images; give at least one")

    def _probe(self) -> Iterator[Batch]:
        """Batches from the start; of a DataLoader, examples without starting its workers."""
        data = self.data
        if is_batched(data) and _has_index(data.dataset):
            entries = (data.collate_fn([data.dataset[index]]) for index in range(len(data.dataset)))
            return as_batches(entries, self.name, self.labelled, batched=True)
        return read_batches(data, self.name, self.labelled)


def load_or_stream(
    data: Data | Stream, memory: str | float, name: str, say: Say, labelled: bool = True
) -> ExampleSet | Stream:
    """Data in memory, where its size is known and fits and its examples are fixed; a stream of it otherwise.

    What is in memory already stays there. An iterator can be read only once, so it has to fit.
    """
    limit = parse_memory(memory)
    if isinstance(data, Stream):
        return replace(data, say=say, labelled=labelled)
    if isinstance(data, Iterator):
        return _read_once(data, limit, memory, name, labelled)
    if _is_in_memory(data):
        return collect(data, name, labelled)
    stream = Stream(data, name, say=say, labelled=labelled)
    size = size_of(stream)
    if size is None:
        say(f"{name} is streamed, as the size of a {stream.kind} is not known before it is read")
    elif size > limit:
        say(f"{name} is streamed, as its {_readable(size)} exceed memory={memory!r}")
    elif views_differ(data, name, labelled):
        say(
            f"{name} is streamed, as its images differ when they are read again; with augment= in place of "
            "its own random augmentation it would be kept in memory"
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
    if _is_in_memory(source):
        return collect(source, name)
    if is_map_style(source) and (size_of(Stream(source, name)) or 0) > limit:
        # Data may be sorted by class, so that its first examples would be of few.
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
        source = Subset(source, order.tolist())
    cut_short = False

    def fitting() -> Iterator[Batch]:
        nonlocal cut_short
        held = 0
        for batch in read_batches(source, name):
            held += bytes_of(batch)
            cut_short = held > limit and held > bytes_of(batch)
            if cut_short:
                return
            yield batch

    whole = collect(fitting(), name, batched=True)
    if cut_short:
        which = f"{len(whole):,} random" if isinstance(source, Subset) else f"the first {len(whole):,}"
        say(f"{which} images of {name} are used, as no more fit into memory={memory!r}")
    return whole


def _read_once(
    data: Iterator[Any], limit: float, memory: str | float, name: str, labelled: bool
) -> ExampleSet:
    """The examples of an iterator, if they fit."""

    def fitting() -> Iterator[Batch]:
        held = 0
        for batch in read_batches(data, name, labelled):
            held += bytes_of(batch)
            if held > limit:
                raise ValueError(
                    f"{name} is a {type(data).__name__}, which can be read only once, and it holds more than "
                    f"memory={memory!r}; give what it was made from, such as a DataLoader or an "
                    "IterableDataset, which is then streamed"
                )
            yield batch

    return collect(fitting(), name, labelled, batched=True)


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


def read_batches(data: Any, name: str, labelled: bool = True) -> Iterator[Batch]:
    """Every entry of data as a batch of inputs with its labels."""
    return as_batches(iterate_entries(data, name), name, labelled, is_batched(data))


def size_of(stream: Stream) -> int | None:
    """The bytes of all examples, judged by the first; None where their number is not known."""
    data = stream.data
    if isinstance(data, IterableDataset) or (isinstance(data, DataLoader) and not _has_index(data.dataset)):
        return None
    hugging_face = type(data).__module__.startswith("datasets.")
    if stream.length is None or (hugging_face and not stream.is_indexed):
        return None
    return stream.length * bytes_of(cut(stream._first_batch(), slice(0, 1)))


def views_differ(data: Any, name: str, labelled: bool = True) -> bool:
    """Whether examples differ when they are read again, as with random augmentation."""
    items: Any = data.dataset if isinstance(data, DataLoader) else data
    batched = is_batched(data)
    if not (is_map_style(items) or (batched and _has_index(items))):
        return False

    def read(index: int) -> list[Tensor]:
        entry = data.collate_fn([items[index]]) if batched else items[index]
        return tensors_of(next(as_batches([entry], name, labelled, batched))[0])

    with random_from(0):  # so that several processes see the same
        return any(
            not all(map(torch.equal, read(index), read(index))) for index in range(min(PROBED, len(items)))
        )


def is_map_style(data: Any) -> bool:
    """Whether data gives examples by index and has a length."""
    return (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, Mapping | str | bytes | IterableDataset | DataLoader | tuple | list)
    )


@contextmanager
def random_from(seed: int) -> Iterator[None]:
    """Seed the global generators that the data's own code draws from, and restore their states afterwards."""
    with random_state_kept():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - users' code draws from it
        yield


def cut(batch: Batch, rows: slice) -> Batch:
    """Some of a batch's examples."""
    inputs, labels = batch
    return map_inputs(lambda tensor: tensor[rows], inputs), None if labels is None else labels[rows]


def bytes_of(batch: Batch) -> int:
    """The memory that a batch takes, labels included."""
    inputs, labels = batch
    return sum(tensor.nbytes for tensor in tensors_of(inputs)) + (0 if labels is None else labels.nbytes)


def _has_index(dataset: Any) -> bool:
    """Whether a DataLoader's dataset gives examples by index, as a list does too."""
    return is_map_style(dataset) or isinstance(dataset, tuple | list)


def _is_in_memory(data: Any) -> bool:
    """Whether `collect` needs no limit: tensors, arrays, lists of them, and what it refuses."""
    if isinstance(data, ImageSet | Examples | Tensor | np.ndarray | tuple | list | Mapping | str | bytes):
        return True
    return type(data) is TensorDataset or not (isinstance(data, Iterable) or is_map_style(data))


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except Exception:  # libraries raise different errors for an unknown length
        return None


def _readable(size: float) -> str:
    unit = next((unit for unit in ("TB", "GB", "MB") if size >= UNITS[unit]), "KB")
    return f"{size / UNITS[unit]:.3g} {unit}"
