"""What the report says in words is what its numbers support, and no more."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from _report import MAIN, changed, make_document, one_run, three_runs, without
from ensbridge.cli.runs import show
from ensbridge.evaluation.scores import Row, Summary, parse_scores, summarise
from ensbridge.report import control_sentence, headline
from ensbridge.report.figures import PLOTS
from ensbridge.report.figures.sheet import NARROW, WIDE, drawing
from ensbridge.report.headline import main_bridge, main_control

# ------------------------------------------------------------------------------ the answer


def test_headline_gives_cost_members_and_the_real_price() -> None:
    assert headline(one_run()) == (
        "One network + bridge, “+1 DBN”: ×1.16 the cost of one network, and the NLL of 2.4 members, which"
        " cost ×2.4. +1 DBN (KL) has a lower NLL, 0.217 against 0.237, at ×1.16."
    )


@pytest.mark.parametrize("summary", [one_run(), three_runs(), without("control")])
def test_the_terminal_has_both_sentences_of_the_page(
    summary: Summary, capsys: pytest.CaptureFixture[str]
) -> None:
    show(summary)
    assert capsys.readouterr().out.endswith(f"\n{headline(summary)} {control_sentence(summary)}\n\n")


def test_headline_over_several_runs_is_the_mean_with_its_spread() -> None:
    assert "2.4 ± 0.0 members over 3 seeds, which cost ×2.4." in headline(three_runs())


def test_headline_is_about_one_bridge_with_kl_unless_another_was_chosen() -> None:
    runs = one_run().runs
    others = [replace(one_run(), main=None), without("+1 DBN (KL)"), summarise(runs, main="+2 DBN (DE-5)")]
    assert [group.model for group in map(main_bridge, others) if group] == [
        "+1 DBN (KL)",
        "+1 DBN",
        "+2 DBN (DE-5)",
    ]
    assert [group.model for group in map(main_control, others) if group][:2] == ["control (KL)", "control"]


def test_headline_names_what_is_cheaper_and_better() -> None:
    assert re.search(r"ED .*0\.200 against 0\.237, at ×1\.00", headline(changed("ED", nll=0.2)))
    assert "ED has" not in headline(one_run())


def test_headline_is_about_the_bridge_that_was_chosen() -> None:
    chosen = summarise(one_run().runs, main="+1 DBN (KL)")
    assert headline(chosen).startswith("One network + bridge, “+1 DBN (KL)”: ×1.16")
    assert [group and group.model for group in (main_bridge(chosen), main_control(chosen))] == [
        "+1 DBN (KL)",
        "control (KL)",
    ]
    assert "control, another bridge" not in control_sentence(chosen)
    assert "the same bridge trained" in control_sentence(chosen)
    two = [replace(row, bridges=2) if row.kind in ("DBN", "control") else row for row in one_run().first.rows]
    both = Summary((replace(one_run().first, rows=tuple(two)),), main="+1 DBN")
    assert "the same bridges trained" in control_sentence(both)
    assert "another bridge" in control_sentence(changed("+1 DBN", bridges=2))


@pytest.mark.parametrize("name", ["+1 DBM", "DE-3", "control"])
def test_a_bridge_that_was_not_measured_cannot_be_chosen(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{re.escape(name)}'.*\+1 DBN"):
        summarise(one_run().runs, main=name)


def test_headline_beyond_the_largest_ensemble() -> None:
    summary = changed("+1 DBN", dee=">5", bridges=2)
    assert "One network + 2 bridges" in headline(summary)
    assert "more than 5 members, which cost more than ×5.0." in headline(summary)


def test_headline_says_when_the_bridge_does_not_beat_one_network() -> None:
    worse = headline(changed("+1 DBN", nll=0.35, dee=0.96, gap=-0.03))
    assert re.search(r"does not beat .*0\.350 against 0\.346", worse)
    unclear = headline(changed("+1 DBN", nll=0.34, dee=1.05, gap=0.05, gap_error=0.04))
    assert re.search(r"does not clearly beat .*0\.05 ± 0\.04 of the gap to DE-3", unclear)
    assert not any("members, which cost" in said for said in (worse, unclear))


def with_gaps(bridge: list[float], control: list[float]) -> Summary:
    """Several runs whose gaps are these; the errors over test images are tiny."""
    gaps = {"+1 DBN": bridge, "control": control}
    runs = []
    for i, run in enumerate(summarise([parse_scores(make_document(s)) for s in range(len(bridge))]).runs):
        rows = (replace(r, gap=gaps[r.model][i], gap_error=1e-6) if r.model in gaps else r for r in run.rows)
        runs.append(replace(run, rows=tuple(rows)))
    return Summary(tuple(runs), MAIN)


def useless(summary: Summary, runs: int) -> Summary:
    """The first runs with a target that is no better than one network, and so without any gap."""

    def change(row: Row) -> Row:
        row = replace(row, gap=None, gap_error=None)
        return replace(row, nll=0.4) if row.model == "DE-3" else row

    changed_runs = [replace(run, rows=tuple(map(change, run.rows))) for run in summary.runs[:runs]]
    return Summary((*changed_runs, *summary.runs[runs:]), MAIN)


def test_where_the_ensemble_is_no_better_than_one_network_no_members_are_named() -> None:
    for summary, which in (
        (useless(one_run(), 1), ""),
        (useless(three_runs(), 3), ""),
        (useless(three_runs(), 1), " in 1 of 3 runs"),
    ):
        said = headline(summary)
        assert re.search(r"0\.2\d\d against 0\.3\d\d .*×1\.16", said)
        assert f"DE-3 itself is no better than one network{which}, so" in said
    (group,) = [group for group in useless(three_runs(), 1).rows if group.model == "+1 DBN"]
    assert group.mean("gap") is None  # the other two runs do not speak for the one that has none
    assert group.mean("nll") is not None


def judged(gap: float | None, error: float) -> str:
    """The sentence on a bridge whose NLL is 0.005 below its control's, give or take this error."""
    gain = {"nll_gain_over_control": 0.005, "nll_gain_over_control_se": error}
    return control_sentence(changed("+1 DBN", gap=gap, gap_error=gap and 0.1, **gain))


def test_the_gain_over_control_needs_no_gap() -> None:
    assert judged(None, 0.001).endswith("0.0050 ± 0.0010 of NLL.")
    assert judged(None, 0.003).endswith("not settled by this.")


def test_the_spread_over_seeds_takes_the_place_of_the_error_over_images() -> None:
    noisy = with_gaps([0.1, 0.9, 0.2], [0.0, 0.0, 0.0])
    assert re.search(r"does not clearly beat .*0\.40 ± 0\.44", headline(noisy))
    unsettled = control_sentence(with_gaps([0.9, 0.5, 0.9], [0.5, 0.6, 0.6]))
    assert "within twice its spread over seeds" in unsettled
    # Good and bad seeds are so for both: what counts is how much their difference varies.
    paired = control_sentence(with_gaps([0.9, 0.5, 0.7], [0.7, 0.31, 0.5]))
    assert paired.endswith("the ensemble itself adds the rest.")


def test_bridge_and_control_are_compared_seed_by_seed_in_the_runs_that_have_both() -> None:
    runs = with_gaps([0.9, 0.5, 0.7], [0.7, 0.31, 0.5]).runs
    # The control of the middle seed is missing: by position its neighbours would be paired.
    fewer = replace(runs[1], rows=tuple(row for row in runs[1].rows if row.model != "control"))
    sentence = control_sentence(Summary((runs[0], fewer, runs[2]), MAIN))
    assert re.search("2 runs that have both; .*adds the rest", sentence)
    shuffled = with_gaps([0.9, 0.5, 0.7], [0.31, 0.7, 0.5]).runs
    dropped = replace(shuffled[0], rows=tuple(row for row in shuffled[0].rows if row.model != "control"))
    unsettled = control_sentence(Summary((dropped, *shuffled[1:]), MAIN))
    # 0.5 and 0.7 against 0.7 and 0.5: the first seed's 0.9 has nothing to be compared with.
    assert re.search(r"0\.60 against 0\.60 .*twice its spread over seeds", unsettled)
    never = [
        replace(run, rows=tuple(row for row in run.rows if row.model != gone))
        for run, gone in zip(runs[:2], ("control", "+1 DBN"), strict=True)
    ]
    controls = [replace(r, rows=tuple(x for x in r.rows if x.model != "control (KL)")) for r in never]
    assert control_sentence(Summary(tuple(controls), MAIN)).startswith("No run has both")


def test_a_single_run_is_judged_by_the_difference_image_by_image() -> None:
    near = changed("+1 DBN", gap=0.7, gap_error=0.1)  # too near to the control's 0.68 by errors of their own
    assert "is within two standard errors" in control_sentence(near)
    assert judged(0.7, 0.001).endswith("0.0050 ± 0.0010 of NLL.")
    assert judged(0.7, 0.003).endswith("not settled by this.")


def test_headline_compares_with_one_network_in_the_same_runs() -> None:
    first, second = three_runs().runs[:2]
    # Only the second run has the bridge, and there one network is better than it.
    rows = tuple(replace(row, nll=0.1) if row.model == "DE-1" else row for row in second.rows)
    alone = replace(first, rows=tuple(row for row in first.rows if row.method == "DE"))
    one = replace(alone, rows=(replace(alone.rows[0], nll=9.0), *alone.rows[1:]))
    worse = headline(Summary((one, replace(second, rows=rows)), MAIN))
    assert re.search(r"does not beat .*0\.237 against 0\.100", worse)
    assert "2.4 members in one of 2 runs" in headline(Summary((alone, second), MAIN))


def test_no_difference_is_called_clear_where_its_error_is_not_known() -> None:
    unknown = changed("+1 DBN", gap_error=None)
    assert "its error is not known" in headline(unknown)
    assert re.search(r"0\.93 against 0\.66 .*not known", control_sentence(unknown))
    no_gap = changed("control", gap=None, gap_error=None)
    assert "not known" in control_sentence(no_gap)
    assert "not known" not in headline(three_runs())  # the spread over seeds is an error


def test_another_ways_control_is_not_called_the_same_bridge() -> None:
    assert "control (KL), another bridge" in control_sentence(without("control"))


def test_without_a_known_target_the_sentences_name_none() -> None:
    run = replace(changed("control", nll=0.245, dee=1.98, gap=0.86).first, target=None)
    assert "the gap to the target ensemble" in control_sentence(Summary((run,), MAIN))


def test_headline_without_a_bridge() -> None:
    summary = without(*(row.model for row in one_run().first.rows if row.kind in ("DBN", "control")))
    assert headline(summary).startswith("No bridge was measured on digits")
    assert control_sentence(summary) == ""


def test_control_sentence_says_whose_the_gain_is() -> None:
    assert control_sentence(one_run()) == (
        "Without the ensemble — the same bridge trained towards the source alone — the NLL of 1.8 members; "
        "the ensemble itself adds the rest."
    )
    as_good = control_sentence(changed("control", nll=0.237, dee=2.43, gap=0.93))
    assert "2.4 members: as good or better" in as_good
    close = control_sentence(changed("control", nll=0.245, dee=1.98, gap=0.86))
    assert re.search(r"0\.93 against 0\.86 .*two standard errors", close)
    assert "adds the rest" not in close
    same_count = control_sentence(changed("control", dee=2.41))
    assert re.search(r"2\.4 members too; .*0\.268 to 0\.237", same_count)
    assert "no control row" in control_sentence(without("control", "control (KL)"))


# ------------------------------------------------------------------------------ captions


def caption(name: str, summary: Summary) -> str:
    plot = next(plot for plot in PLOTS if plot.name == name)
    data = plot.data(summary)
    assert data is not None
    return plot.caption(data)


def test_the_front_says_by_what_it_goes() -> None:
    one, three = caption("front", one_run()), caption("front", three_runs())
    assert ("this one run" in one, "this one run" in three) == (True, False)
    assert ("Bars:" in one, "Bars:" in three) == (False, True)
    alone = without(*(f"DE-{k}" for k in range(2, 6)))
    assert ("dashed line" in one, "dashed line" in caption("front", alone)) == (True, False)


def test_examples_say_how_they_were_chosen_and_of_which_run_they_are() -> None:
    first, *others = three_runs().runs
    text = caption("transition", Summary((replace(first, transitions=()), *others)))
    assert "different classes" in text
    assert "2 steps from t = 1" in text
    assert text.endswith("(seed 7).")


def test_reliability_speaks_of_calibration_only_where_there_was_one() -> None:
    document = make_document()
    for row in document["rows"]:
        row["reliability"]["after"] = None
    assert "validation split" in caption("reliability", one_run())
    assert "validation split" not in caption("reliability", summarise([parse_scores(document)]))
    assert "pooled over seeds" in caption("reliability", three_runs())


@pytest.mark.parametrize("name", ["tradeoff", "capacity"])
def test_bars_and_arrows_are_explained_where_there_are_any(name: str) -> None:
    first, *others = (replace(run, rows=run.rows[-1:]) for run in three_runs().runs)
    single = Summary((first, *(replace(run, **{name: ()}) for run in others)))
    assert "Bars:" in caption(name, three_runs())
    assert "Bars:" not in caption(name, single)  # one run has such rows
    assert ("An arrow" in caption(name, one_run())) == (name == "capacity")
    assert not {"Left:", "Right:", "above", "below"} & set(caption(name, one_run()).split())  # phones stack


def test_logarithmic_axes_are_explained_where_there_are_any() -> None:
    scores = one_run().first
    flat = replace(scores, curves=scores.curves[2:])
    assert "logarithmic" in caption("curves", one_run())
    assert "logarithmic" not in caption("curves", Summary((flat,)))


# ------------------------------------------------------------------------------ whatever may be read


def extreme(high: bool) -> Summary:
    """Two runs of values at the ends of what a file may hold."""
    document = make_document()
    for row in (*document["rows"], *document["tradeoff"], *document["capacity"]):
        ends: dict[str, tuple[Any, Any]] = {"nll": (0, 1e6), "acc": (0, 100), "gap": (-1e6, 1e6)}
        ends |= {"macs_ratio": (1e-3, 1e6), "params_ratio": (1e-3, 1e6), "dee": (-1e6, ">999999")}
        ends |= {"macs": (1, 2**63 - 1), "brier": (0, 1e6), "ece": (0, 1e6), "cnll": (0, 1e6)}
        row |= {key: pair[high] for key, pair in ends.items()}
        row["reliability"]["before"][1] |= {"count": 2**63 - 1, "confidence": float(high)}
    document["rows"][1] |= {"nll": 1e6, "macs_ratio": 1e6}
    for curve in document["curves"]:
        curve["loss"][2:4] = [1e12, 1e-300] if high else [-1e12, 1e-12]
        curve["images"] = [2**63 - 1] * 8 if high else [0] * 8
    document["transitions"][0] |= {"ensemble": [float(high)] * 10, "times": [0.0] * 3}
    return summarise([parse_scores(document), parse_scores(make_document(8))])


@pytest.mark.parametrize("high", [False, True])
def test_every_value_that_is_read_can_be_drawn(high: bool) -> None:
    summary = extreme(high)
    assert headline(summary)
    assert control_sentence(summary)
    with drawing():
        for plot in PLOTS:
            data = plot.data(summary)
            assert data is not None
            assert plot.caption(data)
            assert plot.describe(data)
            for width in (WIDE, NARROW):
                assert plot.draw(data, width).svg()
