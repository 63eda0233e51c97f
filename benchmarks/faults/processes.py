"""Children forked from a process that has imported everything already, so that each costs milliseconds."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

TIMEOUT = 300.0  # seconds after which a child that should have ended long ago is given up
LANE_TIMEOUT = 1800.0  # of one that itself waits for children


@dataclass
class Child:
    """A forked process; `code` is its exit code, or minus the signal that ended it, once it has ended."""

    pid: int
    output: Path  # what it printed
    code: int | None = None

    def ended(self) -> bool:
        """Whether it has ended; never waits."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def wait(self, seconds: float = TIMEOUT) -> bool:
        """Wait so long for its end; whether it came."""
        until = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
        return True

    def wait_stopped(self) -> bool:
        """Wait until it stops itself; False where it ends instead."""
        while self.code is None:
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                return True
            self.code = os.waitstatus_to_exitcode(status)
        return False

    def kill(self) -> int:
        """SIGKILL, where it still runs; its exit code."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
        assert self.code is not None
        return self.code

    def said(self) -> str:
        """Everything it printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def fork(work: Callable[[], object], output: Path) -> Child:
    """A child that does the work, with its standard output and error in a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _work_and_exit(work, output)
    return Child(pid, output)


def _work_and_exit(work: Callable[[], object], output: Path) -> NoReturn:
    code = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
        work()
        code = 0
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # nothing of the parent's is to run here at the end


def in_parallel(works: Sequence[Callable[[], Any]], folder: Path, lanes: int = 2) -> list[Any]:
    """What functions return, each run in a child, so many at a time; they return what JSON holds."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting, running, done = list(enumerate(works)), dict[int, Child](), dict[int, Any]()
    until = time.monotonic() + LANE_TIMEOUT
    while waiting or running:
        while waiting and len(running) < lanes:
            number, work = waiting.pop(0)
            result = folder / f"result-{number}.json"
            running[number] = fork(
                lambda work=work, result=result: result.write_text(json.dumps(work())),
                folder / f"output-{number}.txt",
            )
        for number, child in list(running.items()):
            if child.ended():
                if child.code != 0:
                    raise RuntimeError(f"a part of the soak itself failed:\n{child.said()}")
                done[number] = json.loads((folder / f"result-{number}.json").read_text())
                del running[number]
        if time.monotonic() > until:
            said = [(child.kill(), child.said()) for child in running.values()]
            raise RuntimeError(f"a part of the soak itself did not end: {said}")
        time.sleep(0.01)
    return [done[number] for number in range(len(works))]


def command(*words: object) -> None:
    """Run `ensbridge …` in this process; an exit code other than 0 leaves by SystemExit."""
    from ensbridge import cli

    sys.argv = ["ensbridge", *map(str, words)]
    try:
        cli.main()
    except SystemExit as asked:
        if asked.code:
            raise
