"""The report says what scores.json says: no more, nothing else, and without torch."""

import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from ensbridge.report import figures
from ensbridge.report.figures import Box, Point, cost_quality, linear_axis, log_axis, place_labels
from ensbridge.report.headline import control_sentence, headline, main_bridge
from ensbridge.report.page import render_page, write_page
from ensbridge.report.table import rich_table
from ensbridge.scores import COLUMNS, Scores, cells, parse_scores, read_scores


def make_row(model: str, members: int, nll: float, **values: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "members": members, "bridges": 0, "steps": 0}
    row |= {"macs": 1000 * members, "macs_ratio": float(members)}
    row |= {"params": 100 * members, "params_ratio": float(members)}
    row |= {"acc": 90.0, "nll": nll, "brier": 0.15, "ece": 0.04, "cnll": 0.3, "temperature": 1.2}
    return row | {"dee": float(members), "gap": None, "gap_error": None} | values


def make_document() -> dict[str, Any]:
    one_step = {
        "bridges": 1,
        "steps": 1,
        "macs": 1160,
        "macs_ratio": 1.16,
        "params_ratio": 1.2,
        "gap_error": 0.05,
    }
    five_steps = one_step | {"steps": 5, "macs_ratio": 1.8}
    ensembles = [make_row(f"DE-{k}", k, nll) for k, nll in enumerate([0.346, 0.243, 0.229, 0.222, 0.218], 1)]
    bridges = [
        make_row("+1 DBN (5 steps)", 3, 0.238, **five_steps, dee=2.36, gap=0.92),
        make_row("+1 DBN", 3, 0.237, **one_step, dee=2.43, gap=0.93),
        make_row("+1 DBN (KL)", 3, 0.21, **one_step, dee=">5", gap=1.16),
        make_row("control", 1, 0.268, **one_step, dee=1.8, gap=0.66),
    ]
    environment = {"python": "3.12.3", "device": "cpu"}
    document = {"dataset": "digits", "seed": 7, "classes": 10, "environment": environment}
    return document | {"rows": ensembles + bridges}


def changed(model: str, /, **values: Any) -> Scores:
    """Return the scores with one row's values changed."""
    scores = parse_scores(make_document())
    rows = tuple(replace(row, **values) if row.model == model else row for row in scores.rows)
    assert rows != scores.rows
    return replace(scores, rows=rows)


def without(*models: str) -> Scores:
    scores = parse_scores(make_document())
    return replace(scores, rows=tuple(row for row in scores.rows if row.model not in models))


def test_scores_survive_the_round_trip_from_file_and_folder(tmp_path: Path) -> None:
    document = make_document()
    (tmp_path / "scores.json").write_text(json.dumps(document))
    from_file = read_scores(tmp_path / "scores.json")
    assert json.loads(json.dumps(asdict(from_file))) == document
    assert read_scores(tmp_path) == from_file


def test_kinds_follow_from_the_row() -> None:
    kinds = [row.kind for row in parse_scores(make_document()).rows]
    assert kinds == ["ensemble"] * 5 + ["bridge"] * 3 + ["control"]
    assert parse_scores(make_document() | {"rows": [make_row("ED", 3, 0.3)]}).rows[0].kind == "other"


def test_missing_file_and_empty_folder_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.json does not exist; give"):
        read_scores(tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"holds no scores\.json; give the folder of a finished run"):
        read_scores(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{oops", r"scores\.json is not JSON \(.* in line 1\); delete it and run again"),
        (b"\xff\xfe", r"scores\.json is not UTF-8 text \(byte 0\); delete it and run again"),
        (b"[1]", r"scores\.json is \[1\] where an object is expected; delete it and run again"),
    ],
)
def test_unreadable_content_is_explained(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "scores.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_scores(tmp_path)


@pytest.mark.parametrize("key", [*make_document(), *(f"row.{key}" for key in make_row("DE-1", 1, 0.3))])
def test_each_missing_key_is_named(key: str) -> None:
    document = make_document()
    where = document["rows"][2] if key.startswith("row.") else document
    name = key.removeprefix("row.")
    del where[name]
    place = r"here: rows\[2\]" if key.startswith("row.") else "here"
    with pytest.raises(ValueError, match=rf"^{place} has no '{name}' \(it has: .*delete it and run again"):
        parse_scores(document, where="here")


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("model", 3, "3"),
        ("model", "", '""'),
        ("model", "a\x1b[31mb", r'"a\\u001b\[31mb"'),
        ("members", 1.5, r"1\.5"),
        ("members", 0, "0"),
        ("bridges", True, "true"),
        ("steps", -1, "-1"),
        ("macs", "12", '"12"'),
        ("macs_ratio", 0.0, r"0\.0"),
        ("params_ratio", -1.0, r"-1\.0"),
        ("acc", "90", '"90"'),
        ("nll", float("nan"), "NaN"),
        ("brier", None, "null"),
        ("ece", False, "false"),
        ("cnll", float("inf"), "Infinity"),
        ("temperature", 0, "0"),
        ("dee", "5", '"5"'),
        ("dee", None, "null"),
        ("gap", "0.5", r'"0\.5"'),
        ("gap_error", [], r"\[\]"),
    ],
)
def test_wrong_values_in_a_row_are_named(key: str, value: object, shown: str) -> None:
    document = make_document()
    document["rows"][1][key] = value
    message = rf"^here: rows\[1\]: {key} is {shown}, expected .+; delete it and run again"
    with pytest.raises(ValueError, match=message):
        parse_scores(document, where="here")


@pytest.mark.parametrize(
    ("key", "value"),
    [("dataset", 1), ("seed", "0"), ("classes", 0), ("environment", []), ("rows", []), ("rows", {})],
)
def test_wrong_values_at_the_top_are_named(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^here: {key} is {re.escape(json.dumps(value))}, expected "):
        parse_scores(make_document() | {key: value}, where="here")


def test_cells_are_formatted_in_one_place() -> None:
    rows = {row.model: row for row in parse_scores(make_document()).rows}
    assert cells(rows["+1 DBN"]) == (
        *("+1 DBN", "1.16", "1.20", "90.00", "0.237", "0.150", "0.040", "0.300", "2.43", "0.93 ± 0.05"),
    )
    assert cells(rows["+1 DBN (KL)"])[-2:] == (">5", "1.16 ± 0.05")
    assert cells(rows["DE-1"])[-2:] == ("1.00", "–")
    assert cells(replace(rows["DE-1"], gap=-0.07))[-1] == "-0.07"


def test_text_table_aligns_and_fits() -> None:
    scores = parse_scores(make_document())
    lines = scores.table().splitlines()
    assert len(lines) == 2 + len(scores.rows)
    assert {len(line) for line in lines} == {len(lines[0])}
    assert 80 <= len(lines[0]) <= 110
    assert lines[0].split("  ")[0].strip() == "model"
    assert lines[2].startswith("DE-1 ")  # names to the left
    assert lines[2].endswith(" –")  # numbers to the right
    assert lines[8].split() == ["+1", "DBN", *cells(scores.rows[6])[1:-1], "0.93", "±", "0.05"]


def test_rich_table_shows_whole_numbers_in_80_columns_and_no_markup() -> None:
    scores = changed("control", model="[red]control")
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(rich_table(scores))
    shown = capture.get()
    assert "…" not in shown
    assert "[red]control" in shown
    for row in scores.rows:
        for cell in cells(row):
            assert cell in shown


def test_headline_gives_cost_members_and_the_real_price() -> None:
    assert headline(parse_scores(make_document())) == (
        "One network + bridge: ×1.16 the cost of one network, equals 2.4 members"
        " (three real members cost ×3.0)."
    )


def test_headline_is_about_the_plain_bridge_even_when_another_scores_better() -> None:
    row = main_bridge(parse_scores(make_document()))
    assert row is not None
    assert row.model == "+1 DBN"
    row = main_bridge(without("+1 DBN"))
    assert row is not None
    assert row.model == "+1 DBN (KL)"


def test_headline_beyond_the_largest_ensemble_and_without_the_target() -> None:
    scores = changed("+1 DBN", dee=">5", bridges=2)
    assert "One network + 2 bridges" in headline(scores)
    assert "equals more than 5 members (three" in headline(scores)
    assert headline(without("DE-3")).endswith("equals 2.4 members.")


def test_headline_says_when_the_bridge_does_not_beat_one_network() -> None:
    worse = headline(changed("+1 DBN", nll=0.35, dee=0.96, gap=-0.03))
    assert "does not beat one network alone: NLL 0.350 against 0.346" in worse
    assert "equals" not in worse
    unclear = headline(changed("+1 DBN", nll=0.34, dee=1.05, gap=0.05, gap_error=0.04))
    assert "does not clearly beat one network alone: it closes 0.05 ± 0.04 of the gap to three" in unclear
    assert "equals" not in unclear


def test_headline_without_a_bridge() -> None:
    scores = without("+1 DBN", "+1 DBN (KL)", "+1 DBN (5 steps)", "control")
    assert headline(scores).startswith("No bridge was measured on digits")
    assert control_sentence(scores) == ""


def test_control_sentence_says_whose_the_gain_is() -> None:
    sentence = control_sentence(parse_scores(make_document()))
    assert sentence.endswith("source alone — 1.8 members; the ensemble itself adds the rest.")
    as_good = control_sentence(changed("control", nll=0.237, dee=2.43, gap=0.93))
    assert "2.4 members: as good or better, so nothing here is shown to come from the ensemble" in as_good
    close = control_sentence(changed("control", nll=0.245, dee=1.98, gap=0.86))
    assert "(gap 0.93 against 0.86) is within two standard errors" in close
    assert "adds the rest" not in close
    same_count = control_sentence(changed("control", dee=2.41))
    assert same_count.endswith("2.4 members too; the ensemble itself lowers NLL from 0.268 to 0.237.")
    assert "no control row" in control_sentence(without("control"))


def test_figure_is_well_formed_and_titled() -> None:
    scores = parse_scores(make_document())
    root = ElementTree.fromstring(cost_quality(scores))
    name = "{http://www.w3.org/2000/svg}"
    titles = {node.get("id") for node in root if node.tag in (f"{name}title", f"{name}desc")}
    assert titles == set(root.get("aria-labelledby", "").split())
    labels = [node.text for node in root.iter(f"{name}text") if node.get("class") == "label"]
    assert labels == [row.model for row in scores.rows]
    (line,) = root.iter(f"{name}polyline")
    assert len(line.get("points", "").split()) == 5  # the five ensembles and nothing else
    axis_titles = [node.text for node in root.iter(f"{name}text") if node.get("class") == "axis-title"]
    assert axis_titles == ["test NLL, nats (lower is better)", "cost: MACs, × one network (log scale)"]


def test_figure_places_points_where_the_values_are() -> None:
    root = ElementTree.fromstring(cost_quality(parse_scores(make_document())))
    circles = [node for node in root.iter("{http://www.w3.org/2000/svg}circle") if not node.get("class")]
    at = [(float(node.get("cx", "")), float(node.get("cy", ""))) for node in circles]
    assert at == sorted(at)  # dearer is further right and, here, lower NLL is further down
    assert at[1][0] - at[0][0] == pytest.approx(at[3][0] - at[1][0], abs=0.2)  # ×1 → ×2 → ×4 on a log scale
    ratio = (at[2][1] - at[1][1]) / (at[1][1] - at[0][1])
    assert ratio == pytest.approx((0.243 - 0.229) / (0.346 - 0.243), abs=0.01)


@pytest.mark.parametrize("width", [350, 824])
def test_labels_overlap_nothing_even_where_points_crowd(width: int) -> None:
    frame = Box(58.0, 40.0, width - 18.0, 382.0)
    at = [
        Point(90.0, 60.0),
        Point(200.0, 230.0),
        Point(115.0, 240.0),
        Point(115.0, 246.0),
        Point(117.0, 243.0),
    ]
    names = ["DE-1", "DE-2", "+1 DBN", "+1 DBN (KL)", "control"]
    boxes = place_labels(names, at, at[:2], frame)
    for i, box in enumerate(boxes):
        assert box.outside(frame) == pytest.approx(0.0)
        assert not any(box.left <= point.x <= box.right and box.top <= point.y <= box.bottom for point in at)
        assert all(box.overlap(other) == 0.0 for other in boxes[:i])


def test_axes_cover_their_values_with_a_few_round_ticks() -> None:
    y = linear_axis([0.218, 0.346], 400.0, 0.0)
    assert y.ticks == (0.225, 0.25, 0.275, 0.3, 0.325, 0.35)
    assert 0.0 < y.to_pixel(0.346) < y.to_pixel(0.218) < 400.0
    x = log_axis([1.0, 5.0], 0.0, 300.0)
    assert {1.0, 2.0, 5.0} <= set(x.ticks)
    assert len(x.ticks) < 8
    assert linear_axis([0.3], 0.0, 100.0).to_pixel(0.3) == pytest.approx(50.0)
    assert log_axis([1.0], 0.0, 100.0).to_pixel(1.0) == pytest.approx(50.0)


class Page(HTMLParser):
    """Collects what the tests ask of a page: row headings, tags, and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.row_headings: list[str] = []
        self.row_cells = 0
        self.text = ""
        self._in_row_heading = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.row_cells += tag == "td"
        self._in_row_heading = tag == "th" and ("scope", "row") in attrs

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_row_heading:
            self.row_headings.append(data)
            self._in_row_heading = False


def test_page_holds_the_answer_each_row_once_and_the_provenance() -> None:
    scores = parse_scores(make_document())
    page = Page(render_page(scores))
    assert page.row_headings == [row.model for row in scores.rows]
    assert page.row_cells == len(scores.rows) * (len(COLUMNS) - 1)
    assert page.text.index(headline(scores)) < page.text.index(control_sentence(scores))
    assert page.text.index(control_sentence(scores)) < page.text.index("Every model")
    for column in COLUMNS:
        assert column.meaning in page.text
    assert "3.12.3" in page.text
    assert "seed 7" in page.text


def test_page_refers_to_nothing_outside_itself() -> None:
    html = render_page(parse_scores(make_document()))
    assert not re.search(r"https?://", html.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    assert not {"script", "link", "img", "iframe", "object"} & set(Page(html).tags)
    assert "url(" not in html
    assert "@import" not in html
    assert 'src="' not in html
    assert "default-src 'none'" in html
    identifiers = re.findall(r'\bid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))


def test_page_defines_every_colour_for_light_and_dark() -> None:
    html = render_page(parse_scores(make_document()))
    light, dark = html.split("prefers-color-scheme: dark", 1)
    for name in set(re.findall(r"var\((--[a-z]+)\)", html)):
        assert f"{name}: #" in light
        assert f"{name}: #" in dark
    assert "#" not in "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))  # figures name no colour


def test_hostile_text_is_escaped_everywhere() -> None:
    hostile = '<script>alert("x")</script>&'
    document = make_document() | {"dataset": hostile, "environment": {hostile: hostile}}
    document["rows"][6]["model"] = hostile
    page = Page(render_page(parse_scores(document)))
    assert "script" not in page.tags
    assert page.row_headings[6] == hostile


def test_page_renders_with_a_single_row() -> None:
    document = make_document()
    document["rows"] = document["rows"][:1]
    assert Page(render_page(parse_scores(document))).row_headings == ["DE-1"]


def test_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = parse_scores(make_document())
    assert write_page(scores, tmp_path) == tmp_path / "report.html"
    path = tmp_path / "new" / "page.html"
    assert write_page(scores, path) == path
    before = path.read_text(encoding="utf-8")
    assert before == render_page(scores)
    usual = tmp_path / "usual"
    usual.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)

    def full_disk(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="disk full"):
        write_page(changed("+1 DBN", dee=1.0), path)
    assert path.read_text(encoding="utf-8") == before
    assert [entry.name for entry in path.parent.iterdir()] == ["page.html"]


def test_report_works_where_torch_and_numpy_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(json.dumps(make_document()))
    source = Path(figures.__file__).parents[2]
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'matplotlib'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(source)!r})\n"
        "import ensbridge.report as report\n"
        "from ensbridge.scores import read_scores\n"
        f"scores = read_scores({str(tmp_path)!r})\n"
        f"report.write_page(scores, {str(tmp_path)!r})\n"
        "print(scores.table())\n"
    )
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "+1 DBN (KL)" in done.stdout
    assert (tmp_path / "report.html").is_file()
