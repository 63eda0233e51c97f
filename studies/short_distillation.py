"""CIFAR-10, small networks: which rate of Muon distils trained weights best in a few steps.

    python studies/short_distillation.py cifar10 OUT [--steps 100 400 1600] [--seeds 0 1 2]

Three small networks are trained on labels; a copy of the first is distilled from the three as `compress` does
it, at every rate side by side on the same batches, for each number of steps. Writes
results/short-distillation.json: each network's NLL on 4,000 validation images, at the best temperature.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import ensbridge as eb
from provenance import provenance

RESULTS = Path(__file__).parent.parent / "results"
RATES = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
IMAGES, HELD, MEMBERS = 16_000, 4_000, 3
MEMBER = eb.FitConfig(
    15, 128, 0.05, optimizer="sgd", weight_decay=5e-4, augment=eb.data.Augment(crop=4, flip=True)
)
STUDENT = eb.FitConfig(1, 128, 0.05, optimizer="muon", weight_decay=0.01, augment=eb.data.Augment(mixup=0.4))


def epochs_of(steps: int) -> float:
    """Passes over the training images."""
    return steps * STUDENT.batch_size / IMAGES


def small_network(seed: int) -> nn.Module:
    """Three convolutions with batch normalisation."""

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))

    return eb.experiments.build(build, seed)


def trained_members(seed: int, train: eb.data.ImageSet, out: Path) -> eb.Ensemble:
    """Three networks, trained on labels side by side."""
    nets = [small_network(eb.experiments.derive_seed(seed, "member", index)) for index in range(MEMBERS)]
    method = eb.methods.DeepEnsemble(nets)
    eb.fit(method, train, replace(MEMBER, seed=seed), out / f"members-{seed}")
    return eb.Ensemble(nets).eval()


def distilled(
    members: eb.Ensemble, train: eb.data.ImageSet, steps: int, seed: int, out: Path
) -> dict[float, nn.Module]:
    """A copy of the first member at each rate."""
    ema = eb.methods.EmaRule(0.995)
    methods = {
        f"rate-{number}": eb.methods.EnsembleDistillation(
            members, copy.deepcopy(members.source).requires_grad_(), tau=1.0, ema=ema
        )
        for number in range(len(RATES))
    }
    configs = {
        name: replace(STUDENT, lr=rate, seed=seed, epochs=epochs_of(steps))
        for name, rate in zip(methods, RATES, strict=True)
    }
    eb.fit(eb.methods.JointTraining(methods), train.without_labels(), configs, out / f"steps-{steps}-{seed}")
    return {rate: method.model() for rate, method in zip(RATES, methods.values(), strict=True)}


def best_nll(log_probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The NLL of each image at the temperature that is best for all of them."""
    scaled = log_probs / eb.metrics.fit_temperature(log_probs, labels)
    return eb.metrics.nll_per_image(scaled.log_softmax(-1), labels)


def main() -> None:
    """Train and compare."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("data", help="an npz, a folder, or cifar10")
    asked.add_argument("out", type=Path, help="the study's folder, in which a killed one resumes")
    asked.add_argument("--steps", type=int, nargs="+", default=[100, 400, 1600])
    asked.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked.add_argument("--json", type=Path, default=RESULTS / "short-distillation.json")
    options = asked.parse_args()
    data = eb.data.open_splits(options.data)
    train, val = data.train.subset(torch.arange(IMAGES)), data.val.subset(torch.arange(HELD))
    assert val.labels is not None
    rows = []
    for seed in options.seeds:
        members = trained_members(seed, train, options.out)
        by_size = {f"DE-{size}": members.first(size) for size in (1, MEMBERS)}
        for steps in options.steps:
            nets = distilled(members, train, steps, seed, options.out)
            models = by_size | {f"Muon {rate:g}": net for rate, net in nets.items()}
            nlls = {
                name: best_nll(values, val.labels)
                for name, values in eb.evaluation.predict_each(models, val, 500).items()
            }
            for name, nll in nlls.items():
                above = nll - nlls["DE-1"]
                ensemble = name in by_size
                trained = provenance("cifar10", "DE" if ensemble else "ED", MEMBERS, seed)
                trained |= {"schedule": "short", "epochs": MEMBER.epochs if ensemble else epochs_of(steps)}
                scores = {"cnll": nll.mean().item(), "se": eb.metrics.standard_error(above)}
                rows.append(trained | {"model": name, "steps": steps} | scores)
            line = ", ".join(f"{name} {nll.mean():.4f}" for name, nll in nlls.items())
            print(f"seed {seed}, {steps} steps: {line}", flush=True)
            document = {"command": "python studies/short_distillation.py cifar10 OUT", "rows": rows}
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
