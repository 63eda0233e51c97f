"""The switches of a bridge on CIFAR-10, one at a time, side by side on one GPU; validation images alone.

    python results/ablate_cifar10.py DATA.npz OUT --weights FOLDER --run FOLDER [--mixup 0.4] [--cutmix 0]

Every bridge reads member 1 and learns from members 1 to 3, from the same start, on the same batches. Mixup
and cutmix decide the batches, so another value is another run. NLLs are compared image by image. Killed, it
goes on from the folder of --run.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from cifar import DEVICE, add_training, bridge_config, load, load_members, measure, progress

from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.data import ImageSet
from ensbridge.experiments.recipe import build
from ensbridge.methods import BridgeConfig, DiffusionBridge, JointTraining
from ensbridge.models import ScoreNet
from ensbridge.training.config import derive_seed
from ensbridge.training.fit import fit

BASE = BridgeConfig(temperature=TemperatureLaw(base=2.0), ema=0.9995)
SWITCHES: dict[str, BridgeConfig] = {
    "KL": BASE,
    "T = 1": replace(BASE, temperature=TemperatureLaw(base=1.0)),
    "T = 4": replace(BASE, temperature=TemperatureLaw(base=4.0)),
    "T without spread": replace(BASE, temperature=TemperatureLaw(base=2.0, spread=0.0)),
    "shorter average": replace(BASE, ema=0.99),
    "sees Z_t": replace(BASE, z_input="informative"),
    "not centred": replace(BASE, centre=False),
}
RATES = {"rate / 2": 0.5, "rate × 2": 2.0}
CONTROLS = {"KL": "control", "T = 4": "control, T = 4"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_training(parser, epochs=80, batch=512, lr=2e-3, checkpoint_every=800)
    parser.add_argument("--only", nargs="+", help="some of the switches")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    data, ensemble = load(options.data, options.limit), load_members(options.weights).first(3)
    options.out.mkdir(parents=True, exist_ok=True)

    def method(
        config: BridgeConfig, loss: Literal["kl", "bridge"] = "kl", target: tuple[int, ...] = (0, 1, 2)
    ) -> DiffusionBridge:
        score = build(lambda: ScoreNet.cifar10(z_input=config.z_input), derive_seed(0, "score"))
        return DiffusionBridge(ensemble, score.to(DEVICE), loss=loss, target=target, config=config)

    plain = bridge_config(options, 0)
    methods = {name: method(config) for name, config in SWITCHES.items()}
    methods |= {name: method(BASE) for name in RATES}
    methods |= {control: method(SWITCHES[name], target=(0,)) for name, control in CONTROLS.items()}
    methods |= {"bridge's own loss": method(BASE, "bridge")}
    methods = {name: each for name, each in methods.items() if name in (options.only or methods)}
    configs = {name: replace(plain, lr=plain.lr * RATES.get(name, 1.0)) for name in methods}
    fit(JointTraining(dict(methods)), data.train.without_labels(), configs, options.run, progress("switches"))
    models: dict[str, torch.nn.Module] = {name: each.model() for name, each in methods.items()}
    name = f"switches-mixup{options.mixup:g}-cutmix{options.cutmix:g}"
    measure(options.out, name, ensemble, models, data, final=False)
    compare(options.out / f"{name}-validation.npz", data.val)


def compare(path: Path, held: ImageSet) -> None:
    """How much higher each NLL is than that of KL, and that of each control than its bridge's."""
    assert held.labels is not None
    labels = held.labels.cpu().numpy()
    with np.load(path) as saved:
        nlls = {name: -saved[name].astype(np.float64)[np.arange(len(labels)), labels] for name in saved.files}
    pairs = {name: ("KL", name) for name in nlls if name not in ("KL", *CONTROLS.values())}
    pairs |= {control: (name, control) for name, control in CONTROLS.items()}
    print("\n| NLL higher by | than | |\n|---|---|---|")
    for name, (base, other) in pairs.items():
        if {base, other} <= set(nlls):
            more = nlls[other] - nlls[base]
            print(f"| {name} | {base} | {more.mean():.4f} ± {more.std(ddof=1) / len(more) ** 0.5:.4f} |")


if __name__ == "__main__":
    main()
