"""One look for the page and all figures: a colour, a marker and a line style for each method.

Figures are drawn in the light colours; on the page each becomes a CSS variable, so that one drawing serves
light and dark.  No method is told from another by its colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ensbridge.evaluation.scores import Kind


@dataclass(frozen=True)
class Look:
    """How a method is drawn: its CSS variable, two colours, marker and line."""

    variable: str
    light: str
    dark: str
    marker: str  # in matplotlib's letters
    line: str | tuple[int, tuple[float, ...]]
    label: str


LOOKS: dict[Kind, Look] = {
    "DE": Look("de", "#757b84", "#8a97a4", "o", (0, (7.0, 2.5)), "DE (real members)"),
    "DBN": Look("dbn", "#0a84ea", "#2ba6ff", "D", "-", "DBN (bridge)"),
    "control": Look("control", "#d5650f", "#d9591c", "X", (0, (1.5, 1.5)), "control"),
    "BN": Look("bn", "#0f3d37", "#26cd79", "s", (0, (4.0, 2.0)), "BN"),
    "ED": Look("ed", "#91088f", "#efc2ec", "^", (0, (1.0, 2.5)), "ED"),
    "EnD2": Look("end", "#785409", "#fff2b3", "v", (0, (5.0, 2.0, 1.0, 2.0)), "EnD²"),
    "other": Look("other", "#150a5c", "#7d62cc", "P", (0, (6.0, 2.0, 1.0, 2.0, 1.0, 2.0)), "other"),
}

# What is not a method: background, text, quieter text, rules and the band behind the main row.
BASE: dict[str, tuple[str, str]] = {
    "paper": ("#fcfcfa", "#14171a"),
    "ink": ("#1c2024", "#e8eaec"),
    "soft": ("#5a626b", "#a2abb4"),
    "rule": ("#dcdfe2", "#30363c"),
    "band": ("#edf3f9", "#1a2530"),
}
PAPER, INK, SOFT, RULE, BAND = (light for light, _ in BASE.values())

FRAME = 14  # pixels around a figure that is a file of its own; on the page there is space enough


def variables(dark: bool) -> dict[str, str]:
    """The colours of one theme by the name of their CSS variable.

    >>> variables(dark=False)["ink"], variables(dark=True)["ink"]
    ('#1c2024', '#e8eaec')
    """
    base = {name: pair[dark] for name, pair in BASE.items()}
    return base | {look.variable: look.dark if dark else look.light for look in LOOKS.values()}


def look(kind: str) -> Look:
    """The look of a kind of rows by its name in a file."""
    return LOOKS.get(kind, LOOKS["other"])  # type: ignore[call-overload]
