"""Corruptions in `scores.json` and on the page: read strictly, averaged honestly, shown with care."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from _report import bare, make_document
from ensbridge.cli.base import app
from ensbridge.data.corruptions import CORRUPTIONS
from ensbridge.evaluation.scores import (
    CorruptedRow,
    CorruptedSet,
    Scores,
    Summary,
    parse_scores,
    read_scores,
    summarise,
)
from ensbridge.report import corrupted_tables, write_report
from ensbridge.report.figures import severity
from ensbridge.report.tables import corruption_notes, corruption_tables

# ------------------------------------------------------------------------------ scores.json


def shifted(
    seed: int, made_by: str | None, dataset: str = "cifar10", severities: int = 5, more: Sequence[str] = ()
) -> Scores:
    """Made-up scores whose numbers under each corruption are known."""
    scores = parse_scores(make_document(seed, dataset))
    rows = [
        CorruptedRow(
            row.model,
            severity,
            corruption,
            f"{severity}-{corruption}",
            acc=row.acc - 3 * severity - 0.1 * number + 0.1 * seed,
            nll=row.nll + 0.1 * severity + 0.01 * number + 0.001 * seed,
            brier=0.2,
            ece=0.1,
            cnll=row.nll + 0.05 * severity,
        )
        for row in scores.rows
        if row.model in ("DE-1", "DE-2", "DE-3", "+1 DBN", "control", *more)
        for severity in range(1, severities + 1)
        for number, corruption in enumerate(CORRUPTIONS)
    ]
    return replace(scores, corrupted=tuple(rows), corrupted_set=CorruptedSet(made_by, 0))


OURS = "ensbridge 0.1.0, numpy 2.1.0"


def test_scores_with_corruptions_survive_the_round_trip_and_old_ones_are_read(tmp_path: Path) -> None:
    scores = shifted(6, OURS)
    (tmp_path / "scores.json").write_text(scores.to_json())
    assert read_scores(tmp_path) == scores
    old = json.loads(scores.to_json())
    del old["corrupted"], old["corrupted_set"]
    (tmp_path / "scores.json").write_text(json.dumps(old))
    read = read_scores(tmp_path)
    assert (read.corrupted, read.corrupted_set, read.rows) == ((), None, scores.rows)


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["corrupted"][3].update(values)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set(severity=6), r"^here: corrupted\[3\]\.severity is 6,.* 1 to 5"),
        (_set(acc="90"), r"corrupted\[3\]\.acc is \"90\""),
        (_set(model="a\x1b[1m"), r"corrupted\[3\]\.model is \"a\\u001b\[1m\""),
        (_set(nll=float("nan")), r"corrupted\[3\]\.nll is NaN"),
        (lambda d: d["corrupted"][3].pop("images"), r"corrupted\[3\] has no 'images'"),
        (
            lambda d: d["corrupted"].append(d["corrupted"][0]),
            r"'DE-1' twice.*'gaussian_noise'.*severity 1",
        ),
        (lambda d: d["corrupted"].pop(), r"'DE-1' and 'control'.*images"),
        (lambda d: d.update(corrupted={}), r"^here: corrupted is \{\}"),
        (lambda d: d["corrupted_set"].update(made_by=3), r"corrupted_set\.made_by is 3"),
    ],
)
def test_damaged_rows_are_named(change: Callable[[dict[str, Any]], Any], named: str) -> None:
    document = json.loads(shifted(6, OURS).to_json())
    change(document)
    with pytest.raises(ValueError, match=named):
        parse_scores(document, where="here")


def test_means_over_19_over_18_and_over_severities() -> None:
    runs = [shifted(seed, OURS) for seed in (6, 7, 8)]
    group = {each.model: each for each in summarise(runs).corrupted}["+1 DBN"]
    rows = [[row for row in run.corrupted if row.model == "+1 DBN"] for run in runs]
    assert (group.severities, group.corruptions) == ((1, 2, 3, 4, 5), CORRUPTIONS)
    for name in ("acc", "nll", "brier", "ece", "cnll"):
        all_five = [fmean(getattr(row, name) for row in run) for run in rows]
        mild = [
            [getattr(row, name) for row in run if row.severity == 1 and row.corruption != "frost"]
            for run in rows
        ]
        assert group.mean(name) == pytest.approx(fmean(all_five))
        assert group.spread(name) == pytest.approx(stdev(all_five))
        assert {len(values) for values in mild} == {18}
        assert group.at(1).without("frost").mean(name) == pytest.approx(fmean(map(fmean, mild)))
    one = summarise(runs[:1]).corrupted[0]
    assert one.spread("acc") is None


def test_runs_on_different_corrupted_images_are_not_averaged() -> None:
    with pytest.raises(ValueError, match=r"a and b .*different corrupted images"):
        summarise([shifted(6, OURS), shifted(7, OURS, severities=1)], ["a", "b"])
    plain = replace(shifted(8, OURS), corrupted=(), corrupted_set=None)
    group = summarise([plain, shifted(7, OURS)]).corrupted[0]
    assert (group.runs, len(group.rows)) == (2, 1)


# ------------------------------------------------------------------------------ the report


def cells(summary: Summary, number: int = 0) -> dict[str, tuple[str, ...]]:
    """Our cells by model, and the paper's by "paper: model"."""
    by_name, last = {}, ""
    for name, texts, css in corruption_tables(summary)[number].rows:
        last = last if css else name
        by_name[f"paper: {last}" if css else name] = texts
    return by_name


def test_tables_hold_our_means_and_the_papers_numbers() -> None:
    runs = [shifted(seed, OURS) for seed in (6, 7, 8)]
    summary = summarise(runs)
    mild, all_five = corruption_tables(summary)
    assert (mild.heading, all_five.heading) == ("Severity 1", "Mean over severities 1 to 5")
    assert [title for title, _ in mild.blocks] == ["mean of 19", "mean of 18 without frost"]
    assert mild.columns == ("ACC", "NLL", "cNLL") * 2
    shown = cells(summary)
    accs = [fmean(r.acc for r in run.corrupted if (r.model, r.severity) == ("DE-1", 1)) for run in runs]
    assert shown["DE-1"][0] == f"{fmean(accs):.2f} ± {stdev(accs):.2f}"
    place = CORRUPTIONS.index("frost")
    accs = [
        (19 * acc - (run.rows[0].acc - 3 - 0.1 * place + 0.1 * run.seed)) / 18
        for acc, run in zip(accs, runs, strict=True)
    ]
    assert shown["DE-1"][3] == f"{fmean(accs):.2f} ± {stdev(accs):.2f}"
    theirs = {
        "DE-1": ("86.95", "0.5158", "0.4477"),
        "+2 BN medium": ("87.80", "0.3740", "0.3749"),
        "+1 DBN": ("88.91", "0.3759", "0.3682"),
        "DE-2": ("88.85", "0.3860", "0.3693"),
        "DE-3": ("89.47", "0.3459", "0.3410"),
    }
    assert {name: texts[:3] for name, texts in shown.items() if name.startswith("paper")} == {
        f"paper: {name}": texts for name, texts in theirs.items()
    }
    assert all(texts[3:] == ("–",) * 3 for name, texts in shown.items() if name.startswith("paper"))
    assert shown["+2 BN medium"] == ("–",) * 6  # not measured here
    assert not all_five.has_paper
    assert not corruption_tables(summarise([shifted(6, OURS, "digits")]))[0].has_paper
    assert corruption_tables(summarise([shifted(6, OURS, severities=1)]))[1:] == ()
    assert corruption_tables(summarise([parse_scores(make_document())])) == ()


def test_the_note_says_whose_images_they_are() -> None:
    ours = " ".join(corruption_notes(summarise([shifted(6, OURS)])))
    assert "regeneration" in ours
    assert "not bit-comparable" in ours
    assert "frost from generated" in ours
    published = " ".join(corruption_notes(summarise([shifted(6, None)])))
    assert "not made by ensbridge" in published
    assert "regeneration" not in published
    assert "bit-comparable" not in published
    unknown = " ".join(corruption_notes(summarise([replace(shifted(6, None), corrupted_set=None)])))
    assert "not known" in unknown


def test_the_page_has_the_tables_the_note_and_the_figure(tmp_path: Path) -> None:
    summary = summarise([bare(shifted(6, OURS))])
    html = write_report(summary, tmp_path).read_text(encoding="utf-8")
    section = html.split('<h2 id="corrupted">', 1)[1].split("</section>")[0]
    for words in ("Under corruptions", "Severity 1", "Mean over severities 1 to 5", "without frost"):
        assert words in section
    for values in ("0.5158", "0.4477", "87.80", "0.3682", "88.85", "0.3410"):
        assert f"<td>{values}</td>" in section
    assert "not bit-comparable" in section
    assert section.count("<svg") == 2
    identifiers = re.findall(r'\bid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))
    figure = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["severity"]
    assert [each["model"] for each in figure["series"]] == ["DE-1", "DE-2", "DE-3", "+1 DBN"]
    group = {each.model: each for each in summary.corrupted}["+1 DBN"]
    assert [point["nll"] for point in figure["series"][3]["points"]] == [
        group.at(level).mean("nll") for level in (1, 2, 3, 4, 5)
    ]
    assert (tmp_path / "figures" / "severity.png").is_file()
    two = "+2 DBN (DE-5)"
    chosen = severity.data(summarise([bare(shifted(6, OURS, more=[two]))], main=two))
    assert chosen is not None
    assert chosen["series"][3]["model"] == two
    plain = replace(summary.first, corrupted=(), corrupted_set=None, rows=summary.first.rows[:2])
    html = write_report(Summary((plain,)), tmp_path).read_text(encoding="utf-8")
    assert "orruptions" not in html
    assert not (tmp_path / "figures" / "severity.png").exists()


def test_the_terminal_shows_whole_numbers_in_80_columns() -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        for table in corrupted_tables(summarise([shifted(seed, OURS) for seed in (6, 7)])):
            console.print(table)
    shown = capture.get()
    assert "…" not in shown
    assert all(value in shown for value in ("0.5158", "0.3410", "not bit-comparable"))
    assert corrupted_tables(summarise([parse_scores(make_document())])) == []


def test_the_command_hands_the_folder_on_and_shows_the_tables(tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def fake(run: Path, **options: Any) -> tuple[Scores, list[str]]:
        asked.update(options)
        return shifted(6, OURS), []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ensbridge.experiments.check_runs", lambda runs: asked.update(checked=runs))
        patch.setattr("ensbridge.experiments.evaluate_run", fake)
        done = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--corrupted", "CIFAR-10-C"])
    assert done.exit_code == 0, done.output
    assert (asked["checked"], asked["corrupted"]) == ([tmp_path], Path("CIFAR-10-C"))
    assert "Under corruptions, severity 1" in done.output
    assert "0.5158" in done.output
