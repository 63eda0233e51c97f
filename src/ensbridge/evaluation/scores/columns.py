"""The one place where a score becomes text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ensbridge.evaluation.scores.summary import CorruptedGroup, Group, OverRuns, Summary


@dataclass(frozen=True)
class Column:
    """One column: its heading, how it writes a model's cell, and what it means in one line."""

    heading: str
    cell: Callable[[Group], str]
    meaning: str | Callable[[Summary], str]

    def explain(self, summary: Summary) -> str:
        """What the column means in these runs."""
        return self.meaning if isinstance(self.meaning, str) else self.meaning(summary)


def mean_text(values: Sequence[float], digits: int) -> str:
    """Mean and, over several runs, standard deviation; a number that is the same in all of them has none."""
    if not values:
        return "–"
    spread = stdev(values) if len(values) > 1 else 0.0
    return f"{fmean(values):.{digits}f} ± {spread:.{digits}f}" if spread else f"{fmean(values):.{digits}f}"


def number(name: str, digits: int) -> Callable[[OverRuns], str]:
    """A column of a score's mean and spread."""
    return lambda group: mean_text(group.values(name), digits)


def model_text(group: Group | CorruptedGroup) -> str:
    """A model's name, and in how many of the runs it was measured where it is not in all."""
    part = "" if len(group.rows) == group.runs else f" ({len(group.rows)} of {group.runs} runs)"
    return group.model + part


def dee_text(dee: float | str) -> str:
    """DEE as text; below 1 it is worse than one member, and no number of members.

    >>> dee_text(2.5), dee_text(">5"), dee_text(-6.4)
    ('2.50', '>5', '<1')
    """
    return dee if isinstance(dee, str) else "<1" if dee < 1 else f"{dee:.2f}"


def dee_cell(group: Group) -> str:
    """DEE with its spread; “>” marks a lower bound, and an ensemble's own is exact."""
    if group.worse_than_one:
        return "<1"
    values, bound = group.values("dee"), ">" if group.dee_is_bound else ""
    if all(isinstance(row.dee, str) for row in group.rows):
        return f">{min(values):g}"
    text = f"{bound}{group.mean('dee'):.2f}"
    return text if group.kind == "DE" or len(values) == 1 else f"{text} ± {group.spread('dee'):.2f}"


def _gap(group: Group) -> str:
    if group.runs == 1 and group.first.gap is not None and group.first.gap_error is not None:
        gap, error = group.first.gap, group.first.gap_error
        digits = 2 if max(abs(gap), error) < 10 else 0  # of an error that large no decimals are known
        return f"{gap:.{digits}f} ± {error:.{digits}f}"
    return number("gap", 2)(group)


def _gap_meaning(summary: Summary) -> str:
    target = "the target ensemble" if summary.target is None else f"DE-{summary.target}"
    several = len(summary.runs) > 1
    error = "the standard deviation over seeds" if several else "one standard error over test images"
    return (
        f"Share of the NLL distance from DE-1 to {target} that is closed: 0 is one network, 1 is {target},"
        " above 1 is better than it, below 0 worse than one network. The distance is the same for every row."
        f" ± is {error}."
    )


COLUMNS: tuple[Column, ...] = (
    Column("model", model_text, "What was measured."),
    Column(
        "MACs ×",
        lambda group: f"{group.first.macs_ratio:.2f}",
        "Multiply-accumulates for one image, as a multiple of one network’s. Lower is cheaper.",
    ),
    Column(
        "params ×",
        lambda group: f"{group.first.params_ratio:.2f}",
        "Parameters, as a multiple of one network’s.",
    ),
    Column("ACC", number("acc", 2), "Accuracy on the test split, in percent. Higher is better."),
    Column(
        "NLL",
        number("nll", 3),
        "Negative log-likelihood of the true class, in nats, before calibration. Lower is better.",
    ),
    Column(
        "Brier",
        number("brier", 3),
        "Squared distance between predicted and true probabilities, summed over classes, before calibration."
        " Lower is better.",
    ),
    Column(
        "ECE",
        number("ece", 3),
        "Expected calibration error, 15 bins over the whole split, before calibration: how far confidence is"
        " from accuracy, averaged over images. Lower is better.",
    ),
    Column(
        "cNLL",
        number("cnll", 3),
        "NLL after calibration by one temperature, fitted on the validation split. Lower is better.",
    ),
    Column(
        "DEE",
        dee_cell,
        "Deep-ensemble equivalent: how many real members have the same NLL, read off straight lines between"
        " the ensembles of the same run; “<1” is worse than one network. “>” marks a lower bound, where a"
        " run is better than the largest ensemble measured and counts as that.",
    ),
    Column("gap", _gap, _gap_meaning),
)


def cells(group: Group) -> tuple[str, ...]:
    """Return the model's text, one string for each of `COLUMNS`."""
    return tuple(column.cell(group) for column in COLUMNS)
