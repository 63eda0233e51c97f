"""Confidence against accuracy before and after calibration, for the models that matter most."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.lines import Line2D

from ensbridge.evaluation.scores import Bin, Group, Summary
from ensbridge.report.figures.sheet import NARROW, SMALL, Margins, Sheet, short
from ensbridge.report.headline import ensemble, main_bridge, main_control
from ensbridge.report.style import INK, PAPER, SOFT, look

Data = dict[str, Any]


def data(summary: Summary) -> Data | None:
    """Return the bins of the important models, pooled over runs; None where no row has bins."""
    bridge = main_bridge(summary)
    target = ensemble(summary, bridge.first.members) if bridge is not None else None
    students = [next((g for g in summary.rows if g.kind == kind), None) for kind in ("ED", "EnD2")]
    wanted = [ensemble(summary, 1), target, bridge, main_control(summary), *students]
    groups = [group for group in dict.fromkeys(wanted) if group is not None and _has_bins(group)]
    if not groups:  # models without the usual names: the first few
        groups = [group for group in summary.rows if _has_bins(group)][:6]
    if not groups:
        return None
    return {"dataset": summary.dataset, "seeds": list(summary.seeds), "panels": list(map(_panel, groups))}


def pool(runs: Sequence[Sequence[Bin]]) -> list[Data]:
    """Put the bins of several runs together, each run weighing by its images.

    >>> pool([[Bin(1, 0.5, 1.0)], [Bin(3, 0.75, 0.0)], [Bin(0, None, None)]])
    [{'count': 4, 'confidence': 0.6875, 'accuracy': 0.25}]
    """
    pooled = []
    for bins in zip(*runs, strict=True):
        count = sum(bin_.count for bin_ in bins)
        sums = {name: sum(bin_.count * (getattr(bin_, name) or 0.0) for bin_ in bins) for name in _BIN}
        means = {name: total / count if count else None for name, total in sums.items()}
        pooled.append({"count": count, **means})
    return pooled


def calibration_error(bins: Sequence[Bin]) -> float:
    """Return the expected calibration error of one run's bins.

    >>> calibration_error([Bin(1, 0.6, 1.0), Bin(3, 0.8, 0.8)])
    0.1
    """
    total = sum(bin_.count for bin_ in bins) or 1
    return sum(bin_.count * abs((bin_.confidence or 0.0) - (bin_.accuracy or 0.0)) for bin_ in bins) / total


def describe(data: Data) -> str:
    """List the calibration errors."""
    return " ".join(f"{panel['model']}: {_errors(panel)}." for panel in data["panels"])


def caption(data: Data) -> str:
    """Say how to read it."""
    hollow = "Hollow marks and dashes: before calibration"
    if any(panel["after"] for panel in data["panels"]):
        hollow += "; filled marks and lines: after, by one temperature fitted on the validation split"
    several = " Bins are pooled over seeds; ECE is the mean of the runs." if len(data["seeds"]) > 1 else ""
    return (
        "Test images in bins of equal width by their confidence. On the diagonal (perfect)"
        " accuracy equals mean confidence; below it the model is overconfident, above it underconfident,"
        f" though small bins vary by chance. {hollow}. Larger marks hold more images.{several} The models are"
        " chosen by their names, not by their scores."
    )


def draw(data: Data, width: int) -> Sheet:
    """Draw small multiples at a width in pixels."""
    narrow = width <= NARROW
    columns = 2 if narrow else 3
    gap = 46.0 if narrow else 56.0
    space = Margins(left=40, right=10, top=50, bottom=46, gap_x=gap, gap_y=92)
    height = min((width - 50 - (columns - 1) * gap) / columns, 200)
    handles = _handles(calibrated=any(panel["after"] for panel in data["panels"]))
    sheet = Sheet(width, len(data["panels"]), columns, height, space, handles, 3)
    for number, (axes, panel) in enumerate(zip(sheet.panels, data["panels"], strict=True)):
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
        axes.plot([0, 1], [0, 1], color=SOFT, ls=(0, (1, 3)), lw=1.2, zorder=1, gid=f"diagonal-{number}")
        most = max(bin_["count"] for bin_ in panel["before"])
        for name in ("before", "after"):
            if panel[name]:
                _line(sheet, axes, panel, name, most, f"{name}-{number}")
        errors = _errors(panel).replace(", calibrated", "\n→")
        axes.text(1, 0.03, errors, color=INK, fontsize=SMALL - 1, ha="right")
        sheet.name_axes(axes, "confidence", "accuracy", short(panel["model"], 17))
    return sheet


_BIN = ("confidence", "accuracy")


def _has_bins(group: Group) -> bool:
    return any(_bins(group, "before"))


def _bins(group: Group, name: str) -> list[tuple[Bin, ...]]:
    bins_of = [getattr(row.reliability, name) for row in group.rows if row.reliability is not None]
    kept = [bins for bins in bins_of if bins and any(bin_.count for bin_ in bins)]
    return [bins for bins in kept if len(bins) == len(kept[0])]


def _panel(group: Group) -> Data:
    values: Data = {"model": group.model, "kind": group.kind}
    for name in ("before", "after"):
        bins = _bins(group, name)
        values[name] = pool(bins) if bins else None
        values[f"ece_{name}"] = fmean(map(calibration_error, bins)) if bins else None
    return values | {"ece_before": group.mean("ece")}


def _errors(panel: Data) -> str:
    after = panel["ece_after"]
    text = f"ECE {panel['ece_before']:.3f}"
    return text if after is None else f"{text}, calibrated {after:.3f}"


def _line(sheet: Sheet, axes: Any, panel: Data, name: str, most: int, identifier: str) -> None:
    style, filled = look(panel["kind"]), name == "after"
    bins = [bin_ for bin_ in panel[name] if bin_["count"]]
    xs, ys = ([bin_[key] for bin_ in bins] for key in _BIN)
    common: dict[str, Any] = {"zorder": 3 if filled else 2.5, "clip_on": False}
    axes.plot(xs, ys, color=style.light, lw=1.2, ls="-" if filled else (0, (4, 2)), **common)
    sizes = [14 + 90 * bin_["count"] / most for bin_ in bins]
    colours = {"facecolors": style.light if filled else PAPER, "edgecolors": style.light}
    marks = axes.scatter(xs, ys, s=sizes, marker=style.marker, linewidths=1.3, **colours, **common)
    sheet.mark(marks, identifier, f"{panel['model']}, {name} calibration, {len(bins)} bins")


def _handles(*, calibrated: bool) -> list[Line2D]:
    common: dict[str, Any] = {"color": INK, "marker": "o", "ms": 6.5, "mew": 1.3, "lw": 1.2}
    hollow = Line2D([], [], ls=(0, (4, 2)), mfc=PAPER, label="uncalibrated", **common)
    filled = Line2D([], [], label="calibrated", **common)
    perfect = Line2D([], [], color=SOFT, ls=(0, (1, 3)), lw=1.2, label="perfect")
    return [hollow, *([filled] if calibrated else []), perfect]
