"""Latency of ResNet-32×2 with its bridge beside one and three members: `ensbridge bench`, untrained.

    python benchmarks/latency.py [--runtime onnxruntime] [--threads 2] [--rounds 40] [--device cuda]

Time does not depend on the weights. It prints the tables that latency.md keeps, as Markdown.
"""

from __future__ import annotations

import argparse

import torch

import ensbridge as eb
from ensbridge.benching import bench
from ensbridge.benching.runtimes import RUNTIMES
from ensbridge.benching.words import headline, markdown
from ensbridge.methods import Bridge
from ensbridge.progress import progress_bars


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runtime", action="append", choices=RUNTIMES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    bridge = Bridge(eb.nets.ScoreNet.cifar10(z_input="none")).one_step()
    fast = eb.FastEnsemble(eb.nets.ResNet.resnet32x2(10), [bridge], "stages.0.0", members=3)
    with progress_bars(quiet=False) as bars:
        found = bench(
            fast.to(chosen.device),
            torch.zeros(1, 3, 32, 32, device=chosen.device),
            runtimes=chosen.runtime or RUNTIMES,
            threads=chosen.threads,
            rounds=chosen.rounds,
            begin=bars.stage,
        )
    about = ", ".join(f"{name} {words}" for name, words in found.machine.items() if words)
    print(f"{about}; {found.threads} threads; {found.stand_ins}.\n\n{markdown(found)}\n\n{headline(found)}")


if __name__ == "__main__":
    main()
