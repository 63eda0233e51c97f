"""Timing models in turn. No torch here."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ensbridge.benching.ratios import FEWEST

BLOCK = 0.05  # seconds that the fastest model runs for before the next has its turn
ROUND = 0.2  # and in a whole round, in up to four turns
MOST_CALLS, MOST_TURNS = 200, 4

Call = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Rounds:
    """The seconds that one call of each model took in each round."""

    times: dict[str, list[float]]
    calls: int  # in a round, whose median is its time


def time_rounds(
    models: Mapping[str, Call],
    rounds: int,
    seconds: float = math.inf,
    *,
    clock: Clock = time.perf_counter,
    advance: Callable[[int], None] = lambda steps: None,
) -> Rounds:
    """Time each model once a round, all in a new order each round; no round begins after `seconds`.

    A model's turn is as many calls as the fastest needs for 50 ms; a round is one turn of each or, of fast
    models, four. Its time of a model is the median of the calls, which an interruption does not move.
    `seconds` leaves at least 6 rounds.

    >>> now = iter(range(10_000))
    >>> found = time_rounds({"a": lambda: None, "b": lambda: None}, 7, clock=lambda: next(now))
    >>> found.times["b"], found.calls
    ([1, 1, 1, 1, 1, 1, 1], 1)
    """
    order, orders = list(models), random.Random(0)

    def one(name: str) -> float:
        begun = clock()
        models[name]()
        return clock() - begun

    fastest = min(min(one(name) for _ in range(3)) for name in order)
    calls = min(max(math.ceil(BLOCK / fastest), 1), MOST_CALLS) if fastest > 0 else MOST_CALLS
    turns = min(max(math.ceil(ROUND / (calls * fastest)), 1), MOST_TURNS) if fastest > 0 else MOST_TURNS
    times: dict[str, list[float]] = {name: [] for name in order}
    begun = clock()
    for done in range(rounds):
        if done >= FEWEST and clock() - begun > seconds:
            break
        taken: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(turns):
            orders.shuffle(order)
            for name in order:
                taken[name] += [one(name) for _ in range(calls)]
        for name, own in taken.items():
            times[name].append(statistics.median(own))
        advance(1)
    return Rounds(times, turns * calls)
