"""Embedded data: scikit-learn's digits behind a noisy sensor.

1,797 hand-written digits of 8×8 pixels, scaled to [0, 1] and given Gaussian noise of 0.3 that is drawn once
and belongs to the data. 600 images are for training, 200 for validation, 997 for the test. So few noisy
images leave members in disagreement, which is what an ensemble lives on; clean digits are too easy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ensbridge.data.examples import ImageSet
from ensbridge.utils.extras import need

TRAIN, VALIDATION, NOISE = 600, 200, 0.3


class Splits(NamedTuple):
    """A data set in its three parts."""

    train: ImageSet
    val: ImageSet
    test: ImageSet

    def to(self, device: torch.device) -> Splits:
        """The same set on a device."""
        return Splits(*(part.to(device) for part in self))


def load_digits(noise: float = NOISE) -> Splits:
    """The digits in a fixed shuffle with fixed noise; every call gives the same.

    >>> splits = load_digits()
    >>> [len(part) for part in splits], tuple(splits.train.images.shape[1:])
    ([600, 200, 997], (1, 8, 8))
    """
    need("digits")
    from sklearn.datasets import load_digits as load

    bunch: Any = load()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(bunch.target), generator=generator)
    images = torch.from_numpy(bunch.images).float()[:, None] / 16
    images = images + noise * torch.randn(images.shape, generator=generator)
    whole = ImageSet(images, torch.from_numpy(bunch.target).long())
    parts = order.split([TRAIN, VALIDATION, len(order) - TRAIN - VALIDATION])
    return Splits(*(whole.subset(part) for part in parts))
