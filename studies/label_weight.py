"""Labels beside the ensemble: which share of the loss they should have in a distillation.

    python studies/label_weight.py digits OUT [--seeds 60 61 62 63 64]
    python studies/label_weight.py cifar10 OUT [--seeds 0 1]

A network with new weights is distilled from three members at each weight of the labels, side by side on the
same batches; mixed images have the mixed labels. Digits are the quick start's networks and passes; CIFAR-10
is three small networks of three convolutions on 16,000 images. Writes results/label-weight.json: each
network's scores on validation images, the NLL as it is and at the best temperature.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import ensbridge as eb
from provenance import plain_parser, provenance, write_json
from short_distillation import IMAGES, RESULTS, small_network, trained_members

WEIGHTS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
MEMBERS, HELD = 3, 9_040


class Setting(NamedTuple):
    """What is trained on one data set."""

    train: eb.data.ImageSet
    val: eb.data.ImageSet
    members: Callable[[int, Path], eb.Ensemble]  # by a seed, with a folder
    student: Callable[[int], nn.Module]
    fit: eb.FitConfig
    ema: float


def on_digits() -> Setting:
    """The quick start's networks, members as its recipe trains them, new weights by Muon at 0.1."""
    recipe, data = eb.experiments.digits(), eb.data.load_digits()
    assert recipe.headline_fit is not None

    def members(seed: int, out: Path) -> eb.Ensemble:
        nets = [student(eb.experiments.derive_seed(seed, "member", index)) for index in range(MEMBERS)]
        eb.fit(eb.methods.DeepEnsemble(nets), data.train, replace(recipe.member_fit, seed=seed), out)
        return eb.Ensemble(nets).eval()

    def student(seed: int) -> nn.Module:
        return eb.experiments.build(recipe.member, seed)

    fit = replace(recipe.headline_fit, lr=0.1)
    return Setting(data.train, data.val, members, student, fit, recipe.bridge.ema)


def on_cifar10(source: str, steps: int) -> Setting:
    """Small networks on a part of CIFAR-10."""
    data = eb.data.open_splits(source)
    train, val = data.train.subset(torch.arange(IMAGES)), data.val.subset(torch.arange(HELD))
    augment = eb.data.Augment(crop=4, flip=True, mixup=1.0)
    epochs = steps * 128 / IMAGES
    fit = eb.FitConfig(epochs, 128, 0.1, optimizer="muon", weight_decay=0.01, augment=augment)
    return Setting(train, val, lambda seed, out: trained_members(seed, train, out), small_network, fit, 0.998)


def distilled(setting: Setting, members: eb.Ensemble, seed: int, out: Path) -> dict[str, nn.Module]:
    """A network for each weight of the labels."""
    start = eb.experiments.derive_seed(seed, "student")
    methods = {
        f"weight-{number}": eb.methods.EnsembleDistillation(
            members,
            setting.student(start),
            tau=1.0,
            label_weight=weight,
            ema=eb.methods.EmaRule(setting.ema),
        )
        for number, weight in enumerate(WEIGHTS)
    }
    eb.fit(eb.methods.JointTraining(methods), setting.train, replace(setting.fit, seed=seed), out)
    return {f"{weight:g}": method.model() for weight, method in zip(WEIGHTS, methods.values(), strict=True)}


def scores(log_probs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Accuracy, NLL and NLL at the best temperature."""
    scaled = (log_probs / eb.metrics.fit_temperature(log_probs, labels)).log_softmax(-1)
    return {
        "acc": eb.metrics.accuracy(log_probs, labels),
        "nll": eb.metrics.nll(log_probs, labels),
        "cnll": eb.metrics.nll(scaled, labels),
    }


def main() -> None:
    """Train and compare."""
    asked = plain_parser(__doc__)
    asked.add_argument("data", help="digits, or CIFAR-10: an npz, a folder, or cifar10")
    asked.add_argument("out", type=Path, help="the study's folder, in which a killed one resumes")
    asked.add_argument("--steps", type=int, default=3200, help="of CIFAR-10's distillation")
    asked.add_argument("--seeds", type=int, nargs="+")
    asked.add_argument("--json", type=Path, default=RESULTS / "label-weight.json")
    options = asked.parse_args()
    digits = options.data == "digits"
    setting = on_digits() if digits else on_cifar10(options.data, options.steps)
    name = "digits" if digits else "cifar10"
    kept = json.loads(options.json.read_text(encoding="utf-8"))["rows"] if options.json.exists() else []
    rows: list[dict[str, Any]] = [row for row in kept if row["dataset"] != name]
    labels = setting.val.labels
    assert labels is not None
    for seed in options.seeds or (range(60, 65) if digits else range(2)):
        folder = options.out / f"{name}-{seed}"
        members = setting.members(seed, folder)
        nets = distilled(setting, members, seed, folder / "distilled")
        models = {f"DE-{size}": members.first(size) for size in (1, MEMBERS)} | nets
        for model, log_probs in eb.evaluation.predict_each(models, setting.val, 500).items():
            ensemble = model.startswith("DE")
            trained = provenance(name, "DE" if ensemble else "ED", MEMBERS, seed)
            trained |= {"schedule": "short", "epochs": None if ensemble else setting.fit.epochs}
            rows.append(trained | {"model": model, **scores(log_probs, labels)})
            print(f"seed {seed}: {rows[-1]['model']:<6} {scores(log_probs, labels)}", flush=True)
        commands = [f"python studies/label_weight.py {data} OUT" for data in ("digits", "cifar10")]
        document = {"commands": commands, "rows": rows}
        write_json(options.json, document)


if __name__ == "__main__":
    main()
