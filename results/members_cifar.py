"""How different the first three members of some sets are, on validation images of CIFAR-10 or CIFAR-100.

    python results/members_cifar.py DATA.npz FOLDER... [--recipe cifar100] [--count 3000]

For each folder of members: their errors, on how many images two of them disagree (1 and 2, 1 and 3, 2 and 3),
the NLL of each and of all, and the KL from the ensemble's prediction to the first one's.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path

import torch
from cifar import DEVICE, add_recipe, load, load_members

from ensbridge.evaluation.predict import predict
from ensbridge.experiments.plan import RECIPES
from ensbridge.metrics import accuracy, kl_per_image, nll, standard_error
from ensbridge.models.ensemble import ensemble_logit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    add_recipe(parser)
    parser.add_argument("--count", type=int, default=3000, help="the first so many validation images")
    options = parser.parse_args()
    val = load(options.data, None).val.subset(torch.arange(options.count, device=DEVICE))
    truth, recipe = val.labels, RECIPES[options.recipe]("default")
    assert truth is not None
    print("| members | errors, % | disagree, % | NLL | DE-3: NLL | KL to member 1 |")
    print("|---" * 6 + "|")
    for folder in options.folders:
        each = [predict(member, val, 500) for member in load_members(folder, recipe).first(3).members]
        whole = ensemble_logit(torch.stack(each)).log_softmax(-1)
        labels = [log_probs.argmax(-1) for log_probs in each]
        apart = kl_per_image(whole, each[0])
        columns = [
            [f"{100 - 100 * accuracy(log_probs, truth):.1f}" for log_probs in each],
            [f"{100 * (one != other).double().mean():.1f}" for one, other in combinations(labels, 2)],
            [f"{nll(log_probs, truth):.4f}" for log_probs in each],
            [f"{nll(whole, truth):.4f}"],
            [f"{apart.mean():.3f} ± {standard_error(apart):.3f}"],
        ]
        print(f"| {folder} | " + " | ".join(", ".join(column) for column in columns) + " |", flush=True)


if __name__ == "__main__":
    main()
