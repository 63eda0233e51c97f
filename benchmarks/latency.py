"""Latency of ResNet-32×2 with its bridge beside one member and ensembles: `ensbridge bench`, untrained.

    python benchmarks/latency.py [--runtime onnxruntime] [--batch 1] [--members 3] [--threads 2] [--rounds 40]

Time does not depend on the weights. It prints the tables that latency.md keeps, as Markdown, each once it is
measured.
"""

from __future__ import annotations

import argparse

import torch

import ensbridge as eb
from ensbridge.deploy.benchmark import bench
from ensbridge.deploy.benchmark.bench import Table
from ensbridge.deploy.benchmark.runtimes import RUNTIMES
from ensbridge.deploy.benchmark.text import COLUMNS, COSTS, cells, costs, headline, title
from ensbridge.methods import Bridge
from ensbridge.utils.devices import find_device
from ensbridge.utils.progress import progress_bars


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runtime", action="append", choices=RUNTIMES, help="may be repeated; all of them")
    parser.add_argument("--batch", action="append", type=int, help="images; may be repeated; 1 and 128")
    parser.add_argument("--members", type=int, default=3, help="DE-2 to DE-N are timed; 1 for none (3)")
    parser.add_argument("--threads", type=int, default=2, help="and cores (2)")
    parser.add_argument("--rounds", type=int, default=40, help="6 or more for ratios (40)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    chosen = parser.parse_args()
    if chosen.members < 1:
        parser.error(f"--members is {chosen.members}; give 1 or more")
    try:
        measure(chosen)
    except ValueError as error:
        parser.error(str(error))


def measure(chosen: argparse.Namespace) -> None:
    device = find_device(chosen.device)
    bridge = Bridge(eb.nets.ScoreNet.cifar10(z_input="none")).one_step()
    source = eb.nets.ResNet.resnet32x2(10)
    fast = eb.FastEnsemble(source, [bridge], "stages.0.0", members=chosen.members)
    with progress_bars(quiet=False) as bars:
        found = bench(
            fast.to(device),
            torch.zeros(1, 3, 32, 32, device=device),
            runtimes=chosen.runtime or RUNTIMES,
            batches=chosen.batch or (1, 128),
            threads=chosen.threads,
            rounds=chosen.rounds,
            begin=bars.stage,
            tell=lambda table: bars.show(f"{markdown(table)}\n"),
        )
    about = ", ".join(f"{name} {words}" for name, words in found.machine.items() if words)
    print(f"{about}; {found.threads} threads; {found.stand_ins}; {found.memory_means}.\n\n{headline(found)}")


def markdown(table: Table) -> str:
    """One table as Markdown, or why there is none."""
    if not table.rows:
        return f"{title(table)}: {table.problem}."
    columns = (*COLUMNS, *COSTS[1:])
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    lines += [f"| {' | '.join((*cells(row), *costs(row)[1:]))} |" for row in table.rows]
    return "\n".join([f"{title(table)}:", "", *lines])


if __name__ == "__main__":
    main()
