"""The answer in two sentences, computed from the rows and never kinder than they are."""

from __future__ import annotations

import math
from statistics import stdev

from ensbridge.scores import Group, Summary

# A difference below this many errors (or spreads over seeds) is not called one.
CLEAR = 2.0

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_MAIN = "+1 DBN"


def main_bridge(summary: Summary) -> Group | None:
    """Return the bridge that the headline is about: the plain one-step bridge, else the first.

    It is fixed by its name and never by its score, since choosing on the test split would flatter it.
    """
    bridges = [group for group in summary.rows if group.method == "DBN"]
    named = [group for group in bridges if group.model == _MAIN]
    one_step = [group for group in bridges if group.first.steps == 1]
    return next(iter(named + one_step + bridges), None)


def main_control(summary: Summary) -> Group | None:
    """Return the control of the headline's bridge: the one trained the same way, else the first."""
    bridge = main_bridge(summary)
    if bridge is None:
        return None
    controls = [group for group in summary.rows if group.method == "control"]
    way = bridge.model.removeprefix(_MAIN)  # such as " (KL)"
    named = [group for group in controls if group.model == f"control{way}"]
    return next(iter(named + controls), None)


def headline(summary: Summary) -> str:
    """Say what the bridge costs and how many members it equals, or that it gains nothing."""
    bridge = main_bridge(summary)
    if bridge is None:
        return f"No bridge was measured on {summary.dataset} yet: these are its members and rivals."
    row, one = bridge.first, ensemble(summary, 1)
    name = "One network + bridge" if row.bridges == 1 else f"One network + {row.bridges} bridges"
    cost = f"×{row.macs_ratio:.2f} the cost"
    nll = _mean(bridge, "nll")
    if one is not None and nll >= _mean(one, "nll"):
        return (
            f"{name} does not beat one network alone: NLL {nll:.3f} against {_mean(one, 'nll'):.3f},"
            f" at {cost} (lower NLL is better)."
        )
    gap, error = bridge.mean("gap"), _gap_error(bridge)
    if gap is not None and error is not None and gap < CLEAR * error:
        return (
            f"{name} does not clearly beat one network alone: it closes {gap:.2f} ± {error:.2f}"
            f" of the gap to {_count(row.members)}, at {cost}."
        )
    target = ensemble(summary, row.members)
    real = ""
    if target is not None:
        real = f" ({_count(row.members, 'real member')} cost ×{target.first.macs_ratio:.1f})"
    return f"{name}: {cost} of one network, equals {_members(bridge, spread=True)}{real}."


def control_sentence(summary: Summary) -> str:
    """Say how much of the bridge's gain is there without any ensemble."""
    bridge, control = main_bridge(summary), main_control(summary)
    if bridge is None:
        return ""
    if control is None:
        return (
            "There is no control row (the same bridge trained towards the source alone), so how much of"
            " this is owed to the ensemble is not known."
        )
    found = f"Without the ensemble — the same bridge trained towards the source alone — {_members(control)}"
    ours, theirs = _mean(bridge, "nll"), _mean(control, "nll")
    if theirs <= ours:
        return f"{found}: as good or better, so nothing here is shown to come from the ensemble."
    unsettled = _unsettled(bridge, control)
    if unsettled:
        return f"{found}; {unsettled}, so the ensemble’s own share is not settled by this."
    if _members(control) == _members(bridge):
        return f"{found} too; the ensemble itself lowers NLL from {theirs:.3f} to {ours:.3f}."
    return f"{found}; the ensemble itself adds the rest."


def ensemble(summary: Summary, members: int) -> Group | None:
    """Return the deep ensemble of so many members, None where it was not measured."""
    found = (group for group in summary.rows if group.method == "DE" and group.first.members == members)
    return next(found, None)


def _unsettled(bridge: Group, control: Group) -> str:
    """Say why the difference between the two is not clear, or nothing where it is."""
    ours, theirs = bridge.mean("gap"), control.mean("gap")
    if ours is None or theirs is None:
        return ""
    values = f"(gap {ours:.2f} against {theirs:.2f})"
    pairs = list(zip(bridge.values("gap"), control.values("gap"), strict=False))
    if len(pairs) > 1 and len(bridge.values("gap")) == len(control.values("gap")):
        # Both start from the same source in each run, so the seeds' own luck cancels in the difference.
        error, what = stdev(a - b for a, b in pairs), "twice its spread over seeds"
    else:
        # Both are measured on the same images, so this error is an upper bound in practice.
        error, what = math.hypot(_gap_error(bridge) or 0.0, _gap_error(control) or 0.0), "two standard errors"
    return f"the difference {values} is within {what}" if ours - theirs < CLEAR * error else ""


def _gap_error(group: Group) -> float | None:
    """The spread over seeds, or with one run the error over test images."""
    return group.spread("gap") if len(group.values("gap")) > 1 else group.first.gap_error


def _mean(group: Group, name: str) -> float:
    mean = group.mean(name)
    assert mean is not None  # acc, nll and dee are in every row
    return mean


def _members(group: Group, *, spread: bool = False) -> str:
    """How many members a model equals, such as “2.4 members” or “2.4 ± 0.2 members over 3 seeds”."""
    mean, deviation = _mean(group, "dee"), group.spread("dee")
    if group.dee_is_bound:
        text = f"{mean:.1f}".removesuffix(".0")
        return f"more than {text} members"
    if spread and deviation is not None:
        return f"{mean:.1f} ± {deviation:.1f} members over {len(group.rows)} seeds"
    text = f"{mean:.1f}"
    return f"{text} member" if text == "1.0" else f"{text} members"


def _count(number: int, noun: str = "member") -> str:
    word = _WORDS[number] if number < len(_WORDS) else str(number)
    return f"{word} {noun}" if number == 1 else f"{word} {noun}s"
