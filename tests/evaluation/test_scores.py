"""`scores.json` is read strictly, averaged honestly and written as text in one place."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from _report import make_document, make_row, one_run, three_runs
from ensbridge.evaluation.scores import COLUMNS, Kind, Summary, cells, parse_scores, read_scores, summarise

# ------------------------------------------------------------------------------ reading


def test_scores_survive_the_round_trip_from_file_and_folder(tmp_path: Path) -> None:
    document = make_document()
    (tmp_path / "scores.json").write_text(json.dumps(document))
    from_file = read_scores(tmp_path / "scores.json")
    assert json.loads(json.dumps(asdict(from_file))) == document
    assert json.loads(from_file.to_json()) == document
    assert read_scores(tmp_path) == from_file


def test_what_a_plain_evaluation_lacks_may_be_missing() -> None:
    document = make_document()
    for key in ("settings", "target", "transitions", "curves", "tradeoff", "capacity"):
        del document[key]
    for row in document["rows"]:
        del row["reliability"]
    scores = parse_scores(document)
    assert (scores.settings, scores.target, scores.transitions) == (None, None, ())
    assert scores.rows[0].reliability is None


def test_missing_file_and_empty_folder_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.json does not exist"):
        read_scores(tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"holds no scores\.json"):
        read_scores(tmp_path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{oops", "not JSON .*line 1"),
        (b"[" * 100_000, "not JSON .*deep"),
        (b"\xff\xfe", "not JSON .*byte 0.*UTF-8"),
        (b"[1" + b"0" * 5000 + b"]", "not JSON .*digits"),
        (b'{"seed": 1, "seed": 2}', 'not JSON .*"seed" twice'),
        (b"root:x:0:0:root:/root:/bin/bash", "not JSON"),
        (b"[1]", r"is \[1\], expected an object"),
    ],
)
def test_unreadable_content_is_explained(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "scores.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"scores\.json .*{named}.*; give a scores\.json"):
        read_scores(tmp_path)


_OPTIONAL = ("settings", "target", "transitions", "curves", "tradeoff", "capacity", "reliability")
_OPTIONAL += ("corrupted", "corrupted_set", "loss", "source_temperature", "control", "width", "seed")
_OPTIONAL += ("nll_gain_over_control", "nll_gain_over_control_se", "uncertainty")
_OPTIONAL += ("source", "tau", "headline")
_KEYS = ["seed", *(key for key in make_document() if key not in _OPTIONAL)]
_KEYS += [f"row.{key}" for key in make_document()["rows"][0] if key not in _OPTIONAL]


@pytest.mark.parametrize("key", _KEYS)
def test_each_missing_key_is_named(key: str) -> None:
    document = make_document()
    name = key.removeprefix("row.")
    where = document["rows"][2] if key.startswith("row.") else document
    del where[name]
    place = r"here: rows\[2\]" if key.startswith("row.") else "here"
    with pytest.raises(ValueError, match=rf"^{place} has no '{name}'"):
        parse_scores(document, where="here")


WRONG: dict[str, list[object]] = {
    "model": [3, "", "a\x1b[31mb"],
    "method": ["bridge"],
    "members": [1.5, 0, 10**400],
    "macs": [2**63, -1, "12"],
    "bridges": [True],
    "steps": [-1],
    "macs_ratio": [0.0, 1e-4],
    "params_ratio": [-1.0, 10**400],
    "acc": ["90", 100.5, -0.5],
    "nll": [float("nan"), 1e300],
    "ece": [-0.1, False],
    "brier": [2e6, None],
    "cnll": [float("inf")],
    "temperature": [0],
    "dee": ["5", None, ">" + "9" * 400, -1e9],
    "gap": ["0.5", 1e9, -2e6],
    "gap_error": [-0.1, []],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in WRONG for value in WRONG[key]])
def test_wrong_values_in_a_row_are_named(key: str, value: object) -> None:
    document = make_document()
    document["rows"][1][key] = value
    shown = re.escape(json.dumps(value)[:50])
    with pytest.raises(ValueError, match=rf"^here: rows\[1\](: |\.){key} is {shown}.*, expected .+;"):
        parse_scores(document, where="here")


def test_a_value_too_long_to_show_is_not_shown() -> None:
    document = make_document()
    document["rows"][1]["macs"] = [10**5000]
    with pytest.raises(ValueError, match=r"macs is a value too long") as caught:
        parse_scores(document)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("key", "value"),
    [("dataset", 1), ("seed", "0"), ("class_names", 10), ("environment", []), ("rows", []), ("rows", {})],
)
def test_wrong_values_at_the_top_are_named(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^here: {key} is {re.escape(json.dumps(value))}, expected "):
        parse_scores(make_document() | {key: value}, where="here")


def test_a_full_bin_must_say_its_confidence_and_accuracy() -> None:
    document = make_document()
    document["rows"][0]["reliability"]["before"][2]["accuracy"] = None
    with pytest.raises(ValueError, match=r"before\[2\]: accuracy is null"):
        parse_scores(document)


def test_keys_of_a_strangers_file_cannot_command_the_terminal() -> None:
    with pytest.raises(ValueError, match="has no 'dataset'") as caught:
        parse_scores({"a\x1b[31m": 1})
    assert str(caught.value).isprintable()


def test_a_model_twice_is_refused() -> None:
    document = make_document()
    document["rows"].append(document["rows"][3])
    with pytest.raises(ValueError, match=r"^here: rows .*'DE-4' twice.*4 members"):
        parse_scores(document, where="here")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"label": 10}, r"transitions\[1\] .*10 classes and 3 times"),
        ({"source": [0.5, 0.5]}, r"transitions\[1\] .*10 classes"),
        ({"times": [1.0, 0.0]}, r"transitions\[1\] .*10 classes and 2 times"),
        ({"ensemble": [1.5] * 10}, r"transitions\[1\]\.ensemble\[0\] is 1\.5"),
        ({"image": 3}, r"transitions\[1\]\.image is 3"),
    ],
)
def test_transitions_must_fit_the_classes(change: dict[str, Any], named: str) -> None:
    document = make_document()
    document["transitions"][1] |= change
    with pytest.raises(ValueError, match=named):
        parse_scores(document)


def test_curves_must_have_a_loss_for_each_count() -> None:
    document = make_document()
    document["curves"][0]["loss"].pop()
    with pytest.raises(ValueError, match=r"curves\[0\] has 8 images and 7 losses"):
        parse_scores(document)


def test_losses_must_be_drawable() -> None:
    document = make_document()
    document["curves"][0]["loss"][3] = 1e300
    with pytest.raises(ValueError, match=r"loss\[3\] is 1e\+300, expected "):
        parse_scores(document)


# ------------------------------------------------------------------------------ several runs


def test_statistics_are_those_of_numpy_and_of_the_standard_library() -> None:
    summary = three_runs()
    for group in summary.rows:
        values = [next(row.nll for row in run.rows if row.model == group.model) for run in summary.runs]
        assert group.values("nll") == values
        assert group.mean("nll") == pytest.approx(np.mean(values))
        assert group.spread("nll") == pytest.approx(np.std(values, ddof=1))
        assert group.spread("acc") == pytest.approx(statistics.stdev(group.values("acc")))


def test_rows_are_grouped_by_model_in_the_order_of_the_file() -> None:
    summary = three_runs()
    assert [group.model for group in summary.rows] == [row.model for row in summary.first.rows]
    assert {len(group.rows) for group in summary.rows} == {3}
    assert {group.kind for group in summary.rows} <= set(get_args(Kind))
    assert summary.seeds == (6, 7, 8)


def test_rows_of_one_name_for_other_numbers_of_teachers_stay_apart() -> None:
    document = make_document()
    row = document["capacity"][0]
    document["capacity"] = [row | {"model": "+1 DBN", "members": k, "acc": 90.0 + k} for k in (2, 3)]
    groups = summarise([parse_scores(document)]).capacity
    assert [(group.first.members, group.mean("acc")) for group in groups] == [(2, 92.0), (3, 93.0)]


def test_a_bound_counts_as_the_largest_ensemble_and_says_so() -> None:
    group = next(group for group in three_runs().rows if group.model == "+1 DBN (KL)")
    assert group.dee_is_bound
    assert group.mean("dee") == 5.0
    assert cells(group)[8] == ">5"
    mixed = replace(group, rows=(*group.rows[:2], replace(group.rows[2], dee=3.5)))
    assert cells(mixed)[8] == ">4.50 ± 0.87"


def test_stages_that_only_some_runs_have_count_those_runs() -> None:
    first, *others = three_runs().runs
    summary = Summary((first, *(replace(run, tradeoff=()) for run in others)))
    assert {(len(group.rows), group.runs) for group in summary.tradeoff} == {(1, 1)}
    fewer = Summary((first, *(replace(run, rows=run.rows[:1]) for run in others)))
    assert cells(fewer.rows[1])[0] == "DE-2 (1 of 3 runs)"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dataset": "cifar10"}, "a .*digits.* b .*cifar10"),
        ({"class_names": tuple("abcdefghij")}, "a .*0, 1, 2, 3, 4… .*b"),
        ({"settings": {"recipe": "digits", "preset": "paper"}}, r"preset \(default and paper\)"),
        ({"settings": None}, r"recipe \(digits and None\)"),
        ({"target": 5}, r"gap .*\(DE-3 and DE-5\)"),
        ({"target": None}, r"gap .*\(DE-3 and not said\)"),
        ({"seed": 7}, "a and b .*seed 7"),
    ],
)
def test_runs_that_cannot_be_averaged_are_refused(change: dict[str, Any], named: str) -> None:
    first, second = (parse_scores(make_document(seed)) for seed in (7, 8))
    with pytest.raises(ValueError, match=named):
        summarise([first, replace(second, **change)], ["a", "b"])


def test_no_settings_and_empty_settings_are_the_same() -> None:
    first, second = (parse_scores(make_document(seed)) for seed in (7, 8))
    assert summarise([replace(first, settings=None), replace(second, settings={})]).seeds == (7, 8)


def test_groups_carry_the_seeds_of_their_rows() -> None:
    first, second, third = three_runs().runs
    summary = Summary((first, replace(second, rows=second.rows[:1]), third))
    assert summary.seeds == (6, 7, 8)
    assert [group.seeds for group in summary.rows[:2]] == [(6, 7, 8), (6, 8)]
    assert summary.rows[1].of((7, 8)).rows == (third.rows[1],)


def test_no_run_is_refused() -> None:
    with pytest.raises(ValueError, match="0 runs"):
        summarise([])


# ------------------------------------------------------------------------------ text


def test_cells_are_formatted_in_one_place() -> None:
    groups = {group.model: group for group in one_run().rows}
    assert cells(groups["+1 DBN"]) == (
        *("+1 DBN", "1.16", "1.16", "91.90", "0.237", "0.150", "0.040", "0.300", "2.43", "0.93 ± 0.05"),
    )
    assert cells(groups["+1 DBN (KL)"])[-2:] == (">5", "1.16 ± 0.05")
    assert cells(groups["DE-1"])[-2:] == ("1.00", "–")
    no_split = replace(groups["DE-1"].first, cnll=None, gap=-0.07)
    assert cells(replace(groups["DE-1"], rows=(no_split,)))[-3:] == ("–", "1.00", "-0.07")


def test_cells_over_several_runs_are_mean_and_spread() -> None:
    groups = {group.model: group for group in three_runs().rows}
    assert cells(groups["+1 DBN"])[3:5] == ("91.90 ± 0.08", "0.237 ± 0.004")
    assert cells(groups["+1 DBN"])[-2:] == ("2.43 ± 0.04", "0.93 ± 0.00")
    assert cells(groups["DE-3"])[-2] == "3.00"  # by definition, without a spread


def test_text_table_aligns_and_fits() -> None:
    summary = one_run()
    lines = summary.table().splitlines()
    assert len(lines) == 2 + len(summary.rows)
    assert {len(line) for line in lines} == {len(lines[0])}
    assert 80 <= len(lines[0]) <= 110
    assert lines[0].split("  ")[0].strip() == "model"
    assert lines[2].startswith("DE-1 ")  # names to the left
    assert lines[2].endswith(" –")  # numbers to the right
    assert lines[12].split() == ["+1", "DBN", *cells(summary.rows[10])[1:-1], "0.93", "±", "0.05"]
    assert summary.first.table() == summary.table()


def test_every_column_is_explained() -> None:
    assert all(column.explain(one_run()).endswith(".") for column in COLUMNS)
    assert len({column.heading for column in COLUMNS}) == len(COLUMNS)


def test_the_gap_names_its_ends_and_its_error() -> None:
    gap = COLUMNS[-1]
    assert "from DE-1 to DE-3" in gap.explain(one_run())
    assert "standard error over test images" in gap.explain(one_run())
    assert "deviation over seeds" in gap.explain(three_runs())
    unknown = Summary((replace(one_run().first, target=None),))
    assert "from DE-1 to the target ensemble" in gap.explain(unknown)


def test_an_error_over_images_never_stands_in_a_column_of_spreads() -> None:
    first, *others = three_runs().runs
    summary = Summary((first, *(replace(run, rows=run.rows[:5]) for run in others)))
    group = next(group for group in summary.rows if group.model == "+1 DBN")
    assert (cells(group)[0], cells(group)[-1]) == ("+1 DBN (1 of 3 runs)", "0.93")


def test_made_up_rows_are_whole() -> None:
    values = ("x", "other", 1, 0, 0, 1.0, 90.0, 0.3, 1.0, None)
    assert parse_scores(make_document() | {"rows": [make_row(values)]}).rows[0].method == "other"


def test_a_gap_of_no_use_keeps_its_cell_narrow() -> None:
    scores = one_run().first
    wild = [replace(row, gap=-6.0912, gap_error=141.5) if row.gap is not None else row for row in scores.rows]
    texts = [cells(group)[-1] for group in Summary((replace(scores, rows=tuple(wild)),)).rows]
    assert {text for text in texts if text != "–"} == {"-6 ± 142"}
