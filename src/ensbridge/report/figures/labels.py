"""Placing names beside points, in matplotlib's display pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from matplotlib.path import Path
from matplotlib.transforms import Bbox

RADIUS = 5.0  # of a marker
_FAR = 4 * RADIUS  # a label further away is joined to its point by a line
Point = tuple[float, float]


def place_labels(
    sizes: Sequence[tuple[float, float]],
    points: Sequence[Point],
    markers: Sequence[Point],
    lines: Sequence[Sequence[Point]],
    frame: Bbox,
) -> list[Bbox]:
    """A box of each size near its point, clear of markers, lines and other boxes, inside the frame.

    Crowded points choose first; each takes the place of the least cost, and an overlap costs most.

    >>> frame = Bbox.from_extents(0, 0, 200, 100)
    >>> boxes = place_labels([(40, 14)] * 2, [(50, 50), (60, 50)], [(50, 50), (60, 50)], [], frame)
    >>> boxes[0].count_overlaps(boxes[1:])
    0
    """
    half = 1.5 * RADIUS
    obstacles = [Bbox.from_bounds(x - half, y - half, 2 * half, 2 * half) for x, y in markers]
    paths = [Path(line) for line in lines if len(line) > 1]
    placed: dict[int, Bbox] = {}

    def crowd(index: int) -> int:
        return -sum(math.dist(points[index], other) < 60 for other in markers)

    for index in sorted(range(len(points)), key=crowd):
        best, least = Bbox.null(), math.inf
        for away, box in _candidates(points[index], *sizes[index]):
            if away >= least:  # places come nearest first: none of the rest is better
                break
            cost = away + _cost(box, leader_line(points[index], box), obstacles, paths, frame)
            if cost < least:
                best, least = box, cost
        placed[index] = best
        obstacles.append(best)
        if leader := leader_line(points[index], best):
            paths.append(Path(leader))
    return [placed[index] for index in range(len(points))]


def _cost(
    box: Bbox,
    leader: tuple[Point, Point] | None,
    obstacles: Sequence[Bbox],
    paths: Sequence[Path],
    frame: Bbox,
) -> float:
    """What is wrong with a place, in pixels that a label would rather move away."""
    hidden = box.count_overlaps(obstacles)
    crossings = sum(path.intersects_bbox(box, filled=False) for path in paths)
    if leader:
        hidden += sum(Path(leader).intersects_bbox(other, filled=False) for other in obstacles)
        crossings += sum(Path(leader).intersects_path(path, filled=False) for path in paths)
    outside = box.x0 < frame.x0 or box.y0 < frame.y0 or box.x1 > frame.x1 or box.y1 > frame.y1
    return 1000 * outside + 100 * hidden + 15 * crossings


def _candidates(point: Point, width: float, height: float) -> Iterator[tuple[int, Bbox]]:
    """Distances and boxes on growing rings around a point; beside, above and below it come first."""
    for away in range(0, 97, 4):
        for turn in sorted(range(16), key=lambda turn: turn % 4 > 0):
            angle = math.tau * turn / 16
            x = point[0] + math.cos(angle) * (width / 2 + 2 * RADIUS + away)
            y = point[1] + math.sin(angle) * (height / 2 + 1.6 * RADIUS + away)
            yield away, Bbox.from_bounds(x - width / 2, y - height / 2, width, height)


def leader_line(point: Point, box: Bbox) -> tuple[Point, Point] | None:
    """The line from a marker's edge to a label that is too far away to be recognised as its own."""
    near = min(max(point[0], box.x0), box.x1), min(max(point[1], box.y0), box.y1)
    distance = math.dist(near, point)
    if distance <= _FAR:
        return None
    start = 1.8 * RADIUS / distance
    return (point[0] + start * (near[0] - point[0]), point[1] + start * (near[1] - point[1])), near


def spread_out(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move places on a line apart to at least `gap`, in their order, within low and high.

    >>> spread_out([10.0, 12.0, 40.0], 10.0, 0.0, 100.0)
    [10.0, 20.0, 40.0]
    >>> spread_out([95.0, 99.0], 10.0, 0.0, 100.0)
    [90.0, 100.0]
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    moved = [min(max(positions[i], low), high) for i in order]
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    limit = high
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return [moved[order.index(i)] for i in range(len(positions))]
