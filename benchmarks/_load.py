"""A closed loop of HTTP clients, light enough to share two cores with the server that it loads."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

Check = Callable[[int, int, bytes], None]  # the request's number, the status, the body


@dataclass
class Load:
    """What a closed loop saw."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    cpu: float = 0.0  # seconds of the server's process meanwhile

    @property
    def throughput(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile(self, q: float) -> float:
        """A quantile of the latencies, in milliseconds."""
        return 1000 * float(np.quantile(self.latencies, q))


def infer_request(model: str, images: np.ndarray) -> bytes:
    """A whole HTTP request of the protocol v2 with binary tensors in and out."""
    tensor = {"name": "images", "shape": list(images.shape), "datatype": "FP32"}
    head = json.dumps(
        {
            "inputs": [{**tensor, "parameters": {"binary_data_size": images.nbytes}}],
            "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
        }
    ).encode()
    return raw_request(
        f"/v2/models/{model}/infer", head + images.tobytes(), f"Inference-Header-Content-Length: {len(head)}"
    )


def raw_request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def closed_loop(
    base: str, requests: Sequence[bytes], clients: int, seconds: float, check: Check | None = None
) -> Load:
    """Clients that each send the next request when they have the answer to their last."""
    address, load = urlsplit(base), Load()
    begun = time.perf_counter()

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while time.perf_counter() - begun < seconds:
            at = number % len(requests)
            number += clients
            sent = time.perf_counter()
            writer.write(requests[at])
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: (\d+)", head)
            assert length is not None, head
            body = await reader.readexactly(int(length[1]))
            load.latencies.append(time.perf_counter() - sent)
            if check is not None:
                check(at, int(head[9:12]), body)
            else:
                assert head[9:12] == b"200", (head, body)
            if b"connection: close" in head.lower():
                writer.close()
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    load.seconds = time.perf_counter() - begun
    return load


def cpu_seconds(pid: int) -> float:
    """The time that a process has had on the cores so far, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A process that prints the address where it serves; the address and the process's number."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        yield found[0], process.pid
    finally:
        process.terminate()
        process.wait(timeout=20)
