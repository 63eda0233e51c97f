"""Run folders: configuration, log and checkpoints that survive being killed at any moment.

A checkpoint is one safetensors file, written to a temporary name, flushed to disk and renamed, so that a
whole file or none is there. Its header carries the step and a checksum of all that the file holds.
"""

from __future__ import annotations

import json
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ensbridge.utils.files import append_line, open_folder, read_file, read_json, write_atomically
from ensbridge.utils.text import one_line, short

OUTPUTS = ("checkpoint-*.safetensors", "log.jsonl", "scores.json", "report.html")
KEEP = 2  # The newest and one to fall back on.
SECONDS, TIMES = 30.0, 20.0  # The next is due after so long, and after so many times what writing one took.


class Checkpoint(NamedTuple):
    """What a checkpoint holds, and where it lies."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    path: Path


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"checkpoint-{step:09d}.safetensors"


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and their metadata atomically as one safetensors file."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(held, {**metadata, "checksum": _checksum(held, metadata)}))


def load_checkpoint(path: Path, most: int | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a checkpoint whole, or raise ValueError if it is damaged or has more than `most` bytes."""
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path.name} is not a file, so damaged")
    if most is not None and (size := path.stat().st_size) > most:
        raise ValueError(f"{path.name} is damaged: its {size:,} bytes are more than this run can have")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        checksum = metadata.pop("checksum", None)
        whole = checksum == _checksum(tensors, metadata)
    except (SafetensorError, OSError, RuntimeError, AttributeError) as error:  # types may be unknown to torch
        raise ValueError(f"{path.name} is truncated or damaged ({one_line(error)})") from error
    if not whole:
        raise ValueError(f"{path.name} is damaged: it does not match its checksum")
    return tensors, metadata


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    value = zlib.crc32(repr(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), value)
    return f"{value:08x}"


class RunFolder:
    """A folder that holds one run: config.json, log.jsonl and checkpoint-*.safetensors."""

    def __init__(
        self,
        path: Path | str,
        description: Mapping[str, Any],
        ignore: Sequence[str] = (),
        upgrade: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        """Open a run or begin one; a folder made with another configuration is refused and left as it is.

        What `ignore` names is kept in config.json but may differ. `upgrade` gives the names of today to what
        an earlier version wrote there.
        """
        self.path = open_folder(path)
        self._log = self.path / "log.jsonl"
        wanted = json.loads(json.dumps(description))
        config = self.path / "config.json"
        if config.exists():
            there = read_json(config)
            if not isinstance(there, dict):
                raise ValueError(f"{config} holds no configuration; choose another folder")
            both = upgrade(there), wanted
            old, new = ({k: v for k, v in config.items() if k not in ignore} for config in both)
            if difference := first_difference(old, new):
                raise ValueError(
                    f"{self.path} was made with another configuration ({difference}); "
                    "choose another folder, or delete this one to start again"
                )
        elif any(True for pattern in OUTPUTS for _ in self.path.glob(pattern)):
            raise ValueError(f"{self.path} holds results without their config.json; choose another folder")
        else:
            self.describe(wanted)
        self._saved, self._took = time.monotonic(), 0.0

    def describe(self, description: Mapping[str, Any]) -> None:
        """Write config.json: the same configuration may come to be asked for in other words."""
        write_atomically(self.path / "config.json", json.dumps(description, indent=2).encode())

    def _checkpoints(self) -> list[Path]:
        return sorted(self.path.glob("checkpoint-*.safetensors"))

    def save(self, step: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write the checkpoint of a step and drop those that are no longer needed."""
        newest = checkpoint_path(self.path, step)
        begun = time.monotonic()
        save_checkpoint(newest, tensors, metadata)
        self._saved = time.monotonic()
        self._took = self._saved - begun
        # Those of later steps are damaged, or this run would have resumed from them.
        kept = [path for path in self._checkpoints() if path <= newest][-KEEP:]
        for path in set(self._checkpoints()) - set(kept):
            path.unlink()

    def is_due(self) -> bool:
        """Whether so much time has passed since the last checkpoint that a kill would lose too much."""
        return time.monotonic() - self._saved >= max(SECONDS, TIMES * self._took)

    def newest(self, most: int | None = None) -> Checkpoint | None:
        """The newest whole checkpoint of at most `most` bytes; a damaged one is left aside with a warning."""
        for path in reversed(self._checkpoints()):
            try:
                return Checkpoint(*load_checkpoint(path, most), path)
            except ValueError as error:
                warnings.warn(f"{error}; using the one before it", stacklevel=2)
        return None

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line to log.jsonl."""
        append_line(self._log, json.dumps(line))

    def rewind_log(self, step: int) -> None:
        """Drop the lines of later steps, and half a line that a kill may have left."""
        if not self._log.exists():
            return
        *lines, half = read_file(self._log, remedy="move it away and run again").split(b"\n")
        kept = [line for number, line in enumerate(lines, 1) if self._step_of(line, number) <= step]
        if half or len(kept) < len(lines):
            write_atomically(self._log, b"".join(line + b"\n" for line in kept))

    def _step_of(self, line: bytes, number: int) -> int:
        try:
            step = json.loads(line.decode())["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            step = None
        if type(step) is not int:
            # Nothing but a crash at its end drops a line: what was logged is not ours to lose.
            raise ValueError(f"{self._log} is damaged in line {number}; move it away and run again")
        return step


_ABSENT = object()  # stands for a value that is not there, as a switch that is off may be


def first_difference(there: Any, here: Any, name: str = "") -> str | None:
    """The first place where two JSON values differ, in words.

    >>> first_difference({"fit": {"lr": 0.1}}, {"fit": {"lr": 0.2}})
    'fit.lr is 0.1 there and 0.2 here'
    >>> first_difference({"together": 3}, {})
    'together is 3 there and left alone here'
    """
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(key for key in here if key not in there)]:
            inner = f"{name}.{key[:60]}" if name else key[:60]
            if difference := first_difference(there.get(key, _ABSENT), here.get(key, _ABSENT), inner):
                return difference
        return None
    if there == here:
        return None
    there, here = ("left alone" if value is _ABSENT else short(value) for value in (there, here))
    return f"{name} is {there} there and {here} here"
