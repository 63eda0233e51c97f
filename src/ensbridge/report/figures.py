"""Figures as functions from scores to an SVG string.

Nothing here names a colour: shapes carry classes that the page styles with its variables, so that one
figure serves light and dark.  Lengths are in CSS pixels; draw a figure at the width at which it is shown.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

from ensbridge.scores import Row, Scores

FONT = 13.0  # label size, as in the page's style
_CHARACTER = 0.62 * FONT  # mean width of a character of a system font, rounded up
_RADIUS = 5.0


class Point(NamedTuple):
    """A place in the figure."""

    x: float
    y: float


@dataclass(frozen=True)
class Box:
    """A rectangle that a label, a marker or a piece of a line takes up."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        """Return the area that both share."""
        if self.right <= other.left or other.right <= self.left:
            return 0.0
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)

    def outside(self, frame: "Box") -> float:
        """Return the area that lies outside the frame."""
        return (self.right - self.left) * (self.bottom - self.top) - self.overlap(frame)


@dataclass(frozen=True)
class Axis:
    """A scale from data to pixels with its ticks."""

    to_pixel: Callable[[float], float]
    ticks: tuple[float, ...]


def linear_axis(values: Iterable[float], start: float, end: float, most_ticks: int = 6) -> Axis:
    """Return a linear axis over the values, padded, with ticks at round numbers."""
    values = list(values)
    low, high = min(values), max(values)
    pad = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - pad, high + pad
    rough = (high - low) / most_ticks
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * unit >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step), math.floor(high / step)
    ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
    return Axis(lambda value: start + (end - start) * (value - low) / (high - low), ticks)


def log_axis(values: Iterable[float], start: float, end: float) -> Axis:
    """Return a logarithmic axis over positive values, padded, with ticks at familiar multiples."""
    values = list(values)
    low, high = math.log(min(values)), math.log(max(values))
    pad = 0.06 * (high - low) or 0.5
    low, high = low - pad, high + pad

    def to_pixel(value: float) -> float:
        return start + (end - start) * (math.log(value) - low) / (high - low)

    decades = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    for multiples in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7), (1, 1.5, 2, 3, 5), (1, 2, 5), (1,)):
        found = [m * 10.0**d for d in decades for m in multiples]
        ticks = tuple(tick for tick in found if low <= math.log(tick) <= high)
        pixels = [to_pixel(tick) for tick in ticks]
        if all(right - left > 3 * FONT for left, right in pairwise(pixels)):
            return Axis(to_pixel, ticks)
    return Axis(to_pixel, ticks[:: math.ceil(len(ticks) / 6)])


def cost_quality(scores: Scores, width: int = 720, height: int = 440) -> str:
    """Draw NLL against cost: the deep ensembles as a line, every other row as a labelled marker."""
    frame = Box(left=58.0, top=40.0, right=width - 18.0, bottom=height - 58.0)
    x = log_axis((row.macs_ratio for row in scores.rows), frame.left, frame.right)
    y = linear_axis((row.nll for row in scores.rows), frame.bottom, frame.top)
    at = [Point(x.to_pixel(row.macs_ratio), y.to_pixel(row.nll)) for row in scores.rows]
    line = [point for point, row in zip(at, scores.rows, strict=True) if row.kind == "ensemble"]
    x_title = "cost: MACs, × one network (log scale)"
    parts = _axes(frame, x, y, x_title, "test NLL, nats (lower is better)")
    if len(line) > 1:
        path = " ".join(f"{point.x:.1f},{point.y:.1f}" for point in line)
        parts.append(f'<polyline class="line ensemble" points="{path}"/>')
    shapes = _shapes(scores.rows)
    for row, point, shape in zip(scores.rows, at, shapes, strict=True):
        hover = f"{row.model}: ×{row.macs_ratio:.2f} MACs, NLL {row.nll:.4f}"
        marker = _marker(shape, point)
        parts.append(f'<g class="marker {row.kind}"><title>{escape(hover)}</title>{marker}</g>')
    parts += _labels([row.model for row in scores.rows], at, line, frame)
    name = f"cost-quality-{width}"
    title = f"Cost against quality on {scores.dataset}"
    listed = "; ".join(f"{row.model} ×{row.macs_ratio:.2f}, {row.nll:.3f}" for row in scores.rows)
    describe = f"Cost as a multiple of one network’s MACs, then test NLL where lower is better. {listed}."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="figure"'
            f' role="img" aria-labelledby="{name}-title {name}-desc">',
            f'<title id="{name}-title">{escape(title)}</title>',
            f'<desc id="{name}-desc">{escape(describe)}</desc>',
            *parts,
            "</svg>",
        ]
    )


def _axes(frame: Box, x: Axis, y: Axis, x_title: str, y_title: str) -> list[str]:
    parts: list[str] = []
    digits = max((len(f"{tick:.6g}".partition(".")[2]) for tick in y.ticks), default=0)
    for tick in y.ticks:
        at = y.to_pixel(tick)
        parts.append(f'<path class="grid" d="M{frame.left} {at:.1f}H{frame.right}"/>')
        parts.append(_text(f"{tick:.{digits}f}", Point(frame.left - 10, at + 4.5), "end", "tick"))
    parts.append(f'<path class="axis" d="M{frame.left} {frame.bottom}H{frame.right}"/>')
    for tick in x.ticks:
        at = x.to_pixel(tick)
        parts.append(f'<path class="axis" d="M{at:.1f} {frame.bottom}v5"/>')
        parts.append(_text(f"×{tick:g}", Point(at, frame.bottom + 21), "middle", "tick"))
    parts.append(_text(y_title, Point(0, 18), "start", "axis-title"))
    parts.append(_text(x_title, Point(frame.right, frame.bottom + 45), "end", "axis-title"))
    return parts


def _text(text: str, at: Point, anchor: str, css: str) -> str:
    place = f'x="{at.x:.1f}" y="{at.y:.1f}"'
    return f'<text class="{css}" {place} text-anchor="{anchor}">{escape(text)}</text>'


_SHAPES = ("square", "diamond", "triangle", "pentagon", "down")


def _shapes(rows: tuple[Row, ...]) -> list[str]:
    """Give ensembles a disc, controls a cross, and the others one shape after another."""
    fixed = {"ensemble": "disc", "control": "cross"}
    shapes: list[str] = []
    used = 0
    for row in rows:
        shapes.append(fixed.get(row.kind, _SHAPES[used % len(_SHAPES)]))
        used += row.kind not in fixed
    return shapes


# Corners around the origin for a radius of one, scaled so that the areas look alike.
_CORNERS: dict[str, tuple[tuple[float, float], ...]] = {
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "diamond": ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
    "triangle": ((0, -1.4), (1.3, 0.95), (-1.3, 0.95)),
    "pentagon": ((0, -1.3), (1.24, -0.4), (0.76, 1.05), (-0.76, 1.05), (-1.24, -0.4)),
    "down": ((0, 1.4), (1.3, -0.95), (-1.3, -0.95)),
}


def _marker(shape: str, at: Point) -> str:
    if shape == "disc":
        return f'<circle cx="{at.x:.1f}" cy="{at.y:.1f}" r="{_RADIUS - 0.5}"/>'
    if shape == "cross":
        arm, d = _RADIUS, 2 * _RADIUS
        left, top, bottom = at.x - arm, at.y - arm, at.y + arm
        path = f"M{left:.1f} {top:.1f}l{d} {d}M{left:.1f} {bottom:.1f}l{d} {-d}"
        # The disc, which the page leaves unpainted, makes a thin cross as easy to hover as the rest.
        return f'<path class="stroke" d="{path}"/><circle class="hit" cx="{at.x:.1f}" cy="{at.y:.1f}" r="9"/>'
    corners = " ".join(f"{at.x + _RADIUS * x:.1f},{at.y + _RADIUS * y:.1f}" for x, y in _CORNERS[shape])
    return f'<polygon points="{corners}"/>'


def _labels(names: list[str], at: list[Point], line: list[Point], frame: Box) -> list[str]:
    """Write each name beside its marker, with a thin leader where it had to move away."""
    parts: list[str] = []
    for name, point, box in zip(names, at, place_labels(names, at, line, frame), strict=True):
        leader = _leader(point, box)
        if leader is not None:
            a, b = leader
            parts.append(f'<path class="leader" d="M{a.x:.1f} {a.y:.1f}L{b.x:.1f} {b.y:.1f}"/>')
        # Anchored on the marker's side, so that a wider font than foreseen grows away from the marker.
        x, anchor = (box.left + box.right) / 2, "middle"
        if box.left > point.x:
            x, anchor = box.left, "start"
        elif box.right < point.x:
            x, anchor = box.right, "end"
        parts.append(_text(name, Point(x, box.bottom - 0.28 * FONT), anchor, "label"))
    return parts


def place_labels(names: list[str], at: list[Point], line: list[Point], frame: Box) -> list[Box]:
    """Return a box for each name, near its point and clear of markers, of the line and of other names.

    Each name takes the cheapest place around its point, where an overlap costs far more than distance.
    A name placed early can block a later one, so several orders are tried and the cheapest is kept.
    """
    first = list(range(len(names)))
    tried = [_place_in_order(first, names, at, line, frame)]
    for seed in range(8):
        if tried[-1][0] < _CLASH:  # nothing overlaps
            break
        order = random.Random(seed).sample(first, len(first))
        tried.append(_place_in_order(order, names, at, line, frame))
    return min(tried, key=lambda attempt: attempt[0])[1]


_CLASH = 100.0  # what a square pixel of overlap costs, where a pixel of distance costs 1


def _place_in_order(
    order: list[int], names: list[str], at: list[Point], line: list[Point], frame: Box
) -> tuple[float, list[Box]]:
    markers = [_around(point, 1.5 * _RADIUS) for point in at]
    taken = [box for a, b in pairwise(line) for box in _pieces(a, b)]
    placed: dict[int, Box] = {}
    total = 0.0
    for i in order:
        others = taken + markers[:i] + markers[i + 1 :]
        best, best_box = math.inf, markers[i]
        for cost, box in _around_point(at[i], _CHARACTER * len(names[i]) + 2, 1.2 * FONT):
            if cost >= best:  # places come nearest first: clash or not, none of the rest is cheaper
                break
            clash = box.outside(frame) + box.overlap(markers[i]) + sum(map(box.overlap, others))
            for piece in _leader_pieces(at[i], box):
                if cost + _CLASH * clash >= best:
                    break
                clash += sum(map(piece.overlap, others))
            if cost + _CLASH * clash < best:
                best, best_box = cost + _CLASH * clash, box
        taken += [best_box, *_leader_pieces(at[i], best_box)]
        placed[i] = best_box
        total += best
    return total, [placed[i] for i in range(len(names))]


def _around_point(point: Point, width: float, height: float) -> Iterator[tuple[float, Box]]:
    """Yield boxes of one size on growing rings around a point, each with its cost, cheapest first."""
    for away in range(0, 91, 6):
        for turn in sorted(range(16), key=lambda turn: turn % 4 > 0):
            angle = math.tau * turn / 16
            x = point.x + math.cos(angle) * (width / 2 + 2 * _RADIUS + away)
            y = point.y - math.sin(angle) * (height / 2 + 1.6 * _RADIUS + away)
            slant = 0.0 if turn % 4 == 0 else 2.0  # beside, above or below reads best
            yield away + slant, Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def _leader(point: Point, box: Box) -> tuple[Point, Point] | None:
    """Return the line from a marker's edge to a label that is too far away to speak for itself."""
    near = Point(min(max(point.x, box.left), box.right), min(max(point.y, box.top), box.bottom))
    distance = math.hypot(near.x - point.x, near.y - point.y)
    if distance <= 4 * _RADIUS:
        return None
    start = 1.8 * _RADIUS / distance
    return Point(point.x + start * (near.x - point.x), point.y + start * (near.y - point.y)), near


def _leader_pieces(point: Point, box: Box) -> list[Box]:
    leader = _leader(point, box)
    return [] if leader is None else _pieces(*leader)


def _pieces(a: Point, b: Point) -> list[Box]:
    """Cover a line by small boxes."""
    count = max(1, round(math.hypot(b.x - a.x, b.y - a.y) / 6))
    steps = [i / count for i in range(count + 1)]
    return [_around(Point(a.x + (b.x - a.x) * s, a.y + (b.y - a.y) * s), 3.0) for s in steps]


def _around(point: Point, radius: float) -> Box:
    return Box(point.x - radius, point.y - radius, point.x + radius, point.y + radius)
