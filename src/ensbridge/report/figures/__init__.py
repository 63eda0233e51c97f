"""The six figures: each is its data, taken from the scores as plain JSON, and a drawing of that alone.

A seventh belongs to the table of corruptions, and is there where they were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ensbridge.evaluation.scores import Summary
from ensbridge.report.figures import curves, front, members, reliability, severity, transition
from ensbridge.report.figures.sheet import NARROW, WIDE, Sheet, drawing
from ensbridge.report.figures.svg import Words, for_file, for_page

Data = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """A figure: where its data is from, how it is drawn, and what is said of it in words."""

    name: str
    heading: str
    data: Callable[[Summary], Data | None]
    draw: Callable[[Data, int], Sheet]
    caption: Callable[[Data], str]
    describe: Callable[[Data], str]
    stage: str | None = None  # the recipe's stage that makes its data, where not every run has it


PLOTS: tuple[Plot, ...] = (
    Plot("front", "Cost against quality", front.data, front.draw, front.caption, front.describe),
    Plot(
        "tradeoff",
        "What more members buy, and what they cost",
        members.tradeoff_data,
        members.draw_tradeoff,
        members.tradeoff_caption,
        members.describe,
        stage="tradeoff",
    ),
    Plot(
        "capacity",
        "How many teachers one network can follow",
        members.capacity_data,
        members.draw_capacity,
        members.capacity_caption,
        members.describe,
        stage="capacity",
    ),
    Plot(
        "transition",
        "From one network’s prediction to the ensemble’s",
        transition.data,
        transition.draw,
        transition.caption,
        transition.describe,
    ),
    Plot(
        "reliability",
        "Does confidence mean what it says?",
        reliability.data,
        reliability.draw,
        reliability.caption,
        reliability.describe,
    ),
    Plot("curves", "Training", curves.data, curves.draw, curves.caption, curves.describe),
)

SEVERITY = Plot(
    "severity",
    "As corruptions grow more severe",
    severity.data,
    severity.draw,
    severity.caption,
    severity.describe,
)


@dataclass(frozen=True)
class Drawn:
    """A figure drawn once at each width, and its files."""

    plot: Plot
    data: Data
    wide: str  # SVG for the page
    narrow: str
    svg: str  # a file of its own
    png: bytes


def draw(plot: Plot, data: Data) -> Drawn:
    """Draw a figure from its data."""
    title, description = f"{plot.heading} ({data['dataset']})", plot.describe(data)
    with drawing():
        wide, narrow = plot.draw(data, WIDE), plot.draw(data, NARROW)
        drawn, small = wide.svg(), narrow.svg()
        words = Words(title, description, wide.hover)
        return Drawn(
            plot,
            data,
            wide=for_page(drawn, f"{plot.name}-wide", words),
            narrow=for_page(small, f"{plot.name}-narrow", Words(title, description, narrow.hover)),
            svg=for_file(drawn, plot.name, words),
            png=wide.png(),
        )
