"""Training losses over the images seen, one panel for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ensbridge.evaluation.scores import Curve, Summary
from ensbridge.report.figures.sheet import NARROW, Margins, Sheet, linear_ticks, short
from ensbridge.report.style import look

Data = dict[str, Any]

_LOG_FROM = 20.0  # losses that span more than this factor are drawn on a logarithmic axis
_MIN_LOSS = 1e-12  # below it a loss is nought, which such an axis does not have


def data(summary: Summary) -> Data | None:
    """Return each curve's mean and range over the runs, None where no run has any."""
    names = dict.fromkeys(curve.name for run in summary.runs for curve in run.curves if curve.images)
    if not names:
        return None
    by_name = [
        [c for run in summary.runs for c in run.curves if c.name == name and c.images] for name in names
    ]
    return {"dataset": summary.dataset, "seeds": list(summary.seeds), "curves": list(map(_curve, by_name))}


def describe(data: Data) -> str:
    """List where each loss begins and ends."""
    return " ".join(
        f"{curve['name']}: from {curve['mean'][0]:.3g} to {curve['mean'][-1]:.3g}"
        f" over {curve['images'][-1]:,} images."
        for curve in data["curves"]
    )


def caption(data: Data) -> str:
    """Say how to read it."""
    several = " The line is the mean over seeds, the band their range." if len(data["seeds"]) > 1 else ""
    log = (
        " Losses that span more than a factor of twenty are on a logarithmic axis."
        if any(map(_is_logarithmic, data["curves"]))
        else ""
    )
    return (
        "Training losses, each point a mean since the one before. They are of different kinds or have"
        " different targets, so heights compare within a panel only; look for a line that has converged."
        + log
        + several
    )


def draw(data: Data, width: int) -> Sheet:
    """Draw small multiples at a width in pixels."""
    narrow = width <= NARROW
    columns = 2 if narrow else 4
    space = Margins(left=42, right=10, top=46, bottom=46, gap_x=54, gap_y=94)
    sheet = Sheet(width, len(data["curves"]), columns, 92, space)
    for number, (axes, curve) in enumerate(zip(sheet.panels, data["curves"], strict=True)):
        style = look(curve["kind"])
        thousands = [images / 1000 for images in curve["images"]]
        if len(data["seeds"]) > 1:
            axes.fill_between(thousands, curve["low"], curve["high"], color=style.light, alpha=0.25, lw=0)
        mark = style.marker if len(thousands) == 1 else ""
        (line,) = axes.plot(thousands, curve["mean"], color=style.light, lw=1.6, marker=mark)
        sheet.mark(line, f"curve-{number}", f"{curve['name']}: ends at {curve['mean'][-1]:.4g}")
        logarithmic = _is_logarithmic(curve)
        if logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(numticks=3))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            linear_ticks(axes, 3)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 5, 10]))
        axes.set_xlim(left=0)
        sheet.name_axes(
            axes,
            "thousand images",
            "loss (log)" if logarithmic else "loss",
            short(curve["name"], 18 if narrow else 21),
        )
    return sheet


def _is_logarithmic(curve: Data) -> bool:
    low, high = min(curve["low"]), max(curve["high"])
    return low > _MIN_LOSS and high > _LOG_FROM * low


def _curve(runs: list[Curve]) -> Data:
    """Put a curve's runs on the first one's grid, as far as all of them reach."""
    end = min(curve.images[-1] for curve in runs)
    images = [count for count in runs[0].images if count <= end] or [end]
    losses = np.array([np.interp(images, curve.images, curve.loss) for curve in runs])
    return {
        "name": runs[0].name,
        "kind": runs[0].kind,
        "images": images,
        "mean": losses.mean(axis=0).tolist(),
        "low": losses.min(axis=0).tolist(),
        "high": losses.max(axis=0).tolist(),
    }
