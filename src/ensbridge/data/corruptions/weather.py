"""Weather on an image (32, 32, 3) in [0, 1]: fog, frost and snow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ensbridge.data.corruptions.apply import Image
from ensbridge.data.corruptions.blur import smear, zoom
from ensbridge.data.corruptions.constants import SIZE
from ensbridge.data.corruptions.frost_texture import TEXTURES, frost_texture

GREY = np.array([0.299, 0.587, 0.114])  # the eye's weights of red, green and blue


def fog(image: Image, constant: tuple[float, float], rng: np.random.Generator) -> Image:
    """Add a cloud times a strength, and scale so that the brightest possible value is the old maximum."""
    strength, decay = constant
    highest = image.max()
    return (image + strength * plasma(decay, rng)[..., None]) * highest / (highest + strength)


def plasma(decay: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A cloud (32, 32) from 0 to 1 by diamonds and squares on a torus.

    Each new point is the mean of its four neighbours plus U(-1, 1) · amplitude. The amplitude falls by
    decay² from level to level, since the published code multiplies its draws by their own range.
    """
    heights = np.zeros((SIZE, SIZE))
    step, amplitude = SIZE, 1.0
    while step > 1:
        half = step // 2

        def between(neighbours: NDArray[np.float64], amplitude: float = amplitude) -> NDArray[np.float64]:
            return neighbours / 4 + amplitude * rng.uniform(-1, 1, neighbours.shape)

        corners = heights[::step, ::step]
        sides = corners + np.roll(corners, -1, 0)
        centres = between(sides + np.roll(sides, -1, 1))
        heights[half::step, half::step] = centres
        # A point between two corners has centres across: above and below, or left and right.
        heights[::step, half::step] = between(
            corners + np.roll(corners, -1, 1) + centres + np.roll(centres, 1, 0)
        )
        heights[half::step, ::step] = between(
            corners + np.roll(corners, -1, 0) + centres + np.roll(centres, 1, 1)
        )
        step, amplitude = half, amplitude / decay**2
    heights -= heights.min()
    return heights / heights.max()


def frost(image: Image, constant: tuple[float, float], rng: np.random.Generator) -> Image:
    """Mix with a random place of a random texture: a·x + b·frost. The textures are generated."""
    image_weight, texture_weight = constant
    texture = frost_texture(int(rng.integers(TEXTURES)))
    row, column = rng.integers(0, len(texture) - SIZE, 2)
    return image_weight * image + texture_weight * texture[row : row + SIZE, column : column + SIZE]


def snow(image: Image, constant: tuple[float, ...], rng: np.random.Generator) -> Image:
    """Whiten the image, and add a layer of smeared flakes and the same layer turned by half."""
    mean, deviation, factor, threshold, radius, smearing, kept = constant
    flakes = zoom(mean + deviation * rng.standard_normal((SIZE, SIZE)), factor)
    flakes[flakes < threshold] = 0
    flakes = np.floor(np.clip(flakes, 0, 1) * 255) / 255  # bytes before the smear, as published
    flakes = smear(flakes, radius, smearing, angle=rng.uniform(-135, -45))
    grey = (image @ GREY)[..., None]
    whitened = np.maximum(image, grey * 1.5 + 0.5)
    return kept * image + (1 - kept) * whitened + (flakes + flakes[::-1, ::-1])[..., None]
