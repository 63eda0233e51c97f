"""Models under corruptions: means over corruptions and severities, then over runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ensbridge.evaluation.scores.over_runs import OverRuns
from ensbridge.evaluation.scores.rows import CorruptedRow


@dataclass(frozen=True)
class CorruptedGroup(OverRuns):
    """The rows of one model under corruptions in several runs.

    A score of a run is the mean over its severities and corruptions, each of which counts the same.

    >>> rows = [CorruptedRow("DE-1", 1, name, "", acc, 0.4, 0.2, 0.0, None) for name, acc in
    ...         (("fog", 80.0), ("frost", 70.0))]
    >>> group = CorruptedGroup((tuple(rows),))
    >>> group.mean("acc"), group.without("frost").mean("acc"), group.mean("cnll")
    (75.0, 80.0, None)
    """

    rows: tuple[tuple[CorruptedRow, ...], ...]  # of each run
    runs: int = 1  # of how many

    @property
    def model(self) -> str:
        """The model's name."""
        return self.rows[0][0].model

    @property
    def severities(self) -> tuple[int, ...]:
        """The severities, the mildest first."""
        return tuple(sorted({row.severity for row in self.rows[0]}))

    @property
    def corruptions(self) -> tuple[str, ...]:
        """The corruptions, in the order in which they were measured."""
        return tuple(dict.fromkeys(row.corruption for row in self.rows[0]))

    def at(self, *severities: int) -> CorruptedGroup:
        """The same at some of the severities alone; there must be one."""
        return self._only(lambda row: row.severity in severities)

    def without(self, *corruptions: str) -> CorruptedGroup:
        """The same without some of the corruptions; there must be another."""
        return self._only(lambda row: row.corruption not in corruptions)

    def values(self, name: str) -> list[float]:
        """A score in each run that has it."""
        by_seed = [[getattr(row, name) for row in rows] for rows in self.rows]
        return [fmean(values) for values in by_seed if None not in values]

    def _only(self, wanted: Callable[[CorruptedRow], bool]) -> CorruptedGroup:
        return CorruptedGroup(tuple(tuple(filter(wanted, rows)) for rows in self.rows), self.runs)


def group_corrupted(runs: Sequence[Sequence[CorruptedRow]]) -> tuple[CorruptedGroup, ...]:
    """One group for each model, over the runs that measured it."""
    by_model: dict[str, list[tuple[CorruptedRow, ...]]] = {}
    for rows in runs:
        for model in dict.fromkeys(row.model for row in rows):
            by_model.setdefault(model, []).append(tuple(row for row in rows if row.model == model))
    return tuple(CorruptedGroup(tuple(group), len(runs)) for group in by_model.values())


def images_of(rows: Sequence[CorruptedRow]) -> dict[tuple[int, str], str]:
    """The digest of the images behind each severity and corruption."""
    return {(row.severity, row.corruption): row.images for row in rows}
