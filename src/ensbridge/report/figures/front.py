"""Cost against quality: NLL against MACs of every model, and which of them nothing beats."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from ensbridge.evaluation.scores import Summary
from ensbridge.report.figures.labels import leader_line, place_labels
from ensbridge.report.figures.sheet import (
    NARROW,
    SMALL,
    Margins,
    Sheet,
    cost_axis,
    handle,
    linear_ticks,
    short,
)
from ensbridge.report.style import INK, LOOKS, PAPER, SOFT, look

Data = dict[str, Any]


def data(summary: Summary) -> Data:
    """Return each model's cost and NLL, and whether no other is as good in both and better in one."""
    points = [
        {
            "model": group.model,
            "kind": group.kind,
            "macs_ratio": group.first.macs_ratio,
            "nll": group.mean("nll"),
            "nll_sd": group.spread("nll"),
        }
        for group in summary.rows
    ]
    for point in points:
        point["on_front"] = not any(_beats(other, point) for other in points)
    return {"dataset": summary.dataset, "seeds": list(summary.seeds), "points": points}


def describe(data: Data) -> str:
    """List the values."""
    listed = "; ".join(f"{p['model']} ×{p['macs_ratio']:.2f}, {p['nll']:.3f}" for p in data["points"])
    return f"Cost as a multiple of one network’s MACs, then test NLL where lower is better. {listed}."


def caption(data: Data) -> str:
    """Say how to read it."""
    points = data["points"]
    line = ""
    if sum(point["kind"] == "DE" for point in points) > 1:
        line = (
            " The dashed line joins the deep ensembles: a mark below it has a lower NLL than real members at"
            " its cost, read between their sizes."
        )
    several = len(data["seeds"]) > 1
    values = "mean NLL" if several else "NLL of this one run"
    bars = any(point["nll_sd"] is not None for point in points)
    return (
        f"Left and low is best.{line} The grey staircase is the Pareto front: a model is on it if no other"
        " measured here has as low an NLL for less, or a lower one for as little. It is decided by the"
        f" {values} on the test split, however small the difference."
        + (" Bars: one standard deviation over seeds." if bars else "")
    )


def draw(data: Data, width: int) -> Sheet:
    """Draw the front at a width in pixels."""
    points = data["points"]
    kinds = [kind for kind in LOOKS if any(p["kind"] == kind for p in points)]
    stairs = Line2D([], [], color=SOFT, alpha=0.35, lw=5, label="Pareto front")
    handles = [*(handle(kind) if kind == "DE" else handle(kind, linestyle="") for kind in kinds), stairs]
    space = Margins(left=44, right=18, top=34, bottom=50)
    sheet = Sheet(width, 1, 1, 400, space, handles, 2 if width <= NARROW else 4)
    (axes,) = sheet.panels
    cost_axis(axes, [p["macs_ratio"] for p in points], width - 62)
    _limits(axes, points)
    linear_ticks(axes, 6)
    sheet.name_axes(axes, "cost: MACs, × one network (log scale)", "test NLL, nats (lower is better)")
    front = _staircase(points)
    axes.plot(*zip(*front, strict=True), color=SOFT, alpha=0.35, linewidth=5, zorder=1.5, gid="pareto")
    ensembles = sorted((p["macs_ratio"], p["nll"]) for p in points if p["kind"] == "DE")
    if len(ensembles) > 1:
        style = look("DE")
        axes.plot(
            *zip(*ensembles, strict=True), color=style.light, ls=style.line, lw=1.5, zorder=2, gid="ensembles"
        )
    for number, point in enumerate(points):
        _mark(sheet, axes, number, point)
    _name(sheet, axes, points, [ensembles, front])
    return sheet


def _beats(one: Data, other: Data) -> bool:
    no_worse = one["macs_ratio"] <= other["macs_ratio"] and one["nll"] <= other["nll"]
    return no_worse and (one["macs_ratio"], one["nll"]) != (other["macs_ratio"], other["nll"])


def _staircase(points: list[Data]) -> list[tuple[float, float]]:
    """The corners of the front from the cheapest model to the best."""
    best = sorted({(p["macs_ratio"], p["nll"]) for p in points if p["on_front"]})
    corners = [best[0]]
    for cost, nll in best[1:]:
        corners += [(cost, corners[-1][1]), (cost, nll)]
    return corners


def _limits(axes: Axes, points: list[Data]) -> None:
    lows = [p["nll"] - (p["nll_sd"] or 0.0) for p in points]
    highs = [p["nll"] + (p["nll_sd"] or 0.0) for p in points]
    pad = 0.08 * (max(highs) - min(lows)) or 0.05 * abs(max(highs)) or 1.0
    axes.set_ylim(min(lows) - pad, max(highs) + pad)


def _mark(sheet: Sheet, axes: Axes, number: int, point: Data) -> None:
    style = look(point["kind"])
    x, y, spread = point["macs_ratio"], point["nll"], point["nll_sd"]
    if spread:
        axes.plot([x, x], [y - spread, y + spread], color=style.light, lw=1.5, zorder=2.5)
    size = 8.5 if style.marker in "oDs" else 10
    (mark,) = axes.plot(
        [x], [y], style.marker, color=style.light, ms=size, mec=PAPER, mew=1, zorder=3, clip_on=False
    )
    more = f" ± {spread:.4f}" if spread is not None else ""
    sheet.mark(mark, f"point-{number}", f"{point['model']}: ×{x:.2f} MACs, NLL {y:.4f}{more}")


def _name(sheet: Sheet, axes: Axes, points: list[Data], lines: list[list[tuple[float, float]]]) -> None:
    """Write names beside the marks that the legend alone does not tell, joined to those that are far."""
    kinds = [p["kind"] for p in points]
    named = [p for p in points if p["kind"] in ("DE", "DBN", "other") or kinds.count(p["kind"]) > 1]

    def pixel(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y))
        return float(across), float(up)

    bars = [
        [(p["macs_ratio"], p["nll"] + sign * p["nll_sd"]) for sign in (-1, 1)] for p in points if p["nll_sd"]
    ]
    texts = [
        sheet.figure.text(0, 0, short(p["model"]), color=INK, fontsize=SMALL, va="center") for p in named
    ]
    extents = [text.get_window_extent() for text in texts]
    at = [pixel(p["macs_ratio"], p["nll"]) for p in named]
    corner = axes.get_window_extent()
    boxes = place_labels(
        [(extent.width + 2, extent.height + 1) for extent in extents],
        at,
        [pixel(p["macs_ratio"], p["nll"]) for p in points],
        [[pixel(*p) for p in line] for line in [*lines, *bars]],
        Bbox.from_extents(corner.x0 - 4, corner.y0, corner.x1 + 14, corner.y1 + 8),
    )
    for text, point, box in zip(texts, at, boxes, strict=True):
        # Anchored on the marker's side, so that another font of the page grows away from the marker.
        x, anchor = (box.x0 + box.x1) / 2, "center"
        if box.x0 > point[0]:
            x, anchor = box.x0, "left"
        elif box.x1 < point[0]:
            x, anchor = box.x1, "right"
        text.set(x=x / sheet.width, y=(box.y0 + box.y1) / 2 / sheet.height, ha=anchor)
        if line := leader_line(point, box):
            (x0, y0), (x1, y1) = line
            xs, ys = [x0 / sheet.width, x1 / sheet.width], [y0 / sheet.height, y1 / sheet.height]
            sheet.figure.add_artist(Line2D(xs, ys, color=SOFT, lw=0.8))
