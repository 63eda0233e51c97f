"""Timing models in turn. No torch here."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ensbridge.deploy.benchmark.ratios import MIN_ROUNDS
from ensbridge.utils.progress import Advance, ignore

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
