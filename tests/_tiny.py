"""Networks and data so small that a test with them takes milliseconds; used as `import _tiny`.

Everything is a function of its seed: the global random state is neither read nor changed. Images are
(B, 3, 8, 8) in [0, 1], classes are 3, and `FEATURE` names what the bridges read: 8 channels of 8×8.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ensbridge.data import ImageSet
from ensbridge.ensemble import Ensemble
from ensbridge.nets import ResNet, ScoreNet
from ensbridge.nets.score import ZInput

CLASSES, CHANNELS, SIZE = 3, 8, 8
FEATURE = "stages.0.0"


def generator(seed: int = 0) -> torch.Generator:
    """A generator on the CPU."""
    return torch.Generator().manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Networks built inside start from `seed`; the global random state returns on leaving."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def member(seed: int = 0, classes: int = CLASSES) -> ResNet:
    """A ResNet of two stages with 5,291 parameters."""
    with seeded(seed):
        return ResNet((1, 1), (CHANNELS, 16), classes, stem=CHANNELS).eval()


def batch_norm_member(seed: int = 0, classes: int = CLASSES) -> nn.Module:
    """Another kind of classifier, one whose buffers change when it runs in training mode."""
    with seeded(seed):
        conv = nn.Conv2d(3, CHANNELS, 3, padding=1)
        head = nn.Linear(CHANNELS, classes)
        return nn.Sequential(
            conv, nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head
        ).eval()


def ensemble(count: int = 3, seed: int = 0) -> Ensemble:
    """An ensemble of tiny ResNets, each from a seed of its own."""
    return Ensemble([member(seed + index) for index in range(count)]).eval()


def score(z_input: ZInput = "none", seed: int = 0, classes: int = CLASSES) -> ScoreNet:
    """A score network of two stages that reads `FEATURE` of a tiny member."""
    with seeded(seed):
        return ScoreNet(classes, CHANNELS, [(1, 8, 1, 1), (2, 8, 2, 2)], last=16, z_input=z_input).eval()


def images(count: int = 6, seed: int = 0) -> Tensor:
    """Random images (count, 3, 8, 8)."""
    return torch.rand(count, 3, SIZE, SIZE, generator=generator(seed))


def data(count: int = 24, seed: int = 0) -> ImageSet:
    """Random images with random labels; every class occurs."""
    labels = torch.arange(count)[torch.randperm(count, generator=generator(seed + 1))] % CLASSES
    return ImageSet(images(count, seed), labels)


def logits(count: int = 6, seed: int = 0, members: int | None = None, scale: float = 3.0) -> Tensor:
    """Random logits (count, 3), or (members, count, 3), in float64."""
    shape = (count, CLASSES) if members is None else (members, count, CLASSES)
    return scale * torch.randn(shape, generator=generator(seed), dtype=torch.float64)
