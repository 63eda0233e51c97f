"""How different the first three members of some sets are, on validation images.

    python studies/members.py cifar10 results/cifar10 [--count 3000]

For each folder of members: their errors, on how many images two of them disagree (1 and 2, 1 and 3, 2 and 3),
the NLL of each and of all, and the KL from the ensemble's prediction to the first one's.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import torch

import ensbridge as eb
from common import DEVICE, members_of
from provenance import plain_parser


def main() -> None:
    """Print one row of a table for each folder."""
    asked = plain_parser(__doc__)
    asked.add_argument("data", help="an npz, a folder, or cifar10")
    asked.add_argument("folders", type=Path, nargs="+")
    asked.add_argument("--recipe", choices=["cifar10", "cifar100"], default="cifar10")
    asked.add_argument("--count", type=int, default=3000, help="the first so many validation images")
    options = asked.parse_args()
    recipe = eb.experiments.RECIPES[options.recipe]("default", "published")
    val = eb.data.open_splits(options.data).val.subset(torch.arange(options.count)).to(DEVICE)
    truth = val.labels
    assert truth is not None
    print("| members | errors, % | disagree, % | NLL | DE-3: NLL | KL to member 1 |\n" + "|---" * 6 + "|")
    for folder in options.folders:
        ensemble = members_of(folder, recipe).first(3)
        models = {str(number): net for number, net in enumerate(ensemble.members)} | {"DE-3": ensemble}
        *single, whole = eb.evaluation.predict_each(models, val, 500).values()
        labels = [log_probs.argmax(-1) for log_probs in single]
        apart = eb.metrics.kl_per_image(whole, single[0])
        columns = [
            [f"{100 - 100 * eb.metrics.accuracy(log_probs, truth):.1f}" for log_probs in single],
            [f"{100 * (one != other).double().mean():.1f}" for one, other in combinations(labels, 2)],
            [f"{eb.metrics.nll(log_probs, truth):.4f}" for log_probs in single],
            [f"{eb.metrics.nll(whole, truth):.4f}"],
            [f"{apart.mean():.3f} ± {eb.metrics.standard_error(apart):.3f}"],
        ]
        print(f"| {folder} | " + " | ".join(", ".join(column) for column in columns) + " |", flush=True)


if __name__ == "__main__":
    main()
