"""Requests that arrive within a few milliseconds of each other run as one batch, all in one thread.

Only the event loop touches a `Batcher`; only the worker's thread runs models. Rows of a batch do not depend
on each other, and what fails is run again request by request: no request disturbs another.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ensbridge.deploy.serve.limits import Limits, busy

Outputs: TypeAlias = dict[str, Tensor]  # by name, each with one row an image
Compute: TypeAlias = Callable[[Tensor], Outputs]


class Worker:
    """One thread that runs what it is given in turn; compiled and captured models never see another."""

    def __init__(self, name: str = "compute") -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        # A daemon, so that a call that never returns does not keep the process from ending.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns in the thread, or its exception."""
        future: Future[Any] = Future()
        self._tasks.put((future, partial(function, *arguments)))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, call = self._tasks.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)
            del call, future  # nothing of a request outlives it


@dataclass(eq=False)
class _Request:
    images: Tensor
    arrived: float
    future: asyncio.Future[Outputs]


class Batcher:
    """A queue before one computation: `await batcher(images)` gives the outputs of these images.

    With `merge=False` each request runs alone.
    """

    def __init__(
        self,
        compute: Compute,
        worker: Worker,
        limits: Limits,
        *,
        merge: bool = True,
        observe: Callable[[int], None] = lambda images: None,
    ) -> None:
        self._compute, self._worker, self._limits = compute, worker, limits
        self._merge, self._observe = merge, observe
        self._requests: deque[_Request] = deque()
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._ending = False
        self.waiting = 0  # images
        self.running = 0

    async def __call__(self, images: Tensor) -> Outputs:
        """The outputs of images (B, …); `Refused` with 429 where too many wait."""
        if self.waiting and self.waiting + len(images) > self._limits.queue:
            raise busy(
                429, f"{self.waiting} images are waiting, of at most {self._limits.queue}; try again later"
            )
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.done():
            self._wake, self._loop = asyncio.Event(), loop.create_task(self._serve())
        request = _Request(images, loop.time(), loop.create_future())
        self._requests.append(request)
        self.waiting += len(images)
        self._wake.set()
        try:
            return await request.future
        finally:
            if request in self._requests:  # whoever waited has gone
                self._requests.remove(request)
                self.waiting -= len(images)

    async def drain(self) -> None:
        """Answer all requests, then end; a late one is still answered, but nothing stays behind it."""
        self._ending = True
        self._wake.set()
        if self._loop is not None:
            await asyncio.wait([self._loop])

    async def _serve(self) -> None:
        while self._requests or not self._ending:
            requests = await self._next_batch()
            if not requests:
                continue
            self.running = sum(len(request.images) for request in requests)
            self._observe(self.running)
            try:
                results = await self._worker.run(self._run, [request.images for request in requests])
            finally:
                self.running = 0
            for request, result in zip(requests, results, strict=True):
                if request.future.done():  # its client has gone
                    continue
                if isinstance(result, Exception):
                    request.future.set_exception(result)
                else:
                    request.future.set_result(result)

    async def _next_batch(self) -> list[_Request]:
        """The requests that run next: after a few milliseconds, or as soon as they fill a batch."""
        while not self._requests:
            if self._ending:
                return []
            self._wake.clear()
            await self._wake.wait()
        due = self._requests[0].arrived + self._limits.wait_ms / 1000
        loop = asyncio.get_running_loop()
        while self._merge and self.waiting < self._limits.batch and (left := due - loop.time()) > 0:
            self._wake.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left)
        chosen: list[_Request] = []
        images = 0
        while self._requests and (
            not chosen or (self._merge and images + len(self._requests[0].images) <= self._limits.batch)
        ):
            request = self._requests.popleft()
            self.waiting -= len(request.images)
            if not request.future.done():
                chosen.append(request)
                images += len(request.images)
        return chosen

    def _run(self, requests: Sequence[Tensor]) -> list[Outputs | Exception]:
        """In the worker's thread: the outputs of each request, or why there are none for it."""
        try:
            outputs = self._in_parts(torch.cat(list(requests)))
            counts = [len(images) for images in requests]
            split = {name: rows.split(counts) for name, rows in outputs.items()}
            return [{name: rows[number] for name, rows in split.items()} for number in range(len(requests))]
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [result for images in requests for result in self._run([images])]

    def _in_parts(self, images: Tensor) -> Outputs:
        """A request of more images than a batch may have, batch by batch."""
        if not self._merge or len(images) <= self._limits.batch:
            return self._compute(images)
        parts = [self._compute(part) for part in images.split(self._limits.batch)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
