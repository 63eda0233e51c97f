"""The queue before a model: batches, their bounds, and requests that fail or are given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _tiny
from ensbridge.deploy.serve import backends
from ensbridge.deploy.serve.batching import Batcher, Outputs, Worker
from ensbridge.deploy.serve.limits import Limits, Refused


class Doubling:
    """A computation that waits until it is let go, and fails on images of -1."""

    def __init__(self) -> None:
        self.go, self.batches, self.threads = threading.Event(), [], set()

    def __call__(self, images: Tensor) -> Outputs:
        assert self.go.wait(10)
        self.batches.append(len(images))
        self.threads.add(threading.current_thread().name)
        if (images == -1).any():
            raise RuntimeError("a kernel failed")
        return {"logits": 2 * images}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def images(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def batcher(compute: Doubling, merge: bool = True, **limits: Any) -> Batcher:
    return Batcher(
        compute, Worker(), Limits(**{"batch": 4, "queue": 6, "wait_ms": 20, **limits}), merge=merge
    )


def test_requests_share_batches_and_each_gets_its_own_rows() -> None:
    async def test() -> None:
        compute = Doubling()
        queue = batcher(compute)
        compute.go.set()
        answers = await asyncio.gather(*(queue(images(value, -2 * value)) for value in range(1, 4)))
        for value, outputs in enumerate(answers, start=1):
            assert outputs["logits"].flatten().tolist() == [2 * value, -4 * value]
        assert compute.batches == [4, 2]
        assert compute.threads == {"compute"}

    run(test())


def test_a_request_of_many_images_runs_in_parts_and_one_that_must_not_be_merged_alone() -> None:
    async def test() -> None:
        compute = Doubling()
        compute.go.set()
        outputs = await batcher(compute)(images(*range(9)))
        assert outputs["logits"].flatten().tolist() == [2 * value for value in range(9)]
        assert compute.batches == [4, 4, 1]
        compute.batches.clear()
        alone = batcher(compute, merge=False, queue=10)
        await asyncio.gather(alone(images(*range(6))), alone(images(1)))
        assert compute.batches == [6, 1]

    run(test())


def test_a_full_queue_refuses_and_what_was_accepted_is_answered() -> None:
    async def test() -> None:
        compute = Doubling()
        queue = batcher(compute, wait_ms=0)
        first = asyncio.ensure_future(queue(images(0)))
        while not queue.running:
            await asyncio.sleep(0.001)
        waiting = [asyncio.ensure_future(queue(images(value, value))) for value in (1, 2, 3)]
        await asyncio.sleep(0)
        assert queue.waiting == 6
        with pytest.raises(Refused) as refused:
            await queue(images(4))
        assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
        compute.go.set()
        answers = await asyncio.gather(first, *waiting)
        assert [int(outputs["logits"][0]) for outputs in answers] == [0, 2, 4, 6]
        await queue.drain()
        assert queue.waiting == 0

    run(test())


def test_a_request_that_fails_leaves_the_others_of_its_batch_alone() -> None:
    async def test() -> None:
        compute = Doubling()
        compute.go.set()
        queue = batcher(compute)
        good, bad, other = await asyncio.gather(
            queue(images(1)), queue(images(-1)), queue(images(2)), return_exceptions=True
        )
        assert isinstance(bad, RuntimeError)
        assert isinstance(good, dict)
        assert isinstance(other, dict)
        assert [int(good["logits"]), int(other["logits"])] == [2, 4]

    run(test())


def test_a_request_that_is_given_up_is_never_run() -> None:
    async def test() -> None:
        compute = Doubling()
        queue = batcher(compute, wait_ms=0)
        first = asyncio.ensure_future(queue(images(1)))
        while not queue.running:
            await asyncio.sleep(0.001)
        second, third = (asyncio.ensure_future(queue(images(value))) for value in (2, 3))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        assert queue.waiting == 1
        compute.go.set()
        assert [int((await each)["logits"]) for each in (first, third)] == [2, 6]
        assert compute.batches == [1, 1]

    run(test())


def test_a_queue_that_has_ended_still_answers_and_leaves_nothing_running() -> None:
    async def test() -> None:
        compute = Doubling()
        compute.go.set()
        queue, before = batcher(compute, wait_ms=0), asyncio.all_tasks()
        waiting = [asyncio.ensure_future(queue(images(value))) for value in range(5)]
        await asyncio.sleep(0)
        await queue.drain()
        assert [int((await each)["logits"]) for each in waiting] == [0, 2, 4, 6, 8]
        assert int((await queue(images(7)))["logits"]) == 14
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == before

    run(test())


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"queue": -1}, {"seconds": 9.0}, {"wait_ms": 1e9}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    (value,) = wrong.values()
    with pytest.raises(ValueError, match=f"{value:g}".replace("+", r"\+")):
        Limits(**wrong)


def test_a_captured_graph_answers_every_batch_up_to_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []

    def capture(model: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
        """Without a GPU: the model, for images of that shape alone."""
        captured.append(len(images))

        def run(given: Tensor) -> Tensor:
            assert given.shape == images.shape
            with torch.no_grad():
                return model(given)

        return run

    monkeypatch.setattr(backends, "capture", capture)
    fast = _tiny.pyramids()
    example = _tiny.images(1)
    run = backends.build_backend("cuda-graph", fast, example, 21)
    assert captured == [1, 4, 16, 21]
    for count in range(1, 22):
        images = _tiny.images(count, seed=count)
        with torch.no_grad():
            expected = torch.cat(fast.with_source(images), -1)
        torch.testing.assert_close(run(images), expected, rtol=1e-4, atol=1e-5)
