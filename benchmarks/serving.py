"""Throughput and latency of `ensbridge serve` beside servers of one network, under a closed loop.

    python benchmarks/serving.py [--backend onnxruntime] [--clients 32] [--rounds 24] [--seconds 2]

Three servers are up at once and loaded in turn, in a new order each round, one image a request:

- the model (source and bridge), by `ensbridge serve`;
- one network (the source alone, saved as a model without bridges), by `ensbridge serve`: the same stack;
- one network behind a bare FastAPI route: no batching, no limits, one image a call.

Ratios are of the same round; beside their median stands its 95 % interval. On a machine that others use too,
the server's own CPU time an image says more than the throughput. It prints the tables of serving.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import torch
import uvicorn
from _load import Load, closed_loop, cpu_seconds, infer_request, raw_request, server
from fastapi import FastAPI, Request, Response

import ensbridge as eb
from ensbridge.deploy.benchmark.timing import median_interval
from ensbridge.deploy.serve.backends import build_backend
from ensbridge.deploy.serve.run import address, bind

MODEL = "zoo:cifar10"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="eager", help="eager, compiled or onnxruntime (eager)")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each server in each round (2)")
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
            measure(chosen, {"model": a, "one network": b, "one network, bare": c})


def measure(chosen: argparse.Namespace, servers: dict[str, tuple[str, int]]) -> None:
    images = np.random.default_rng(0).random((64, 1, 3, 32, 32), dtype=np.float32)
    protocol = [infer_request("net", image) for image in images]
    requests = dict.fromkeys(servers, protocol)
    requests["one network, bare"] = [raw_request("/infer", image.tobytes()) for image in images]
    rounds: list[dict[str, Load]] = []
    order, draws = list(servers), random.Random(0)
    for number in range(-1, chosen.rounds):
        draws.shuffle(order)
        loads = {}
        for name in order:
            address, pid = servers[name]
            before = cpu_seconds(pid)
            loads[name] = asyncio.run(closed_loop(address, requests[name], chosen.clients, chosen.seconds))
            loads[name].cpu = cpu_seconds(pid) - before
        said = {name: f"{load.throughput:.0f}/s" for name, load in loads.items()}
        print(f"round {number + 1}", said, file=sys.stderr)
        if number >= 0:  # the first warms up
            rounds.append(loads)
    print(table(rounds, list(servers)))


def table(rounds: list[dict[str, Load]], names: list[str]) -> str:
    """Medians of the rounds; ratios to one network in the same round, with their median's 95 % interval."""
    measures = [
        lambda load: load.throughput,
        lambda load: load.quantile(0.5),
        lambda load: load.quantile(0.99),
        lambda load: 1000 * load.cpu / len(load.latencies),
    ]
    lines = [
        "| server | images/s | median ms | p99 ms | CPU ms an image | throughput × | p99 × | CPU × |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        figures = [[measure(loads[name]) for loads in rounds] for measure in measures]
        base = [[measure(loads["one network"]) for loads in rounds] for measure in measures]
        throughput, latency, p99, cpu = map(median, figures)
        ratios = [spread(figures[at], base[at]) if name != "one network" else "1" for at in (0, 2, 3)]
        lines.append(
            f"| {name} | {throughput:.0f} | {latency:.0f} | {p99:.0f} | {cpu:.1f} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def spread(values: list[float], base: list[float]) -> str:
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    low, high = median_interval(ratios) or (min(ratios), max(ratios))
    return f"{median(ratios):.2f} ({low:.2f} … {high:.2f})"


def serve_bare(folder: str, backend: str) -> None:
    """One network behind one route: the least that FastAPI and uvicorn can do."""
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # as `ensbridge serve` has it
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
