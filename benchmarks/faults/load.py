"""Load at saturation with malformed requests among the good ones: nothing lost or mixed up, memory flat.

A server of the shipped model takes a closed loop of requests. Each good answer is compared with a direct call
of the loaded model, each malformed request must get a 4xx, and the server's memory is read each second.
"""

from __future__ import annotations

import asyncio
import random
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from _load import closed_loop, infer_request, raw_request, server

import ensbridge as eb

MODEL, IMAGES = "zoo:cifar10", 256
TOLERANCE = 1e-5  # of a logit's scale, at least 1
GROWTH = 0.10  # of memory, from the second quarter of the run to the last


def serve_under_load(seconds: float, clients: int, malformed: float) -> dict[str, object]:
    """Load a server and count what was wrong."""
    images = np.random.default_rng(0).random((IMAGES, 1, 3, 32, 32), dtype=np.float32)
    with torch.inference_mode():
        expected = eb.load(MODEL)(torch.from_numpy(images[:, 0])).numpy()
    requests, bad = mixed([infer_request("net", image) for image in images], malformed)
    counts = {"good": 0, "refused": 0, "wrong": 0, "failed": 0}

    def check(at: int, status: int, body: bytes) -> None:
        if at in bad:
            counts["refused" if 400 <= status < 500 else "failed"] += 1
            return
        if status != 200:
            counts["failed"] += 1
            return
        logits = np.frombuffer(body[-4 * expected.shape[1] :], "<f4")
        truth = expected[at % IMAGES]
        near = np.abs(logits - truth).max() <= TOLERANCE * max(1.0, np.abs(truth).max())
        counts["good" if near else "wrong"] += 1

    command = ["-m", "ensbridge", "serve", f"net={MODEL}", "--port", "0"]
    with server(command) as (base, pid):
        memory: list[int] = []
        load = asyncio.run(_watched(closed_loop(base, requests, clients, seconds, check), pid, memory))
    quarter = max(1, len(memory) // 4)
    before, after = np.median(memory[quarter : 2 * quarter] or memory), np.median(memory[-quarter:])
    answered = sum(counts.values())
    passed = (
        counts["wrong"] == counts["failed"] == 0 and answered == len(load.latencies) and counts["good"] > 0
    )
    return {
        "seconds": round(load.seconds, 1),
        "requests": len(load.latencies),
        **counts,
        "images_per_second": round(counts["good"] / load.seconds, 1),
        "p99_ms": round(load.quantile(0.99), 1),
        "memory_mb": [round(float(value) / 1e6, 1) for value in (before, after, max(memory))],
        "passed": bool(passed and after <= (1 + GROWTH) * before),
    }


def mixed(good: list[bytes], malformed: float) -> tuple[list[bytes], set[int]]:
    """Ten rounds of the good requests, a share of them replaced by malformed ones; which those are."""
    draws = random.Random(0)
    requests = good * 10
    bad = set(draws.sample(range(len(requests)), round(malformed * len(requests))))
    for at in bad:
        requests[at] = malform(requests[at], draws)
    return requests, bad


def malform(request: bytes, draws: random.Random) -> bytes:
    """A request that keeps to HTTP and is wrong in one of many ways."""
    head, _, body = request.partition(b"\r\n\r\n")
    path = head.split()[1].decode()
    length = next(line for line in head.decode().split("\r\n") if line.startswith("Inference-Header"))
    noise = draws.randbytes(draws.randrange(1, 2000))
    choices = [
        raw_request(path, noise),
        raw_request(path, noise, length),
        raw_request(path, body[: draws.randrange(1, len(body))], length),
        raw_request(path, body + noise, length),
        raw_request(path.replace("net", "other"), body, length),
        raw_request(path, body.replace(b"images", b"pixels"), length),
        raw_request(path, body.replace(b"[1, 3, 32, 32]", b"[9, 3, 32, 32]"), length),
        raw_request(path, body[:-4] + b"\x00\x00\xc0\x7f", length),  # not a number
        raw_request(path, zlib.compress(body), length, "Content-Encoding: gzip"),
        raw_request("/v1/predict", noise, "Content-Type: multipart/form-data; boundary=x"),
        raw_request("/v1/predict", noise, "Content-Type: application/json"),
    ]
    return draws.choice(choices)


async def _watched(load, pid: int, memory: list[int]):
    """The load's result, with the process's resident memory read each second meanwhile."""
    task = asyncio.ensure_future(load)
    while not task.done():
        memory.append(resident(pid))
        await asyncio.wait([task], timeout=1)
    return task.result()


def resident(pid: int) -> int:
    """Bytes of memory of a process, on Linux."""
    if not sys.platform.startswith("linux"):
        return 0
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096
