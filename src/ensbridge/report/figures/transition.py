"""How predictions go from the source through the bridge's steps towards the ensemble's."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.axes import Axes
from PIL import Image

from ensbridge.evaluation.scores import Summary
from ensbridge.evaluation.scores.reading import REMEDY
from ensbridge.report.figures.labels import spread_out
from ensbridge.report.figures.sheet import NARROW, SMALL, Margins, Sheet, short
from ensbridge.report.style import INK, PAPER, RULE, SOFT

Data = dict[str, Any]

MAX_EXAMPLES = 6
_CLASSES = 3  # lines in a panel
_MAX_SIDE = 512  # pixels of an image's side; more is no example of a classifier's input
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
    examples = [asdict(transition) for transition in run.transitions[:MAX_EXAMPLES]]
    for number, example in enumerate(examples):
        if example["image"] is not None:
            decode(example["image"], f"transitions[{number}]")
    return {
        "dataset": summary.dataset,
        "seeds": [run.seed],
        "class_names": list(run.class_names),
        "examples": examples,
    }


def decode(text: str, where: str) -> Image.Image:
    """Return the picture in a base64 PNG, or say in one sentence that it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's on odd chunks: it shows the image or raises
            content = io.BytesIO(base64.b64decode(text, validate=True))
            picture = Image.open(content, formats=["PNG"])
            if max(picture.size) <= _MAX_SIDE:
                return picture.convert("RGB")
    except Exception as error:  # Pillow raises what it likes of damaged chunks
        raise ValueError(f"{where}: image is not a complete PNG in base64; {REMEDY}") from error
    pixels = "×".join(map(str, picture.size))
    raise ValueError(f"{where}: image has {pixels} pixels, more than {_MAX_SIDE} a side; {REMEDY}")


def describe(data: Data) -> str:
    """List the true class's confidences."""
    lines = []
    for example in data["examples"]:
        k = example["label"]
        models = {"source": example["source"]}
        models |= {"bridge": example["path"][-1]} if example["path"] else {}
        models["ensemble"] = example["ensemble"]
        values = ", ".join(f"{name} {probabilities[k]:.2f}" for name, probabilities in models.items())
        lines.append(f"True class {data['class_names'][k]}: {values}.")
    return " ".join(lines)


def caption(data: Data) -> str:
    """Say how to read it."""
    counts = sorted({len(example["times"]) - 1 for example in data["examples"]})
    steps = f" of {counts[0]} steps" if len(counts) == 1 and counts[0] > 1 else ""
    numbered = ""
    if any(example["image"] is None for example in data["examples"]):
        numbered = " They are not part of this page; a number is an image’s place in the test split, from 0."
    return (
        "Confidence in the true class (solid) and in the two others that become likeliest. From the left: the"
        f" source’s own; along the bridge{steps} from t = 1, where it starts from the source’s prediction at"
        " a temperature of its own, to t = 0; and the real ensemble’s, at which the bridge should arrive. The"
        " images are test images to which source and ensemble give different classes, taken by how far apart"
        f" the two predictions lie, without regard to the bridge.{numbered} One run (seed"
        f" {data['seeds'][0]})."
    )


def draw(data: Data, width: int) -> Sheet:
    """Draw each example as its image and a small panel, at a width in pixels."""
    columns = 1 if width <= NARROW else 2
    space = Margins(left=_SIDE + 44, right=76, top=26, bottom=46, gap_x=_SIDE + 44 + 76, gap_y=88)
    sheet = Sheet(width, len(data["examples"]), columns, 118, space)
    sheet.back = 28
    for number, (axes, example) in enumerate(zip(sheet.panels, data["examples"], strict=True)):
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
    xs = [0.0, *(1.7 + i for i in range(len(example["path"]))), len(example["path"]) + 2.4]
    classes = shown_classes(example)
    axes.set(xlim=(-0.3, xs[-1] + 0.3), ylim=(-0.03, 1.05), yticks=[0, 0.5, 1])
    for x in (xs[0], xs[-1]):
        axes.axvline(x, color=RULE, lw=1, zorder=1)
    for rank, k in enumerate(classes):
        colour, line, marker = (INK, "-", "o") if rank == 0 else _LINES[rank - 1]
        heights = [stop[k] for stop in stops]
        order = 3 - rank / 10
        axes.plot(xs, heights, color=colour, ls=line, lw=0.7, zorder=order)
        width = 2.2 if rank == 0 else 1.4
        axes.plot(xs[1:-1], heights[1:-1], color=colour, ls=line, lw=width, zorder=order)
        (marks,) = axes.plot(
            xs, heights, marker, color=colour, mec=PAPER, ms=6.5, zorder=order + 0.05, clip_on=False
        )
        values = ", ".join(f"{height:.2f}" for height in heights)
        sheet.mark(marks, f"class-{number}-{rank}", f"{names[k]}: {values}")
    _end_labels(axes, [stops[-1][k] for k in classes], [short(names[k], 10) for k in classes], xs[-1])
    _times(axes, example["times"], xs)
    sheet.name_axes(axes, "time t along the bridge", "confidence")


def _end_labels(axes: Axes, heights: list[float], names: list[str], last: float) -> None:
    """Write the classes' names at the right, moved apart where they would touch."""
    pixels = axes.get_window_extent().height / 1.06
    for rank, (name, y) in enumerate(zip(names, spread_out(heights, 15 / pixels, 0.0, 1.0), strict=True)):
        colour, weight = (INK, "semibold") if rank == 0 else (SOFT, "normal")
        text: dict[str, Any] = {"color": colour, "weight": weight, "fontsize": SMALL, "va": "center"}
        axes.annotate(name, (last, y), xytext=(9, 0), textcoords="offset points", **text)


def _times(axes: Axes, times: Sequence[float], xs: Sequence[float]) -> None:
    """Label source, ensemble and as many times as there is room for, the first and the last among them."""
    step = axes.get_window_extent().width / (xs[-1] + 0.6)
    every, last = max(1, math.ceil(24 / step)), len(times) - 1
    kept = [i for i in range(len(times)) if (i % every == 0 and last - i >= every) or i in (0, last)]
    labels = {xs[0]: "source"} | {xs[i + 1]: f"{times[i]:.2g}" for i in kept} | {xs[-1]: "ens."}
    axes.set_xticks(list(labels), list(labels.values()))


def _picture(sheet: Sheet, axes: Axes, example: Data, name: str) -> None:
    bounds = axes.get_position()
    left = bounds.x0 * sheet.width - 44 - _SIDE
    image = sheet.panel(left, sheet.height * (1 - bounds.y1), _SIDE, _SIDE)
    text: dict[str, Any] = {"transform": image.transAxes, "va": "top", "fontsize": SMALL}
    if example["image"] is None:  # a frame with its number
        image.set(xticks=[], yticks=[])
        for side in image.spines.values():
            side.set(visible=True, color=RULE)
        if example["index"] is not None:
            image.text(0.5, 0.6, f"image\n{example['index']:,}", color=SOFT, ha="center", **text)
    else:
        image.set_axis_off()
        image.imshow(decode(example["image"], "image"), interpolation="none", aspect="equal")
    image.text(0, -0.06, "true class", color=SOFT, **text)
    image.text(0, -0.27, short(name, 11), color=INK, weight="semibold", **text)
