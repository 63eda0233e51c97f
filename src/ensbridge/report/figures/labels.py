"""Placing names beside points: pure geometry in pixels, y downwards."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

_RADIUS = 5.0  # of a marker
_CLASH = 100.0  # what a square pixel of overlap costs, where a pixel of distance costs 1


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

    def overlap(self, other: Box) -> float:
        """Return the area that both share.

        >>> Box(0, 0, 4, 4).overlap(Box(2, 3, 9, 9))
        2
        """
        if self.right <= other.left or other.right <= self.left:
            return 0.0
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)

    def outside(self, frame: Box) -> float:
        """Return the area that lies outside the frame."""
        return (self.right - self.left) * (self.bottom - self.top) - self.overlap(frame)


@dataclass(frozen=True)
class Scene:
    """What labels must keep clear of: every marker, lines, and the frame's edge."""

    markers: Sequence[Point]
    lines: Sequence[Sequence[Point]]
    frame: Box
    font: float = 13.0

    def width(self, name: str) -> float:
        """The width of a name, rounded up from the mean character of a system font."""
        return 0.6 * self.font * len(name) + 2


def place_labels(names: Sequence[str], at: Sequence[Point], scene: Scene) -> list[Box]:
    """Return a box for each name, near its point and clear of markers, lines and other names.

    Each name takes the cheapest place around its point, where an overlap costs far more than distance.
    A name placed early can block a later one, so several orders are tried and the cheapest is kept.
    """
    first = list(range(len(names)))
    tried = [_place_in_order(first, names, at, scene)]
    for seed in range(8):
        if tried[-1][0] < _CLASH:  # nothing overlaps
            break
        tried.append(_place_in_order(random.Random(seed).sample(first, len(first)), names, at, scene))
    return min(tried, key=lambda attempt: attempt[0])[1]


def _place_in_order(
    order: list[int], names: Sequence[str], at: Sequence[Point], scene: Scene
) -> tuple[float, list[Box]]:
    markers = {point: _around(point, 1.5 * _RADIUS) for point in (*scene.markers, *at)}
    taken = [box for line in scene.lines for a, b in pairwise(line) for box in _pieces(a, b)]
    placed: dict[int, Box] = {}
    total = 0.0
    for i in order:
        others = _edges(taken + [box for point, box in markers.items() if point != at[i]])
        places = _around_point(at[i], scene.width(names[i]), 1.2 * scene.font)
        clashes = _shared(_edges([box for _, box in places]), others)
        best, best_box = math.inf, markers[at[i]]
        for (cost, box), clash in zip(places, clashes, strict=True):
            if cost >= best:  # places come nearest first: clash or not, none of the rest is cheaper
                break
            cost += _CLASH * (clash + box.outside(scene.frame) + box.overlap(markers[at[i]]))
            if cost < best and (pieces := _leader_pieces(at[i], box)):
                cost += _CLASH * _shared(_edges(pieces), others).sum()
            if cost < best:
                best, best_box = cost, box
        taken += [best_box, *_leader_pieces(at[i], best_box)]
        placed[i] = best_box
        total += best
    return total, [placed[i] for i in range(len(names))]


def _edges(boxes: Sequence[Box]) -> np.ndarray:
    """The boxes' edges, one row for each of left, top, right and bottom."""
    return np.array([(box.left, box.top, box.right, box.bottom) for box in boxes]).reshape(-1, 4).T


def _shared(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The area that each of some boxes shares with others: `Box.overlap`, all at once."""
    (left, top, right, bottom), (x0, y0, x1, y1) = some[:, :, None], others[:, None, :]
    width = np.minimum(right, x1) - np.maximum(left, x0)
    height = np.minimum(bottom, y1) - np.maximum(top, y0)
    return (width.clip(0) * height.clip(0)).sum(axis=1)


def _around_point(point: Point, width: float, height: float) -> list[tuple[float, Box]]:
    """Return boxes of one size on growing rings around a point, each with its cost, cheapest first."""
    places = []
    for away in range(0, 91, 6):
        for turn in sorted(range(16), key=lambda turn: turn % 4 > 0):
            angle = math.tau * turn / 16
            x = point.x + math.cos(angle) * (width / 2 + 2 * _RADIUS + away)
            y = point.y - math.sin(angle) * (height / 2 + 1.6 * _RADIUS + away)
            slant = 0.0 if turn % 4 == 0 else 2.0  # beside, above or below reads best
            places.append((away + slant, Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)))
    return places


def leader(point: Point, box: Box) -> tuple[Point, Point] | None:
    """Return the line from a marker's edge to a label that is too far away to speak for itself."""
    near = Point(min(max(point.x, box.left), box.right), min(max(point.y, box.top), box.bottom))
    distance = math.hypot(near.x - point.x, near.y - point.y)
    if distance <= 4 * _RADIUS:
        return None
    start = 1.8 * _RADIUS / distance
    return Point(point.x + start * (near.x - point.x), point.y + start * (near.y - point.y)), near


def spread_out(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move places on a line apart to at least `gap`, in their order, within low and high.

    >>> spread_out([10.0, 12.0, 40.0], 10.0, 0.0, 100.0)
    [10.0, 20.0, 40.0]
    >>> spread_out([95.0, 99.0], 10.0, 0.0, 100.0)
    [90.0, 100.0]
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = [min(max(places[i], low), high) for i in order]
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    limit = high
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return [moved[order.index(i)] for i in range(len(places))]


def _leader_pieces(point: Point, box: Box) -> list[Box]:
    found = leader(point, box)
    return [] if found is None else _pieces(*found)


def _pieces(a: Point, b: Point) -> list[Box]:
    """Cover a line by small boxes."""
    count = max(1, round(math.hypot(b.x - a.x, b.y - a.y) / 6))
    steps = [i / count for i in range(count + 1)]
    return [_around(Point(a.x + (b.x - a.x) * s, a.y + (b.y - a.y) * s), 3.0) for s in steps]


def _around(point: Point, radius: float) -> Box:
    return Box(point.x - radius, point.y - radius, point.x + radius, point.y + radius)
