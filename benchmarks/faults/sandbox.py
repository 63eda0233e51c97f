"""Mutated files read in a forked process with an end to its time and memory, where whatever it does is seen.

A file must be read, or refused with an exception that is documented for it and that says one line. An audit
hook of Python counts every attempt to start a process, run code, connect or write outside of the scratch
folder, and programs hidden in files would leave a file of their own, the canary.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import struct
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from faults.processes import fork

SECONDS = 20.0  # for one file; a busy machine needs a second at most
MEMORY = 2**30  # bytes of address space more than the process had when it began
FORBIDDEN = (
    *(
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "os.forkpty",
        "subprocess.Popen",
        "pty.spawn",
    ),
    *(
        "os.startfile",
        "ctypes.dlopen",
        "ctypes.dlsym",
        "socket.connect",
        "socket.bind",
        "os.remove",
        "shutil.rmtree",
    ),
    *("pickle.find_class", "code.__new__", "os.chmod", "os.link", "os.symlink", "os.kill", "os.rename"),
)
# Which modules of Python run code of installed ones: late imports, and the annotations of dataclasses.
_OF_PYTHON = ("importlib._bootstrap", "importlib._bootstrap_external", "typing", "dataclasses", "collections")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class AbstractKind(ABC):
    """A kind of file: how valid ones are made, changed and read."""

    name: ClassVar[str]
    documented: ClassVar[tuple[type[BaseException], ...]] = (ValueError,)  # these types themselves
    allowed: ClassVar[tuple[str, ...]] = ()  # of FORBIDDEN, what reading needs

    def __init__(self, folder: Path, canary: Path) -> None:
        """Make valid files; `folder` is for scratch, and programs that are put into files create `canary`."""
        self.folder, self.canary = folder, canary

    @abstractmethod
    def valid(self) -> list[bytes]:
        """Files that are accepted."""

    @abstractmethod
    def mutated(self, draws: random.Random) -> bytes:
        """A changed one."""

    @abstractmethod
    def read(self, content: bytes) -> None:
        """Read it as a user does; whatever is wrong with it is raised."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """End what was started."""


@dataclass
class Outcome:
    """What was seen of some files of a kind."""

    files: int = 0
    accepted: int = 0
    refused: int = 0
    undocumented: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    code_run: list[str] = field(default_factory=list)
    peak_memory_mb: float = 0.0  # above what the process had when it began

    def add(self, other: dict[str, Any]) -> None:
        """Count another's files too."""
        for name, value in asdict(self).items():
            both = max(value, other[name]) if name == "peak_memory_mb" else value + other[name]
            setattr(self, name, both)


def run_files(
    kind: type[AbstractKind], numbers: Sequence[int], seed: int, folder: Path, seconds: float = SECONDS
) -> dict[str, Any]:
    """Mutate and read the files of these numbers; a process that hangs or dies is begun again after it."""
    outcome, left = Outcome(), list(numbers)
    folder.mkdir(parents=True, exist_ok=True)
    while left:
        clock = mmap.mmap(-1, 16)  # shared with the child: the number of its file, and since when
        clock[:] = struct.pack("<qd", -1, time.monotonic())
        lines = folder / "outcomes.jsonl"
        lines.unlink(missing_ok=True)
        scratch = folder / str(len(left))  # of this process alone, as one before may have died midway
        scratch.mkdir()
        child = fork(partial(_read_all, kind, left, seed, scratch, clock, lines), folder / "output.txt")
        hung = False
        while not child.ended():
            number, since = struct.unpack("<qd", clock[:])
            limit = seconds if number >= 0 else 10 * seconds  # of making the valid ones
            if time.monotonic() - since > limit:
                hung = True
                child.kill()
            time.sleep(0.02)
        number, _ = struct.unpack("<qd", clock[:])
        for line in lines.read_text().splitlines() if lines.exists() else ():
            outcome.add(json.loads(line))
        if child.code == 0:
            break
        if number < 0:
            raise RuntimeError(f"{kind.name}: valid files are not read:\n{child.said()}")
        outcome.files += 1
        end = f"seed {seed}, file {number}"
        outcome.hangs.append(end) if hung else outcome.crashes.append(
            f"{end}: ended with {child.code}, {child.said()[-300:]}"
        )
        left = left[left.index(number) + 1 :]
    return asdict(outcome)


def draws_of(kind: type[AbstractKind], seed: int, number: int) -> random.Random:
    """What decides a file."""
    return random.Random(f"{seed}:{kind.name}:{number}")


def _read_all(
    kind: type[AbstractKind], numbers: Sequence[int], seed: int, folder: Path, clock: mmap.mmap, lines: Path
) -> None:
    """In the child: first the valid files, then the changed ones."""
    canary = folder / "canary"
    files = kind(folder, canary)
    for content in files.valid():
        files.read(content)
    events: list[str] = []
    watch = _watch(events, folder, kind.allowed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is that of now
    warnings.simplefilter("ignore")  # of what is left aside
    with lines.open("a") as log:
        for number in numbers:
            clock[:] = struct.pack("<qd", number, time.monotonic())
            content = files.mutated(draws_of(kind, seed, number))
            outcome = Outcome(files=1)
            with watch:
                _read(files, content, outcome, f"seed {seed}, file {number}")
            outcome.code_run += [f"seed {seed}, file {number}: {event}" for event in events]
            if canary.exists():
                outcome.code_run.append(f"seed {seed}, file {number}: the canary is there")
                canary.unlink()
            events.clear()
            outcome.peak_memory_mb = max(0.0, round((_peak() - before) / 1e6, 1))
            print(json.dumps(asdict(outcome)), file=log, flush=True)
    files.close()


def _read(files: AbstractKind, content: bytes, outcome: Outcome, name: str) -> None:
    try:
        files.read(content)
    except BaseException as error:
        said = str(error)
        if type(error) in files.documented and said.isprintable() and len(said) < 3000:
            outcome.refused += 1
        else:
            outcome.undocumented.append(f"{name}: {type(error).__name__}: {said[:300]!r}")
    else:
        outcome.accepted += 1


class _watch:
    """An audit hook that notes what is forbidden while it is entered; a hook stays for the process's life."""

    def __init__(self, events: list[str], folder: Path, allowed: Sequence[str]) -> None:
        self.on, self.events, self.folder, self.allowed = False, events, str(folder), allowed
        sys.addaudithook(self.hook)

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or event in self.allowed:
            return
        if event == "open":
            path, flags = str(arguments[0]), arguments[2] or 0
            if flags & _WRITES and not path.isdigit() and not path.startswith(self.folder):
                self.events.append(f"open {path} for writing")
        elif event in ("exec", "marshal.loads"):
            if sys._getframe(1).f_globals.get("__name__") not in _OF_PYTHON:
                self.events.append(f"{event} {str(arguments)[:100]}")
        elif event in FORBIDDEN and not (arguments and str(arguments[0]).startswith(self.folder)):
            self.events.append(f"{event} {str(arguments)[:100]}")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


Say = Callable[[str], None]
