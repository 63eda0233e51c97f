"""Work in two threads of one process, and who hears of its progress.

Small networks are trained faster by one thread each than by two threads each, and nothing is left behind
when the process is killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol

import torch

from ensbridge.training.fit import Progress

WORKERS = 2
Work = Callable[[Progress], None]  # work that reports its steps


class Reporter(Protocol):
    """Hears how far a run is."""

    def stage(self, name: str, total: int, unit: str = "steps") -> Callable[[int], None]:
        """A stage of so many steps begins; the answer is called with the number of steps just done."""
        ...


class Silent:
    """A reporter that says nothing."""

    def stage(self, name: str, total: int, unit: str = "steps") -> Callable[[int], None]:
        """Begin a stage that nobody watches."""
        return lambda steps: None


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread each, so that numbers do not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Stopped(InterruptedError):
    """Ends a job because of another's error, or of an interrupt."""


def side_by_side(jobs: Sequence[Work], advance: Callable[[int], None], workers: int = WORKERS) -> None:
    """Run jobs, so many at a time; the first error, or an interrupt, stops them all."""
    stop = threading.Event()

    def run(job: Work) -> None:
        if stop.is_set():  # a worker is free before the others hear why
            return
        torch.set_num_threads(1)  # OpenMP counts threads for each calling thread
        try:
            job(_counted(advance, stop))
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = [pool.submit(run, job) for job in jobs]
            wait(futures)  # an error ends all of them
            errors = [error for future in futures if (error := future.exception())]
            for error in errors:  # in the order of their jobs
                if not isinstance(error, _Stopped):
                    raise error
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _counted(advance: Callable[[int], None], stop: threading.Event) -> Progress:
    """A progress callback that reports steps as they come, also after a resumed start."""
    last = 0

    def progress(step: int, total: int, loss: float) -> None:
        nonlocal last
        if stop.is_set():
            raise _Stopped("another part of the run stopped")
        advance(step - last if step > last else step)
        last = step

    return progress
