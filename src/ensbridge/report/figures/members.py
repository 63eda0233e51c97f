"""ACC and DEE against the number of members aimed at: what more bridges buy, and what one bridge can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import ScaledTranslation

from ensbridge.evaluation.scores import Group, Kind, Summary, Width
from ensbridge.report.figures.sheet import (
    NARROW,
    Margins,
    Sheet,
    cost_axis,
    handle,
    line_style,
    linear_ticks,
)
from ensbridge.report.style import PAPER, look
from ensbridge.report.tables import paper_capacity

Data = dict[str, Any]

_SCORES = {"acc": "ACC, percent", "dee": "DEE, members"}


def tradeoff_data(summary: Summary) -> Data | None:
    """Return the ensembles and what was trained towards ever more members, None without such rows."""
    return _data(summary, summary.tradeoff)


def capacity_data(summary: Summary) -> Data | None:
    """Return what single networks learnt from ever more teachers, None without such rows."""
    data = _data(summary, summary.capacity)
    return data and data | {"paper": paper_capacity(summary.dataset)}


def describe(data: Data) -> str:
    """List the values."""
    lines = []
    for series in data["series"]:
        values = ", ".join(
            f"{p['members']} members (×{p['macs_ratio']:.2f} MACs) ACC {p['acc']:.2f} DEE {_dee(p)}"
            for p in series["points"]
        )
        lines.append(f"{series['name']}: {values}.")
    return " ".join(lines)


def tradeoff_caption(data: Data) -> str:
    """Say how to read it."""
    return (
        "The same models twice: by the number of members that they were trained towards, where the real"
        " ensembles (DE) show what that many members give, and by their cost, where high and left is best."
        f"{_marks(data)}"
    )


def capacity_caption(data: Data) -> str:
    """Say how to read it."""
    paper = ""
    if data["paper"]:
        paper = " Hollow diamonds: the paper’s DBN, with the paper’s networks and its own ensembles for DEE."
    return (
        "One network (ED, EnD²), or the source and one bridge (DBN, BN), trained towards ever more teachers."
        " A line that goes flat while that of the real ensembles (DE) climbs on no longer gains from more of"
        f" them.{paper}{_marks(data)}"
    )


def draw_tradeoff(data: Data, width: int) -> Sheet:
    """Draw ACC and DEE against members and against cost, at a width in pixels."""
    panels = [(x, y) for y in _SCORES for x in ("members", "macs_ratio")]
    return _draw(data, width, panels, 200, "members of the target ensemble")


def draw_capacity(data: Data, width: int) -> Sheet:
    """Draw ACC and DEE against the number of teachers, at a width in pixels."""
    panels = [("members", y) for y in _SCORES]
    return _draw(data, width, panels, 230, "teachers (members of the target)")


def _draw(data: Data, width: int, panels: Sequence[tuple[str, str]], height: float, members: str) -> Sheet:
    """Draw panels of one score against another, each a pair of names; `members` labels their number."""
    narrow = width <= NARROW
    handles = [handle(series["kind"], series["name"]) for series in data["series"]]
    if data.get("paper"):
        handles.append(handle("DBN", "DBN, paper", linestyle="", **_hollow()))
    space = Margins(left=40, right=18, top=30, gap_x=64, gap_y=82)
    columns, legend_columns = (1, 2) if narrow else (2, 5)
    sheet = Sheet(width, len(panels), columns, height, space, handles, legend_columns)
    for axes, (x, y) in zip(sheet.panels, panels, strict=True):
        _panel(sheet, axes, data, x, y, members)
    return sheet


def _hollow() -> dict[str, Any]:
    """How the paper's marks differ from ours."""
    return {"mfc": PAPER, "mec": look("DBN").light, "mew": 1.5, "ms": 7}


def _data(summary: Summary, groups: Sequence[Group]) -> Data | None:
    """The real ensembles and other models, one series for each method and width."""
    if not groups:
        return None
    by_method: dict[tuple[Kind, Width | None], list[Group]] = {}
    for group in (*(group for group in summary.rows if group.kind == "DE"), *groups):
        by_method.setdefault((group.kind, group.first.width), []).append(group)
    counts = Counter(kind for kind, _ in by_method)
    series = []
    for (kind, width), members in by_method.items():
        ordered = sorted(members, key=lambda group: (group.first.members, group.first.macs_ratio))
        name = look(kind).label if counts[kind] == 1 or width is None else f"{look(kind).label} {width}"
        series.append({"kind": kind, "name": name, "points": [_point(group) for group in ordered]})
    return {"dataset": summary.dataset, "seeds": list(summary.seeds), "series": series}


def _point(group: Group) -> Data:
    values: Data = {"members": group.first.members, "macs_ratio": group.first.macs_ratio}
    for name in _SCORES:
        values |= {name: group.mean(name), f"{name}_sd": group.spread(name)}
    return values | {"dee_is_bound": group.dee_is_bound}


def _dee(point: Data) -> str:
    if point["dee"] < 1:
        return "<1 (worse than one member)"
    return f"{'more than ' if point['dee_is_bound'] else ''}{point['dee']:.2f}"


def _panel(sheet: Sheet, axes: Axes, data: Data, x: str, y: str, members: str) -> None:
    points = [point for series in data["series"] for point in series["points"]]
    width = axes.get_window_extent().width
    if x == "macs_ratio":
        cost_axis(axes, [point[x] for point in points], width)
    else:
        counts = sorted({point[x] for point in [*points, *data.get("paper", [])]})
        axes.set_xlim(counts[0] - 0.35, counts[-1] + 0.35)
        axes.xaxis.set_major_locator(FixedLocator(counts))
    for number, series in enumerate(data["series"]):
        _series(sheet, axes, series, x, y, number)
    for number, point in enumerate(data.get("paper", [])):
        (mark,) = axes.plot([point["members"]], [point[y]], look("DBN").marker, **_hollow())
        words = f"the paper’s DBN, {point['members']} teachers: {point[y]:g}"
        sheet.mark(mark, f"{y}-paper-{number}", words)
    arrows = y == "dee" and any(point["dee_is_bound"] for point in points)
    axes.margins(y=0.16 if arrows else 0.1)
    linear_ticks(axes)
    name = {"macs_ratio": "MACs, × one network (log scale)", "members": members}[x]
    sheet.name_axes(axes, name, _SCORES[y])


def _series(sheet: Sheet, axes: Axes, series: Data, x: str, y: str, number: int) -> None:
    style, points = line_style(series["kind"]), series["points"]
    xs, ys = [p[x] for p in points], [p[y] for p in points]
    spreads = [p[f"{y}_sd"] or 0.0 for p in points]
    order = 3 if series["kind"] == "DBN" else 2.5
    if any(spreads):
        axes.errorbar(xs, ys, yerr=spreads, fmt="none", ecolor=style["color"], elinewidth=1.2, zorder=order)
    (line,) = axes.plot(xs, ys, zorder=order, **style)
    values = ", ".join(f"{p[x]:g}: {_dee(p) if y == 'dee' else f'{p[y]:.2f}'}" for p in points)
    sheet.mark(line, f"{y}-{x}-{number}", f"{series['name']}, {_SCORES[y]}: {values}")
    if y == "dee":
        for point in points:
            if point["dee_is_bound"]:
                _arrow(axes, (point[x], point[y]), style["color"])


def _arrow(axes: Axes, at: tuple[float, float], colour: str) -> None:
    """Point upwards from a value that is only a lower bound."""
    up = axes.transData + ScaledTranslation(0, 20 / 72, axes.figure.dpi_scale_trans)
    head = "->,head_length=0.4,head_width=0.3"
    arrow = {"arrowstyle": head, "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=at, xycoords=up, xytext=at, textcoords="data", arrowprops=arrow, zorder=3)


def _marks(data: Data) -> str:
    points = [point for series in data["series"] for point in series["points"]]
    bound = any(point["dee_is_bound"] for point in points)
    bars = any(point["acc_sd"] is not None for point in points)
    arrow = " An arrow upwards: a lower bound, as a run is better than the largest ensemble measured."
    return (arrow if bound else "") + (" Bars: one standard deviation over seeds." if bars else "")
