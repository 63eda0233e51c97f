"""Where the time of a training goes: to reading data, to the teachers, or to what is trained."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class TimeSplit:
    """Seconds spent on data and on teachers, of all seconds that were measured.

    >>> split = TimeSplit()
    >>> split.seconds |= {"data": 61.0, "teachers": 30.0, "total": 100.0}
    >>> print(split)
    data 61 %, teachers 30 %, bridge 9 %
    """

    def __init__(self) -> None:
        self.seconds = {"data": 0.0, "teachers": 0.0, "total": 0.0}

    @contextmanager
    def measure(self, part: str, device: torch.device | None = None) -> Iterator[None]:
        """Add the time spent inside to a part; with a `device`, a GPU's work is waited for."""
        synchronize(device)
        begun = time.perf_counter()
        try:
            yield
        finally:
            synchronize(device)
            self.seconds[part] += time.perf_counter() - begun

    def shares(self) -> dict[str, float]:
        """Each part's share of the time; what is neither data nor teachers is the bridge's."""
        total = max(self.seconds["total"], 1e-9)
        data = min(self.seconds["data"] / total, 1.0)
        teachers = min(self.seconds["teachers"] / total, 1.0 - data)
        return {"data": data, "teachers": teachers, "bridge": 1.0 - data - teachers}

    def __str__(self) -> str:
        return ", ".join(f"{part} {100 * share:.0f} %" for part, share in self.shares().items())


def synchronize(device: torch.device | None) -> None:
    """Wait until a GPU has done what it was given."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
