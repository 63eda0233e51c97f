"""The answer in two sentences, computed from the rows and never kinder than they are."""

import math

from ensbridge.scores import Row, Scores

# A difference below this many standard errors is not called one.
CLEAR = 2.0

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def main_bridge(scores: Scores) -> Row | None:
    """Return the bridge that the headline is about: the plain one-step bridge, else the first.

    It is fixed by its name and never by its score, since choosing on the test split would flatter it.
    """
    bridges = [row for row in scores.rows if row.kind == "bridge"]
    named = [row for row in bridges if row.model == "+1 DBN"]
    one_step = [row for row in bridges if row.steps == 1]
    return next(iter(named + one_step + bridges), None)


def headline(scores: Scores) -> str:
    """Say what the bridge costs and how many members it equals, or that it gains nothing."""
    bridge = main_bridge(scores)
    if bridge is None:
        return f"No bridge was measured on {scores.dataset} yet: these are its members and rivals."
    one = _ensemble(scores, 1)
    name = "One network + bridge" if bridge.bridges == 1 else f"One network + {bridge.bridges} bridges"
    cost = f"×{bridge.macs_ratio:.2f} the cost"
    if one is not None and bridge.nll >= one.nll:
        return (
            f"{name} does not beat one network alone: NLL {bridge.nll:.3f} against {one.nll:.3f},"
            f" at {cost} (lower NLL is better)."
        )
    if bridge.gap is not None and bridge.gap_error is not None and bridge.gap < CLEAR * bridge.gap_error:
        return (
            f"{name} does not clearly beat one network alone: it closes"
            f" {bridge.gap:.2f} ± {bridge.gap_error:.2f} of the gap to {_count(bridge.members)}, at {cost}."
        )
    target = _ensemble(scores, bridge.members)
    real = ""
    if target is not None:
        real = f" ({_count(bridge.members, 'real member')} cost ×{target.macs_ratio:.1f})"
    return f"{name}: {cost} of one network, equals {_members(bridge)}{real}."


def control_sentence(scores: Scores) -> str:
    """Say how much of the bridge's gain is there without any ensemble."""
    bridge = main_bridge(scores)
    if bridge is None:
        return ""
    control = next((row for row in scores.rows if row.kind == "control"), None)
    if control is None:
        return (
            "There is no control row (the same bridge trained towards the source alone), so how much of"
            " this is owed to the ensemble is not known."
        )
    found = f"Without the ensemble — the same bridge trained towards the source alone — {_members(control)}"
    if control.nll <= bridge.nll:
        return f"{found}: as good or better, so nothing here is shown to come from the ensemble."
    if bridge.gap is not None and control.gap is not None:
        # Both are measured on the same images, so this error is an upper bound in practice.
        error = math.hypot(bridge.gap_error or 0.0, control.gap_error or 0.0)
        if bridge.gap - control.gap < CLEAR * error:
            return (
                f"{found}; the difference (gap {bridge.gap:.2f} against {control.gap:.2f}) is within two"
                " standard errors, so the ensemble’s own share is not settled by this run."
            )
    if _members(control) == _members(bridge):
        return f"{found} too; the ensemble itself lowers NLL from {control.nll:.3f} to {bridge.nll:.3f}."
    return f"{found}; the ensemble itself adds the rest."


def _ensemble(scores: Scores, members: int) -> Row | None:
    return next((row for row in scores.rows if row.kind == "ensemble" and row.members == members), None)


def _members(row: Row) -> str:
    if isinstance(row.dee, str):
        return f"more than {row.dee.removeprefix('>')} members"
    text = f"{row.dee:.1f}"
    return f"{text} member" if text == "1.0" else f"{text} members"


def _count(number: int, noun: str = "member") -> str:
    word = _WORDS[number] if number < len(_WORDS) else str(number)
    return f"{word} {noun}" if number == 1 else f"{word} {noun}s"
