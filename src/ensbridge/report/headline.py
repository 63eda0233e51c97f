"""The answer in two sentences, computed from the rows and never kinder than they are."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import NamedTuple

from ensbridge.evaluation.scores import Group, Row, Summary

# A difference below this many errors (or spreads over seeds) is not called one.
CLEAR = 2.0
ROUNDING = 1e-6  # of an NLL: as `metrics` has it, which pages are made without

_WORSE = "worse than one member"  # what a DEE below 1 says; as a number of members it would mean nothing


def main_bridge(summary: Summary) -> Group | None:
    """Return the bridge that the headline is about: the chosen one, the runs' own, or one bridge of one step.

    With KL before the paper's loss. It is fixed by what it is and never by its score, since choosing on the
    test split would flatter it.
    """
    bridges = [group for group in summary.rows if group.kind == "DBN"]
    chosen = [group for group in bridges if group.model == summary.main]
    chosen += [group for group in bridges if group.first.headline]
    one_step = [group for group in bridges if group.first.steps == 1]
    alone = [group for group in one_step if group.first.bridges == 1]
    with_kl = [group for group in alone if group.first.loss == "kl"]
    return next(iter(chosen + with_kl + alone + one_step + bridges), None)


def main_control(summary: Summary) -> Group | None:
    """Return the control of the headline's bridge: the one trained the same way, else the first."""
    bridge = main_bridge(summary)
    if bridge is None:
        return None
    controls = [group for group in summary.rows if group.kind == "control"]
    same = [group for group in controls if _is_control_of(group.first, bridge.first)]
    return next(iter(same + controls), None)


def _is_control_of(control: Row, bridge: Row) -> bool:
    return control.info == bridge.info.as_control()


def headline(summary: Summary) -> str:
    """Say what the bridge costs and how many members it equals, or that it gains nothing."""
    bridge = main_bridge(summary)
    if bridge is None:
        return f"No bridge was measured on {summary.dataset} yet: these are its members and baselines."
    row = bridge.first
    name = "One network + bridge" if row.bridges == 1 else f"One network + {row.bridges} bridges"
    name += f", “{bridge.model}”"
    cost = f"×{row.macs_ratio:.2f} the cost"
    both = _common(bridge, ensemble(summary, 1))
    nlls = None if both is None else (_mean(both.ours, "nll"), _mean(both.theirs, "nll"))
    if nlls is not None and nlls[0] >= nlls[1]:
        return (
            f"{name} does not beat one network alone: NLL {nlls[0]:.3f} against {nlls[1]:.3f}, at {cost}"
            " (lower NLL is better)."
        )
    # Over seeds or, with one run, over test images; None where neither is known.
    error = bridge.first.gap_error if len(bridge.values("gap")) == 1 else bridge.spread("gap")
    gap = bridge.mean("gap")
    if gap is None and nlls is not None and (worthless := _no_better(summary)):
        return (
            f"{name} has an NLL of {nlls[0]:.3f} against {nlls[1]:.3f} of one network alone, at {cost};"
            f" {worthless}, so no number of members can be named."
        )
    if gap is not None and error is not None and gap < CLEAR * error:
        return (
            f"{name} does not clearly beat one network alone: it closes {gap:.2f} ± {error:.2f}"
            f" of the gap to {_target(summary)}, at {cost}."
        )
    unknown = "" if error is not None else "; its error is not known"
    better = "".join(f" {sentence}" for sentence in _cheaper_and_better(summary, bridge))
    if bridge.worse_than_one:
        return f"{name}: {cost} of one network, and {_WORSE} by NLL{unknown}.{better}"
    more = "more than " if bridge.dee_is_bound else ""
    price = f", which cost {more}×{_mean(bridge, 'dee'):.1f}"
    members = _members(bridge, spread=True)
    return f"{name}: {cost} of one network, and the NLL of {members}{price}{unknown}.{better}"


def _cheaper_and_better(summary: Summary, bridge: Group) -> list[str]:
    """What the table's own front says against the bridge: models of no higher cost and a lower NLL."""
    return [
        f"{group.model} has a lower NLL, {_mean(group, 'nll'):.3f} against {_mean(bridge, 'nll'):.3f}, at"
        f" ×{group.first.macs_ratio:.2f}."
        for group in summary.rows
        if group.kind not in ("DE", "control")
        and group.first.macs_ratio <= bridge.first.macs_ratio
        and _mean(group, "nll") < _mean(bridge, "nll")
    ]


def control_sentence(summary: Summary) -> str:
    """Say how much of the bridge's gain is there without any ensemble, over the runs that have both."""
    bridge, control = main_bridge(summary), main_control(summary)
    if bridge is None:
        return ""
    if control is None:
        return (
            "There is no control row (the same bridge trained towards the source alone), so how much of"
            " this is due to the ensemble is not known."
        )
    both = _common(bridge, control)
    if both is None:
        return (
            "No run has both the bridge and its control (the same bridge trained towards the source alone),"
            " so how much of this is due to the ensemble is not known."
        )
    same = _is_control_of(control.first, bridge.first)
    alike = "the same bridge" if bridge.first.bridges == 1 else "the same bridges"
    what = alike if same else f"{control.model}, another bridge,"
    sentence = f"Without the ensemble — {what} trained towards the source alone —"
    nll = f"an NLL {_WORSE}’s" if both.theirs.worse_than_one else f"the NLL of {_members(both.theirs)}"
    sentence += f" {nll}{both.which}"
    ours, theirs = _mean(both.ours, "nll"), _mean(both.theirs, "nll")
    if theirs <= ours:
        return f"{sentence}: as good or better, so nothing here is shown to come from the ensemble."
    unsettled = _unsettled(both, _target(summary))
    if unsettled:
        return f"{sentence}; {unsettled}, so the ensemble’s own share is not settled by this."
    if _members(both.theirs) == _members(both.ours):
        return f"{sentence} too; the ensemble itself lowers NLL from {theirs:.3f} to {ours:.3f}."
    gain, error = both.ours.first.nll_gain_over_control, both.ours.first.nll_gain_over_control_se
    known = len(both.ours.rows) == 1 and gain is not None and error is not None
    measured = f", {gain:.4f} ± {error:.4f} of NLL" if known else ""
    return f"{sentence}; the ensemble itself adds the rest{measured}."


def ensemble(summary: Summary, members: int) -> Group | None:
    """Return the deep ensemble of so many members, None where it was not measured."""
    groups = (group for group in summary.rows if group.kind == "DE" and group.first.members == members)
    return next(groups, None)


class _Both(NamedTuple):
    """Two models in the runs that have both, row by row of the same seed."""

    ours: Group
    theirs: Group
    which: str  # said of the runs where they are not all


def _common(ours: Group, theirs: Group | None) -> _Both | None:
    """Pair two models by seed, None where no run has both."""
    if theirs is None:
        return None
    seeds = [seed for seed in ours.seeds if seed in theirs.seeds]
    if not seeds:
        return None
    whole = len(seeds) == len(ours.seeds) == len(theirs.seeds)
    runs = "run that has" if len(seeds) == 1 else f"{len(seeds)} runs that have"
    return _Both(ours.of(seeds), theirs.of(seeds), "" if whole else f" in the {runs} both")


def _unsettled(both: _Both, target: str) -> str:
    """Say why the difference between the two is not clear, or nothing where it is."""
    theirs = dict(zip(both.theirs.seeds, both.theirs.rows, strict=True))
    rows = [(row, theirs[seed]) for seed, row in zip(both.ours.seeds, both.ours.rows, strict=True)]
    pairs = [(a, b, a.gap, b.gap) for a, b in rows if a.gap is not None and b.gap is not None]
    if not pairs:
        return _unsettled_gain(*rows[0]) if len(rows) == 1 else "the error of the difference is not known"
    means = [fmean(gaps) for gaps in zip(*((a, b) for _, _, a, b in pairs), strict=True)]
    values = f"({means[0]:.2f} against {means[1]:.2f} of the gap to {target})"
    difference, what = means[0] - means[1], "two standard errors"
    one, other, _, _ = pairs[0]
    if len(pairs) > 1:
        # Both start from the same source in each run, so the seeds' own luck cancels in the difference.
        error, what = stdev(a - b for _, _, a, b in pairs), "twice its spread over seeds"
    elif (measured := _gain(one, other)) is not None:
        difference, error = measured  # image by image, in NLL
    elif one.gap_error is None or other.gap_error is None:
        return f"the error of the difference {values} is not known"
    else:
        # Both are measured on the same images, so this error is an upper bound in practice.
        error = math.hypot(one.gap_error, other.gap_error)
    return f"the difference {values} is within {what}" if difference < CLEAR * error else ""


def _gain(bridge: Row, control: Row) -> tuple[float, float] | None:
    """How much lower a bridge's NLL is than its control's, and the error; None where it was not measured."""
    gain, error = bridge.nll_gain_over_control, bridge.nll_gain_over_control_se
    return None if gain is None or error is None or not _is_control_of(control, bridge) else (gain, error)


def _unsettled_gain(bridge: Row, control: Row) -> str:
    """The same of one run in which there is no gap, image by image in NLL."""
    measured = _gain(bridge, control)
    if measured is None:
        return "the error of the difference is not known"
    gain, error = measured
    if gain >= CLEAR * error:
        return ""
    return f"the difference ({gain:.4f} ± {error:.4f} of NLL) is within two standard errors"


def _no_better(summary: Summary) -> str:
    """Say in how many runs the target ensemble is no better than one member; nothing where it always is."""
    target, one = (ensemble(summary, size) for size in (summary.target or 0, 1))
    both = None if target is None else _common(target, one)
    if both is None:
        return ""
    pairs = list(zip(both.ours.rows, both.theirs.rows, strict=True))
    failed = sum(row.nll >= alone.nll - ROUNDING for row, alone in pairs)
    which = "" if failed == len(pairs) else f" in {failed} of {len(pairs)} runs"
    return f"{_target(summary)} itself is no better than one network{which}" if failed else ""


def _mean(group: Group, name: str) -> float:
    mean = group.mean(name)
    assert mean is not None  # acc, nll and dee are in every row
    return mean


def _target(summary: Summary) -> str:
    return "the target ensemble" if summary.target is None else f"DE-{summary.target}"


def _members(group: Group, *, spread: bool = False) -> str:
    """How many members a model equals, such as “2.4 members” or “2.4 ± 0.2 members over 3 seeds”."""
    if group.worse_than_one:
        return _WORSE
    mean, deviation = _mean(group, "dee"), group.spread("dee")
    over = f" over {len(group.rows)} seeds" if spread and deviation is not None else ""
    if group.dee_is_bound:
        text = f"{mean:.1f}".removesuffix(".0")
        return f"more than {text} members{over}"
    if over:
        return f"{mean:.1f} ± {deviation:.1f} members{over}"
    text = f"{mean:.1f}"
    one = f" in one of {group.runs} runs" if spread and group.runs > 1 else ""
    return (f"{text} member" if text == "1.0" else f"{text} members") + one
