"""Spatter on an image (32, 32, 3) in [0, 1]: drops of water, or of mud at the higher severities.

The drops are where blurred noise is above a threshold. Mud covers them; water is brighter on one side of
each drop than on the other, by the distance from its edge in relief. The steps are those of the published
code, bytes in between included, but for exact distances to the edges where it has approximate ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ensbridge.data.corruptions.apply import SIZE, Image

WATER = np.array([175, 238, 238]) / 255
MUD = np.array([63, 42, 20]) / 255
FARTHEST = 20  # beyond this many pixels all distances are one
RELIEF = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
LOW, HIGH = 50, 150  # gradients of possible and of certain edges


def spatter(image: Image, constant: tuple[float, ...], rng: np.random.Generator) -> Image:
    """Splash water or mud on an image."""
    mean, deviation, blur, threshold, last, is_mud = constant
    noise = mean + deviation * rng.standard_normal((SIZE, SIZE))
    liquid = ndimage.gaussian_filter(noise, blur, mode="nearest")
    if is_mud:
        cover = ndimage.gaussian_filter((liquid > threshold).astype(np.float64), last, mode="nearest")
        cover = np.where(cover < 0.8, 0, cover)[..., None]
        return image * (1 - cover) + MUD * cover
    liquid[liquid < threshold] = 0
    # Noise above 1 is rare; it stays at the brightest byte here, where the published bytes run over.
    drops = np.floor(np.clip(liquid, 0, 1) * 255)
    light = drops * relief(drops)
    brightest = light.max()
    return image + (last * light / brightest if brightest else light)[..., None] * WATER


def relief(drops: NDArray[np.float64]) -> NDArray[np.float64]:
    """How bright each place of a layer of drops (32, 32), 0 to 255, shines, 0 to 255."""
    outline = edges(drops)
    away = ndimage.distance_transform_edt(~outline) if outline.any() else np.full(drops.shape, FARTHEST)
    away = np.minimum(np.asarray(away, np.float64), FARTHEST)
    spread = equalise(np.floor(_box(away) + 1e-6).astype(int))
    raised = np.clip(ndimage.correlate(spread, RELIEF, mode="mirror"), 0, 255)
    return np.rint(_box(raised.astype(np.float64)))


def _box(layer: NDArray[np.float64]) -> NDArray[np.float64]:
    return ndimage.uniform_filter(layer, 3, mode="mirror")


def equalise(levels: NDArray[np.int_]) -> NDArray[np.int_]:
    """Stretch levels 0 to 255 so that each is as common as another; a single level stays as it is.

    >>> equalise(np.array([[3, 3, 7, 9]])).tolist()
    [[0, 0, 128, 255]]
    """
    counts = np.bincount(levels.ravel(), minlength=256)
    counts[levels.min()] = 0
    if not counts.any():
        return levels
    return np.rint(counts.cumsum() * 255 / counts.sum()).astype(int)[levels]


def edges(layer: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Canny's edges: crests of the gradient above HIGH, and those above LOW that touch them."""
    wide = np.pad(layer, 1, mode="edge")
    tall, flat = (wide[:-2] + 2 * wide[1:-1] + wide[2:]), (wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:])
    right, down = tall[:, 2:] - tall[:, :-2], flat[2:] - flat[:-2]
    steep = np.abs(right) + np.abs(down)
    around = np.pad(steep, 1)
    before, after = {}, {}
    for name, (y, x) in {"row": (0, 1), "column": (1, 0), "down": (1, 1), "up": (1, -1)}.items():
        before[name] = around[1 - y : 1 - y + len(layer), 1 - x : 1 - x + len(layer)]
        after[name] = around[1 + y : 1 + y + len(layer), 1 + x : 1 + x + len(layer)]
    # Of equal neighbours along an axis the first is the crest; on a diagonal neither is.
    across = (steep > before["row"]) & (steep >= after["row"])
    along = (steep > before["column"]) & (steep >= after["column"])
    falling = (steep > before["down"]) & (steep > after["down"])
    rising = (steep > before["up"]) & (steep > after["up"])
    slope = np.tan(np.pi / 8)
    crest = np.where(
        np.abs(down) < slope * np.abs(right),
        across,
        np.where(np.abs(down) > np.abs(right) / slope, along, np.where(right * down < 0, rising, falling)),
    )
    possible = crest & (steep > LOW)
    certain = possible & (steep > HIGH)
    if (possible == certain).all():
        return certain
    return np.asarray(ndimage.binary_propagation(certain, np.ones((3, 3)), mask=possible), np.bool_)
