"""The quick start's recipe: scikit-learn's digits, scaled down until two cores do it in a few minutes.

Measured on two CPU cores over seeds 0, 1, 2 (results/quickstart.md), as NLL and DEE: DE-1 0.725, DE-3 0.505;
one network and its bridge at ×1.247 MACs 0.537, 2.04 ± 0.08, its control 0.651, 1.40 ± 0.04; with KL 0.499,
3.23 ± 0.14, its control 0.570, 1.83 ± 0.08; ED 0.517, EnD² 0.676, +2 BN medium 0.595. Temperature, rates,
noise and weight decays were chosen by cross-validation on training images (studies/choose_digits.py).
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ensbridge.bridge.bridge import BridgeConfig, Preset, ZInput
from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.data.augment import Augment
from ensbridge.data.digits import load_digits
from ensbridge.experiments.recipe import Recipe, Schedule, match_compute
from ensbridge.models.resnet import ResNet
from ensbridge.models.score_net import ScoreNet
from ensbridge.models.tail import Tail
from ensbridge.training.candidates import distil_config
from ensbridge.training.config import FitConfig


def member() -> ResNet:
    """An FRN-Swish ResNet of 78,426 parameters: the paper's family with one block in each of three stages."""
    return ResNet((1, 1, 1), (16, 32, 64), 10, stem=16, strides=(1, 2, 1), mean=(0.3,), std=(0.4,))


def score(z_input: ZInput) -> ScoreNet:
    """A score network of the paper's kind for 16 channels at 8×8."""
    return ScoreNet(10, 16, [(1, 16, 1, 1), (3, 24, 1, 2), (3, 32, 1, 1)], 64, z_input=z_input)


def tail(source: nn.Module, feature: str, width: float) -> nn.Module:
    """A bridge network of Yun et al. behind a block of the source."""
    assert isinstance(source, ResNet)
    return Tail(source, feature, width)


def digits(preset: Preset = "default", schedule: Schedule = "published") -> Recipe:
    """Five members, bridges towards three and five of them, and every baseline with as many image passes.

    The paper has no such experiment, so there is one schedule.

    >>> recipe = digits()
    >>> recipe.members, recipe.target, recipe.bridge.temperature.base
    (5, 3, 2.0)
    >>> digits("released").end2_predict, digits("paper").ed_fit.augment.mixup
    ('softmax', 0.0)
    """
    config = replace(BridgeConfig.preset(preset), temperature=TemperatureLaw(base=2.0), ema=0.99)
    mixed = Augment(noise=0.1, mixup=0.4)
    plain = mixed if preset == "default" else Augment(noise=0.1)
    bridge = FitConfig(epochs=64, batch_size=64, lr=8e-3, augment=mixed)
    distill = replace(bridge, epochs=8, lr=1e-3)
    sgd = replace(bridge, optimizer="sgd")
    recipe = Recipe(
        name="digits",
        preset=preset,
        class_names=tuple("0123456789"),
        load=load_digits,
        member=member,
        score=score,
        tail=tail,
        feature="stages.0.0",
        tail_feature="stages.1.0",  # at 0.8 of three blocks: the second
        members=5,
        target=3,
        member_fit=FitConfig(epochs=30, batch_size=50, lr=0.1, optimizer="sgd", weight_decay=1e-3),
        bridge_fit=bridge,
        distill_fit=distill,
        kl_fit=bridge,
        ed_fit=replace(sgd, lr=0.1, weight_decay=1e-3, augment=plain),
        end2_fit=replace(sgd, lr=0.1, weight_decay=1e-3, augment=plain),
        bn_fit=replace(sgd, lr=0.2, weight_decay=1e-5, warmup_steps=47, warmup_lr=2e-3),  # 5 epochs
        curve_fit=FitConfig(epochs=30, batch_size=50, lr=0.1, optimizer="sgd", weight_decay=1e-3),
        bridge=config,
        headline_fit=distil_config(bridge) if preset == "default" else None,
        end2_predict="softmax" if preset == "released" else "dirichlet",
        on_gpu=False,  # compiling its steps would take longer than they do
    )
    return match_compute(recipe)
