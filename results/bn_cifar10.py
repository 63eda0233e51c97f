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
from pathlib import Path

import torch
from run_cifar import CROP, DEVICE, bridge_config, load, load_members, measure, progress
from safetensors.torch import save_file

from ensbridge.data import Splits
from ensbridge.ensemble import Ensemble
from ensbridge.fast_ensemble import FastEnsemble
from ensbridge.methods import BezierCurve, BridgeNetwork, Together
from ensbridge.nets import ResNet
from ensbridge.nets.tail import Tail
from ensbridge.recipes.recipe import build
from ensbridge.train.config import FitConfig, derive_seed
from ensbridge.train.fit import fit

WIDTHS = {"small": 0.5, "medium": 1.0}
WARMUP_EPOCHS = 5


def train_curves(
    data: Splits, ensemble: Ensemble, others: list[int], epochs: float, batch: int, every: int, run: Path
) -> dict[int, BezierCurve]:
    """The curve from member 1 to each of the others, by its number."""
    members = list(ensemble.members)
    curves = {number: BezierCurve(members[0], members[number - 1]) for number in others}
    config = FitConfig(
        epochs,
        batch,
        0.1,
        "sgd",
        weight_decay=1e-3,
        augment=CROP,
        log_every=800,
        checkpoint_every=every,
        seed=derive_seed(0, "curve"),
    )
    methods = {f"to {number}": curve for number, curve in curves.items()}
    fit(Together(methods), data.train, config, run / "curves", progress("curves"))
    return curves


def train_networks(
    data: Splits, source: ResNet, centres: dict[int, torch.nn.Module], options: argparse.Namespace
) -> dict[tuple[str, int], BridgeNetwork]:
    """A small network for every centre and a medium one for the first two, by size and member."""
    feature = source.block_at(0.8)
    networks = {
        (size, number): BridgeNetwork(source, [centres[number]], tail(source, feature, size, number), feature)
        for size in WIDTHS
        for number in list(centres)[: 2 if size == "medium" else None]
    }
    long = bridge_config(options, 0)
    config = replace(
        long,
        optimizer="sgd",
        weight_decay=1e-5,
        warmup_steps=WARMUP_EPOCHS * len(data.train) // options.batch,
        warmup_lr=options.lr / 100,
    )
    methods = {f"{size} {number}": each for (size, number), each in networks.items()}
    images = data.train.without_labels()
    fit(Together(methods), images, config, options.run / "networks", progress("networks"))
    return networks


def tail(source: ResNet, feature: str, size: str, number: int) -> Tail:
    net = build(lambda: Tail(source, feature, WIDTHS[size]), derive_seed(0, "tail", size, number))
    return net.to(DEVICE)  # pyright: ignore[reportReturnType]


def save(path: Path, net: torch.nn.Module) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in net.state_dict().items()}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", type=Path, required=True, help="the folder of the members")
    parser.add_argument("--run", type=Path, required=True, help="the folder of the checkpoints")
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3, 4, 5], help="the curves' other ends")
    parser.add_argument("--curve-epochs", type=float, default=200)
    parser.add_argument("--curve-batch", type=int, default=256)
    parser.add_argument("--epochs", type=float, default=320)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--mixup", type=float, default=0.4)
    parser.add_argument("--cutmix", type=float, default=0.0)
    parser.add_argument("--checkpoint-every", type=int, default=400)
    parser.add_argument("--final", action="store_true", help="look at the test set, once all is chosen")
    parser.add_argument("--limit", type=int, help="only so many images of each part, to rehearse")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    data, ensemble = load(options.data, options.limit), load_members(options.weights)
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    curves = train_curves(
        data,
        ensemble,
        options.members,
        options.curve_epochs,
        options.curve_batch,
        options.checkpoint_every,
        options.run,
    )
    print(f"curves took {(time.time() - begun) / 60:.1f} minutes in this call", flush=True)
    for number, curve in curves.items():
        save(options.out / f"curve-1-{number}.safetensors", curve.student)
    centres = {number: curve.at(0.5) for number, curve in curves.items()}
    source = ensemble.source
    assert isinstance(source, ResNet)
    networks = train_networks(data, source, centres, options)
    print(f"with networks {(time.time() - begun) / 60:.1f} minutes in this call", flush=True)
    for (size, number), each in networks.items():
        save(options.out / f"bn-{size}-{number}.safetensors", each.bridge)
    models: dict[str, torch.nn.Module] = {
        f"centre of 1 and {number}": centre for number, centre in centres.items()
    }
    for size in WIDTHS:
        own = [each for (of, _), each in networks.items() if of == size]
        for count in {min(2, len(own)): None, len(own): None}:
            models[f"+{count} BN {size}"] = FastEnsemble.of(*own[:count])
    measure(options.out, "bn", ensemble, models, data, options.final)


if __name__ == "__main__":
    main()
