"""The report says what the scores say: no more, nothing else, and without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from _report import bare, changed, make_document, one_run, report_of_three_runs, three_runs
from ensbridge import report
from ensbridge.evaluation.scores import COLUMNS, Summary, cells, parse_scores, summarise
from ensbridge.metrics import format_dee
from ensbridge.report import (
    control_sentence,
    headline,
    paper_rows,
    paper_table,
    rich_table,
    shipped,
    write_report,
)
from ensbridge.report.tables import TextTable, comparison, paper_capacity

# ------------------------------------------------------------------------------ the terminal


def printed(table: object, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_table_of_one_run_shows_whole_numbers_in_80_columns_and_no_markup() -> None:
    summary = changed("control", model="[red]control")
    shown = printed(rich_table(summary), 80)
    assert "…" not in shown
    assert "[red]control" in shown
    assert all(cell in shown for group in summary.rows for cell in cells(group))


def test_table_of_several_runs_puts_the_spread_beside_or_below() -> None:
    summary = three_runs()
    wide = printed(rich_table(summary), 140)
    assert all(cell in wide for group in summary.rows for cell in cells(group))
    narrow = printed(rich_table(summary), 80)
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    parts = [part for group in summary.rows for cell in cells(group)[1:] for part in cell.split(" ± ")]
    assert all(part in narrow for part in parts)
    assert all(group.model in narrow for group in summary.rows)


def test_a_long_name_of_several_runs_costs_no_column() -> None:
    runs = three_runs().runs
    named = [[replace(row, model=f"{row.model} (KL, DE-5)") for row in run.rows] for run in runs]
    summary = Summary(tuple(replace(run, rows=tuple(rows)) for run, rows in zip(runs, named, strict=True)))
    narrow = printed(rich_table(summary), 80)
    assert max(map(len, narrow.splitlines())) <= 80
    parts = [part for group in summary.rows for cell in cells(group)[1:] for part in cell.split(" ± ")]
    assert all(part in narrow for part in parts)


def test_runs_that_share_their_members_claim_no_spread_of_them(tmp_path: Path) -> None:
    first, *others = (bare(run) for run in three_runs().runs)
    ensembles = [row for row in first.rows if row.method == "DE"]
    shared = Summary(
        (first, *(replace(run, rows=(*ensembles, *run.rows[len(ensembles) :])) for run in others))
    )
    said = "share their members"
    assert shared.shares_members
    assert not three_runs().shares_members
    assert said in write_report(shared, tmp_path).read_text(encoding="utf-8")
    assert said not in (report_of_three_runs() / "report.html").read_text(encoding="utf-8")
    for group in shared.rows:
        assert any("±" in cell for cell in cells(group)) == (group.kind != "DE")


# ------------------------------------------------------------------------------ the paper


def test_the_papers_numbers_are_the_papers() -> None:
    cifar = {row.model: row for row in paper_rows("cifar10")}
    assert (cifar["+1 DBN"].acc, cifar["+1 DBN"].nll, cifar["+1 DBN"].dee) == (92.98, 0.2403, 2.363)
    assert (cifar["ED"].dee, cifar["DE-5"].brier, cifar["+4 BN small"].macs_ratio) == ("<1", 0.0951, 1.245)
    assert (cifar["ED (DE-5)"].nll, cifar["EnD² (DE-5)"].acc, cifar["EnD² (DE-5)"].dee) == (
        0.3577,
        92.11,
        1.077,
    )
    hundred = {row.model: row.nll for row in paper_rows("cifar100")}
    assert (hundred["+2 DBN (DE-5)"], hundred["ED (DE-5)"], hundred["EnD² (DE-5)"]) == (
        0.8998,
        1.2428,
        1.3597,
    )
    assert {row.model: row.dee for row in paper_rows("tiny-imagenet")}["+2 BN medium"] == 4.102
    assert {row.model: row.cnll for row in paper_rows("imagenet64")}["+1 DBN"] == 1.2140
    assert {row.model: row.acc for row in paper_rows("cifar10-c")}["DE-3"] == 89.47
    assert paper_capacity("cifar10")[-1] == {"members": 8, "acc": 92.94, "dee": 2.468}
    assert paper_rows("digits") == ()


def names_of(table: TextTable) -> list[str]:
    """The models of the rows that are ours: each is followed by the paper's."""
    return [row.model for row in table.rows[::2]]


def test_the_papers_rows_stand_beside_ours_by_name_and_without_its_ece() -> None:
    table = comparison(three_runs("cifar10"))
    assert table is not None
    assert table.columns == ("MACs ×", "params ×", "ACC", "NLL", "Brier", "DEE")
    ours, theirs = (dict(zip(names_of(table), table.rows[start::2], strict=True)) for start in (0, 1))
    assert ours["+1 DBN"].cells == (
        "1.16",
        "1.16",
        "91.90 ± 0.08",
        "0.2370 ± 0.0040",
        "0.1500",
        "2.43 ± 0.04",
    )
    assert theirs["+1 DBN"].cells == (
        *("1.17", "1.21", "92.98 ± 0.16", "0.2403 ± 0.0027", "0.1084 ± 0.0013", "2.36"),
    )
    assert (ours["+4 BN small"].cells[2], theirs["+4 BN small"].cells[2]) == ("–", "91.87 ± 0.05")
    assert ours["DE-3"].cells[5] == theirs["DE-3"].cells[5] == "3.00"
    assert "control" not in ours
    assert not any(name.startswith("ece") for name in vars(paper_rows("cifar10")[0]))
    once = comparison(one_run("cifar10"))
    assert once is not None
    row = names_of(once).index("+1 DBN")
    assert [each.cells[2] for each in once.rows[2 * row : 2 * row + 2]] == ["91.90", "92.98 ± 0.16"]
    shown = printed(paper_table(three_runs("cifar10")), 80)
    assert "…" not in shown
    ours, theirs = (
        line.split()
        for line in shown.splitlines()
        if "91.90±0.08" in line or "92.98" in line
        if "DE-2" not in line
    )
    assert ours[2:] == ["1.16", "1.16", "91.90±0.08", "0.2370±0.0040", "0.1500", "2.43±0.04"]
    assert theirs == ["paper", "1.17", "1.21", "92.98±0.16", "0.2403±0.0027", "0.1084±0.0013", "2.36"]
    assert "per-batch" in shown


def test_other_data_and_other_models_have_no_paper() -> None:
    assert paper_table(one_run()) is None
    others = tuple(replace(row, method="other") for row in one_run("cifar10").first.rows)
    assert comparison(Summary((replace(one_run("cifar10").first, rows=others),))) is None


# ------------------------------------------------------------------------------ the page


class Page(HTMLParser):
    """Collects what the tests ask of a page: row headings, tags, and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.headings: list[str] = []
        self.row_headings: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "th" and ("scope", "row") in attrs:
            self._inside = "row"
            self.row_headings.append("")
        elif tag != "a":  # links stand within what they are in
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside if tag == "a" else ""

    def handle_data(self, data: str) -> None:
        data = data.replace("\u00a0", " ")
        self.text += data
        if self._inside == "row":
            self.row_headings[-1] += data
        elif self._inside == "h2":
            self.headings.append(data)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three pages, each written once: three seeds, the paper's data set, and a plain evaluation."""
    folder = tmp_path_factory.mktemp("pages")
    plain = replace(bare(one_run().first), dataset="mine")
    paths = {
        "three": report_of_three_runs() / "report.html",
        "cifar": write_report(Summary((bare(one_run("cifar10").first),)), folder / "cifar"),
        "bare": write_report(Summary((replace(plain, rows=plain.rows[:2]),)), folder / "bare"),
    }
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


def test_page_answers_first_then_shows_each_row_once_and_the_provenance(pages: dict[str, str]) -> None:
    summary = three_runs()
    page = Page(pages["three"])
    assert page.row_headings == [group.model for group in summary.rows]
    order = [
        headline(summary),
        control_sentence(summary),
        "Every model",
        "Cost against",
        "Glossary",
        "come from",
    ]
    places = [page.text.index(words) for words in order]
    assert places == sorted(places)
    assert all(column.explain(summary) in page.text for column in COLUMNS[1:])
    assert "from DE-1 to DE-3" in page.text
    assert "seeds 6, 7, 8" in page.text
    for words in (
        "3.12.3",
        "preset",
        "Ensemble distillation",
        "Dirichlet",
        "low-loss curve",
    ):
        assert words in page.text


def test_page_shows_the_figures_in_their_order(pages: dict[str, str]) -> None:
    names = re.findall(r'<h2 id="figure-(\w+)"', pages["three"])
    assert names == ["front", "tradeoff", "capacity", "transition", "reliability", "curves"]
    assert pages["three"].count("<svg") == 12  # each for two widths


def test_page_of_one_run_says_so(pages: dict[str, str]) -> None:
    text = Page(pages["cifar"]).text
    assert "One seed" in text
    assert "The gap’s ± is one standard error" in text
    assert "The gap’s ±" not in Page(pages["bare"]).text  # it has none
    assert "One seed" not in Page(pages["three"]).text


def test_page_shows_the_papers_numbers_where_it_has_them(pages: dict[str, str]) -> None:
    assert "Beside the paper" in Page(pages["cifar"]).headings
    page = Page(pages["cifar"])
    assert "92.98 ± 0.16" in page.text
    assert "per-batch" in page.text
    place = page.row_headings.index("paper")
    assert page.row_headings[place - 1] == "DE-1"
    assert "Beside the paper" not in Page(pages["three"]).headings


def test_missing_parts_are_left_out_with_a_sentence(pages: dict[str, str]) -> None:
    page = Page(pages["bare"])
    assert pages["bare"].count("<svg") == 2
    missing = ("no examples", "no reliability bins", "no training curves")
    for named in ("--stage tradeoff", "--stage capacity", *missing):
        assert named in page.text


@pytest.mark.parametrize("name", ["three", "cifar", "bare"])
def test_page_refers_to_nothing_outside_itself(pages: dict[str, str], name: str) -> None:
    html = pages[name]
    assert not re.search(r"https?://", html.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    assert not {"script", "link", "img", "iframe", "object"} & set(Page(html).tags)
    assert "@import" not in html
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    assert all(
        link.startswith(("#", "data:image/png;base64,")) for link in re.findall(r'href="([^"]*)"', html)
    )
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html
    identifiers = re.findall(r'\bid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))
    inside = set(re.findall(r'(?:href="#|url\(#)([^")]+)', html))
    assert inside <= set(identifiers)
    assert len(html.encode()) < 1_500_000


def test_page_defines_every_colour_for_light_and_dark(pages: dict[str, str]) -> None:
    html = pages["three"]
    light, dark = html.split("prefers-color-scheme: dark", 1)
    for name in set(re.findall(r"var\((--[a-z]+)\)", html)):
        assert f"{name}: #" in light
        assert f"{name}: #" in dark
    figures = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert not re.search(r"(?:fill|stroke|color): ?(?:#|rgb|black|white)", figures)  # figures name no colour


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    hostile = '<script>alert("x")</script>&$x_1$ id="front-wide" ± 1'
    document = make_document() | {"dataset": hostile, "environment": {hostile: hostile}}
    document["class_names"][0] = document["curves"][0]["name"] = document["rows"][10]["model"] = hostile
    document["settings"] = {"recipe": hostile}
    document |= {"tradeoff": [], "capacity": [], "curves": document["curves"][:1]}
    document |= {"rows": document["rows"][9:11], "transitions": document["transitions"][:1]}
    html = write_report(summarise([parse_scores(document)]), tmp_path).read_text(encoding="utf-8")
    page = Page(html)
    assert "script" not in page.tags
    assert page.row_headings[1] == hostile
    identifiers = re.findall(r'<[^>]*\bid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))


# ------------------------------------------------------------------------------ shipped runs


def test_the_digits_runs_ship_with_the_package() -> None:
    kept = shipped("digits")
    assert kept is not None
    assert kept.seeds == (0, 1, 2)
    assert {group.kind for group in kept.rows} == {"DE"}
    assert [(group.kind, group.first.members) for group in kept.tradeoff] == [
        (method, members) for method in ("DBN", "BN") for members in (2, 3, 4, 5)
    ]
    assert [(group.first.members, group.kind) for group in kept.capacity] == [
        (teachers, method) for teachers in (2, 3, 4, 5) for method in ("DBN", "BN", "ED", "EnD2")
    ]
    for run in kept.runs:  # each DEE follows from the NLLs of its own run's ensembles
        nll_by_size = [row.nll for row in run.rows]
        for row in (*run.tradeoff, *run.capacity):
            assert row.dee == format_dee(row.nll, nll_by_size)


def test_names_that_lead_elsewhere_ship_nothing() -> None:
    for name in ("../digits", "no-such-data", "a/b", ""):
        assert shipped(name) is None


def test_shipped_runs_stand_in_and_are_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Summary(tuple(replace(run, capacity=()) for run in three_runs().runs))
    monkeypatch.setattr("ensbridge.report.writing.shipped", {"digits": kept}.get)
    scores = bare(one_run().first)
    path = write_report(Summary((replace(scores, rows=scores.rows[:1]),)), tmp_path)
    text = Page(path.read_text(encoding="utf-8")).text
    assert re.search(r"digits runs that ship .*\(seeds 6, 7, 8\)", text)
    assert "--stage capacity" in text  # the shipped runs lack it too
    assert "tradeoff" in json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------ without torch


def test_report_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(bare(one_run().first).to_json())
    source = Path(report.__file__).parents[2]
    code = (
        "import sys\n"
        "for name in ('torch', 'scipy', 'sklearn'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(source)!r})\n"
        "import ensbridge.report as report\n"
        "print([name for name in ('numpy', 'matplotlib', 'jinja2') if name in sys.modules])\n"
        "from ensbridge.evaluation.scores import read_scores, summarise\n"
        f"summary = summarise([read_scores({str(tmp_path)!r})])\n"
        f"report.write_report(summary, {str(tmp_path)!r})\n"
        "print(summary.table())\n"
    )
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[]\n")
    assert "+1 DBN (KL)" in done.stdout
    assert (tmp_path / "report.html").is_file()
