"""Trainings killed with SIGKILL at random moments and run again until they end: the weights must be the same.

Half of the kills come at a moment of the clock, which is anywhere in a step, an evaluation or a write. The
others come at a file operation drawn at random: just before a temporary file is opened, a checkpoint is
renamed into place or an old one is deleted.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from faults.processes import Child, fork, in_parallel
from faults.trainings import TRAININGS, Training, scores_in, weights_in

EVENTS = ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir")
Row = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """A training that nothing interrupted."""

    seconds: float
    operations: int  # on files
    weights: dict[str, str]
    scores: dict[str, str]


@dataclass
class Counts:
    """What was seen of one training."""

    runs: int = 0
    kills: int = 0
    by_clock: int = 0
    at_file_operations: int = 0
    half_written: int = 0  # kills after which a temporary file was left behind
    other_ends: list[str] = field(default_factory=list)
    weights_differ: int = 0
    scores_differ: int = 0


def killed_trainings(kills: int, seed: int, folder: Path, say: Callable[[str], None]) -> list[Row]:
    """Kill every training until so many kills have landed in all; a row of counts for each training."""
    rows = []
    for number, training in enumerate(TRAININGS):
        share = kills // len(TRAININGS) + (number < kills % len(TRAININGS))
        reference = uninterrupted(training, folder / f"reference-{number}")
        say(f"{training.name}: {reference.seconds:.1f} s uninterrupted; {share} kills")
        lanes = [
            partial(
                _lane, training, reference, share // 2 + (lane < share % 2), f"{seed}:{number}:{lane}",
                folder / f"lane-{number}-{lane}",
            )
            for lane in range(2)
        ]  # fmt: skip
        counts = in_parallel(lanes, folder / f"lanes-{number}")
        total = {name: sum((count[name] for count in counts), type(counts[0][name])()) for name in counts[0]}
        rows.append({"training": training.name, **total})
    return rows


def uninterrupted(training: Training, folder: Path) -> Reference:
    """Train without a fault."""
    folder.mkdir(parents=True)
    counted = folder / "operations"
    begun = time.monotonic()
    child = fork(partial(_train, training, folder, None, counted), folder / "output.txt")
    if not child.wait() or child.code != 0:
        raise RuntimeError(f"{training.name} fails without any fault:\n{child.said()}")
    seconds = time.monotonic() - begun
    return Reference(seconds, int(counted.read_text()), weights_in(folder), scores_in(folder))


def _lane(training: Training, reference: Reference, kills: int, seed: str, folder: Path) -> Row:
    """Runs, each killed a few times, until so many kills have landed."""
    draws, counts = random.Random(seed), Counts()
    while counts.kills < kills:
        place = folder / str(counts.runs)
        place.mkdir(parents=True)
        counts.runs += 1
        child = _start(training, reference, place, draws, counts)
        while child.code == -signal.SIGKILL:
            counts.kills += 1
            counts.half_written += any(place.rglob(".ensbridge-*.tmp"))
            child = _start(training, reference, place, draws if counts.kills < kills else None, counts)
        if child.code != 0:
            counts.other_ends.append(
                f"run {counts.runs} of {seed} ended with {child.code}: {child.said()[-500:]}"
            )
        counts.weights_differ += weights_in(place) != reference.weights
        counts.scores_differ += scores_in(place) != reference.scores
        shutil.rmtree(place)
    return vars(counts)


def _start(
    training: Training, reference: Reference, place: Path, draws: random.Random | None, counts: Counts
) -> Child:
    """Start a training, or resume it, and kill it at a moment that is drawn, unless it ends before."""
    operation = None
    if draws and draws.random() < 0.5:
        operation = draws.randrange(reference.operations)
    child = fork(partial(_train, training, place, operation), place / "output.txt")
    if not draws or operation is not None:
        child.wait()
        counts.at_file_operations += child.code == -signal.SIGKILL
    elif not child.wait(draws.uniform(0, reference.seconds)):
        counts.by_clock += child.kill() == -signal.SIGKILL
    return child


def _train(training: Training, folder: Path, operation: int | None, counted: Path | None = None) -> None:
    """Train in this process."""
    seen = watched(folder, operation, partial(training.run, folder))
    if counted is not None:
        counted.write_text(str(seen))


def watched(
    folder: Path, operation: int | None, work: Callable[[], object], send: int = signal.SIGKILL
) -> int:
    """Do some work, with a signal to this process before its n-th change of a file there; count those."""
    seen, inside = 0, str(folder)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in EVENTS or not str(arguments[0]).startswith(inside):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        seen += 1
        if seen - 1 == operation:
            os.kill(os.getpid(), send)

    sys.addaudithook(watch)
    work()
    return seen
