"""The six figures: each is its data, taken from the scores as plain JSON, and a drawing of that alone.

A seventh belongs to the table of corruptions, and is there where they were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ensbridge.evaluation.scores import Summary
from ensbridge.report.figures import curves, front, members, reliability, severity, transition
from ensbridge.report.figures.sheet import NARROW, WIDE, Sheet, drawing
from ensbridge.report.figures.svg import AltText, for_file, for_page

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


def _plot(heading: str, module: Any) -> Plot:
    """The figure that a module draws, by the module's name."""
    name = module.__name__.rpartition(".")[2]
    return Plot(name, heading, module.data, module.draw, module.caption, module.describe)


PLOTS: tuple[Plot, ...] = (
    _plot("Cost against quality", front),
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
    _plot("From one network’s prediction to the ensemble’s", transition),
    _plot("Does confidence mean what it says?", reliability),
    _plot("Training", curves),
)

SEVERITY = _plot("As corruptions grow more severe", severity)


@dataclass(frozen=True)
class Figure:
    """A figure on the page: the drawing at each width and its files or, without data, a note on why not."""

    name: str
    heading: str
    note: str  # where the data is from when it is not this run's, or what is missing
    data: Data | None = None
    caption: str = ""
    wide: str = ""  # SVG for the page, which shows one of the two, so that text keeps its size
    narrow: str = ""
    svg: str = ""  # a file of its own
    png: bytes = b""


def draw(plot: Plot, data: Data | None, note: str = "") -> Figure:
    """Draw a figure from its data, where there is any."""
    figure = Figure(plot.name, plot.heading, note)
    if data is None:
        return figure
    title, description = f"{plot.heading} ({data['dataset']})", plot.describe(data)
    with drawing():
        wide, narrow = plot.draw(data, WIDE), plot.draw(data, NARROW)
        drawn, words = wide.svg(), AltText(title, description, wide.hover)
        return replace(
            figure,
            data=data,
            caption=plot.caption(data),
            wide=for_page(drawn, f"{plot.name}-wide", words),
            narrow=for_page(narrow.svg(), f"{plot.name}-narrow", AltText(title, description, narrow.hover)),
            svg=for_file(drawn, plot.name, words),
            png=wide.png(),
        )
