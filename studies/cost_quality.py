"""README's cost–quality figure, for light and dark pages, from results/cifar10.json and cifar10/best.json.

python studies/cost_quality.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[1] / "results"
THEMES = {  # text, grid, and a colour for each series
    "light": (
        "#1f2328",
        "#d8dee4",
        {"DE": "#57606a", "ours": "#0969da", "frozen": "#8250df", "other": "#bc4c00"},
    ),
    "dark": (
        "#e6edf3",
        "#30363d",
        {"DE": "#9198a1", "ours": "#58a6ff", "frozen": "#bc8cff", "other": "#f0883e"},
    ),
}
# Series: label, colour, marker, rows, and where the label stands (row, shift in points).
SERIES = [
    ("deep ensembles of 1–5 networks", "DE", "o-", ["DE-1", "DE-2", "DE-3", "DE-4", "DE-5"], (2, (0, 12))),
    (
        "ours: distilled, with one bridge, with two",
        "ours",
        "D-",
        ["distilled network", "+ coarse bridge", "+ both bridges"],
        (2, (10, -6)),
    ),
    (
        "bridges, frozen network",
        "frozen",
        "s-",
        ["+1 DBN (KL, T = 4)", "+2 DBN (KL, T = 4)"],
        (0, (10, 2)),
    ),
    ("its control, no ensemble", "frozen", "x", ["control (KL, T = 4)"], (0, (10, 6))),
    ("the paper’s bridge", "frozen", "d", ["+1 DBN"], (0, (8, 6))),
    ("BN", "other", "v", ["+2 BN small", "+4 BN small", "+2 BN medium"], (2, (8, 4))),
    ("ED", "other", "^", ["ED"], (0, (8, 0))),
    ("EnD²", "other", ">", ["EnD²"], (0, (8, -3))),
]


def read(name: str) -> Any:
    """A file of results/."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def draw(theme: str) -> None:
    """Write the figure for one theme."""
    ink, grid, colours = THEMES[theme]
    best = [row for row in read("cifar10/best.json")["rows"] if row["part"] == "test"]
    rows = {row["model"]: row for row in (*best, *read("cifar10.json")["rows"])}
    plt.rcParams.update({"svg.hashsalt": "ensbridge", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(7.6, 3.9), layout="constrained")
    for label, kind, style, names, (index, shift) in SERIES:
        points = [(rows[name]["macs_ratio"], rows[name]["nll"]["mean"]) for name in names]
        axes.plot(*zip(*points, strict=True), style, color=colours[kind], markersize=6, linewidth=1.4)
        axes.annotate(
            label,
            points[index],
            shift,
            textcoords="offset points",
            color=colours[kind],
            fontsize=9,
            va="center",
        )
    axes.set(
        xlim=(0.85, 5.25), ylim=(0.17, 0.37), xlabel="inference cost (multiply–accumulates of one network)"
    )
    axes.set_ylabel("test NLL, lower is better")
    axes.set_xticks(range(1, 6), [f"×{cost}" for cost in range(1, 6)])
    axes.grid(color=grid, linewidth=0.6)
    axes.tick_params(colors=ink, length=0)
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_color(ink)
    for spine in axes.spines.values():
        spine.set_visible(False)
    out = RESULTS / "figures" / f"cost-quality-{theme}.svg"
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, transparent=True, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    for name in THEMES:
        draw(name)
