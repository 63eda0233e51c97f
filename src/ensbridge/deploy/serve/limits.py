"""What a request may ask for, how work is batched, and how a request is refused. No FastAPI here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

GRACE = 9.0  # seconds after SIGTERM in which accepted requests are finished; the process ends within 10


@dataclass(frozen=True)
class Limits:
    """Bounds on a request and on what waits; beyond each a client gets a 4xx or 503 with one sentence.

    >>> Limits().body
    33554432
    """

    body: int = 32 * 2**20  # bytes of a request
    bodies: int = 512 * 2**20  # bytes of all requests together that are read or waiting
    images: int = 256  # in a request
    pixels: int = 2**24  # of an image file, before it is decoded
    request_pixels: int = 2**28  # of all image files of a request
    json: int = 4 * 2**20  # bytes of an inference request's JSON, which takes many times that to parse
    queue: int = 512  # images that wait for a model
    seconds: float = 8.0  # from a request's first byte to its answer; below GRACE, so that none is cut
    connections: int = 1024
    batch: int = 16  # images that run together
    wait_ms: float = 2.0  # how long the first of a batch waits for others

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= (0 if field.name == "wait_ms" else 1):
                raise ValueError(f"{field.name.replace('_', '-')} is {value}; it must be at least 1")
        if not self.seconds < GRACE:
            raise ValueError(
                f"seconds is {self.seconds:g}; it must be below {GRACE:g}, so that a server that "
                "is told to end can finish its requests"
            )
        if self.wait_ms > 1000 * self.seconds:
            raise ValueError(f"wait-ms is {self.wait_ms:g}; it must be within a request's {self.seconds:g} s")


class Refused(Exception):
    """A request that is not answered: its HTTP status and one sentence for the client."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, dict(headers or {})


def busy(status: int, sentence: str) -> Refused:
    """A refusal that says to come again."""
    return Refused(status, sentence, {"Retry-After": "1"})
