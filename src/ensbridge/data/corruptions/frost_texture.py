"""Frost on a window pane, generated: the photographs of the published set are not at hand.

Ferns of ice, a spine with branches at 60° and smaller ones on these, grow over cloudy ice. The textures
are always the same, as the photographs are; what is random is the place that an image gets.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

TEXTURES = 5
SIDE = 192
DARK, PALE = np.array([34, 52, 78]) / 255, np.array([236, 244, 255]) / 255  # the pane, and thick ice


@lru_cache
def frost_texture(number: int) -> NDArray[np.float64]:
    """One of the textures, (192, 192, 3) in [0, 1].

    >>> frost_texture(0).shape
    (192, 192, 3)
    """
    rng = np.random.default_rng([0, number])
    ice = 0.35 * _clouds(rng) + 0.75 * _ferns(rng, count=12 + 4 * number)
    ice += 0.04 * rng.standard_normal(ice.shape)  # the grain of small crystals
    share = np.clip(ice, 0, 1)[..., None]
    return DARK + (PALE - DARK) * share


def _clouds(rng: np.random.Generator) -> NDArray[np.float64]:
    """Smooth noise of several sizes, from 0 to 1, as thick as thin."""
    total = np.zeros((SIDE, SIDE))
    for size in (24, 12, 6, 3):
        layer = ndimage.gaussian_filter(rng.standard_normal((SIDE, SIDE)), size, mode="wrap")
        total += size**0.5 * layer / layer.std()
    ranks = total.ravel().argsort().argsort()
    return (ranks / ranks.max()).reshape(SIDE, SIDE)


def _ferns(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Ferns at random places and angles, bright along their lines, from 0 to 1; the texture is a torus."""
    ice = np.zeros((SIDE, SIDE))
    for _ in range(count):
        _grow(
            ice,
            rng.uniform(0, SIDE, 2),
            rng.uniform(0, 2 * np.pi),
            rng.uniform(40, 100),
            rng.uniform(0.5, 1),
            3,
        )
    lines = ndimage.gaussian_filter(ice, 0.7, mode="wrap")
    glow = ndimage.gaussian_filter(ice, 3, mode="wrap")
    return 1 - np.exp(-(2.5 * lines + 1.0 * glow))


def _grow(
    ice: NDArray[np.float64],
    start: NDArray[np.float64],
    angle: float,
    length: float,
    thickness: float,
    order: int,
) -> None:
    """Add a line and, along it, pairs of shorter ones at 60° to it, which carry their own."""
    direction = np.array([np.sin(angle), np.cos(angle)])
    along = np.arange(0, length, 0.5)[:, None]
    rows, columns = (np.rint(start + along * direction).astype(int) % SIDE).T
    np.add.at(ice, (rows, columns), 0.5 * thickness * (1 - along[:, 0] / length))
    if order == 1:
        return
    for distance in np.arange(4, length, 6):
        for side in (-np.pi / 3, np.pi / 3):
            _grow(
                ice,
                start + distance * direction,
                angle + side,
                0.45 * (length - distance),
                0.7 * thickness,
                order - 1,
            )
