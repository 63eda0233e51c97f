"""Several runs of one experiment as one: mean and spread over seeds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich.cells import cell_len

from ensbridge.evaluation.scores.rows import CorruptedRow, Kind, Row, Scores


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


@dataclass(frozen=True)
class Group(OverRuns):
    """The rows of one model in several runs.

    >>> row = Row("DE-1", "DE", 1, 0, 0, 4, 1.0, 3, 1.0, 91.5, 0.3, 0.1, 0.0, None, None, 1.0, None, None)
    >>> group = Group((row, row), seeds=(0, 1), runs=3)
    >>> group.mean("acc"), group.spread("acc"), group.of((1, 2)).spread("acc")
    (91.5, 0.0, None)
    """

    rows: tuple[Row, ...]
    seeds: tuple[int, ...]  # of the rows' runs, in the same order
    runs: int = 1  # of how many

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.seeds), (len(self.rows), self.seeds)

    @property
    def first(self) -> Row:
        """The model in the first run: what does not depend on the seed is the same in all."""
        return self.rows[0]

    @property
    def model(self) -> str:
        """The model's name."""
        return self.first.model

    @property
    def kind(self) -> Kind:
        """The model's method, or that it is a control."""
        return self.first.kind

    def of(self, seeds: Iterable[int]) -> Group:
        """The model in the runs of these seeds alone, as far as it has them; there must be one."""
        wanted = set(seeds)
        kept = [(row, seed) for row, seed in zip(self.rows, self.seeds, strict=True) if seed in wanted]
        return Group(tuple(row for row, _ in kept), tuple(seed for _, seed in kept), self.runs)

    def values(self, name: str) -> list[float]:
        """A score in each run that has it; a DEE beyond the largest ensemble counts as that ensemble.

        A gap that some run lacks is none at all: where the ensemble is no better than one member there is
        nothing to close, and the other runs would speak for it.
        """
        scores = [getattr(row, name) for row in self.rows]
        if name == "gap" and None in scores:
            return []
        return [float(str(value).lstrip(">")) for value in scores if value is not None]

    @property
    def dee_is_bound(self) -> bool:
        """Whether a run's DEE lies beyond the largest measured ensemble: the mean is then a lower bound."""
        return any(isinstance(row.dee, str) for row in self.rows)

    @property
    def worse_than_one(self) -> bool:
        """Whether the mean DEE is below 1, where it stands for no number of members."""
        mean = self.mean("dee")
        return mean is not None and mean < 1


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


@dataclass(frozen=True)
class Summary:
    """Runs of one experiment that differ by their seeds."""

    runs: tuple[Scores, ...]
    main: str | None = None  # the bridge that reports speak of, where it was chosen, as on validation

    @property
    def first(self) -> Scores:
        """The first run, for what is the same in all."""
        return self.runs[0]

    @property
    def dataset(self) -> str:
        """The data set."""
        return self.first.dataset

    @property
    def seeds(self) -> tuple[int, ...]:
        """The runs' seeds."""
        return tuple(run.seed for run in self.runs)

    @property
    def target(self) -> int | None:
        """The size of the ensemble that gaps are measured to, None where the runs do not say."""
        return self.first.target

    @property
    def rows(self) -> tuple[Group, ...]:
        """One group for each model of the table."""
        return self._groups("rows")

    @property
    def tradeoff(self) -> tuple[Group, ...]:
        """One group for each method and number of members, over the runs that trained it."""
        return self._groups("tradeoff")

    @property
    def capacity(self) -> tuple[Group, ...]:
        """One group for each method and number of teachers, over the runs that trained it."""
        return self._groups("capacity")

    @property
    def shares_members(self) -> bool:
        """Whether there are several runs, in which every ensemble has the very same NLL."""
        ensembles = [group for group in self.rows if group.kind == "DE"]
        return len(self.runs) > 1 and bool(ensembles) and not any(group.spread("nll") for group in ensembles)

    @property
    def corrupted(self) -> tuple[CorruptedGroup, ...]:
        """One group for each model under corruptions, over the runs that measured it."""
        by_model: dict[str, list[tuple[CorruptedRow, ...]]] = {}
        for run in self.runs:
            for model in dict.fromkeys(row.model for row in run.corrupted):
                rows = tuple(row for row in run.corrupted if row.model == model)
                by_model.setdefault(model, []).append(rows)
        return tuple(CorruptedGroup(tuple(group), len(self.runs)) for group in by_model.values())

    def table(self) -> str:
        """The rows as plain aligned text, names to the left and numbers to the right."""
        from ensbridge.evaluation.scores.columns import COLUMNS, cells

        lines = [tuple(column.heading for column in COLUMNS), *map(cells, self.rows)]
        widths = [max(map(cell_len, texts)) for texts in zip(*lines, strict=True)]

        def join(line: tuple[str, ...]) -> str:
            gaps = [" " * (width - cell_len(text)) for text, width in zip(line, widths, strict=True)]
            numbers = (gap + text for gap, text in zip(gaps[1:], line[1:], strict=True))
            return "  ".join([line[0] + gaps[0], *numbers])

        rule = "  ".join("─" * width for width in widths)
        return "\n".join([join(lines[0]), rule, *map(join, lines[1:])])

    def _groups(self, part: str) -> tuple[Group, ...]:
        by_name: dict[tuple[str, int], list[tuple[Row, int]]] = {}
        for run in self.runs:
            for row in getattr(run, part):
                by_name.setdefault((row.model, row.members), []).append((row, run.seed))
        count = sum(bool(getattr(run, part)) for run in self.runs)
        return tuple(
            Group(tuple(row for row, _ in group), tuple(seed for _, seed in group), count)
            for group in by_name.values()
        )


def summarise(runs: Sequence[Scores], names: Sequence[str] | None = None, main: str | None = None) -> Summary:
    """Put runs of one experiment side by side; runs that cannot be averaged are refused.

    `names` are the runs' names in errors, such as their folders; `main` is the row of the bridge that reports
    speak of, the plain one of one step unless another was chosen before the test split was looked at.

    >>> row = Row("DE-1", "DE", 1, 0, 0, 4, 1.0, 3, 1.0, 91.5, 0.3, 0.1, 0.0, None, None, 1.0, None, None)
    >>> one, other = (Scores(name, 0, ("a", "b"), {}, (row,)) for name in ("digits", "cifar10"))
    >>> summarise([one, other], ["runs/a", "runs/b"])
    Traceback (most recent call last):
    ValueError: runs/a is on digits and runs/b on cifar10; give runs of one data set
    """
    if not runs:
        raise ValueError("there are 0 runs to put together; give at least 1")
    names = names or [f"run {number}" for number in range(1, len(runs) + 1)]
    seen: dict[int, str] = {}
    for run, name in zip(runs, names, strict=True):
        _check_alike(runs[0], run, names[0], name)
        if run.seed in seen:
            raise ValueError(
                f"{seen[run.seed]} and {name} both have seed {run.seed}; give each seed once, "
                "or their spread says nothing"
            )
        seen[run.seed] = name
    _check_corrupted(runs, names)
    summary = Summary(tuple(runs), main)
    bridges = [group.model for group in summary.rows if group.kind == "DBN"]
    if main is not None and main not in bridges:
        choice = f"give one of {', '.join(bridges)}" if bridges else "leave it out"
        raise ValueError(f"there is no bridge {main!r} in these runs; {choice}")
    return summary


def _check_alike(first: Scores, run: Scores, of_first: str, name: str) -> None:
    """Refuse two runs that differ by more than their seed."""
    if run.dataset != first.dataset:
        raise ValueError(
            f"{of_first} is on {first.dataset} and {name} on {run.dataset}; give runs of one data set"
        )
    if run.class_names != first.class_names:
        raise ValueError(
            f"{of_first} has the classes {', '.join(first.class_names[:5])}… and {name} others; "
            "give runs of one data set"
        )
    here, there = run.settings or {}, first.settings or {}
    if here != there:
        key = next(key for key in [*there, *here] if here.get(key) != there.get(key))
        if key in ("schedule", "digest") and None in (here.get("schedule"), there.get("schedule")):
            raise ValueError(
                f"{of_first} and {name} were measured by other versions, or with other contents, of "
                "their recipe; measure both again with ensbridge evaluate"
            )
        raise ValueError(
            f"{of_first} and {name} differ in their {key} ({there.get(key)} and {here.get(key)}); "
            "give runs that differ by their seed alone"
        )
    if run.target != first.target:
        targets = " and ".join("not said" if n is None else f"DE-{n}" for n in (first.target, run.target))
        raise ValueError(
            f"{of_first} and {name} differ in what their gap is measured to ({targets}); give runs that "
            "differ by their seed alone"
        )


def _check_corrupted(runs: Sequence[Scores], names: Sequence[str]) -> None:
    """Refuse runs that were measured on different corrupted images."""
    measured = [
        (name, {(row.severity, row.corruption): row.images for row in run.corrupted})
        for run, name in zip(runs, names, strict=True)
        if run.corrupted
    ]
    for name, images in measured:
        if images != measured[0][1]:
            raise ValueError(
                f"{measured[0][0]} and {name} were measured on different corrupted images; "
                "evaluate both with the same --corrupted"
            )
