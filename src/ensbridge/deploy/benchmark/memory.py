"""How much memory a call needs, and the cores that it runs on."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

# Bytes below which a process's growth tells nothing: one model's was seen to differ by 0.7 MB from one run to
# the next, since the kernel counts some pages late and malloc keeps what it once had.
RESOLUTION = 2_000_000
STATUS, RESET, TASKS = (Path("/proc/self") / name for name in ("status", "clear_refs", "task"))


def resident() -> int | None:
    """The bytes of this process that are in memory, once what is free was given back; None but on Linux."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        RESET.write_text("5")  # the peak starts anew
        return _status("VmRSS")
    except (OSError, AttributeError, TypeError):
        return None


def peak_memory(call: Callable[[], object], before: int | None = None) -> int | None:
    """The bytes by which a call raises the process's memory, above `before` or what is resident now.

    It reads the kernel's own peak, which other threads of the process move too; None but on Linux.

    >>> need = peak_memory(lambda: torch.ones(5_000_000))
    >>> need is None or need > 15_000_000
    True
    """
    now = resident()
    call()
    if now is None:
        return None
    return max(_status("VmHWM") - (now if before is None else before), 0)


def cores() -> list[int]:
    """The cores that this process may run on.

    >>> len(cores()) >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Run torch on so many threads and, where the system allows it, everything on as many cores.

    >>> with pinned(1):
    ...     torch.get_num_threads(), len(cores())
    (1, 1)
    """
    before, there = torch.get_num_threads(), cores()
    if not 1 <= threads <= len(there):
        raise ValueError(f"threads is {threads}; this process may use 1 to {len(there)} cores")
    torch.set_num_threads(threads)
    _move(there[:threads])
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _move(there)


def _move(to: list[int]) -> None:
    """Let every thread of this process run on these cores; those that begin later follow."""
    if not hasattr(os, "sched_setaffinity"):
        return
    tasks = [int(task.name) for task in TASKS.iterdir()] if TASKS.is_dir() else []
    for task in {0, *tasks}:
        with suppress(OSError):  # a thread that has ended meanwhile
            os.sched_setaffinity(task, to)


def _status(name: str) -> int:
    line = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if line is None:
        raise OSError(f"{STATUS} has no {name}")
    return 1024 * int(line[1])
