"""Blurs of an image (32, 32, 3) in [0, 1]."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ensbridge.data.corruptions.apply import Image
from ensbridge.data.corruptions.constants import SIZE


def gaussian_blur(image: Image, deviation: float, rng: np.random.Generator) -> Image:
    """Gaussian blur within each colour, edges continued, the kernel cut at four deviations."""
    return ndimage.gaussian_filter(image, (deviation, deviation, 0), mode="nearest")


def glass_blur(image: Image, constant: tuple[float, int, int], rng: np.random.Generator) -> Image:
    """Blur, take each inner pixel from a random neighbour above or left, some times over, and blur again.

    The published code means to swap neighbours, but assigns views of one array to each other, which copies
    the one and keeps it; and its random shifts leave out the upper end, so that -reach … reach - 1 is drawn.
    It goes from the last pixel to the first, so each copies what was not touched yet: one gather.
    """
    deviation, reach, times = constant
    # Between its two blurs the published image is bytes, cut off.
    levels = np.floor(gaussian_blur(image, deviation, rng) * 255 + 1e-6)
    inner = np.arange(reach + 1, SIZE - reach + 1)
    for _ in range(times):
        down, right = rng.integers(-reach, reach, (2, len(inner), len(inner)))
        levels[reach + 1 :, reach + 1 :] = levels[inner[:, None] + down, inner + right]
    return gaussian_blur(levels / 255, deviation, rng)


def defocus_blur(image: Image, constant: tuple[float, float], rng: np.random.Generator) -> Image:
    """Correlate with a disk whose rim is smoothed; edges are mirrored about the border pixels."""
    kernel = disk(*constant)
    return ndimage.correlate(image, kernel[:, :, None], mode="mirror")


@lru_cache
def disk(radius: float, deviation: float) -> NDArray[np.float64]:
    """The points of a grid within `radius`, summing to 1, smoothed by 3×3 values of a Gaussian."""
    reach = int(radius) + 1
    line = np.arange(-reach, reach + 1)
    inside = (line[:, None] ** 2 + line**2 <= radius**2).astype(np.float64)
    bell = np.exp(-0.5 * np.array([1, 0, 1]) / deviation**2)
    bell /= bell.sum()
    rim = bell[:, None] * bell
    return ndimage.correlate(inside / inside.sum(), rim, mode="constant")


def motion_blur(image: Image, constant: tuple[float, float], rng: np.random.Generator) -> Image:
    """Smear along one direction within ±45° of the horizontal."""
    return smear(image, *constant, angle=rng.uniform(-45, 45))


def smear(image: Image, radius: float, deviation: float, angle: float) -> Image:
    """A one-sided Gaussian of 2·radius + 1 whole steps along an angle in degrees; edges are continued.

    As ImageMagick does it, by which the published set was made: each step goes to the nearest pixel, halves
    downwards, and the result is bytes, rounded. (32, 32) or (32, 32, 3).
    """
    steps = np.arange(2 * int(np.ceil(radius)) + 1)
    weights = np.exp(-0.5 * (steps / deviation) ** 2)
    weights /= weights.sum()
    radians = np.deg2rad(angle)
    right = np.ceil(steps * np.cos(radians) - 0.5).astype(int)
    down = np.ceil(steps * np.sin(radians) - 0.5).astype(int)
    pad = len(steps)
    wide = np.pad(image, ((pad, pad), (pad, pad), (0, 0))[: image.ndim], mode="edge")
    total = np.zeros_like(image)
    for weight, x, y in zip(weights, right + pad, down + pad, strict=True):
        total += weight * wide[y : y + len(image), x : x + len(image)]
    return np.rint(total * 255) / 255


def zoom_blur(image: Image, largest: float, rng: np.random.Generator) -> Image:
    """The mean of the image and of its centre zooms 1, 1.01, … up to the largest."""
    count = round((largest - 1) * 100) + 1
    total = image.copy()
    for number in range(count):
        total += zoom(image, 1 + number / 100)
    return total / (count + 1)


def zoom(image: Image, factor: float) -> Image:
    """Cut the centre out and stretch it to the old size, linearly: (32, 32) or (32, 32, 3)."""
    stretch = zoom_matrix(factor)
    rows = (stretch @ image.reshape(SIZE, -1)).reshape(image.shape)
    return np.moveaxis(np.tensordot(stretch, rows, (1, 1)), 0, 1)


@lru_cache
def zoom_matrix(factor: float) -> NDArray[np.float64]:
    """What zooms one axis: the weights (32, 32) of old pixels in new ones.

    The centre has ceil(32 / factor) pixels, and is stretched so that its end pixels become the ends of
    round(of them · factor) new ones, of which the middle 32 are kept.
    """
    old = int(np.ceil(SIZE / factor))
    new = round(old * factor)
    positions = (np.arange(SIZE) + (new - SIZE) // 2) * (old - 1) / (new - 1)
    below = np.minimum(positions.astype(int), old - 2)
    share = positions - below
    matrix = np.zeros((SIZE, SIZE))
    line, start = np.arange(SIZE), (SIZE - old) // 2
    matrix[line, start + below] = 1 - share
    matrix[line, start + below + 1] = share
    return matrix
