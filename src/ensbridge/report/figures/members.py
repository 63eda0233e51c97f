"""ACC and DEE against the number of members aimed at: what more bridges buy, and what one bridge can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import ScaledTranslation

from ensbridge.evaluation.scores import Group, Kind, Summary, Width
from ensbridge.report.figures.sheet import NARROW, Margins, Sheet, cost_axis, handle, linear_ticks
from ensbridge.report.paper import paper_capacity
from ensbridge.report.style import PAPER, look

Data = dict[str, Any]

_SCORES = {"acc": "ACC, percent", "dee": "DEE, members"}


def tradeoff_data(summary: Summary) -> Data | None:
    """Return the ensembles and what was trained towards ever more members, None without such rows."""
    if not summary.tradeoff:
        return None
    ensembles = tuple(group for group in summary.rows if group.kind == "DE")
    return _data(summary, (*ensembles, *summary.tradeoff))


def capacity_data(summary: Summary) -> Data | None:
    """Return what single networks learnt from ever more teachers, None without such rows."""
    if not summary.capacity:
        return None
    ensembles = tuple(group for group in summary.rows if group.kind == "DE")
    found = _data(summary, (*ensembles, *summary.capacity))
    theirs = [{"members": p.members, "acc": p.acc, "dee": p.dee} for p in paper_capacity(summary.dataset)]
    return found | {"paper": theirs}


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
    narrow = width <= NARROW
    top = _legend_height(data, narrow) + 30.0
    space = Margins(left=40, right=18, top=top, gap_x=64, gap_y=82)
    sheet, panels = Sheet.of_panels(width, 4, 1 if narrow else 2, 200, space)
    places = [("members", "acc"), ("macs_ratio", "acc"), ("members", "dee"), ("macs_ratio", "dee")]
    for axes, (x, y) in zip(panels, places, strict=True):
        _panel(sheet, axes, data, x, y, "members of the target ensemble")
    _legend(sheet, data, narrow)
    return sheet


def draw_capacity(data: Data, width: int) -> Sheet:
    """Draw ACC and DEE against the number of teachers, at a width in pixels."""
    narrow = width <= NARROW
    top = _legend_height(data, narrow) + 30.0
    space = Margins(left=40, right=18, top=top, gap_x=64, gap_y=82)
    sheet, panels = Sheet.of_panels(width, 2, 1 if narrow else 2, 230, space)
    for axes, y in zip(panels, _SCORES, strict=True):
        _panel(sheet, axes, data, "members", y, "teachers (members of the target)")
        for number, point in enumerate(data["paper"]):
            style = look("DBN")
            (mark,) = axes.plot(
                [point["members"]], [point[y]], style.marker, mfc=PAPER, mec=style.light, ms=7, mew=1.5
            )
            sheet.mark(
                mark, f"{y}-paper-{number}", f"the paper’s DBN, {point['members']} teachers: {point[y]:g}"
            )
    _legend(sheet, data, narrow)
    return sheet


def _data(summary: Summary, groups: Sequence[Group]) -> Data:
    series: dict[tuple[Kind, Width | None], list[Group]] = {}
    for group in groups:
        series.setdefault((group.kind, group.first.width), []).append(group)
    counts = Counter(kind for kind, _ in series)
    found = []
    for (kind, width), members in series.items():
        ordered = sorted(members, key=lambda group: (group.first.members, group.first.macs_ratio))
        name = look(kind).label if counts[kind] == 1 or width is None else f"{look(kind).label} {width}"
        found.append({"kind": kind, "name": name, "points": [_point(group) for group in ordered]})
    return {"dataset": summary.dataset, "seeds": list(summary.seeds), "series": found}


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
    arrows = y == "dee" and any(point["dee_is_bound"] for point in points)
    axes.margins(y=0.16 if arrows else 0.1)
    linear_ticks(axes)
    name = {"macs_ratio": "MACs, × one network (log scale)", "members": members}[x]
    sheet.name_axes(axes, name, _SCORES[y])


def _series(sheet: Sheet, axes: Axes, series: Data, x: str, y: str, number: int) -> None:
    style, points = look(series["kind"]), series["points"]
    xs, ys = [p[x] for p in points], [p[y] for p in points]
    spreads = [p[f"{y}_sd"] or 0.0 for p in points]
    order = 3 if series["kind"] == "DBN" else 2.5
    if any(spreads):
        axes.errorbar(xs, ys, yerr=spreads, fmt="none", ecolor=style.light, elinewidth=1.2, zorder=order)
    size = 7 if style.marker in "oDs" else 8.5
    (line,) = axes.plot(
        xs,
        ys,
        color=style.light,
        ls=style.line,
        lw=1.8,
        marker=style.marker,
        ms=size,
        mec=PAPER,
        zorder=order,
    )
    values = ", ".join(f"{p[x]:g}: {_dee(p) if y == 'dee' else f'{p[y]:.2f}'}" for p in points)
    sheet.mark(line, f"{y}-{x}-{number}", f"{series['name']}, {_SCORES[y]}: {values}")
    if y == "dee":
        for point in points:
            if point["dee_is_bound"]:
                _arrow(axes, (point[x], point[y]), style.light)


def _arrow(axes: Axes, at: tuple[float, float], colour: str) -> None:
    """Point upwards from a value that is only a lower bound."""
    up = axes.transData + ScaledTranslation(0, 20 / 72, axes.figure.dpi_scale_trans)
    arrow = {
        "arrowstyle": "->,head_length=0.4,head_width=0.3",
        "color": colour,
        "lw": 1.6,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", xy=at, xycoords=up, xytext=at, textcoords="data", arrowprops=arrow, zorder=3)


def _marks(data: Data) -> str:
    points = [point for series in data["series"] for point in series["points"]]
    bound = any(point["dee_is_bound"] for point in points)
    bars = any(point["acc_sd"] is not None for point in points)
    text = (
        " An arrow upwards: a lower bound, as a run is better than the largest ensemble measured."
        if bound
        else ""
    )
    return text + (" Bars: one standard deviation over seeds." if bars else "")


def _handles(data: Data) -> list[Line2D]:
    found = [handle(series["kind"], series["name"]) for series in data["series"]]
    if data.get("paper"):
        found.append(_paper_handle())
    return found


def _paper_handle() -> Line2D:
    style = look("DBN")
    return Line2D(
        [], [], ls="", marker=style.marker, mfc=PAPER, mec=style.light, mew=1.5, ms=7, label="DBN, paper"
    )


def _columns(narrow: bool) -> int:
    return 2 if narrow else 5


def _legend_height(data: Data, narrow: bool) -> float:
    return 20.0 * -(-len(_handles(data)) // _columns(narrow))


def _legend(sheet: Sheet, data: Data, narrow: bool) -> None:
    sheet.legend(_handles(data), _columns(narrow))
