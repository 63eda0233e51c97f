"""The report's files: one page, each figure as SVG and PNG, and the figures' data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensbridge.evaluation.scores import Summary
from ensbridge.report.shipped import shipped
from ensbridge.utils.files import open_folder, open_inner_folder, write_atomically

if TYPE_CHECKING:
    from ensbridge.report.figures import Drawn, Plot


@dataclass(frozen=True)
class Part:
    """A figure's place on the page: the drawing or, without one, why there is none."""

    plot: Plot
    drawn: Drawn | None
    note: str  # where the data is from when it is not this run's, or what is missing


def write_report(summary: Summary, out: str | Path) -> Path:
    """Write `report.html`, `figures/` and `figures.json` into the folder `out` and return the page's path."""
    from ensbridge.report.figures import PLOTS, SEVERITY, draw
    from ensbridge.report.page import render_page

    drawable = [
        (plot, *_data(plot, summary)) for plot in PLOTS
    ]  # all of it, so that bad input costs no drawing
    drawable.append((SEVERITY, SEVERITY.data(summary), ""))
    parts = [Part(plot, draw(plot, data) if data else None, note) for plot, data, note in drawable]
    page = render_page(summary, parts[:-1], parts[-1])
    folder = open_folder(out)
    figures = open_inner_folder(folder / "figures")
    for part in parts:
        svg, png = (figures / f"{part.plot.name}.{kind}" for kind in ("svg", "png"))
        if part.drawn is None:  # an earlier report's figure would pass for this one's
            svg.unlink(missing_ok=True)
            png.unlink(missing_ok=True)
        else:
            write_atomically(svg, part.drawn.svg.encode())
            write_atomically(png, part.drawn.png)
    data = {part.plot.name: part.drawn.data for part in parts if part.drawn is not None}
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(folder / "figures.json", text.encode())
    write_atomically(folder / "report.html", page.encode())
    return folder / "report.html"


def _data(plot: Plot, summary: Summary) -> tuple[dict[str, Any] | None, str]:
    """Return a figure's data and a note on where it is from, or None and a note on why there is none."""
    data = plot.data(summary)
    if data is not None:
        return data, ""
    if plot.stage is None:
        return None, f"Left out: {_MISSING[plot.name]}"
    kept = shipped(summary.dataset)
    data = plot.data(kept) if kept is not None else None
    one = len(summary.runs) == 1
    if kept is None or data is None:
        recipe = (summary.first.settings or {}).get("recipe", "RECIPE")
        lack = "this run has" if one else "these runs have"
        command = f"ensbridge train {recipe} --stage {plot.stage}"
        return (
            None,
            f"Left out: {lack} no such rows; {command} trains them, ensbridge evaluate measures them.",
        )
    seeds = ", ".join(map(str, kept.seeds))
    which = f"seed {seeds}" if len(kept.seeds) == 1 else f"seeds {seeds}"
    here = "this run" if one else "these runs"
    return data, f"From the {kept.dataset} runs that ship with the package ({which}), not from {here}."


_MISSING = {
    "transition": "these scores hold no examples of the bridge’s path; runs of a recipe do.",
    "reliability": "these scores hold no reliability bins; runs of a recipe do.",
    "curves": "these scores hold no training curves; runs of a recipe do.",
}
