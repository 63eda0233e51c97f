"""Commands that meet a full disk, a read-only folder or each other: one clear sentence, and nothing lost."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from faults.commands import Command, lost_since, make_commands, newest_only, snapshot
from faults.disks import AbstractDisk, open_disk
from faults.kills import watched
from faults.processes import Child, fork, in_parallel

Row = dict[str, Any]
FAULTS = ("disk full", "read-only folder", "two at once, the first stopped midway", "two started together")
FRESH, BEGUN, FINISHED = "fresh", "begun", "finished"


def storage_faults(trials: int, seed: int, folder: Path, say: Callable[[str], None]) -> tuple[list[Row], str]:
    """A row of counts for every fault and command, and how disks were made to fail."""
    commands = make_commands(folder / "inputs")
    say(f"commands: {', '.join(work.name for work in commands)}; {trials} trials of each with each fault")
    lanes = [
        partial(_lane, work, trials, f"{seed}:{work.name}", folder / f"disk-{number}")
        for number, work in enumerate(commands)
    ]
    results = in_parallel(lanes, folder / "lanes")
    rows = [row for result in results for row in result["rows"]]
    return sorted(rows, key=lambda row: FAULTS.index(row["fault"])), results[0]["way"]


def _lane(work: Command, trials: int, seed: str, folder: Path) -> Row:
    """All faults of one command, on a disk of this process."""
    disk, draws = open_disk(folder), random.Random(seed)
    rows = []
    for fault, trial in zip(FAULTS, (_full_disk, _read_only, _stopped, _together), strict=True):
        row: Row = {"fault": fault, "command": work.name, "trials": 0, "refused": 0, "not_met": 0}
        row |= {"lost": [], "left_behind": 0, "other_ends": [], "results_differ": []}
        for number in range(trials):
            row["trials"] += 1
            trial(_Trial(work, disk, draws, row, f"{seed}, {fault}, trial {number}"))
        rows.append(row)
    return {"rows": rows, "way": disk.way}


class _Trial:
    """One command in one folder that meets one fault; what is seen goes into a row of counts."""

    def __init__(self, work: Command, disk: AbstractDisk, draws: random.Random, row: Row, name: str) -> None:
        self.work, self.disk, self.draws, self.row, self.name = work, disk, draws, row, name
        self.folder = work.prepare(disk.folder / "work")
        self.before: dict[str, str] = {}
        self.temporary: set[Path] = set()  # files that a kill left before the fault came

    def begin(self, state: str) -> None:
        """Bring the folder into a state: as it is, killed at a file operation, or finished."""
        if state == BEGUN:
            self.start(self.draws.randrange(self.work.operations)).wait()
        elif state == FINISHED:
            self.start().wait()
        self.before, self.temporary = snapshot(self.folder), self._temporary()

    def start(
        self, operation: int | None = None, send: int = signal.SIGKILL, output: str = "output.txt"
    ) -> Child:
        """The command in a child, which gets a signal at a change of a file, if one is given."""

        def work() -> None:
            self.disk.enter()
            watched(self.folder, operation, partial(self.work.run, self.folder), send)

        return fork(work, self.disk.folder.parent / f"{self.disk.folder.name}-{output}")

    def check(self, child: Child, words: tuple[str, ...]) -> None:
        """Count how a command ended that met the fault, and what it left."""
        child.wait()
        if child.code == 0:
            self.row["not_met"] += 1
        elif child.code == 2 and is_sentence(child.said()) and any(word in child.said() for word in words):
            self.row["refused"] += 1
        else:
            self.row["other_ends"].append(f"{self.name}: {child.code}, {child.said()[-800:]}")

    def _temporary(self) -> set[Path]:
        return {*self.folder.rglob(".ensbridge-*.tmp")}

    def mend(self) -> None:
        """Take the fault away, see what is lost, and run the command to its end."""
        lost = lost_since(self.before, self.folder, self.work.reference)
        self.row["lost"] += [f"{self.name}: {name}" for name in lost]
        self.row["left_behind"] += len(self._temporary() - self.temporary)
        self.disk.mend()
        self.finish()

    def finish(self) -> None:
        """Run the command to its end and compare what it made."""
        child = self.start()
        child.wait()
        if child.code != 0:
            self.row["other_ends"].append(f"{self.name}, run again: {child.code}, {child.said()[-800:]}")
        now, then = newest_only(snapshot(self.folder)), newest_only(self.work.reference)
        differ = sorted(name for name in {*now, *then} if now.get(name) != then.get(name))
        self.row["results_differ"] += [f"{self.name}: {name}" for name in differ]


def is_sentence(said: str) -> bool:
    """Whether a command said one line, as its errors are."""
    return said.startswith("ensbridge: ") and said.count("\n") == 1 and said.endswith("\n")


def _full_disk(trial: _Trial) -> None:
    trial.begin(trial.draws.choice((FRESH, BEGUN)))
    left = trial.work.size - sum(path.stat().st_size for path in trial.folder.rglob("*") if path.is_file())
    trial.disk.fill(trial.draws.randrange(max(1, left)))
    trial.check(trial.start(), ("disk is full", "may not be so large"))
    trial.mend()


def _read_only(trial: _Trial) -> None:
    trial.begin(trial.draws.choice((FRESH, BEGUN, FINISHED)))
    trial.disk.make_read_only()
    trial.check(trial.start(), ("read-only", "cannot be made", "cannot be written"))
    trial.mend()


def _stopped(trial: _Trial) -> None:
    """A second process comes while the first is stopped before a change of a file; then the first ends."""
    trial.begin(FRESH)
    first = trial.start(trial.draws.randrange(trial.work.operations), signal.SIGSTOP, "first.txt")
    stopped = first.wait_stopped()
    trial.check(trial.start(), ("in use by another process",))
    if stopped:
        os.kill(first.pid, signal.SIGCONT)
    first.wait()
    if first.code != 0 and not (first.code == 2 and is_sentence(first.said())):
        trial.row["other_ends"].append(f"{trial.name}, the first: {first.code}, {first.said()[-800:]}")
    trial.finish()


def _together(trial: _Trial) -> None:
    """Two processes start at once: one does the work, the other is refused or comes after it."""
    trial.begin(trial.draws.choice((FRESH, BEGUN)))
    pair = trial.start(output="first.txt"), trial.start(output="second.txt")
    for child in pair:
        child.wait()
    trial.check(pair[pair[1].code == 2], ("in use by another process",))
    if 0 not in (pair[0].code, pair[1].code):
        trial.row["other_ends"].append(
            f"{trial.name}: neither ended well, {[child.said() for child in pair]}"
        )
    trial.finish()
