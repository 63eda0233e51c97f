"""Jobs in two threads: all of them run, and none begins once one has stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ensbridge.experiments.runner import side_by_side
from ensbridge.utils.progress import StepCallback


def test_all_jobs_run_and_their_steps_are_counted() -> None:
    done: list[int] = []

    def job(number: int) -> Callable[[StepCallback], None]:
        def run(progress: StepCallback) -> None:
            for step in range(1, number + 1):
                progress(step, number, 0.0)
            done.append(number)

        return run

    steps: list[int] = []
    side_by_side([job(number) for number in range(1, 6)], steps.append)
    assert sorted(done) == [1, 2, 3, 4, 5]
    assert sum(steps) == 15


def beside(progress: StepCallback) -> None:
    """Take steps until told to stop."""
    for step in range(1, 10**7):
        progress(step, 10**7, 0.0)
    raise AssertionError("it was not stopped")


@pytest.mark.parametrize("workers", [1, 2])
def test_no_job_begins_after_one_has_failed(workers: int) -> None:
    """The worker of a failed job is free at once: it must not take the next before the others hear of it."""
    begun: list[int] = []

    def fail(progress: StepCallback) -> None:
        raise TimeoutError("time is up")

    for _ in range(50):
        with pytest.raises(TimeoutError, match="time is up"):
            side_by_side(
                [fail, *[beside] * (workers - 1), lambda progress: begun.append(1)],
                lambda steps: None,
                workers,
            )
    assert not begun


@pytest.mark.parametrize("first", [True, False])
def test_an_error_stops_the_job_beside_it_and_is_the_one_that_is_raised(first: bool) -> None:
    def fail(progress: StepCallback) -> None:
        raise ValueError("the reason")

    for _ in range(50):
        with pytest.raises(ValueError, match="the reason"):
            side_by_side([fail, beside] if first else [beside, fail], lambda steps: None)


def test_of_several_errors_the_first_jobs_is_raised() -> None:
    meet = threading.Barrier(2, timeout=10)

    def fail(word: str) -> Callable[[StepCallback], None]:
        def run(progress: StepCallback) -> None:
            meet.wait()
            raise ValueError(word)

        return run

    for _ in range(50):
        with pytest.raises(ValueError, match="one"):
            side_by_side([fail("one"), fail("two")], lambda steps: None)
