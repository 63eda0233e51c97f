"""Work in two threads of one process.

Small networks are trained faster by one thread each than by two threads each, and nothing is left behind
when the process is killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

from ensbridge.utils.progress import Advance, StepCallback, count_steps

WORKERS = 2
Work = Callable[[StepCallback], None]  # work that reports its steps


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


def side_by_side(jobs: Sequence[Work], advance: Advance, workers: int = WORKERS) -> None:
    """Run jobs, so many at a time; the first error, or an interrupt, stops them all."""
    stop = threading.Event()

    def checked_advance(steps: int) -> None:
        if stop.is_set():
            raise _Stopped("another part of the run stopped")
        advance(steps)

    def run(job: Work) -> None:
        if stop.is_set():  # a worker is free before the others stop
            return
        torch.set_num_threads(1)  # OpenMP counts threads for each calling thread
        try:
            job(count_steps(checked_advance))
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
