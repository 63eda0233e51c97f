"""Noise: random numbers for every value of an image (32, 32, 3) in [0, 1]."""

from __future__ import annotations

import numpy as np

from ensbridge.data.corruptions.apply import Image


def gaussian_noise(image: Image, deviation: float, rng: np.random.Generator) -> Image:
    """x + N(0, deviation²)."""
    return image + deviation * rng.standard_normal(image.shape)


def shot_noise(image: Image, photons: float, rng: np.random.Generator) -> Image:
    """Poisson(x · photons) / photons: what a sensor counts in the dark."""
    return rng.poisson(image * photons) / photons


def impulse_noise(image: Image, share: float, rng: np.random.Generator) -> Image:
    """Salt and pepper: that share of the values, each colour for itself, becomes 0 or 1."""
    hit = rng.random(image.shape) < share
    salt = rng.random(image.shape) < 0.5
    return np.where(hit, salt, image)


def speckle_noise(image: Image, deviation: float, rng: np.random.Generator) -> Image:
    """x + x · N(0, deviation²)."""
    return image + image * deviation * rng.standard_normal(image.shape)
