"""Timing models in turn, ratios of their times, and when none is claimed. No torch here.

A round times every model, in a random order, so that what the machine does meanwhile falls on all of them; a
ratio is of two times of the same round. Of the rounds' ratios three things are told:

- their median, the claim;
- an interval that holds the true median with 95 % probability for any distribution: between two of the sorted
  ratios, as the binomial law has it. It is how far the claim may be off, and narrows with more rounds. Rounds
  that drift together make it too narrow; those of one run are near enough to independent, because drift
  cancels in a ratio;
- their spread, the middle half of them: where a single round ends up, which more rounds do not narrow.

The median is claimed where its interval excludes 1 and neither interval nor spread is wider than the
difference from 1; else a reason stands in its place. So "×1.2" is never said of what may be ×1.05 or ×1.35.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ensbridge.utils.progress import Advance, ignore

CONFIDENCE = 0.95
SPREAD = (0.25, 0.75)
MIN_ROUNDS = 6  # for an interval of that confidence
ROUND = 0.5  # seconds that the fastest model is timed for in a round
MIN_CALLS, MAX_CALLS = 3, 200

Call = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Rounds:
    """The seconds that one call of each model took in each round."""

    times: dict[str, list[float]]
    calls: int  # in a round, of which the fastest is its time


def time_rounds(
    models: Mapping[str, Call],
    rounds: int,
    seconds: float = math.inf,
    *,
    clock: Clock = time.perf_counter,
    advance: Advance = ignore,
) -> Rounds:
    """Time each model once a round, all in a new order each round; no round begins after `seconds`.

    Models are called several times a round, one call of each after the other, so that a slow moment of the
    machine falls on all of them. Each timed call follows an untimed one of the same model, so that it finds
    its own weights and buffers in the caches, as a model in use does. The round's time of a model is that of
    its fastest call: whatever else a machine does only ever adds time. `seconds` leaves at least 6 rounds.

    >>> now = iter(range(10_000))
    >>> result = time_rounds({"a": lambda: None, "b": lambda: None}, 7, clock=lambda: next(now))
    >>> result.times["b"], result.calls
    ([1, 1, 1, 1, 1, 1, 1], 3)
    """
    order, orders = list(models), random.Random(0)

    def one(name: str) -> float:
        begun = clock()
        models[name]()
        return clock() - begun

    fastest = min(min(one(name) for _ in range(3)) for name in order)
    calls = min(max(math.ceil(ROUND / fastest), MIN_CALLS), MAX_CALLS) if fastest > 0 else MAX_CALLS
    times: dict[str, list[float]] = {name: [] for name in order}
    begun = clock()
    for done in range(rounds):
        if done >= MIN_ROUNDS and clock() - begun > seconds:
            break
        taken: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(calls):
            orders.shuffle(order)
            for name in order:
                models[name]()
                taken[name].append(one(name))
        for name, durations in taken.items():
            times[name].append(min(durations))
        advance(1)
    return Rounds(times, calls)


@dataclass(frozen=True)
class Ratio:
    """How many times as long as one member a model takes; where `median` is None, `reason` says why."""

    median: float | None
    low: float  # 25th percentile of the rounds
    high: float  # 75th
    interval: tuple[float, float] | None  # that holds the true median, 95 %
    reason: str | None

    def __str__(self) -> str:
        if self.median is None or self.interval is None:
            return "—"
        return f"×{self.median:.2f} ({self.interval[0]:.2f} … {self.interval[1]:.2f})"


def ratio_of(times: Sequence[float], one: Sequence[float]) -> Ratio:
    """The ratio of two models' times, by rounds.

    >>> str(ratio_of([1.21, 1.19, 1.2, 1.18, 1.22, 1.2], [1.0] * 6))
    '×1.20 (1.18 … 1.22)'
    >>> ratio_of([1.5, 1.05, 1.2, 1.1, 1.4, 1.2], [1.0] * 6).reason
    'its median may be anything from ×1.05 to ×1.50, wider than its difference of 0.20 from ×1'
    """
    ratios = [time / other for time, other in zip(times, one, strict=True)]
    median, low, high = map(float, np.quantile(ratios, (0.5, *SPREAD)))
    interval = median_interval(ratios)
    reason = None
    if interval is None:
        reason = f"{len(ratios)} round{'s' * (len(ratios) != 1)}: too few; give at least {MIN_ROUNDS}"
    elif interval[0] <= 1 <= interval[1]:
        reason = f"its median, anything from ×{interval[0]:.2f} to ×{interval[1]:.2f}, cannot be told from ×1"
    elif interval[1] - interval[0] > abs(median - 1):
        reason = (
            f"its median may be anything from ×{interval[0]:.2f} to ×{interval[1]:.2f}, wider than its "
            f"difference of {abs(median - 1):.2f} from ×1"
        )
    elif high - low > abs(median - 1):
        reason = (
            f"half of its rounds lie between ×{low:.2f} and ×{high:.2f}, wider apart than its difference of "
            f"{abs(median - 1):.2f} from ×1"
        )
    return Ratio(None if reason else median, low, high, interval, reason)


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Two of the values between which the true median lies with 95 % probability; None of fewer than 6.

    Each value is below the true median with probability 1/2: the k-th of n from either end is on its wrong
    side as often as a fair coin shows fewer than k heads.

    >>> median_interval([5, 1, 4, 2, 6, 3]), median_interval(range(5)), median_interval(range(100))
    ((1, 6), None, (39, 60))
    """
    ordered, count = sorted(values), len(values)
    wrong, k = 0.0, 0  # probability that a coin shows at most k - 1 heads
    while (more := wrong + math.comb(count, k) / 2**count) <= (1 - CONFIDENCE) / 2:
        wrong, k = more, k + 1
    return (ordered[k - 1], ordered[-k]) if k else None
