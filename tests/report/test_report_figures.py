"""Figures show the values that the scores hold, where they are, in colours that everyone can tell apart."""

from __future__ import annotations

import base64
import json
import math
import os
import stat
import struct
import zlib
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from _report import bare, make_document, make_png, make_row, one_run, report_of_three_runs, three_runs
from ensbridge.evaluation.scores import Summary, parse_scores, summarise
from ensbridge.report import write_report
from ensbridge.report.figures import PLOTS, Data, Plot
from ensbridge.report.figures.labels import place_labels
from ensbridge.report.figures.sheet import NARROW, WIDE, drawing, log_ticks
from ensbridge.report.figures.transition import decode, shown_classes
from ensbridge.report.style import BASE, FRAME, LOOKS, variables

SVG = "{http://www.w3.org/2000/svg}"
NAMES = [plot.name for plot in PLOTS]


@pytest.fixture(scope="module")
def written() -> Path:
    return report_of_three_runs()


@pytest.fixture(scope="module")
def data(written: Path) -> Data:
    return json.loads((written / "figures.json").read_text(encoding="utf-8"))


def drawing_of(folder: Path, name: str) -> ElementTree.Element:
    return ElementTree.fromstring((folder / "figures" / f"{name}.svg").read_text(encoding="utf-8"))


def marks(root: ElementTree.Element, identifier: str) -> np.ndarray:
    """Where the markers of a line are, in pixels."""
    (group,) = (node for node in root.iter(f"{SVG}g") if node.get("id") == identifier)
    uses = group.iter(f"{SVG}use")
    return np.array([(float(use.get("x", "")), float(use.get("y", ""))) for use in uses])


def assert_linear(values: Any, pixels: Any) -> None:
    """Assert that pixels are a straight line over values, up to the file's two decimals."""
    slope, offset = np.polyfit(values, pixels, 1)
    assert np.abs(slope * np.asarray(values) + offset - pixels).max() < 0.03
    assert abs(slope) > 0


# ------------------------------------------------------------------------------ the data


def test_every_figure_has_its_files_and_its_data(written: Path, data: Data) -> None:
    assert list(data) == NAMES
    files = {path.name for path in (written / "figures").iterdir()}
    assert files == {f"{name}.{kind}" for name in NAMES for kind in ("svg", "png")}


def test_data_of_the_front_are_the_summarys_means(data: Data) -> None:
    for point, group in zip(data["front"]["points"], three_runs().rows, strict=True):
        assert (point["model"], point["nll"], point["nll_sd"]) == (
            group.model,
            group.mean("nll"),
            group.spread("nll"),
        )
    on_front = [point["model"] for point in data["front"]["points"] if point["on_front"]]
    assert on_front == ["EnD²", "+2 BN small", "+1 DBN (KL)"]


@pytest.mark.parametrize("name", ["tradeoff", "capacity"])
def test_data_of_the_series_are_the_summarys_means(data: Data, name: str) -> None:
    summary = three_runs()
    groups = [g for g in summary.rows if g.kind == "DE"] + list(getattr(summary, name))
    points = {(s["kind"], p["members"]): p for s in data[name]["series"] for p in s["points"]}
    assert len(points) == len(groups)
    for group in groups:
        point = points[group.kind, group.first.members]
        assert point["macs_ratio"] == group.first.macs_ratio
        assert (point["acc"], point["acc_sd"]) == (group.mean("acc"), group.spread("acc"))
        assert (point["dee"], point["dee_is_bound"]) == (group.mean("dee"), group.dee_is_bound)


def test_two_kinds_of_one_method_are_two_series() -> None:
    rows = [
        make_row((f"+{k} BN {size}", "BN", k + 1, k, 1, 1.1 * k, 91.0, 0.25, 1.9, 0.7))
        for size in ("small", "medium")
        for k in (2, 4)
    ]
    summary = summarise([parse_scores(make_document() | {"tradeoff": rows})])
    found = next(plot for plot in PLOTS if plot.name == "tradeoff").data(summary)
    assert found is not None
    assert [(s["name"], len(s["points"])) for s in found["series"][1:]] == [("BN small", 2), ("BN medium", 2)]


def test_reliability_is_pooled_by_count_and_names_the_tables_error(data: Data) -> None:
    panels = data["reliability"]["panels"]
    assert [panel["model"] for panel in panels] == ["DE-1", "DE-3", "+1 DBN", "control", "ED", "EnD²"]
    runs = [run.rows[0].reliability for run in three_runs().runs]
    bins = [reliability.before[3] for reliability in runs if reliability is not None]
    pooled = panels[0]["before"][3]
    assert pooled["count"] == 90
    weights = [each.count for each in bins]
    assert pooled["accuracy"] == pytest.approx(np.average([b.accuracy or 0 for b in bins], weights=weights))
    assert panels[0]["before"][0] == {"count": 0, "confidence": None, "accuracy": None}
    assert panels[0]["ece_before"] == three_runs().rows[0].mean("ece")
    assert panels[0]["ece_after"] == pytest.approx(0.01)


def test_curves_are_the_mean_and_range_of_the_runs(data: Data) -> None:
    losses = np.array([run.curves[1].loss for run in three_runs().runs])
    curve = data["curves"]["curves"][1]
    assert curve["name"] == "bridge"
    np.testing.assert_allclose(curve["mean"], losses.mean(axis=0))
    np.testing.assert_allclose([curve["low"], curve["high"]], [losses.min(axis=0), losses.max(axis=0)])


def test_curves_of_unequal_length_end_where_the_shortest_does() -> None:
    first, second = (parse_scores(make_document(seed)) for seed in (7, 8))
    curve = second.curves[0]
    shorter = replace(curve, images=curve.images[:5], loss=curve.loss[:5])
    found = next(p for p in PLOTS if p.name == "curves").data(
        Summary((first, replace(second, curves=(shorter,))))
    )
    assert found is not None
    assert found["curves"][0]["images"] == list(curve.images[:5])


def test_transitions_show_the_true_class_first_and_then_the_likeliest(data: Data) -> None:
    example = data["transition"]["examples"][1]
    assert shown_classes(example)[:2] == [1, 2]
    assert example["image"] == make_png(30)


def with_chunk(name: bytes, content: bytes) -> str:
    """A PNG with one more chunk behind its header."""
    png = base64.b64decode(make_png(0))
    header = 8 + 4 + 4 + 13 + 4
    chunk = struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return base64.b64encode(png[:header] + chunk + png[header:]).decode()


@pytest.mark.parametrize(
    ("image", "named"),
    [
        ("<svg/>", "PNG"),
        ("AAAA", "PNG"),
        (make_png(0)[:40], "PNG"),
        (make_png(0, side=600), "600×600.*512"),
        (with_chunk(b"cHRM", b""), "PNG"),
        (with_chunk(b"acTL", b"\0"), "PNG"),
        (with_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**21))), "PNG"),
    ],
)
def test_a_bogus_image_is_refused_in_one_sentence(image: str, named: str, tmp_path: Path) -> None:
    document = make_document()
    document["transitions"][0]["image"] = image
    with pytest.raises(ValueError, match=rf"^transitions\[0\]: image .*{named}"):
        write_report(summarise([parse_scores(document)]), tmp_path / "out")
    assert not (tmp_path / "out").exists()  # nothing is written of a report that cannot be whole
    assert decode(make_png(0), "here").size == (8, 8)


def test_an_example_without_its_image_has_its_number_in_the_test_split(tmp_path: Path) -> None:
    document = make_document()
    for number, transition in enumerate(document["transitions"]):
        transition.update(image=None, index=4321 + number)
    write_report(summarise([parse_scores(document)]), tmp_path)
    drawn = drawing_of(tmp_path, "transition")
    assert not [*drawn.iter(f"{SVG}image")]
    shown = "".join(drawn.itertext())
    for number in range(len(document["transitions"])):
        assert f"{4321 + number:,}" in shown
    examples = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["transition"]["examples"]
    assert [example["index"] for example in examples] == [*range(4321, 4321 + len(examples))]


# ------------------------------------------------------------------------------ the drawings


@pytest.mark.parametrize("name", NAMES)
def test_drawing_is_well_formed_titled_and_described(written: Path, name: str) -> None:
    root = drawing_of(written, name)
    assert root.get("role") == "img"
    described = {node.get("id"): node.text for node in root if node.tag in (f"{SVG}title", f"{SVG}desc")}
    assert set(described) == set(root.get("aria-labelledby", "").split())
    assert all(described.values())
    identifiers = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(identifiers) == len(set(identifiers))


def drawn_texts(figure: Figure) -> list[Text]:
    """The texts of a drawing; ticks beyond an axis' limits exist but are not drawn."""
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {id(tick.label1) for tick in ticks if not low <= tick.get_loc() <= high}
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text)]
    return [text for text in texts if text.get_text() and text.get_visible() and id(text) not in hidden]


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("plot", PLOTS, ids=NAMES)
def test_every_axis_has_a_label_and_no_text_leaves_the_sheet(data: Data, plot: Plot, width: int) -> None:
    with drawing():
        sheet = plot.draw(data[plot.name], width)
        sheet.figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in drawn_texts(sheet.figure)]
    panels = [axes for axes in sheet.figure.axes if axes.axison]
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)
    assert min(box.x0 for box in boxes) >= -1
    assert min(box.y0 for box in boxes) >= -1
    assert max(box.x1 for box in boxes) <= sheet.width + 1
    assert max(box.y1 for box in boxes) <= sheet.height + 1


def test_marks_of_the_front_lie_where_the_values_are(written: Path, data: Data) -> None:
    root, points = drawing_of(written, "front"), data["front"]["points"]
    places = np.concatenate([marks(root, f"front-point-{i}") for i in range(len(points))])
    assert_linear([math.log(point["macs_ratio"]) for point in points], places[:, 0])
    assert_linear([point["nll"] for point in points], places[:, 1])
    assert places[0, 1] < places[1, 1]  # a higher NLL is higher up


@pytest.mark.parametrize(
    ("name", "x"), [("tradeoff", "members"), ("tradeoff", "macs_ratio"), ("capacity", "members")]
)
@pytest.mark.parametrize("y", ["acc", "dee"])
def test_marks_of_the_series_lie_where_the_values_are(
    written: Path, data: Data, name: str, x: str, y: str
) -> None:
    series = data[name]["series"]
    root = drawing_of(written, name)
    places = np.concatenate([marks(root, f"{name}-{y}-{x}-{i}") for i in range(len(series))])
    points = [point for each in series for point in each["points"]]
    assert_linear([math.log(p[x]) if x == "macs_ratio" else p[x] for p in points], places[:, 0])
    assert_linear([point[y] for point in points], places[:, 1])


def test_a_bound_has_an_arrow_and_a_dee_below_one_stays(written: Path, data: Data) -> None:
    points = [p for each in data["capacity"]["series"] for p in each["points"]]
    assert sum(point["dee_is_bound"] for point in points) == 1
    assert min(point["dee"] for point in points) == pytest.approx(0.4)
    text = (written / "figures" / "capacity.svg").read_text(encoding="utf-8")
    assert "more than 5.00" in text


def test_marks_of_a_transition_lie_where_the_values_are(written: Path, data: Data) -> None:
    example = data["transition"]["examples"][0]
    root = drawing_of(written, "transition")
    heights = [
        [stop[k] for stop in (example["source"], *example["path"], example["ensemble"])] for k in (0, 1)
    ]
    places = np.concatenate([marks(root, f"transition-class-0-{rank}") for rank in range(2)])
    assert_linear([*heights[0], *heights[1]], places[:, 1])


def test_hovering_over_a_mark_names_it(written: Path) -> None:
    root = drawing_of(written, "front")
    words = [node.findtext(f"{SVG}title") for node in root.iter(f"{SVG}g") if "point" in node.get("id", "")]
    assert words[0] == "DE-1: ×1.00 MACs, NLL 0.3460 ± 0.0040"


def test_pictures_are_pngs_of_200_dots_an_inch(written: Path) -> None:
    for name in NAMES:
        content = (written / "figures" / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", content[16:24])
        assert width == pytest.approx((WIDE + 2 * FRAME) / 72 * 200, abs=2)
        assert height > 500


def test_a_single_row_makes_a_report_without_the_figures_of_an_earlier_one(tmp_path: Path) -> None:
    scores = bare(one_run().first)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "curves.svg").write_text("of another run")
    # On data of which no runs ship with the package, or those would be drawn.
    write_report(Summary((replace(scores, rows=scores.rows[:1], dataset="mine"),)), tmp_path)
    assert len(marks(drawing_of(tmp_path, "front"), "front-point-0")) == 1
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"front.svg", "front.png"}


# ------------------------------------------------------------------------------ writing


def test_writing_twice_gives_the_same_bytes(written: Path, tmp_path: Path) -> None:
    write_report(three_runs(), tmp_path)
    for path in written.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / path.relative_to(written)).read_bytes(), path.name


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = bare(one_run().first)
    summary = Summary((replace(scores, rows=scores.rows[:2]),))
    path = write_report(summary, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "report.html"
    before = path.read_bytes()
    usual = tmp_path / "usual"
    usual.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)

    def full_disk(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="disk full"):
        write_report(summary, path.parent)
    assert path.read_bytes() == before
    assert {entry.name for entry in path.parent.iterdir()} == {"report.html", "figures", "figures.json"}


# ------------------------------------------------------------------------------ colours

# Machado, Oliveira and Fernandes 2009, severity 1, in linear RGB.
_SEEN_BY = {
    "most": np.eye(3),
    "protanopes": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopes": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def linear(colour: str) -> np.ndarray:
    """A colour's light: red, green and blue without the screen's curve."""
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(light: np.ndarray) -> np.ndarray:
    """CIE L*a*b* under D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = to_xyz @ light.clip(0, 1) / [0.9505, 1.0, 1.089]
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


@pytest.mark.parametrize("dark", [False, True])
def test_marks_and_text_stand_out_from_the_background(dark: bool) -> None:
    colours = variables(dark)
    for look in LOOKS.values():
        assert contrast(colours[look.variable], colours["paper"]) >= 3.0, look.variable
    for name in ("ink", "soft"):
        assert contrast(colours[name], colours["paper"]) >= 4.5
        assert contrast(colours[name], colours["band"]) >= 4.5


@pytest.mark.parametrize("eyes", _SEEN_BY)
@pytest.mark.parametrize("dark", [False, True])
def test_methods_can_be_told_apart_by_colour(eyes: str, dark: bool) -> None:
    seen = {
        look.variable: lab(_SEEN_BY[eyes] @ linear(variables(dark)[look.variable])) for look in LOOKS.values()
    }
    for one, other in combinations(seen, 2):
        # A just noticeable difference is about 2.3.
        assert np.linalg.norm(seen[one] - seen[other]) >= 15, (one, other)


def test_methods_can_be_told_apart_without_colour() -> None:
    assert len({look.marker for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.line for look in LOOKS.values()}) == len(LOOKS)
    light = [look.light for look in LOOKS.values()] + [pair[0] for pair in BASE.values()]
    assert len(set(light)) == len(light)  # the page finds a colour's variable by its light value


# ------------------------------------------------------------------------------ labels and ticks


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_labels_overlap_nothing_even_where_points_crowd(width: int) -> None:
    frame = Bbox.from_extents(58.0, 40.0, width - 18.0, 382.0)
    at = [(90.0, 60.0), (200.0, 230.0), (115.0, 240.0), (115.0, 246.0), (117.0, 243.0)]
    sizes = [(8.0 * len(name), 15.0) for name in ("DE-1", "DE-2", "+1 DBN", "+1 DBN (KL)", "control")]
    boxes = place_labels(sizes, at, at, [at[:2]], frame)
    for i, box in enumerate(boxes):
        assert (box.width, box.height) == pytest.approx(sizes[i])
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1
        assert not any(box.contains(*point) for point in at)
        assert box.count_overlaps(boxes[:i]) == 0


def test_ticks_of_costs_are_familiar_and_few() -> None:
    assert {1.0, 2.0, 5.0} <= set(log_ticks(math.log(0.9), math.log(5.5), 300))
    assert len(log_ticks(math.log(1e-3), math.log(1e6), 300)) < 12
