"""What `compress(…, cache=DIR)` saves: time and members' passes of a first and a second run, on the digits.

python benchmarks/output_cache.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ensbridge as eb

EPOCHS = 20


def member() -> nn.Module:
    """A convolutional network of four layers."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(128, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def main() -> None:
    """Print a table of runs without a cache, with an empty one, and with a full one."""
    train, val, test = eb.data.load_digits()
    torch.manual_seed(0)
    members = [member() for _ in range(6)]
    for seed, net in enumerate(members):
        config = eb.FitConfig(epochs=15, batch_size=50, lr=5e-3, seed=seed)
        eb.fit(eb.methods.DeepEnsemble([net]), train, config)
    seen = 0

    def count(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal seen
        seen += len(inputs[0])

    for net in members[1:]:
        net.register_forward_pre_hook(count)
    print("| | CPU time | images seen by members 2 to 6 | test NLL |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        kept: dict[str, Any] = {"cache": folder}
        runs: dict[str, dict[str, Any]] = {
            "without a cache, with mixup": {},
            "cache, first run": kept,
            "cache, second run": kept,
        }
        for name, options in runs.items():
            seen, begun = 0, time.process_time()
            fast = eb.compress(
                members,
                train,
                val,
                feature="4",
                budget=1.2,
                source="frozen",
                epochs=EPOCHS,
                batch_size=50,
                quiet=True,
                **options,
            )
            seconds, images = time.process_time() - begun, seen
            (row,) = eb.evaluate({"fast": fast}, test, reference=eb.Ensemble(members)).rows[-1:]
            print(f"| {name} | {seconds:.1f} s | {images:,} | {row.nll:.3f} |")
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(f"\n{len(train)} images, {EPOCHS} epochs, {size / 1e6:.1f} MB on disk")


if __name__ == "__main__":
    main()
