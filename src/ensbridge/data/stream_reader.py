"""A stream's batches, step by step: where each begins, and how a run that was stopped finds its place again.

Every batch has the same number of examples. What is left of a pass begins the first batch of the next one, so
that none is lost. What the data's own code draws at random depends on the seed and the position alone.
"""

from __future__ import annotations

import base64
import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ensbridge.data.loader import _batches
from ensbridge.data.stream import (
    Stream,
    cut_rows,
    join_rows,
    map_tensors,
    random_from,
    read_batches,
    rows_of,
)
from ensbridge.utils.inputs import as_floats
from ensbridge.utils.progress import Advance, ignore, stage_lines

Seed = Callable[..., int]  # of a position: derive_seed with a run's own seed


class Position(NamedTuple):
    """Where in a stream a batch begins."""

    passes: int  # that are over
    entries: int  # of this pass that are before it
    rows: int  # of the next entry that are before it
    state: str | None = None  # the data's own, before that entry, as JSON


class AbstractReader(ABC):
    """Reads the batches of a run in the order of its steps; holds one at a time."""

    def __init__(self, stream: Stream, rows: int, seed: Seed) -> None:
        self.stream, self.rows, self.seed = stream, rows, seed
        self.held: tuple[int, Any, Tensor | None] | None = None

    def read(self, step: int) -> tuple[Any, Tensor | None]:
        """The batch of a step, on the stream's device and as floats; asked again, the same one."""
        if self.held is None or self.held[0] != step:
            self.held = None
            self.held = step, *_on_device(self._read(step), self.stream.device)
        return self.held[1:]

    @abstractmethod
    def _read(self, step: int) -> tuple[Any, Tensor | None]:
        """The batch of a step as the data gives it."""

    @abstractmethod
    def position(self, step: int) -> str | None:
        """Where the batch of a step begins, as JSON for a checkpoint; None where the step says it."""

    @abstractmethod
    def resume(self, step: int, position: str | None) -> None:
        """Go to the batch of a step."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what was opened."""


class IndexedReader(AbstractReader):
    """Reads a Dataset's examples by index, in the order in which they would be taken from memory."""

    def __init__(self, stream: Stream, rows: int, seed: Seed, indices: Callable[[int], Tensor]) -> None:
        super().__init__(stream, rows, seed)
        self.indices = indices

    def _read(self, step: int) -> tuple[Any, Tensor | None]:
        data, indices = self.stream.data, self.indices(step).tolist()
        with random_from(self.seed("data", step)):
            if hasattr(data, "__getitems__"):
                items = data.__getitems__(indices)
            else:
                items = [data[index] for index in indices]
        return _joined(list(_batches(items, self.stream.name, self.stream.labelled)), self.stream.name)

    def position(self, step: int) -> str | None:
        """The step is all it takes."""
        return None

    def resume(self, step: int, position: str | None) -> None:
        """Nothing needs to be read for it."""

    def close(self) -> None:
        """Nothing was opened."""


class LoaderReader(AbstractReader):
    """Reads an iterable, pass after pass.

    Of `parts` processes each takes every entry of its own number, unless the data is split already.
    """

    def __init__(self, stream: Stream, rows: int, seed: Seed, part: int = 0, parts: int = 1) -> None:
        super().__init__(stream, rows, seed)
        self.data, self.part, self.parts = _own_copy(stream.data), part, parts
        self.step = 0  # of the next batch
        self.begins: dict[int, Position] = {}  # of the last batch that was read, and of the next
        self._go_to(Position(0, 0, 0))

    def _read(self, step: int) -> tuple[Any, Tensor | None]:
        if step != self.step:
            if step not in self.begins:
                raise ValueError(
                    f"batch {step} was asked for after batch {self.step - 1}; they come in order"
                )
            self._go_to(self.begins[step])
            self.step = step
        self.begins = {step: self._here()}
        taken: list[tuple[Any, Tensor | None]] = []
        missing = self.rows
        while missing:
            if not self.left:
                self._next_entry()
            batch, labels = self.left.pop()
            take, count = min(missing, rows_of(batch)), rows_of(batch)
            taken.append(_cut(batch, labels, slice(0, take)))
            if take < count:
                self.left.append(_cut(batch, labels, slice(take, None)))
            self.used = self.used + take if take < count else 0
            missing -= take
        self.step = step + 1
        self.begins[self.step] = self._here()
        return _joined(taken, self.stream.name)

    def position(self, step: int) -> str | None:
        """The passes, entries and rows before it, and the data's own state where it has one."""
        return json.dumps(self.begins[step] if step in self.begins else Position(0, 0, 0))

    def resume(self, step: int, position: str | None) -> None:
        """Go there by the data's own state, or by reading what is before it."""
        if step == 0:
            return
        name = self.stream.name
        if position is None:
            self.step = step
            self.stream.say(f"{name} is read from its start at step {step}, as its place was not kept")
            return
        start, advance = _position_of(position), ignore
        if start.state is not None:
            self.stream.say(f"{name} resumes at step {step} by its own state")
        else:
            how = f"by skipping what was read of pass {start.passes + 1}"
            sentence = f"a {self.stream.kind} has no state of its own, so {name} resumes at step {step} {how}"
            advance = stage_lines(sentence, start.entries, "batches", self.stream.say)
        self._go_to(start, advance)
        self.step = step

    def close(self) -> None:
        """End the pass, and its workers with it."""
        self.entries: Iterator[Any] = iter(())
        self.left: list[tuple[Any, Tensor | None]] = []

    def _here(self) -> Position:
        if self.left:
            return Position(self.passes, self.count - 1, self.used, self.before)
        return Position(self.passes, self.count, 0, self._state())

    def _go_to(self, position: Position, advance: Advance = ignore) -> None:
        self.close()
        self.passes, self.count, self.used, self.before = position.passes, 0, 0, None
        if position.state is not None:
            self.data.load_state_dict(_decoded(json.loads(position.state)))
        self._begin_pass()
        if position.state is not None:
            self.count, self.start_state = position.entries, position.state
        else:
            for _ in range(position.entries):
                self._next_entry()
                self.left.clear()
                advance(1)
        if position.rows:
            self._next_entry()
            batch, labels = self.left.pop()
            self.left.append(_cut(batch, labels, slice(position.rows, None)))
            self.used = position.rows

    def _begin_pass(self) -> None:
        _set_epoch(self.data, self.passes)
        self.count = 0
        self.drawn, self.start_state = False, None  # whether an entry was, and the state before the first
        entries = read_batches(self.data, self.stream.name, self.stream.labelled)
        self.entries = islice(entries, self.part, None, self.parts)

    def _next_entry(self) -> None:
        """Read an entry, of the next pass where this one is over."""
        self.before = self._state()
        entry = self._drawn()
        if entry is None:
            if not self.count:
                raise ValueError(
                    f"{self.stream.name} gave nothing in pass {self.passes + 1}; give data that can be read "
                    "again, and at least as many batches as processes"
                )
            self.passes, self.before = self.passes + 1, None
            self._begin_pass()
            self._next_entry()
            return
        self.count += 1
        self.used = 0
        self.left.append(entry)

    def _drawn(self) -> tuple[Any, Tensor | None] | None:
        # The first draw of a pass is also that of its order, and of its workers' seeds.
        with random_from(self.seed("entry", self.passes, self.count)):
            self.drawn = True
            return next(self.entries, None)

    def _state(self) -> str | None:
        """The data's own state, if it has one that can be written as JSON; none at the start of a pass."""
        stateful = hasattr(self.data, "state_dict") and hasattr(self.data, "load_state_dict")
        if not self.drawn or not stateful or self.parts > 1:
            return self.start_state
        try:
            return json.dumps(_encoded(self.data.state_dict()))
        except (TypeError, ValueError):
            return None


def open_reader(
    stream: Stream,
    rows: slice,
    seed: Seed,
    indices: Callable[[int], Tensor],
    part: int = 0,
    parts: int = 1,
) -> AbstractReader:
    """A reader of this process's `rows` of each batch; `indices` orders the examples of a Dataset."""
    count = rows.stop - rows.start
    if stream.is_indexed:
        return IndexedReader(stream, count, seed, lambda step: indices(step)[rows])
    return LoaderReader(stream, count, seed, *((0, 1) if stream.sharded else (part, parts)))


def _joined(batches: Sequence[tuple[Any, Tensor | None]], name: str) -> tuple[Any, Tensor | None]:
    images = join_rows([batch for batch, _ in batches], name)
    known = [labels for _, labels in batches if labels is not None]
    if known and len(known) != len(batches):
        raise ValueError(f"some entries of {name} have labels and others none; give all or none")
    return images, torch.cat(known) if known else None


def _cut(batch: Any, labels: Tensor | None, rows: slice) -> tuple[Any, Tensor | None]:
    return cut_rows(batch, rows), None if labels is None else labels[rows]


def _on_device(batch: tuple[Any, Tensor | None], device: torch.device) -> tuple[Any, Tensor | None]:
    images, labels = batch

    def move(tensor: Tensor) -> Tensor:
        moved = tensor.to(device, non_blocking=tensor.is_pinned() if device.type == "cuda" else False)
        return as_floats(moved)

    return map_tensors(move, images), None if labels is None else labels.to(device)


def _own_copy(data: Any) -> Any:
    """Data whose state may be set without the user's changing: of Hugging Face's it would stay."""
    return copy.deepcopy(data) if type(data).__module__.startswith("datasets.") else data


def _set_epoch(data: Any, number: int) -> None:
    """Tell whatever wants to know it, such as a DistributedSampler, which pass begins."""
    dataset = getattr(data, "dataset", None)
    sampler, batch_sampler = getattr(data, "sampler", None), getattr(data, "batch_sampler", None)
    if hasattr(data, "_num_iter_calls"):  # by which Fabric's loaders set it
        data._num_iter_calls = number
    for part in (data, dataset, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(number)


def _position_of(text: str | None) -> Position:
    try:
        passes, entries, rows, state = json.loads(text or "")
    except (TypeError, ValueError) as error:
        raise ValueError("its metadata has no position in the stream that can be read") from error
    counts = (passes, entries, rows)
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(state, str | None):
        raise ValueError(f"its position in the stream is {counts}, expected whole numbers")
    return Position(passes, entries, rows, state)


def _encoded(value: Any) -> Any:
    """A state in JSON's types; tensors, arrays and bytes in base 64."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return {"__pairs__": [[_encoded(key), _encoded(part)] for key, part in value.items()]}
        return {key: _encoded(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_encoded(part) for part in value]
    if isinstance(value, Tensor):
        return {"__tensor__": _encoded(value.detach().cpu().numpy())}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return {
            "__array__": base64.b64encode(array.tobytes()).decode(),
            "dtype": array.dtype.str,
            "shape": array.shape,
        }
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "__pairs__" in value:
        return {_decoded(key): _decoded(part) for key, part in value["__pairs__"]}
    if "__tensor__" in value:
        return torch.from_numpy(_decoded(value["__tensor__"]))
    if "__array__" in value:
        array = np.frombuffer(base64.b64decode(value["__array__"]), np.dtype(value["dtype"]))
        return array.reshape(value["shape"]).copy()
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"])
    return {key: _decoded(part) for key, part in value.items()}
