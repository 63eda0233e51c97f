"""The quick start's recipe: scikit-learn's digits, scaled down until two cores do it in under two minutes.

Measured on two CPU cores over seeds 0, 1, 2 (results/quickstart.md): DE-1 NLL 0.725, DE-3 0.505; one network
and its bridge 0.537, DEE 2.04 ± 0.08 at ×1.247 MACs; its control 0.658, DEE 1.36. Temperature, rate, noise
and weight decay were chosen by cross-validation on training images (results/choose_digits.py).
"""

from __future__ import annotations

from torch import nn

from ensbridge.data.augment import Augment
from ensbridge.data.digits import load_digits
from ensbridge.methods.diffusion_bridge import BridgeConfig
from ensbridge.nets.resnet import ResNet
from ensbridge.nets.score import ScoreNet, ZInput
from ensbridge.recipes.recipe import Recipe
from ensbridge.schedule import TemperatureLaw
from ensbridge.train.config import FitConfig


def member() -> nn.Module:
    """An FRN-Swish ResNet of 78,426 parameters: the paper's family with one block in each of three stages."""
    return ResNet((1, 1, 1), (16, 32, 64), 10, stem=16, strides=(1, 2, 1), mean=(0.3,), std=(0.4,))


def score(z_input: ZInput) -> ScoreNet:
    """A score network of the paper's kind for 16 channels at 8×8."""
    return ScoreNet(10, 16, [(1, 16, 1, 1), (3, 24, 1, 2), (3, 32, 1, 1)], 64, z_input=z_input)


def digits() -> Recipe:
    """Five members, one bridge towards the first three.

    >>> recipe = digits()
    >>> recipe.members, recipe.target, recipe.bridge.temperature.base
    (5, 3, 2.0)
    """
    bridge = BridgeConfig(temperature=TemperatureLaw(base=2.0), ema=0.99)
    augment = Augment(noise=0.1, mixup=0.4)
    return Recipe(
        name="digits",
        load=load_digits,
        member=member,
        score=score,
        feature="stages.0.0",
        members=5,
        target=3,
        member_fit=FitConfig(epochs=30, batch_size=50, lr=0.1, optimizer="sgd", weight_decay=1e-3),
        bridge_fit=FitConfig(epochs=64, batch_size=64, lr=8e-3, augment=augment),
        distill_fit=FitConfig(epochs=8, batch_size=64, lr=1e-3, augment=augment),
        bridge=bridge,
        kl_bridge=bridge,
    )
