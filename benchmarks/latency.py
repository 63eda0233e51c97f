"""Latency of ResNet-32×2 with its bridge beside one and three members, with onnxruntime, in one run.

    python benchmarks/latency.py [--rounds 40] [--threads 2]

Untrained weights: time does not depend on them. Every round times each model once, in turn, so that a slow
moment of the machine falls on all of them; ratios are of the same round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

import ensbridge as eb
from ensbridge.methods import Bridge


def models() -> dict[str, nn.Module]:
    source = eb.nets.ResNet.resnet32x2(10)
    bridge = Bridge(eb.nets.ScoreNet.cifar10(z_input="none")).one_step()
    fast = eb.FastEnsemble(source, [bridge], "stages.0.0")
    three = eb.Ensemble([eb.nets.ResNet.resnet32x2(10) for _ in range(3)])
    return {"one member": source.eval(), "source + bridge": fast.eval(), "DE-3": three.eval()}


def session(model: nn.Module, threads: int) -> onnxruntime.InferenceSession:
    batch = torch.export.Dim("batch", min=1)
    traced = torch.export.export(
        model, (torch.rand(2, 3, 32, 32),), dynamic_shapes=({0: batch},), strict=False
    )
    program = torch.onnx.export(traced, dynamo=True, input_names=["images"], verbose=False)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        program.save(path)
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    sessions = {name: session(model, arguments.threads) for name, model in models().items()}
    lines = [
        "| batch | model | median ms | ratio to one member, median (10th … 90th percentile) |",
        "|---|---|---|---|",
    ]
    for size in (1, 128):
        images = {"images": np.random.default_rng(0).random((size, 3, 32, 32), dtype=np.float32)}
        times: dict[str, list[float]] = {name: [] for name in sessions}
        repeats = 8 if size == 1 else 1
        for _ in range(arguments.rounds + 3):
            for name, each in sessions.items():
                begun = time.perf_counter()
                for _ in range(repeats):
                    each.run(None, images)
                times[name].append((time.perf_counter() - begun) / repeats)
        for name, own in times.items():
            own, one = own[3:], times["one member"][3:]
            ratios = sorted(a / b for a, b in zip(own, one, strict=True))
            low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
            middle = f"×{statistics.median(ratios):.2f} ({low:.2f} … {high:.2f})"
            lines.append(f"| {size} | {name} | {1000 * statistics.median(own):.2f} | {middle} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
