"""Peak memory of `compress` on a stream that is larger than memory; figures in stream_memory.md.

Images are made up as they are read, so that what is measured is what `compress` holds. Run it with

    python benchmarks/stream_memory.py --gigabytes 20
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import ensbridge as eb

SIZE, CLASSES, BATCH = 64, 10, 256
IMAGE = 4 * 3 * SIZE * SIZE  # bytes


class MadeUp(IterableDataset[Tensor]):
    """Batches of random images, as many bytes of them as are asked for."""

    def __init__(self, bytes_in_all: float) -> None:
        self.batches = max(1, round(bytes_in_all / (IMAGE * BATCH)))
        self.read = 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.batches):
            batch = torch.rand(BATCH, 3, SIZE, SIZE)
            self.read += batch.nbytes
            yield batch


def member(seed: int) -> nn.Module:
    """A small convolutional network that shrinks its input at once: reading is what is to take the time."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4),
        nn.ReLU(),
        nn.Conv2d(8, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def resident() -> float:
    """The most memory that this process has had, in gigabytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def main() -> None:
    """Stream once through `compress` and print a row of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    arguments = parser.parse_args()
    members, train = [member(seed) for seed in range(3)], MadeUp(1e9 * arguments.gigabytes)
    val = torch.rand(200, 3, SIZE, SIZE), torch.arange(200) % CLASSES
    before, begun = resident(), time.monotonic()
    eb.compress(
        members,
        train,
        val,
        feature="3",
        budget=6.0,
        source="frozen",
        epochs=1,
        batch_size=BATCH,
        device="cpu",
    )
    seconds = time.monotonic() - begun
    print("| stream | read | resident before | resident at most | time |\n|---:|---:|---:|---:|---:|")
    print(
        f"| {arguments.gigabytes:g} GB | {train.read / 1e9:.1f} GB | {before:.2f} GB "
        f"| {resident():.2f} GB | {seconds:.0f} s |"
    )


if __name__ == "__main__":
    main()
