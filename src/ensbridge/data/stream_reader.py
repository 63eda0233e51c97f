"""Read a stream's batches step by step, and resume at the position of a checkpoint.

Every batch has the same number of examples. The rest of a pass begins the first batch of the next one. What
the data's own code draws at random depends only on the seed and the position.
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

from ensbridge.data.loader import Batch, as_batches
from ensbridge.data.stream import Stream, cut, random_from, read_batches
from ensbridge.utils.inputs import as_floats, count_rows, map_inputs, tensors_of
from ensbridge.utils.progress import Advance, ignore, stage_lines

Seed = Callable[..., int]  # of a position: derive_seed with a run's own seed


class Position(NamedTuple):
    """Where in a stream a batch begins."""

    passes: int  # completed
    entries: int  # of this pass before it
    rows: int  # of the next entry before it
    state: str | None = None  # the data's own before that entry, as JSON


class AbstractReader(ABC):
    """Reads the batches of a run in the order of its steps; holds one at a time."""

    def __init__(self, stream: Stream, rows: int, seed: Seed) -> None:
        self.stream, self.rows, self.seed = stream, rows, seed
        self.held: tuple[int, Any, Tensor | None] | None = None

    def read(self, step: int) -> tuple[Any, Tensor | None]:
        """The batch of a step, on the stream's device and as floats; the same one if read again."""
        if self.held is None or self.held[0] != step:
            self.held = None
            self.held = step, *_to_device(self._read(step), self.stream.device)
        return self.held[1:]

    @abstractmethod
    def _read(self, step: int) -> Batch:
        """The batch of a step as the data gives it."""

    def position(self, step: int) -> str | None:
        """Where the batch of a step begins, as JSON for a checkpoint; None where the step determines it."""
        return None

    def resume(self, step: int, position: str | None) -> None:  # noqa: B027 - by index there is nothing to do
        """Continue with the batch of a step."""

    def close(self) -> None:  # noqa: B027 - by index nothing is open
        """Release what was opened."""


class IndexedReader(AbstractReader):
    """Reads a Dataset's examples by index, in the order of training from memory."""

    def __init__(self, stream: Stream, rows: int, seed: Seed, indices: Callable[[int], Tensor]) -> None:
        super().__init__(stream, rows, seed)
        self.indices = indices

    def _read(self, step: int) -> Batch:
        data, indices = self.stream.data, self.indices(step).tolist()
        with random_from(self.seed("data", step)):
            if hasattr(data, "__getitems__"):
                items = data.__getitems__(indices)
            else:
                items = [data[index] for index in indices]
        return _join(list(as_batches(items, self.stream.name, self.stream.labelled)), self.stream.name)


class LoaderReader(AbstractReader):
    """Reads an iterable, pass after pass.

    Process `part` of `parts` reads every `parts`-th entry, unless the data is sharded already.
    """

    def __init__(self, stream: Stream, rows: int, seed: Seed, part: int = 0, parts: int = 1) -> None:
        super().__init__(stream, rows, seed)
        # Hugging Face's data keep the state that is loaded, so the user's object is not touched.
        hugging_face = type(stream.data).__module__.startswith("datasets.")
        self.data = copy.deepcopy(stream.data) if hugging_face else stream.data
        self.part, self.parts = part, parts
        self.step = 0  # of the next batch
        self.begins: dict[int, Position] = {}  # of the last batch that was read, and of the next
        self._seek(Position(0, 0, 0))

    def _read(self, step: int) -> Batch:
        if step != self.step:
            if step not in self.begins:
                raise ValueError(
                    f"batch {step} was requested after batch {self.step - 1}; batches are read in order"
                )
            self._seek(self.begins[step])
        self.begins = {step: self._here()}
        taken: list[Batch] = []
        missing = self.rows
        while missing:
            entry = self.rest or self._next_entry()
            count = count_rows(entry[0])
            take = min(missing, count)
            taken.append(cut(entry, slice(0, take)))
            self.rest = cut(entry, slice(take, None)) if take < count else None
            self.used = self.used + take if take < count else 0
            missing -= take
        self.step = step + 1
        self.begins[self.step] = self._here()
        return _join(taken, self.stream.name)

    def position(self, step: int) -> str | None:
        """The passes, entries and rows before it, and the data's own state where it has one."""
        return json.dumps(self.begins.get(step, Position(0, 0, 0)))

    def resume(self, step: int, position: str | None) -> None:
        """Continue from the data's own state, or by skipping what was read of the pass."""
        if step == 0:
            return
        name = self.stream.name
        self.step = step
        if position is None:
            self.stream.say(f"{name} is read from its start at step {step}, as its position was not saved")
            return
        start, advance = _parse_position(position), ignore
        if start.state is not None:
            self.stream.say(f"{name} resumes at step {step} from its own state")
        else:
            how = f"by skipping what was read of pass {start.passes + 1}"
            sentence = f"a {self.stream.kind} has no state of its own, so {name} resumes at step {step} {how}"
            advance = stage_lines(sentence, start.entries, "batches", self.stream.say)
        self._seek(start, advance)

    def close(self) -> None:
        """End the pass, and its workers with it."""
        self.entries: Iterator[Batch] = iter(())
        self.rest: Batch | None = None  # of the entry that was read last

    def _here(self) -> Position:
        if self.rest is not None:
            return Position(self.passes, self.count - 1, self.used, self.before)
        return Position(self.passes, self.count, 0, self._state())

    def _seek(self, position: Position, advance: Advance = ignore) -> None:
        self.close()
        self.passes, self.used, self.before = position.passes, 0, None
        if position.state is not None:
            self.data.load_state_dict(decode_state(position.state))
        self._begin_pass()
        if position.state is not None:
            self.count, self.start_state = position.entries, position.state
        else:
            for _ in range(position.entries):
                self._next_entry()
                advance(1)
        if position.rows:
            self.rest = cut(self._next_entry(), slice(position.rows, None))
            self.used = position.rows

    def _begin_pass(self) -> None:
        _set_epoch(self.data, self.passes)
        self.count = 0
        self.started, self.start_state = False, None  # whether an entry was read; the state before the first
        entries = read_batches(self.data, self.stream.name, self.stream.labelled)
        self.entries = islice(entries, self.part, None, self.parts)

    def _next_entry(self) -> Batch:
        """Read an entry, of the next pass where this one is over."""
        self.before = self._state()
        # The first draw of a pass also decides its order and its workers' seeds.
        with random_from(self.seed("entry", self.passes, self.count)):
            self.started = True
            entry = next(self.entries, None)
        if entry is None:
            if not self.count:
                raise ValueError(
                    f"{self.stream.name} gave nothing in pass {self.passes + 1}; give data that can be read "
                    "again, and at least as many batches as processes"
                )
            self.passes += 1
            self._begin_pass()
            return self._next_entry()
        self.count += 1
        self.used = 0
        return entry

    def _state(self) -> str | None:
        """The data's own state, if it has one that can be written as JSON; None at the start of a pass."""
        stateful = hasattr(self.data, "state_dict") and hasattr(self.data, "load_state_dict")
        if not self.started or not stateful or self.parts > 1:
            return self.start_state
        try:
            return encode_state(self.data.state_dict())
        except (TypeError, ValueError):
            return None


def open_reader(
    stream: Stream, rows: slice, seed: Seed, indices: Callable[[int], Tensor], part: int = 0, parts: int = 1
) -> AbstractReader:
    """A reader of this process's `rows` of each batch; `indices` orders the examples of a Dataset."""
    count = rows.stop - rows.start
    if stream.is_indexed:
        return IndexedReader(stream, count, seed, lambda step: indices(step)[rows])
    return LoaderReader(stream, count, seed, *((0, 1) if stream.sharded else (part, parts)))


def _join(batches: Sequence[Batch], name: str) -> Batch:
    """Several batches as one."""
    if len(batches) == 1:
        return batches[0]
    columns = zip(*(tensors_of(inputs) for inputs, _ in batches), strict=True)
    try:
        joined = iter([torch.cat(column) for column in columns])
    except RuntimeError as error:
        raise ValueError(
            f"{name} has batches of examples of different shapes, which cannot be joined; give a loader "
            "whose batches all have batch_size examples, with drop_last=True"
        ) from error
    labels = [labels for _, labels in batches if labels is not None]
    if labels and len(labels) != len(batches):
        raise ValueError(f"some entries of {name} have labels and others none; give all or none")
    return map_inputs(lambda _: next(joined), batches[0][0]), torch.cat(labels) if labels else None


def _to_device(batch: Batch, device: torch.device) -> Batch:
    inputs, labels = batch

    def move(tensor: Tensor) -> Tensor:
        return as_floats(tensor.to(device, non_blocking=device.type == "cuda" and tensor.is_pinned()))

    return map_inputs(move, inputs), None if labels is None else labels.to(device)


def _set_epoch(data: Any, number: int) -> None:
    """Set the epoch of samplers and data sets that shuffle by it, such as a DistributedSampler."""
    if hasattr(data, "_num_iter_calls"):  # from which Fabric's loaders set it
        data._num_iter_calls = number
    batch_sampler = getattr(data, "batch_sampler", None)
    parts = (getattr(data, "dataset", None), getattr(data, "sampler", None), batch_sampler)
    for part in (data, *parts, getattr(batch_sampler, "sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(number)


def _parse_position(text: str) -> Position:
    try:
        passes, entries, rows, state = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ValueError("its metadata has no position in the stream that can be read") from error
    counts = (passes, entries, rows)
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(state, str | None):
        raise ValueError(f"its position in the stream is {counts}, expected integers from 0")
    return Position(passes, entries, rows, state)


def encode_state(state: Any) -> str:
    """A state as JSON; tensors, arrays and bytes in base 64."""
    return json.dumps(_encode(state))


def decode_state(text: str) -> Any:
    """The state in such JSON."""
    return json.loads(text, object_hook=_decode)


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return {"__pairs__": [[_encode(key), _encode(part)] for key, part in value.items()]}
        return {key: _encode(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_encode(part) for part in value]
    if isinstance(value, Tensor):
        return {"__tensor__": _encode(value.detach().cpu().numpy())}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        text = base64.b64encode(array.tobytes()).decode()
        return {"__array__": text, "dtype": array.dtype.str, "shape": array.shape}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    return value


def _decode(value: dict[str, Any]) -> Any:
    match value:
        case {"__pairs__": pairs}:
            return dict(pairs)
        case {"__tensor__": array}:
            return torch.from_numpy(array)
        case {"__array__": text, "dtype": dtype, "shape": shape}:
            return np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape).copy()
        case {"__bytes__": text}:
            return base64.b64decode(text)
    return value
