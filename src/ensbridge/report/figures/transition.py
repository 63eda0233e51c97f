"""How predictions go from the source through the bridge's steps towards the ensemble's."""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from PIL import Image

from ensbridge.evaluation.scores import Summary
from ensbridge.evaluation.scores.reading import REMEDY
from ensbridge.report.figures.labels import spread_out
from ensbridge.report.figures.sheet import NARROW, SMALL, Margins, Sheet, short
from ensbridge.report.style import INK, PAPER, RULE, SOFT

Data = dict[str, Any]

MOST = 6  # examples
_CLASSES = 3  # lines in a panel
_LARGEST = 512  # pixels of an image's side; more is no example of a classifier's input
# What Pillow raises of damaged chunks.
_DAMAGE = (OSError, SyntaxError, ValueError, IndexError, EOFError, struct.error, zlib.error)
_DAMAGE += (Image.DecompressionBombError,)
_SIDE = 76.0  # of an image in the figure
# The true class is ink and solid, the others quieter: line and marker tell them apart.
_LINES: tuple[tuple[str, Any, str], ...] = (
    (SOFT, (0, (5, 2)), "s"),
    (SOFT, (0, (1.5, 1.8)), "^"),
    (SOFT, "-.", "v"),
)


def data(summary: Summary) -> Data | None:
    """Return the examples of the first run that has any, else None; an image that is no PNG is refused."""
    run = next((run for run in summary.runs if run.transitions), None)
    if run is None:
        return None
    examples = [
        {
            "image": each.image,
            "label": each.label,
            "source": list(each.source),
            "times": list(each.times),
            "path": [list(stop) for stop in each.path],
            "ensemble": list(each.ensemble),
        }
        for each in run.transitions[:MOST]
    ]
    for number, each in enumerate(examples):
        decode(each["image"], f"transitions[{number}]")
    return {
        "dataset": summary.dataset,
        "seeds": [run.seed],
        "class_names": list(run.class_names),
        "examples": examples,
    }


def decode(text: str, where: str) -> Image.Image:
    """Return the picture in a base64 PNG, or say in one sentence that it is none."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where}: image is not base64; {REMEDY}") from error
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError(f"{where}: image is not a PNG; {REMEDY}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's on odd chunks: it shows the image or raises
            picture = Image.open(io.BytesIO(content), formats=["PNG"])
            size = picture.size
            shown = picture.convert("RGB") if max(size) <= _LARGEST else None
    except _DAMAGE as error:
        raise ValueError(f"{where}: image is a damaged PNG; {REMEDY}") from error
    if shown is None:
        pixels = "×".join(map(str, size))
        raise ValueError(f"{where}: image has {pixels} pixels, more than {_LARGEST} a side; {REMEDY}")
    return shown


def describe(data: Data) -> str:
    """List the true class's confidences."""
    lines = []
    for each in data["examples"]:
        k = each["label"]
        ways = {"source": each["source"], "ensemble": each["ensemble"]}
        if each["path"]:
            ways = {"source": each["source"], "bridge": each["path"][-1], "ensemble": each["ensemble"]}
        values = ", ".join(f"{name} {probabilities[k]:.2f}" for name, probabilities in ways.items())
        lines.append(f"True class {data['class_names'][k]}: {values}.")
    return " ".join(lines)


def caption(data: Data) -> str:
    """Say how to read it."""
    counts = sorted({len(each["times"]) - 1 for each in data["examples"]})
    steps = f" of {counts[0]} steps" if len(counts) == 1 and counts[0] > 1 else ""
    return (
        "Confidence in the true class (solid) and in the two others that become likeliest. From the left: the"
        f" source’s own; along the bridge{steps} from t = 1, where it starts from the source’s prediction at"
        " a temperature of its own, to t = 0; and the real ensemble’s, at which the bridge should arrive. The"
        " images are test images to which source and ensemble give different classes, taken by how far apart"
        f" the two predictions lie, without regard to the bridge. One run (seed {data['seeds'][0]})."
    )


def draw(data: Data, width: int) -> Sheet:
    """Draw each example as its image and a small panel, at a width in pixels."""
    columns = 1 if width <= NARROW else 2
    space = Margins(left=_SIDE + 44, right=76, top=26, bottom=46, gap_x=_SIDE + 44 + 76, gap_y=88)
    sheet, panels = Sheet.of_panels(width, len(data["examples"]), columns, 118, space)
    sheet.back = 28
    for number, (axes, example) in enumerate(zip(panels, data["examples"], strict=True)):
        _lines(sheet, axes, example, data["class_names"], number)
        _picture(sheet, axes, example, data["class_names"][example["label"]])
    return sheet


def shown_classes(example: Data) -> list[int]:
    """Return the classes that a panel shows: the true one first, then those that are ever likeliest."""
    stops = [example["source"], *example["path"], example["ensemble"]]
    heights = [max(stop[k] for stop in stops) for k in range(len(example["source"]))]
    likeliest = sorted(range(len(heights)), key=lambda k: -heights[k])
    return [example["label"], *(k for k in likeliest if k != example["label"])][:_CLASSES]


def _lines(sheet: Sheet, axes: Axes, example: Data, names: Sequence[str], number: int) -> None:
    stops = [example["source"], *example["path"], example["ensemble"]]
    # Source and ensemble stand apart: they are other models than the bridge.
    places = [0.0, *(1.7 + i for i in range(len(example["path"]))), len(example["path"]) + 2.4]
    classes = shown_classes(example)
    axes.set(xlim=(-0.3, places[-1] + 0.3), ylim=(-0.03, 1.05), yticks=[0, 0.5, 1])
    for place in (places[0], places[-1]):
        axes.axvline(place, color=RULE, lw=1, zorder=1)
    for rank, k in enumerate(classes):
        colour, line, marker = (INK, "-", "o") if rank == 0 else _LINES[rank - 1]
        heights = [stop[k] for stop in stops]
        order = 3 - rank / 10
        axes.plot(places, heights, color=colour, ls=line, lw=0.7, zorder=order)
        axes.plot(
            places[1:-1], heights[1:-1], color=colour, ls=line, lw=2.2 if rank == 0 else 1.4, zorder=order
        )
        (marks,) = axes.plot(
            places, heights, marker, color=colour, mec=PAPER, ms=6.5, zorder=order + 0.05, clip_on=False
        )
        values = ", ".join(f"{height:.2f}" for height in heights)
        sheet.mark(marks, f"class-{number}-{rank}", f"{names[k]}: {values}")
    _end_labels(axes, [stops[-1][k] for k in classes], [short(names[k], 10) for k in classes], places[-1])
    _times(axes, example["times"], places)
    sheet.name_axes(axes, "time t along the bridge", "confidence")


def _end_labels(axes: Axes, heights: list[float], names: list[str], last: float) -> None:
    """Write the classes' names at the right, moved apart where they would touch."""
    pixels = axes.get_window_extent().height / 1.06
    for rank, (name, y) in enumerate(zip(names, spread_out(heights, 15 / pixels, 0.0, 1.0), strict=True)):
        axes.annotate(
            name,
            (last, y),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            color=INK if rank == 0 else SOFT,
            fontsize=SMALL,
            weight="semibold" if rank == 0 else "normal",
        )


def _times(axes: Axes, times: Sequence[float], places: Sequence[float]) -> None:
    """Label source, ensemble and as many times as there is room for, the first and the last among them."""
    step = axes.get_window_extent().width / (places[-1] + 0.6)
    every, last = max(1, math.ceil(24 / step)), len(times) - 1
    kept = [i for i in range(len(times)) if (i % every == 0 and last - i >= every) or i in (0, last)]
    labels = {places[i + 1]: f"{times[i]:.2g}" for i in kept}
    labels |= {places[0]: "source", places[-1]: "ens."}
    axes.set_xticks(sorted(labels), [labels[place] for place in sorted(labels)])


def _picture(sheet: Sheet, axes: Axes, example: Data, name: str) -> None:
    place = axes.get_position()
    left = place.x0 * sheet.width - 44 - _SIDE
    top = sheet.height * (1 - place.y1)
    image = sheet.panel(left, top, _SIDE, _SIDE)
    image.set_axis_off()
    image.imshow(decode(example["image"], "image"), interpolation="none", aspect="equal")
    image.text(0, -0.06, "true class", transform=image.transAxes, va="top", color=SOFT, fontsize=SMALL)
    image.text(
        0,
        -0.27,
        short(name, 11),
        transform=image.transAxes,
        va="top",
        color=INK,
        fontsize=SMALL,
        weight="semibold",
    )
