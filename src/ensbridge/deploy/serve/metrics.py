"""What `/metrics` tells Prometheus. Each server has a registry of its own."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The server's counters."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        seconds = "From a request's first byte to its answer"
        self.requests = counter("ensbridge_requests", "Answered requests", ["route", "status"])
        self.seconds = histogram("ensbridge_request_seconds", seconds, ["route"], buckets=SECONDS)
        self.images = counter("ensbridge_images", "Images that were predicted", ["model"])
        self.batches = histogram("ensbridge_batch_images", "Images in a batch", ["model"], buckets=IMAGES)
        self.reloads = counter("ensbridge_reloads", "Times a model was loaded again", ["model", "success"])
        self.bodies = gauge("ensbridge_body_bytes", "Bytes of requests that are read or waiting")
        self.queues = gauge("ensbridge_queue_images", "Images that wait", ["model"])
        ProcessCollector(registry=self.registry)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def batch(self, model: str, images: int) -> None:
        """Count a batch."""
        self.images.labels(model).inc(images)
        self.batches.labels(model).observe(images)

    def reloaded(self, model: str, success: bool) -> None:
        """Count a reload."""
        self.reloads.labels(model, str(success).lower()).inc()
