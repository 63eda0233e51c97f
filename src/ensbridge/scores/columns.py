"""The one place where a score becomes text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ensbridge.scores.summary import Group


@dataclass(frozen=True)
class Column:
    """One column: its heading, how it writes a model's cell, and what it means in one line."""

    heading: str
    cell: Callable[[Group], str]
    meaning: str


def _number(name: str, digits: int) -> Callable[[Group], str]:
    """Mean and, over several runs, standard deviation."""

    def cell(group: Group) -> str:
        mean, spread = group.mean(name), group.spread(name)
        if mean is None:
            return "–"
        return f"{mean:.{digits}f}" if spread is None else f"{mean:.{digits}f} ± {spread:.{digits}f}"

    return cell


def _model(group: Group) -> str:
    part = "" if len(group.rows) == group.runs else f" ({len(group.rows)} of {group.runs} runs)"
    return group.model + part


def _dee(group: Group) -> str:
    values, bound = group.values("dee"), ">" if group.dee_is_bound else ""
    if all(isinstance(row.dee, str) for row in group.rows):
        return f">{min(values):g}"
    exact = group.method == "DE" or len(values) == 1
    return (
        f"{bound}{group.mean('dee'):.2f}"
        if exact
        else f"{bound}{group.mean('dee'):.2f} ± {group.spread('dee'):.2f}"
    )


def _gap(group: Group) -> str:
    if len(group.rows) == 1 and group.first.gap is not None and group.first.gap_error is not None:
        return f"{group.first.gap:.2f} ± {group.first.gap_error:.2f}"
    return _number("gap", 2)(group)


COLUMNS: tuple[Column, ...] = (
    Column("model", _model, "What was measured."),
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
    Column("ACC", _number("acc", 2), "Accuracy on the test split, in percent. Higher is better."),
    Column(
        "NLL",
        _number("nll", 3),
        "Negative log-likelihood of the true class, in nats, before calibration. Lower is better.",
    ),
    Column(
        "Brier",
        _number("brier", 3),
        "Squared distance between predicted and true probabilities, summed over classes. Lower is better.",
    ),
    Column(
        "ECE",
        _number("ece", 3),
        "Expected calibration error, 15 bins over the whole split: how far confidence is from accuracy."
        " Lower is better.",
    ),
    Column(
        "cNLL",
        _number("cnll", 3),
        "NLL after one temperature fitted on the validation split. Lower is better.",
    ),
    Column(
        "DEE",
        _dee,
        "Deep-ensemble equivalent: how many real members give the same NLL. “>5” is beyond the largest"
        " ensemble measured.",
    ),
    Column(
        "gap",
        _gap,
        "Share of the NLL distance from one network to the target ensemble that is closed: 0 is one network,"
        " 1 is the ensemble. One run: ± one standard error over test images.",
    ),
)


def cells(group: Group) -> tuple[str, ...]:
    """Return the model's text, one string for each of `COLUMNS`."""
    return tuple(column.cell(group) for column in COLUMNS)
