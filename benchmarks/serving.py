"""Throughput and latency of `ensbridge serve` beside servers of one network, under a closed loop.

    python benchmarks/serving.py [--backend onnxruntime] [--clients 32] [--rounds 8] [--seconds 5]

Three servers are up at once and loaded in turn, in a new order each round, one image a request:

- the model (source and bridge), by `ensbridge serve`;
- one network (the source alone, saved as a model without bridges), by `ensbridge serve`: the same stack;
- one network behind a bare FastAPI route: no batching, no limits, one image a call.

Ratios are of the same round; their median stands beside their range. It prints the table of serving.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import uvicorn
from _load import Load, closed_loop, infer_request, raw_request, server
from fastapi import FastAPI, Request, Response

import ensbridge as eb
from ensbridge.deploy.serve.backends import build_backend
from ensbridge.deploy.serve.run import address, bind

MODEL = "zoo:cifar10"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="eager", help="eager, compiled or onnxruntime (eager)")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each server in each round (5)")
    parser.add_argument("--bare", metavar="FOLDER", help=argparse.SUPPRESS)  # runs the bare server
    chosen = parser.parse_args()
    if chosen.bare:
        serve_bare(chosen.bare, chosen.backend)
        return
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / "one"
        fast = eb.load(MODEL)
        eb.FastEnsemble(fast.source, image_shape=fast.image_shape, class_names=fast.class_names).save(one)
        serve = ["-m", "ensbridge", "serve", "--port", "0", "--backend", chosen.backend]
        bare = [__file__, "--bare", str(one), "--backend", chosen.backend]
        with server([*serve, f"net={MODEL}"]) as a, server([*serve, f"net={one}"]) as b, server(bare) as c:
            measure(chosen, {"model": a[0], "one network": b[0], "one network, bare": c[0]})


def measure(chosen: argparse.Namespace, addresses: dict[str, str]) -> None:
    images = np.random.default_rng(0).random((64, 1, 3, 32, 32), dtype=np.float32)
    protocol = [infer_request("net", image) for image in images]
    requests = dict.fromkeys(addresses, protocol)
    requests["one network, bare"] = [raw_request("/infer", image.tobytes()) for image in images]
    rounds: list[dict[str, Load]] = []
    order, draws = list(addresses), random.Random(0)
    for number in range(-1, chosen.rounds):
        draws.shuffle(order)
        seconds = chosen.seconds if number >= 0 else 1.0  # the first warms up and does not count
        loads = {
            name: asyncio.run(closed_loop(addresses[name], requests[name], chosen.clients, seconds))
            for name in order
        }
        print(
            f"round {number + 1}",
            {name: f"{load.throughput:.0f}/s" for name, load in loads.items()},
            file=sys.stderr,
        )
        if number >= 0:
            rounds.append(loads)
    print(table(rounds, list(addresses)))


def table(rounds: list[dict[str, Load]], names: list[str]) -> str:
    lines = [
        "| server | images/s | median ms | p99 ms | throughput ratio (range) | p99 ratio (range) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        loads = [loads[name] for loads in rounds]
        figures = [[load.throughput, load.quantile(0.5), load.quantile(0.99)] for load in loads]
        throughput, median, p99 = np.median(figures, axis=0)
        base = [loads["one network"] for loads in rounds]
        speed = [load.throughput / other.throughput for load, other in zip(loads, base, strict=True)]
        tail = [load.quantile(0.99) / other.quantile(0.99) for load, other in zip(loads, base, strict=True)]
        lines.append(
            f"| {name} | {throughput:.0f} | {median:.0f} | {p99:.0f} | {spread(speed)} | {spread(tail)} |"
        )
    return "\n".join(lines)


def spread(ratios: list[float]) -> str:
    return f"×{np.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"


def serve_bare(folder: str, backend: str) -> None:
    """One network behind one route: the least that FastAPI and uvicorn can do."""
    run = build_backend(backend, eb.load(folder), torch.zeros(1, 3, 32, 32), 16)  # type: ignore[arg-type]
    app, thread = FastAPI(), ThreadPoolExecutor(1)

    async def infer(request: Request) -> Response:
        image = torch.frombuffer(bytearray(await request.body()), dtype=torch.float32).view(1, 3, 32, 32)
        both = await asyncio.get_running_loop().run_in_executor(thread, run, image)
        return Response(both[:, :10].numpy().tobytes(), media_type="application/octet-stream")

    app.add_api_route("/infer", infer, methods=["POST"])
    taken = bind("127.0.0.1", 0)
    print(f"serving on {address(taken)}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[taken])


if __name__ == "__main__":
    main()
