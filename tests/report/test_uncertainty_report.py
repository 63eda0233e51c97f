"""The page's section on uncertainty: there where it was measured, with the numbers that were."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from _report import bare, make_document
from ensbridge.evaluation.scores import (
    Detection,
    ImageScore,
    PredictionSets,
    Scores,
    Summary,
    Uncertainty,
    parse_scores,
    summarise,
)
from ensbridge.report import write_report
from ensbridge.report.tables import SCORE_LABELS, uncertainty_tables

EXTRA: dict[str, ImageScore] = {"DE-3": "mutual_information", "+1 DBN": "disagreement"}


def measured(seed: int, sets: bool = True) -> Scores:
    """A run in which three models have their uncertainty measured on two sets of other images."""
    scores = bare(parse_scores(make_document(seed)))
    rows = []
    for number, row in enumerate(scores.rows):
        if row.model in ("DE-1", *EXTRA):
            names: list[ImageScore] = ["msp", "entropy", *([EXTRA[row.model]] if row.model in EXTRA else [])]
            ood = [
                Detection(
                    images,
                    name,
                    0.8 + 0.01 * place + 0.001 * number + 0.002 * seed,
                    0.004,
                    0.3 - 0.01 * place,
                )
                for images in ("noise", "<b>near")
                for place, name in enumerate(names)
            ]
            chosen = (PredictionSets("lac", 0.05, 0.951, 1.07), PredictionSets("aps", 0.05, 0.948, 1.4))
            found = Uncertainty(0.008 + 0.001 * seed, 0.007, chosen if sets else (), tuple(ood))
            row = replace(row, uncertainty=found)
        rows.append(row)
    return replace(scores, rows=tuple(rows))


def section(summary: Summary, folder: Path) -> str:
    html = write_report(summary, folder).read_text(encoding="utf-8")
    identifiers = re.findall(r'\bid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r'href="#([^"]+)"', html)) <= set(identifiers)
    return html.split('<h2 id="uncertainty">', 1)[1].split("</section>")[0] if "uncertainty" in html else ""


def cells(row: str) -> list[str]:
    return [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", row)]


def test_the_page_shows_what_was_measured(tmp_path: Path) -> None:
    html = section(summarise([measured(1)]), tmp_path)
    rows = re.findall(r"<tr>\n<th scope=\"row\">(.*?)</th>(.*?)</tr>", html, re.DOTALL)
    by_table = [
        [(re.sub(r"<[^>]+>", "", name), cells(row)) for name, row in rows[i : i + 3]] for i in (0, 3, 6)
    ]
    assert len(rows) == 9
    assert by_table[0][0] == ("DE-1", ["9.00", "7.00", "95.10", "1.07", "94.80", "1.40"])
    ensemble, bridge = by_table[1][1:]
    assert ensemble == (
        "DE-3",
        ["80.40 ± 0.40", "81.40 ± 0.40", "82.40 ± 0.40", "–", "30.00", "29.00", "28.00", "–"],
    )
    assert bridge[0] == "+1 DBN"
    assert [text == "–" for text in bridge[1]] == [False, False, True, False] * 2
    assert "&lt;b&gt;near" in html
    assert "<b>near" not in html
    assert "one standard error over images" in html
    for heading in re.findall(r'<th scope="col">(.*?)</th>', html):
        assert heading == "model" or heading.startswith('<a href="#term-'), heading


def test_several_runs_are_mean_and_spread(tmp_path: Path) -> None:
    runs = [measured(seed) for seed in (1, 2, 3)]
    html = section(summarise(runs), tmp_path)
    own = [run.rows[0].uncertainty for run in runs]
    aurcs = [1000 * each.aurc for each in own if each is not None]
    aurocs = [100 * each.ood[0].auroc for each in own if each is not None]
    for values in (aurcs, aurocs):
        assert f'{fmean(values):.2f}<span class="sd"> ± {stdev(values):.2f}</span>' in html
    assert "standard deviation over seeds" in html


def test_what_was_not_measured_is_not_shown(tmp_path: Path) -> None:
    assert section(summarise([bare(parse_scores(make_document()))]), tmp_path) == ""
    first, *_ = uncertainty_tables(summarise([measured(1, sets=False)]))
    assert [block for block, _ in first.blocks] == ["selective risk, ×1000"]
    assert [row.model for row in first.rows] == ["DE-1", "DE-3", "+1 DBN"]
    assert len(SCORE_LABELS) == 4
