"""CIFAR-10: a distilled source with bridges beside it, trained at the same time; what helps, on validation.

    python results/levers_cifar10.py DATA.npz OUT --weights FOLDER --run FOLDER --inputs 0.4,0 1,0
    python results/levers_cifar10.py DATA.npz OUT --weights FOLDER --run FOLDER --inputs 1,0 --joint

The targets are the predictions of five members on the augmented images; labels are not used. For each of
--inputs (mixup's alpha, cutmix's alpha) these are trained side by side on the same batches:

    ed3, ed5   a fresh network distilled from three or from five members at τ = 1 (ed3 with the first inputs)
    ed5 + …    bridges that read its feature and logits and send no gradient back into it: at T = 2, at T = ∞,
               of plain residual blocks at T = 2, and two of half the cost at T = 2
    joint      a fresh network and a bridge at T = 2, each loss with a gradient into both; --joint instead
               trains such pairs at T = 1 and at T = 4, and a network with two bridges at T = 2

A bridge's prediction is given alone and averaged with that of its source. One row of JSON each goes to OUT.
The test images are not looked at.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar import CIFAR10, DEVICE, add_training, bridge_config, load, load_members, progress, save_weights
from torch import Tensor, nn

from ensbridge.bridge.sampler import estimate_z0
from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.data import ImageSet
from ensbridge.evaluation.predict import predict_each
from ensbridge.experiments.recipe import build
from ensbridge.methods import (
    AbstractMethod,
    Batch,
    Bridge,
    BridgeConfig,
    EmaRule,
    EnsembleDistillation,
    JointTraining,
)
from ensbridge.metrics import accuracy, ece, nll, nll_per_image, standard_error
from ensbridge.metrics.cost import count_macs
from ensbridge.models import ResNet, ScoreNet
from ensbridge.models.ensemble import Ensemble, at_least_float32, ensemble_logit, weights_digest
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.resnet import BasicBlock, initialise
from ensbridge.training.config import FitConfig, derive_seed
from ensbridge.training.fit import fit

EMA = 0.9995
FEATURE = CIFAR10.feature
HALF_STAGES = [(1, 32, 1, 2), (3, 48, 1, 2), (3, 64, 2, 1), (3, 96, 1, 1), (3, 128, 1, 1)]
PAIRS = {"two halves": ("half-a", "half-b"), "two": ("T2", "T2b")}
INFINITE = 1e6  # a temperature at which nothing is left of the source's logits


class ResNetWithFeature(nn.Module):
    """A ResNet that also returns its first block's output, written out so that it compiles as one graph."""

    def __init__(self, net: ResNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and the feature."""
        net = self.net
        images = images.contiguous(memory_format=torch.channels_last)
        x = net.stem((images - net.mean) / net.std)
        feature = None
        for block in net.blocks().values():
            x = block(x)
            feature = x if feature is None else feature
        assert feature is not None
        return net.head(x.mean((2, 3))), feature


class PlainScore(nn.Module):
    """Three residual blocks of the source's own kind on its feature; no time and no Z_t go in."""

    def __init__(self, classes: int = 10, channels: int = 32, widths: Sequence[int] = (64, 112, 112)) -> None:
        super().__init__()
        strides, inputs = (2, 2, 1), (channels, *widths)
        parts = zip(inputs, widths, strides, strict=False)
        self.blocks = nn.Sequential(*(BasicBlock(*part, bias=True) for part in parts))
        self.head = nn.Linear(widths[-1], classes)
        self.apply(initialise)
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        """What a score network gives, from the feature alone."""
        return self.head(self.blocks(h).mean((2, 3)))


class DistilledSource(AbstractMethod):
    """A network distilled from an ensemble and bridges from its logits, all towards the ensemble at once.

    Unless `joint`, the source learns from its own loss alone, as if there were no bridges. The source has one
    optimiser, the bridges another.
    """

    parts = ("source", "bridges")

    def __init__(self, ensemble: Ensemble, net: ResNet, bridges: Mapping[str, Bridge], joint: bool) -> None:
        self.ensemble, self.net, self.bridges, self.joint = ensemble.eval(), net, dict(bridges), joint
        self.student = nn.ModuleDict({"source": net, "bridges": nn.ModuleDict(self.bridges)})
        self.with_feature = ResNetWithFeature(net)
        self.ema = EmaRule(EMA)

    def loss(self, batch: Batch) -> Tensor:
        """KL(ensemble ‖ source), and KL(ensemble ‖ bridge) for each bridge."""
        target = ensemble_logit(batch.member_logits(self.ensemble)).log_softmax(-1)
        logits, feature = self.with_feature(batch.images)
        logits = at_least_float32(logits)
        losses = [kl(target, logits)]
        if not self.joint:
            logits, feature = logits.detach(), feature.detach()
        for bridge in self.bridges.values():
            temperature = bridge.draw_temperature(len(logits), logits.device, batch.generator)
            z1 = bridge.start(logits, temperature)
            now = z1.new_ones(len(z1))
            losses.append(kl(target, estimate_z0(bridge.epsilon, bridge.schedule, z1, feature, now)))
        return torch.stack(losses).sum()

    def model(self) -> nn.Module:
        """The source by itself."""
        return self.net

    def networks(self) -> Sequence[nn.Module]:
        """The source and the score networks."""
        return [self.with_feature, *(bridge.score for bridge in self.bridges.values())]

    def teachers(self) -> Sequence[tuple[Ensemble, None]]:
        """The ensemble."""
        return [(self.ensemble, None)]

    def describe(self) -> dict[str, Any]:
        """The teachers and the score networks."""
        return {
            "method": "distilled_source",
            "joint": self.joint,
            "teachers": weights_digest(self.ensemble),
            "bridges": {name: str(bridge.score) for name, bridge in self.bridges.items()},
        }

    def models(self, name: str) -> dict[str, nn.Module]:
        """What can be made of it: the source, each bridge, each with the source's prediction averaged in."""
        found: dict[str, nn.Module] = {name: self.net}

        def add(label: str, *bridges: Bridge) -> None:
            found[f"{name} + {label}"] = FastEnsemble(self.net, bridges, FEATURE)
            found[f"{name} + {label}, mean with {name}"] = FastEnsemble(
                self.net, bridges, FEATURE, average_source=True
            )

        for label, bridge in self.bridges.items():
            add(label, bridge)
        for label, pair in PAIRS.items():
            if set(pair) <= set(self.bridges):
                add(label, *(self.bridges[each] for each in pair))
        return found


def kl(log_p: Tensor, logits: Tensor) -> Tensor:
    """KL(p ‖ softmax(logits)), mean over the batch."""
    return (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1).mean()


def make_methods(ensemble: Ensemble, seed: int, with_ed3: bool) -> dict[str, AbstractMethod]:
    """ed5 with its bridges, joint and, where asked, ed3."""

    def network() -> ResNet:
        net = build(CIFAR10.member, derive_seed(seed, "student")).to(DEVICE)
        assert isinstance(net, ResNet)
        return net

    def bridge(name: str, base: float, *score: Any) -> Bridge:
        return _bridge(seed, name, base, *score)

    def half() -> ScoreNet:
        return ScoreNet(10, 32, HALF_STAGES, 128, z_input="none")

    beside = {
        "T2": bridge("T2", 2.0),
        "Tinf": bridge("Tinf", INFINITE),
        "plain": bridge("plain", 2.0, PlainScore),
        "half-a": bridge("half-a", 2.0, half),
        "half-b": bridge("half-b", 2.0, half),
    }
    methods: dict[str, AbstractMethod] = {
        "ed5": DistilledSource(ensemble, network(), beside, joint=False),
        "joint": DistilledSource(ensemble, network(), {"T2": bridge("T2", 2.0)}, joint=True),
    }
    if with_ed3:
        methods["ed3"] = EnsembleDistillation(ensemble.first(3), network(), tau=1.0)
        methods["ed3"].ema = EmaRule(EMA)
    return methods


def make_joint_methods(ensemble: Ensemble, seed: int) -> dict[str, AbstractMethod]:
    """Networks trained jointly with a bridge at other temperatures, and with two bridges."""

    def method(**bases: float) -> DistilledSource:
        net = build(CIFAR10.member, derive_seed(seed, "student")).to(DEVICE)
        assert isinstance(net, ResNet)
        return DistilledSource(
            ensemble, net, {name: _bridge(seed, name, base) for name, base in bases.items()}, joint=True
        )

    return {
        "joint-T1": method(T1=1.0),
        "joint-T4": method(T4=4.0),
        "joint-two": method(T2=2.0, T2b=2.0),
    }


def _bridge(seed: int, name: str, base: float, score=lambda: ScoreNet.cifar10(z_input="none")) -> Bridge:
    config = BridgeConfig(temperature=TemperatureLaw(base=base), ema=EMA)
    return Bridge(build(score, derive_seed(seed, "score", name)).to(DEVICE), config, (0.0, 1.0))


def fit_configs(methods: Mapping[str, AbstractMethod], bridges: FitConfig) -> dict[str, FitConfig]:
    """Networks by SGD, bridges by Adam, on the same batches."""
    networks = replace(bridges, optimizer="sgd", lr=0.2, weight_decay=5e-4, warmup_steps=200)
    return {name: bridges if name.endswith(".bridges") else networks for name in JointTraining(methods).parts}


def report(models: Mapping[str, nn.Module], held: ImageSet, out: Path, name: str) -> None:
    """Print a row for each model, and write the rows and every log-probability into `out`."""
    assert held.labels is not None
    images, _ = held.batch(torch.zeros(1, dtype=torch.long, device=DEVICE))
    labels, one = held.labels.cpu(), count_macs(CIFAR10.member().to(DEVICE), images)
    log_probs = {label: each.cpu() for label, each in predict_each(models, held, 1000).items()}
    print(f"{'validation, ' + name:42s}  MACs×    ACC     NLL    ECE")
    rows = []
    for label, each in log_probs.items():
        row = {
            "model": label,
            "macs_ratio": count_macs(models[label], images) / one,
            "acc": accuracy(each, labels),
            "nll": nll(each, labels),
            "nll_se": standard_error(nll_per_image(each, labels)),
            "ece": ece(each, labels),
        }
        rows.append(row)
        figures = f"{row['macs_ratio']:5.3f}  {100 * row['acc']:5.2f}  {row['nll']:.4f}  {row['ece']:.4f}"
        print(f"{label:42s}  {figures}", flush=True)
    (out / f"{name}-validation.json").write_text(json.dumps(rows, indent=1))
    arrays = {label: each.half().numpy() for label, each in log_probs.items()}
    np.savez_compressed(out / f"{name}-validation.npz", **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_training(parser, epochs=100, batch=512, lr=2e-3, checkpoint_every=100_000)
    parser.add_argument("--inputs", nargs="+", default=["0.4,0"], help="alpha of mixup and of cutmix")
    parser.add_argument("--joint", action="store_true", help="only networks trained jointly, at other T")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    data = load(options.data, options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    ensemble = load_members(options.weights)
    report(ensemble.by_size(), data.val, options.out, "members")
    for number, inputs in enumerate(options.inputs):
        options.mixup, options.cutmix = (float(each) for each in inputs.split(","))
        name = f"mixup{options.mixup:g}-cutmix{options.cutmix:g}{'-joint' if options.joint else ''}"
        if options.joint:
            methods = make_joint_methods(ensemble, options.seed)
        else:
            methods = make_methods(ensemble, options.seed, with_ed3=number == 0)
        config = bridge_config(options, options.seed)
        begun = time.time()
        fit(
            JointTraining(methods),
            data.train.without_labels(),
            fit_configs(methods, config),
            options.run / name,
            progress(name),
        )
        minutes = (time.time() - begun) / 60
        models: dict[str, nn.Module] = {}
        for label, method in methods.items():
            save_weights(options.out / f"{name}-{label}.safetensors", method.student, half=True)
            models |= method.models(label) if isinstance(method, DistilledSource) else {label: method.student}
        report(models, data.val, options.out, name)
        print(f"{name}: {minutes:.1f} minutes for {options.epochs:g} epochs\n", flush=True)


if __name__ == "__main__":
    main()
