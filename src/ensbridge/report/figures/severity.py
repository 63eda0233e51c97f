"""ACC and NLL as corruptions grow more severe."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FixedLocator

from ensbridge.evaluation.scores import CorruptedGroup, Summary
from ensbridge.report.figures.sheet import NARROW, Margins, Sheet, handle, line_style, linear_ticks
from ensbridge.report.headline import main_bridge
from ensbridge.report.style import PAPER, look

Data = dict[str, Any]

_SCORES = {"acc": "ACC, percent", "nll": "NLL, nats (lower is better)"}
# Ensembles have one colour, so that they differ by how full their marks are.
_FILLS: dict[str, dict[str, Any]] = {
    "DE-1": {"markerfacecolor": PAPER},
    "DE-2": {"fillstyle": "bottom", "markerfacecoloralt": PAPER},
}


def data(summary: Summary) -> Data | None:
    """Return one network, ensembles and the bridge by severity, None where there are not two severities."""
    groups = {group.model: group for group in summary.corrupted}
    first = next(iter(groups.values()), None)
    if first is None or len(first.severities) < 2:
        return None
    kinds = {row.model: row.kind for run in summary.runs for row in run.rows}
    main = main_bridge(summary)
    bridges = [name for name in groups if kinds.get(name) == "DBN"]
    bridge = [main.model] if main is not None and main.model in groups else bridges[:1]
    chosen = [name for name in ("DE-1", "DE-2", "DE-3", *bridge) if name in groups] or list(groups)[:4]
    series = [
        {"model": name, "kind": kinds.get(name, "other"), "points": _points(groups[name])} for name in chosen
    ]
    return {
        "dataset": summary.dataset,
        "seeds": list(summary.seeds),
        "corruptions": len(first.corruptions),
        "series": series,
    }


def describe(data: Data) -> str:
    """List the values."""
    lines = []
    for series in data["series"]:
        values = ", ".join(
            f"severity {p['severity']} ACC {p['acc']:.2f} NLL {p['nll']:.3f}" for p in series["points"]
        )
        lines.append(f"{series['model']}: {values}.")
    return " ".join(lines)


def caption(data: Data) -> str:
    """Say how to read it."""
    bars = " Bars: one standard deviation over seeds." if len(data["seeds"]) > 1 else ""
    return f"Means of {data['corruptions']} corruptions at each severity.{bars}"


def draw(data: Data, width: int) -> Sheet:
    """Draw ACC and NLL against severity, at a width in pixels."""
    columns = 1 if width <= NARROW else 2
    handles = [handle(series["kind"], series["model"], **_style(series)) for series in data["series"]]
    space = Margins(left=44, right=18, top=34, gap_x=64, gap_y=82)
    sheet = Sheet(width, 2, columns, 220, space, handles, 2 * columns)
    for axes, (name, words) in zip(sheet.panels, _SCORES.items(), strict=True):
        for number, series in enumerate(data["series"]):
            severities, values, spreads = (
                [point[key] for point in series["points"]] for key in ("severity", name, f"{name}_sd")
            )
            (line,) = axes.plot(severities, values, **_style(series))
            sheet.mark(line, f"{name}-{number}", f"{series['model']}: {name.upper()} by severity")
            if any(spreads):
                colour = look(series["kind"]).light
                axes.errorbar(
                    severities, values, spreads, fmt="none", ecolor=colour, elinewidth=1.5, zorder=1.5
                )
        axes.xaxis.set_major_locator(FixedLocator([p["severity"] for p in data["series"][0]["points"]]))
        linear_ticks(axes, 5)
        sheet.name_axes(axes, "severity", words)
    return sheet


def _style(series: Data) -> dict[str, Any]:
    style = line_style(series["kind"])
    return style | {"markeredgecolor": style["color"]} | _FILLS.get(series["model"], {})


def _points(group: CorruptedGroup) -> list[Data]:
    return [
        {
            "severity": severity,
            **{name: group.at(severity).mean(name) for name in _SCORES},
            **{f"{name}_sd": group.at(severity).spread(name) for name in _SCORES},
        }
        for severity in group.severities
    ]
