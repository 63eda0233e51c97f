"""The page in a reader's hands: what comes first, what fits, and where abbreviations lead."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Annotation

from _report import changed, make_document, one_run, report_of_three_runs, three_runs
from ensbridge.evaluation.scores import Summary, parse_scores, summarise
from ensbridge.evaluation.scores.columns import dee_cell
from ensbridge.report import control_sentence, headline, write_report
from ensbridge.report.figures import PLOTS
from ensbridge.report.figures.members import capacity_data, draw_capacity
from ensbridge.report.glossary import glossary, linker
from ensbridge.report.style import LOOKS

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def cifar10() -> Summary:
    """What was measured on CIFAR-10: many rows, three seeds."""
    sys.path.insert(0, str(ROOT / "studies"))
    try:
        from make_summaries import MAIN, read_seed  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(ROOT / "studies"))
    seeds = sorted((ROOT / "results" / "cifar10").glob("seed[0-9]-test.json"))
    return summarise([read_seed(path) for path in seeds], main=MAIN["cifar10"])


# ------------------------------------------------------------------------------ in a browser

# Tells the page around it how wide its first table is, and where the right edges of its headings are.
MEASURE = """<script>
const box = document.querySelector(".scroll"), left = box.getBoundingClientRect().left;
const edges = [...box.querySelectorAll("thead th")].map(th => th.getBoundingClientRect().right - left);
parent.postMessage({shown: box.clientWidth, whole: box.scrollWidth,
  page: document.documentElement.scrollWidth,
  headings: [...box.querySelectorAll("thead th")].map(th => th.textContent), edges}, "*");
</script>"""
FRAME = """<iframe src="page.html" style="width: {width}px; height: 2000px; border: 0"></iframe>
<script>addEventListener("message", e => document.body.textContent = JSON.stringify(e.data));</script>"""


def measured(html: str, width: int, folder: Path) -> dict[str, Any]:
    """The page's first table in a browser's window of so many pixels."""
    assert CHROMIUM is not None
    open_to_scripts = re.sub(r"<meta http-equiv=[^>]*>", "", html)
    (folder / "page.html").write_text(
        open_to_scripts.replace("</body>", MEASURE + "</body>"), encoding="utf-8"
    )
    (folder / "frame.html").write_text(f"<!doctype html><body>{FRAME.format(width=width)}</body>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    options += [f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},2000"]
    done = subprocess.run(
        [CHROMIUM, *options, f"file://{folder / 'frame.html'}"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_the_table_fits_a_desktop_and_a_phone_shows_what_the_headline_speaks_of(
    cifar10: Summary, tmp_path: Path
) -> None:
    html = write_report(cifar10, tmp_path / "report").read_text(encoding="utf-8")
    desktop = measured(html, 1280, tmp_path)
    assert "gap" in desktop["headings"]
    assert desktop["whole"] == desktop["shown"]
    phone = measured(html, 390, tmp_path)
    assert phone["page"] <= 390
    seen = [h for h, edge in zip(phone["headings"], phone["edges"], strict=True) if edge <= phone["shown"]]
    assert {"NLL", "DEE"} <= set(seen)


def headings(html: str) -> list[list[str]]:
    """The headings of each table, without their links."""
    tables = re.findall(r"<thead>(.*?)</thead>", html, re.DOTALL)
    return [[re.sub("<.*?>", "", th) for th in re.findall(r'<th scope="col">(.*?)</th>', t)] for t in tables]


def test_what_the_headline_speaks_of_comes_first_in_every_table(tmp_path: Path) -> None:
    html = write_report(one_run("cifar10"), tmp_path).read_text(encoding="utf-8")
    scores, paper = headings(html)
    assert scores[:4] == ["model", "NLL", "DEE", "MACs ×"]
    assert paper[:4] == ["model", "NLL", "DEE", "MACs ×"]
    # Each number stands under its heading.
    row = re.search(r'<tr class="dbn main">(.*?)</tr>', html, re.DOTALL)
    assert row is not None
    cells = re.findall(r"<td>(.*?)</td>", row[1])
    bridge = next(group.first for group in one_run().rows if group.model == "+1 DBN")
    assert dict(zip(scores[1:], cells, strict=True)) == {
        "NLL": f"{bridge.nll:.3f}",
        "DEE": f"{bridge.dee:.2f}",
        "MACs ×": f"{bridge.macs_ratio:.2f}",
        "ACC": f"{bridge.acc:.2f}",
        "params ×": f"{bridge.params_ratio:.2f}",
        "Brier": f"{bridge.brier:.3f}",
        "ECE": f"{bridge.ece:.3f}",
        "cNLL": f"{bridge.cnll:.3f}",
        "gap": '0.93<span class="sd"> ± 0.05</span>',
    }


# ------------------------------------------------------------------------------ abbreviations


def test_every_abbreviation_leads_to_its_meaning_in_the_page() -> None:
    html = (report_of_three_runs() / "report.html").read_text(encoding="utf-8")
    meanings = set(re.findall(r'<dt id="(term-[^"]+)"', html))
    links = set(re.findall(r'href="#(term-[^"]+)"', html))
    assert links <= meanings
    assert meanings - links <= {"term-t"}  # no temperature is in a name here
    for table in re.findall(r"<thead>(.*?)</thead>", html, re.DOTALL):
        for heading in re.findall(r'<th scope="col">(.*?)</th>', table):
            assert heading == "model" or heading.startswith('<a href="#term-')


def test_links_are_of_whole_terms_and_leave_the_rest_escaped() -> None:
    link = linker(glossary(one_run()))
    found = re.findall(r'#term-(\w+)">(.*?)<', link("cNLL, DE-3 & EnD² in BNs of T = 4; ED’s, END, PRED, T"))
    assert found == [("cnll", "cNLL"), ("de", "DE-3"), ("end2", "EnD²"), ("t", "T"), ("ed", "ED")]
    assert link("<b>&") == "&lt;b&gt;&amp;"


# ------------------------------------------------------------------------------ marks and DEE


def test_a_lower_bounds_arrow_is_open_where_every_mark_is_full() -> None:
    data = capacity_data(one_run())
    assert data is not None
    notes = draw_capacity(data, 800).figure.findobj(Annotation)
    arrows = [note.arrow_patch for note in notes if isinstance(note, Annotation) and note.arrow_patch]
    assert len(arrows) == 1
    assert not arrows[0].get_arrowstyle().fillend  # type: ignore[attr-defined]
    assert LOOKS["ED"].marker == "^"


@pytest.mark.parametrize("dee", [-6.4, 0.4, 0.996])
@pytest.mark.parametrize("model", ["control", "+1 DBN", "ED"])
def test_a_dee_below_one_is_never_a_number_of_members(dee: float, model: str) -> None:
    summary = changed(model, dee=dee, nll=0.3 if model == "+1 DBN" else 1.3, gap=0.2, gap_error=None)
    sentences = headline(summary), control_sentence(summary)
    for text in sentences:
        assert all(float(number) >= 1 for number in re.findall(r"(-?\d+\.\d+) members?\b", text))
    assert sum("worse than one member" in text for text in sentences) == (model != "ED")
    group = next(group for group in summary.rows if group.model == model)
    assert dee_cell(group) == "<1"


def test_the_page_says_so_too(tmp_path: Path) -> None:
    html = write_report(changed("control", dee=-6.4, nll=1.3, gap=-9.0), tmp_path).read_text(encoding="utf-8")
    assert "-6.4" not in html
    assert "worse than one member" in html
    assert "<td>&lt;1</td>" in html


def test_over_seeds_the_mean_decides_and_figures_say_it_too() -> None:
    documents = [make_document(seed) for seed in (6, 7, 8)]
    for document, dee in zip(documents, (-20.0, 1.5, 2.0), strict=True):
        document["capacity"][0]["dee"] = dee
        next(row for row in document["rows"] if row["model"] == "control")["dee"] = dee
    summary = summarise([parse_scores(document) for document in documents], main="+1 DBN")
    control = next(group for group in summary.rows if group.model == "control")
    assert control.worse_than_one
    assert "worse than one member" in control_sentence(summary)
    plot = next(plot for plot in PLOTS if plot.name == "capacity")
    data = plot.data(summary)
    assert data is not None
    described = plot.describe(data)
    assert not re.search(r"DEE -|DEE 0\.", described)
    assert not next(group for group in three_runs().rows if group.model == "control").worse_than_one
