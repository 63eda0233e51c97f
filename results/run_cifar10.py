"""CIFAR-10 on one GPU: members, then bridges with their control, from one npz of the data.

    python results/run_cifar10.py members DATA.npz OUT --members 1 2 3 [--epochs 200]
    python results/run_cifar10.py bridges DATA.npz OUT --weights FOLDER [--epochs 100]
    python results/run_cifar10.py long DATA.npz OUT --weights FOLDER --run FOLDER [--epochs 300]

`long` trains KL bridges towards members {1, 2, 3} and {1, 4, 5} and a control side by side; killed, it goes
on from the folder of --run.

DATA.npz holds train_images, train_labels, test_images, test_labels (uint8 NHWC). The first 40,960 training
images are trained on, the other 9,040 are for validation. Weights land in OUT as safetensors.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ensbridge.data import Augment, ImageSet, Splits
from ensbridge.ensemble import Ensemble
from ensbridge.evaluation import evaluate, predict
from ensbridge.fast_ensemble import FastEnsemble
from ensbridge.methods import BridgeConfig, DeepEnsemble, DiffusionBridge, Together
from ensbridge.metrics import accuracy, nll
from ensbridge.nets import ResNet, ScoreNet
from ensbridge.recipes.recipe import build
from ensbridge.schedule import TemperatureLaw
from ensbridge.train.config import FitConfig, derive_seed
from ensbridge.train.distill import distill_together
from ensbridge.train.fit import fit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CROP = Augment(crop=4, flip=True)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def load(path: Path, limit: int | None) -> Splits:
    with np.load(path) as arrays:
        images = {
            part: torch.from_numpy(arrays[f"{part}_images"]).permute(0, 3, 1, 2) for part in ("train", "test")
        }
        labels = {part: torch.from_numpy(arrays[f"{part}_labels"]).long() for part in ("train", "test")}
    cut = 40_960
    parts = (
        (images["train"][:cut], labels["train"][:cut]),
        (images["train"][cut:], labels["train"][cut:]),
        (images["test"], labels["test"]),
    )
    return Splits(*(ImageSet(x[:limit].contiguous(), y[:limit].contiguous()).to(DEVICE) for x, y in parts))


def progress(name: str):
    begun, said = time.time(), [time.time()]

    def report(step: int, total: int, loss: float) -> None:
        if time.time() - said[0] > 20 or step == total:
            said[0] = time.time()
            print(f"{name} {step}/{total} loss {loss:.4f} {time.time() - begun:.0f} s", flush=True)

    return report


def train_members(data: Splits, out: Path, chosen: list[int], epochs: float, batch: int) -> None:
    config = FitConfig(
        epochs, batch, 0.1, "sgd", weight_decay=1e-3, augment=CROP, log_every=1600, checkpoint_every=10**9
    )
    for index in chosen:
        seed = derive_seed(0, "member", index)
        net = build(lambda: ResNet.resnet32x2(10), seed).to(DEVICE)
        begun = time.time()
        fit(DeepEnsemble([net]), data.train, replace(config, seed=seed), progress=progress(f"member {index}"))
        plain = build(lambda: ResNet.resnet32x2(10), seed).to(DEVICE)
        plain.load_state_dict(net.state_dict())
        log_probs = predict(plain, data.val, 1000)
        figures = accuracy(log_probs, data.val.labels), nll(log_probs, data.val.labels)
        save_file(
            {k: v.cpu().contiguous() for k, v in plain.state_dict().items()},
            out / f"member-{index}.safetensors",
        )
        print(
            f"member {index}: validation acc {figures[0]:.4f} nll {figures[1]:.4f}",
            f"in {time.time() - begun:.0f} s",
            flush=True,
        )


def load_members(weights: Path) -> Ensemble:
    members = []
    for path in sorted(weights.glob("member-*.safetensors")):
        members.append(ResNet.resnet32x2(10).to(DEVICE))
        members[-1].load_state_dict(load_file(path))
    return Ensemble(members).eval()


def save_bridges(out: Path, prefix: str, methods: dict[str, DiffusionBridge]) -> None:
    for name, each in methods.items():
        save_file(
            {k: v.cpu().contiguous() for k, v in each.bridge.state_dict().items()},
            out / f"{prefix}-{name.replace(' ', '-')}.safetensors",
        )


def measure(
    out: Path, prefix: str, ensemble: Ensemble, models: dict[str, FastEnsemble], data: Splits
) -> None:
    ladder = {f"DE-{k}": ensemble.first(k) for k in range(1, len(ensemble) + 1)}
    for part, held in (("validation", data.val), ("test", data.test)):
        scores = evaluate(
            {**ladder, **models},
            held,
            data.val,
            reference=ensemble,
            target=3,
            dataset="cifar10" if part == "test" else "cifar10 validation",
            class_names=CLASSES,
            batch_size=1000,
        )
        print(f"\n{part}\n{scores.table()}", flush=True)
        (out / f"{prefix}-{part}.json").write_text(scores.to_json())


def train_bridges(data: Splits, out: Path, weights: Path, options: argparse.Namespace) -> None:
    everything = load_members(weights)
    ensemble = everything.first(3)
    mixed = replace(CROP, mixup=0.4)
    long = FitConfig(
        options.epochs,
        options.batch,
        options.lr,
        augment=mixed,
        log_every=800,
        checkpoint_every=10**9,
        seed=options.seed,
    )
    short = replace(long, epochs=options.distill_epochs, lr=options.lr / 10)

    def method(temperature: float, **extra) -> DiffusionBridge:
        config = BridgeConfig(temperature=TemperatureLaw(base=temperature), ema=options.ema)
        score = build(lambda: ScoreNet.cifar10(z_input="none"), derive_seed(options.seed, "score")).to(DEVICE)
        return DiffusionBridge(ensemble, score, config=config, **extra)

    walked = {"bridge": method(2.0), "control": method(2.0, target=(0,))}
    straight = {"kl": method(2.0, loss="kl"), "kl-control": method(2.0, loss="kl", target=(0,))}
    for temperature in options.temperatures:
        straight[f"kl-T{temperature:g}"] = method(temperature, loss="kl")
    images = data.train.without_labels()
    begun = time.time()
    fit(Together({**walked, **straight}), images, long, progress=progress("bridges"))
    distilled = distill_together(walked, images, short, progress=progress("distil"))
    minutes = (time.time() - begun) / 60
    named = {
        "5 steps": walked["bridge"],
        "1 step": distilled["bridge"],
        "control": distilled["control"],
        **straight,
    }
    save_bridges(out, "bridge", named)
    measure(out, "scores", everything, {name: FastEnsemble.of(each) for name, each in named.items()}, data)
    print(f"bridges and distillation took {minutes:.1f} minutes; options {vars(options)}")


def train_long(data: Splits, out: Path, weights: Path, options: argparse.Namespace) -> None:
    ensemble = load_members(weights)
    config = FitConfig(
        options.epochs,
        options.batch,
        options.lr,
        augment=replace(CROP, mixup=0.4),
        log_every=800,
        checkpoint_every=1600,
        seed=options.seed,
    )

    def method(*target: int) -> DiffusionBridge:
        bridge = BridgeConfig(temperature=TemperatureLaw(base=options.base), ema=options.ema)
        score = build(lambda: ScoreNet.cifar10(z_input="none"), derive_seed(options.seed, "score", *target))
        return DiffusionBridge(ensemble, score.to(DEVICE), loss="kl", target=target, config=bridge)

    methods = {"a": method(0, 1, 2), "b": method(0, 3, 4), "control": method(0)}
    begun = time.time()
    fit(Together(methods), data.train.without_labels(), config, options.run, progress("bridges"))
    minutes = (time.time() - begun) / 60
    save_bridges(out, "long", methods)
    models = {
        "+1 DBN (KL)": FastEnsemble.of(methods["a"]),
        "+2 DBN (KL, DE-5)": FastEnsemble.of(methods["a"], methods["b"]),
        "control (KL)": FastEnsemble.of(methods["control"]),
    }
    measure(out, "scores-long", ensemble, models, data)
    print(f"this call trained for {minutes:.1f} minutes; options {vars(options)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=["members", "bridges", "long"])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--run", type=Path, help="the folder of the long run's checkpoints")
    parser.add_argument("--base", type=float, default=2.0, help="T of the long run")
    parser.add_argument("--epochs", type=float, default=200)
    parser.add_argument("--distill-epochs", type=float, default=10)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--ema", type=float, default=0.9995)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[])
    parser.add_argument("--limit", type=int, help="only so many images of each part, to rehearse")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    data = load(options.data, options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage == "members":
        train_members(data, options.out, options.members, options.epochs, options.batch)
    elif options.stage == "long":
        train_long(data, options.out, options.weights, options)
    else:
        train_bridges(data, options.out, options.weights, options)


if __name__ == "__main__":
    main()
