"""The report's files: one page, each figure as SVG and PNG, and the figures' data."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensbridge.evaluation.scores import Summary, parse_scores, summarise
from ensbridge.report.tables import seeds_text
from ensbridge.utils.files import open_folder, open_inner_folder, write_atomically

if TYPE_CHECKING:
    from ensbridge.report.figures import Plot


def write_report(summary: Summary, out: str | Path) -> Path:
    """Write `report.html`, `figures/` and `figures.json` into the folder `out` and return the page's path."""
    from ensbridge.report.figures import PLOTS, SEVERITY, draw
    from ensbridge.report.page import render_page

    drawable = [(plot, *_data(plot, summary)) for plot in PLOTS]
    drawable.append((SEVERITY, SEVERITY.data(summary), ""))  # all data first: bad input costs no drawing
    drawings = [draw(*entry) for entry in drawable]
    page = render_page(summary, drawings[:-1], drawings[-1])
    folder = open_folder(out)
    inner = open_inner_folder(folder / "figures")
    for figure in drawings:
        for kind, content in (("svg", figure.svg.encode()), ("png", figure.png)):
            path = inner / f"{figure.name}.{kind}"
            if content:
                write_atomically(path, content)
            else:  # an earlier report's figure would pass for this one's
                path.unlink(missing_ok=True)
    data = {figure.name: figure.data for figure in drawings if figure.data is not None}
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
        advice = f"{command} trains them, ensbridge evaluate measures them."
        return None, f"Left out: {lack} no such rows; {advice}"
    here = "this run" if one else "these runs"
    which = seeds_text(kept)
    return data, f"From the {kept.dataset} runs that ship with the package ({which}), not from {here}."


_MISSING = {
    "transition": "these scores hold no examples of the bridge’s path; runs of a recipe do.",
    "reliability": "these scores hold no reliability bins; runs of a recipe do.",
    "curves": "these scores hold no training curves; runs of a recipe do.",
}


@cache
def shipped(dataset: str) -> Summary | None:
    """Return the runs on a data set that ship with the package, None where there are none.

    >>> shipped("no-such-data") is None
    True
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", dataset):  # a name from a file must not lead elsewhere
        return None
    path = files("ensbridge.report").joinpath(f"shipped-{dataset}.json")
    if not path.is_file():
        return None
    runs = json.loads(path.read_text(encoding="utf-8"))
    return summarise([parse_scores(run, where=f"{path.name}[{i}]") for i, run in enumerate(runs)])
