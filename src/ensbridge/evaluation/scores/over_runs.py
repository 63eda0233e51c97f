"""The mean of a score over several runs, and its spread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from statistics import fmean, stdev


class OverRuns(ABC):
    """What has a score for each of several runs."""

    @abstractmethod
    def values(self, name: str) -> list[float]:
        """A score in each run that has it."""

    def mean(self, name: str) -> float | None:
        """The mean of a score over the runs, None where no run has it."""
        values = self.values(name)
        return fmean(values) if values else None

    def spread(self, name: str) -> float | None:
        """The standard deviation of a score over the runs, None with fewer than two."""
        values = self.values(name)
        return stdev(values) if len(values) > 1 else None
