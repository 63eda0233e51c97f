"""A matplotlib figure whose lengths are CSS pixels, and the files made of it."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from PIL import Image, ImageOps

from ensbridge.report.style import FRAME, INK, PAPER, RULE, SOFT, look

WIDE, NARROW = 824, 350  # the page's text column, and a phone's
FONT, SMALL = 13.0, 12.0
LEGEND_ROW = 20.0
_DPI = 72.0  # one point is then one pixel
_PNG_DPI = 200.0

# Names come from files: "$" must stay a dollar. A fixed salt and no dates make the bytes the same each time.
_RC: dict[str, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "ensbridge",
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is wider than what pages use
    "font.size": SMALL,
    "axes.unicode_minus": True,
    "path.simplify": True,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Draw and save inside this, whatever the user's own settings of matplotlib are."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        # Letters that matplotlib's font lacks are no matter: the page's font has them.
        warnings.simplefilter("ignore", UserWarning)
        yield


@dataclass(frozen=True)
class Margins:
    """Space around panels and between them; that of a legend is added at the top."""

    left: float = 52.0
    right: float = 14.0
    top: float = 40.0
    bottom: float = 48.0
    gap_x: float = 70.0
    gap_y: float = 96.0


class Sheet:
    """Equal panels in reading order under a legend, and the words that a reader sees on hovering."""

    def __init__(
        self,
        width: float,
        count: int,
        columns: int,
        panel_height: float,
        space: Margins,
        handles: Sequence[Line2D] = (),
        legend_columns: int = 1,
    ) -> None:
        rows = math.ceil(count / columns)
        top = space.top + LEGEND_ROW * math.ceil(len(handles) / legend_columns)
        self.width, self.height = width, top + rows * panel_height + (rows - 1) * space.gap_y + space.bottom
        self.hover: dict[str, str] = {}  # by the mark's id
        self.back = min(space.left, space.gap_x - 8)  # how far left of its axes a panel's words begin
        self.figure = Figure(figsize=(width / _DPI, self.height / _DPI), dpi=_DPI, facecolor=PAPER)
        FigureCanvasAgg(self.figure)
        if handles:
            self.figure.legend(
                handles=list(handles),
                loc="upper left",
                bbox_to_anchor=(0.0, 1.0),
                ncols=legend_columns,
                frameon=False,
                fontsize=SMALL,
                labelcolor=INK,
                handlelength=2.4,
                columnspacing=1.6,
                handletextpad=0.6,
                borderaxespad=0,
                borderpad=0,
                labelspacing=0.6,
            )
        panel = (width - space.left - space.right - (columns - 1) * space.gap_x) / columns
        steps = panel + space.gap_x, panel_height + space.gap_y
        places = (divmod(number, columns) for number in range(count))
        self.panels = [
            self.panel(space.left + column * steps[0], top + row * steps[1], panel, panel_height)
            for row, column in places
        ]

    def panel(self, left: float, top: float, width: float, height: float) -> Axes:
        """Return quiet axes whose top left corner is so far from the sheet's."""
        bottom = self.height - top - height
        bounds = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(bounds, facecolor="none")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set(color=SOFT, linewidth=1)
        axes.tick_params(colors=SOFT, labelsize=SMALL, length=0, pad=6)
        axes.tick_params(axis="x", length=4, pad=4)
        axes.grid(axis="y", color=RULE, linewidth=1)
        axes.set_axisbelow(True)
        return axes

    def name_axes(self, axes: Axes, x: str, y: str, title: str = "") -> None:
        """Write the axes' labels: x below, y above its axis where it can be read without turning the head."""
        bounds = axes.get_position()
        height = bounds.height * self.height
        axes.set_xlabel(x, color=SOFT, fontsize=SMALL, labelpad=5)
        axes.set_ylabel(y, color=SOFT, fontsize=SMALL, rotation=0, ha="left", va="bottom")
        axes.yaxis.set_label_coords(-self.back / (bounds.width * self.width), 1 + 8 / height)
        if title:
            left = bounds.x0 - self.back / self.width
            self.figure.text(
                left, bounds.y1 + 25 / self.height, title, color=INK, fontsize=FONT, weight="semibold"
            )

    def mark(self, artist: Any, name: str, hover: str) -> None:
        """Give a mark its id in the SVG and its words for hovering."""
        artist.set_gid(name)
        self.hover[name] = hover

    def svg(self) -> str:
        """The drawing as matplotlib's own SVG."""
        file = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(file, format="svg", metadata=nothing)
        return file.getvalue().decode()

    def png(self) -> bytes:
        """The drawing as a PNG of 200 dots an inch."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=_PNG_DPI, pil_kwargs={"compress_level": 1})
        drawn = Image.open(file, formats=["PNG"]).convert("RGB")
        framed = ImageOps.expand(drawn, round(FRAME / _DPI * _PNG_DPI), PAPER)
        file = io.BytesIO()
        framed.save(file, format="PNG", dpi=(_PNG_DPI, _PNG_DPI))
        return file.getvalue()


def line_style(kind: str) -> dict[str, Any]:
    """How the line and the markers of a kind of rows are drawn."""
    style = look(kind)
    return {
        "color": style.light,
        "marker": style.marker,
        "linestyle": style.line,
        "linewidth": 1.8,
        "markersize": 7.5 if style.marker in "oDs" else 9,
        "markeredgecolor": PAPER,
    }


def handle(kind: str, label: str = "", **changes: Any) -> Line2D:
    """A legend's entry for a kind of rows: its line and marker."""
    return Line2D([], [], label=label or look(kind).label, **(line_style(kind) | changes))


def linear_ticks(axes: Axes, most: int = 6) -> None:
    """Put a few ticks at round numbers on the y axis."""
    axes.yaxis.set_major_locator(MaxNLocator(nbins=most, steps=[1, 2, 2.5, 5, 10]))


def cost_axis(axes: Axes, ratios: Iterable[float], width: float) -> None:
    """Make the x axis logarithmic over costs, with ticks at familiar multiples that do not touch."""
    ratios = list(ratios)
    low, high = math.log(min(ratios)), math.log(max(ratios))
    pad = 0.07 * (high - low) or 0.5
    low, high = low - pad, high + pad
    axes.set_xscale("log")
    axes.set_xlim(math.exp(low), math.exp(high))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(log_ticks(low, high, width)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"×{value:g}"))


def log_ticks(low: float, high: float, width: float) -> list[float]:
    """Return familiar multiples between exp(low) and exp(high), as many as `width` pixels hold.

    >>> log_ticks(math.log(0.9), math.log(5.5), 700)
    [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]
    >>> log_ticks(math.log(0.9), math.log(5.5), 200)
    [1.0, 2.0, 5.0]
    """
    decades = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    ticks: list[float] = []
    for multiples in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7), (1, 1.5, 2, 3, 5), (1, 2, 5), (1,)):
        candidates = [round(m * 10.0**d, 12) for d in decades for m in multiples]
        ticks = [tick for tick in candidates if low <= math.log(tick) <= high]
        gaps = [(math.log(b) - math.log(a)) / (high - low) * width for a, b in pairwise(ticks)]
        if all(gap > 34 for gap in gaps):
            return ticks
    return ticks[:: math.ceil(len(ticks) / 6)]


def short(text: str, most: int = 26) -> str:
    """A name cut to what a figure can hold.

    >>> short("a" * 40, 10)
    'aaaaaaaaa…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"
