"""Source and bridge in onnxruntime beside a member that is exported as plainly as torch does it, and in int8.

    python benchmarks/onnx_latency.py [--batch 1] [--threads 2] [--rounds 24]

Models of a table are timed in the same rounds: zoo:cifar10 as `ensbridge export` writes it, its source by
plain `torch.onnx.export`, and its source by the export's own way. Then all three again in int8 (onnxruntime's
static quantisation per channel, with random images for its ranges: its time is that of any int8 model, its
predictions are not measured here). It prints the tables that latency.md keeps.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingTypeStubs]
import torch
from onnxruntime.quantization import (  # pyright: ignore[reportMissingTypeStubs]
    CalibrationDataReader,
    QuantFormat,
    quantize_static,
)

import ensbridge as eb
from ensbridge.deploy.benchmark.timing import SPREAD, ratio_of, time_rounds
from ensbridge.deploy.export import export, onnx_bytes, silence, trace

MODEL, SHAPE = "zoo:cifar10", (3, 32, 32)
PLAIN, OWN, FAST = "one member, plain torch.onnx.export", "one member, exported as ours is", "source + bridge"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", action="append", type=int, help="images; may be repeated; 1 and 128")
    parser.add_argument("--threads", type=int, default=2, help="and cores (2)")
    parser.add_argument("--rounds", type=int, default=24, help="6 or more for ratios (24)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = write_models(Path(folder))
        for precision, paths in {"float32": files, "int8": quantised(files)}.items():
            for batch in chosen.batch or (1, 128):
                print(measure(precision, paths, batch, chosen.threads, chosen.rounds), flush=True)


def write_models(folder: Path) -> dict[str, Path]:
    """The three files."""
    fast, images = eb.load(MODEL), torch.rand(2, *SHAPE)
    source = fast.source.eval()
    files = {name: folder / f"{number}.onnx" for number, name in enumerate((PLAIN, OWN, FAST))}
    with silence():
        free = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(
            source,
            (images,),
            files[PLAIN],
            dynamo=True,
            dynamic_shapes=free,
            external_data=False,
            verbose=False,
        )
        files[OWN].write_bytes(onnx_bytes(trace(source, images))[0])
        export(fast, files[FAST], to="onnx", example=images)
    return files


class _RandomImages(CalibrationDataReader):
    def __init__(self, name: str) -> None:
        draws = np.random.default_rng(0)
        self.feeds = iter([{name: draws.random((8, *SHAPE), np.float32)} for _ in range(4)])

    def get_next(self) -> Any:
        return next(self.feeds, None)


def quantised(files: dict[str, Path]) -> dict[str, Path]:
    """The same in int8: convolutions and matrix products, weights per channel."""
    logging.disable(logging.WARNING)  # its advice is for smaller files
    paths = {}
    for name, path in files.items():
        paths[name] = path.with_suffix(".int8.onnx")
        (first, *_) = onnxruntime.InferenceSession(path).get_inputs()
        with silence():
            quantize_static(
                path,
                paths[name],
                _RandomImages(first.name),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                op_types_to_quantize=["Conv", "Gemm", "MatMul"],
            )
    return paths


def measure(precision: str, files: dict[str, Path], batch: int, threads: int, rounds: int) -> str:
    """A table of the three models at one batch size."""
    images = np.random.default_rng(1).random((batch, *SHAPE), np.float32)
    calls = {name: caller(path, images, threads) for name, path in files.items()}
    timings = time_rounds(calls, rounds)
    lines = [
        f"{precision}, batch {batch}, {threads} threads: {rounds} rounds of {timings.calls} calls",
        "",
        "| model | median ms | middle half | to the plain member | to the member exported alike |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, times in timings.times.items():
        middle, low, high = 1000 * np.quantile(times, (0.5, *SPREAD))
        ratios = [
            "×1" if name == other else str(ratio_of(times, timings.times[other])) for other in (PLAIN, OWN)
        ]
        lines.append(f"| {name} | {middle:.3g} | {low:.3g} … {high:.3g} | {' | '.join(ratios)} |")
    return "\n".join([*lines, ""])


def caller(path: Path, images: np.ndarray[Any, Any], threads: int) -> Callable[[], object]:
    """Runs a file on a batch."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: images}
    return lambda: session.run(None, feed)


if __name__ == "__main__":
    main()
