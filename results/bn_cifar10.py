"""Bridge networks on CIFAR-10 on one GPU: curves from member 1 to others, networks towards their centres.

    python results/bn_cifar10.py DATA.npz OUT --weights FOLDER --run FOLDER [--members 2 3 4 5] [--final]

Curves have the members' training, with the control points side by side; bridge networks, small for every
curve and medium for the first two, are trained side by side on shared teachers with the inputs, batch and
epochs of the diffusion bridges. Killed, it goes on from the folder of --run; weights land in OUT.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from cifar import (
    CIFAR10,
    DEVICE,
    add_training,
    bridge_config,
    load,
    load_members,
    measure,
    progress,
    save_weights,
)
from torch import nn

from ensbridge.data import Splits
from ensbridge.experiments.paper import BN_WARMUP_EPOCHS
from ensbridge.experiments.recipe import build
from ensbridge.methods import BezierCurve, BridgeNetwork, JointTraining
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.training.config import derive_seed
from ensbridge.training.fit import fit

WIDTHS = {"small": 0.5, "medium": 1.0}


def train_curves(data: Splits, ensemble: Ensemble, options: argparse.Namespace) -> dict[int, BezierCurve]:
    """The curve from member 1 to each of the others, by its number."""
    members = list(ensemble.members)
    curves = {number: BezierCurve(members[0], members[number - 1]) for number in options.members}
    config = replace(
        CIFAR10.curve_fit,
        epochs=options.curve_epochs,
        batch_size=options.curve_batch or CIFAR10.curve_fit.batch_size,
        checkpoint_every=options.checkpoint_every,
        seed=derive_seed(0, "curve"),
    )
    methods = {f"to {number}": curve for number, curve in curves.items()}
    fit(JointTraining(methods), data.train, config, options.run / "curves", progress("curves"))
    return curves


def train_networks(
    data: Splits, source: nn.Module, centres: dict[int, nn.Module], options: argparse.Namespace
) -> dict[tuple[str, int], BridgeNetwork]:
    """A small network for every centre and a medium one for the first two, by size and member."""
    feature = CIFAR10.tail_feature

    def network(size: str, number: int) -> BridgeNetwork:
        seed = derive_seed(0, "tail", size, number)
        net = build(lambda: CIFAR10.tail(source, feature, WIDTHS[size]), seed)
        return BridgeNetwork(source, [centres[number]], net.to(DEVICE), feature)

    networks = {
        (size, number): network(size, number)
        for size in WIDTHS
        for number in list(centres)[: 2 if size == "medium" else None]
    }
    config = replace(
        bridge_config(options, 0),
        optimizer="sgd",
        weight_decay=CIFAR10.bn_fit.weight_decay,
        warmup_steps=BN_WARMUP_EPOCHS * len(data.train) // options.batch,
        warmup_lr=CIFAR10.bn_fit.warmup_lr,
    )
    methods = {f"{size} {number}": each for (size, number), each in networks.items()}
    images = data.train.without_labels()
    fit(JointTraining(methods), images, config, options.run / "networks", progress("networks"))
    return networks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_training(parser, epochs=320, batch=512, lr=CIFAR10.bn_fit.lr, checkpoint_every=400)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3, 4, 5], help="the curves' other ends")
    parser.add_argument("--curve-epochs", type=float, default=200)
    parser.add_argument("--curve-batch", type=int, help="the recipe's unless given")
    parser.add_argument("--final", action="store_true", help="look at the test set, once all is chosen")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    data, ensemble = load(options.data, options.limit), load_members(options.weights)
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    curves = train_curves(data, ensemble, options)
    print(f"curves took {(time.time() - begun) / 60:.1f} minutes in this call", flush=True)
    for number, curve in curves.items():
        save_weights(options.out / f"curve-1-{number}.safetensors", curve.student)
    centres = {number: curve.at(0.5) for number, curve in curves.items()}
    networks = train_networks(data, ensemble.source, centres, options)
    print(f"with networks {(time.time() - begun) / 60:.1f} minutes in this call", flush=True)
    for (size, number), each in networks.items():
        save_weights(options.out / f"bn-{size}-{number}.safetensors", each.bridge)
    models: dict[str, nn.Module] = {f"centre of 1 and {number}": centre for number, centre in centres.items()}
    for size in WIDTHS:
        own = [each for (of, _), each in networks.items() if of == size]
        for count in {min(2, len(own)): None, len(own): None}:
            models[f"+{count} BN {size}"] = FastEnsemble.of(*own[:count])
    measure(options.out, "bn", ensemble, models, data, options.final)


if __name__ == "__main__":
    main()
