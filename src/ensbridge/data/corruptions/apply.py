"""Corrupt images, as a function of their pixels, their indices in the set, and the seed."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ensbridge.data.corruptions.constants import CONSTANTS, CORRUPTIONS, SEVERITIES, SIZE
from ensbridge.utils.extras import need

Image = NDArray[np.float64]  # (32, 32, 3), in [0, 1]
Corruption = Callable[[Image, Any, np.random.Generator], Image]

# An unchanged value may come back a rounding error too small, which must not cost it a level.
EPS = 1e-6


def corrupt(
    images: NDArray[np.uint8], name: str, severity: int, seed: int = 0, first: int = 0
) -> NDArray[np.uint8]:
    """Corrupt images (N, 32, 32, 3), uint8, of which the first has index `first` in its set.

    Every image has its own random generator, seeded by the seed, the corruption, the severity and its index,
    so that a subset is corrupted as it is within the whole set.

    >>> images = np.full((4, 32, 32, 3), 128, np.uint8)
    >>> noisy = corrupt(images, "gaussian_noise", severity=3, seed=0)
    >>> bool((corrupt(images[2:], "gaussian_noise", severity=3, seed=0, first=2) == noisy[2:]).all())
    True
    """
    check_images(images)
    check_severity(severity)
    seed = check_number("seed", seed)
    first = check_number("first", first)
    function = corruption(name)
    constant = CONSTANTS[name][severity - 1]
    result = np.empty_like(images)
    for index, image in enumerate(images):
        rng = generator(seed, name, severity, first + index)
        changed = function(image / 255, constant, rng)
        # Truncated, as the published set is, not rounded.
        result[index] = np.uint8(np.clip(changed, 0, 1) * 255 + EPS)
    return result


def generator(seed: int, name: str, severity: int, index: int) -> np.random.Generator:
    """The random generator of one image under one corruption at one severity."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), severity, index])


def corruption(name: str) -> Corruption:
    """The function of a corruption: (image, constant, generator) to image."""
    if name not in CONSTANTS:
        raise ValueError(f"corruption {name!r} is not known; there are: {', '.join(CORRUPTIONS)}")
    need("corruptions")
    from ensbridge.data.corruptions import functions

    return getattr(functions, name)


def check_images(images: NDArray[np.uint8], where: str = "images") -> None:
    """Refuse anything but a uint8 array of colour images of the size that the constants are for."""
    if not isinstance(images, np.ndarray):
        raise ValueError(f"images are a {type(images).__name__}; give a numpy array of uint8")
    if images.dtype != np.uint8:
        raise ValueError(f"images are {images.dtype}; give uint8 from 0 to 255")
    if images.shape[1:] != (SIZE, SIZE, 3) or len(images) == 0:
        raise ValueError(
            f"{where} have shape {images.shape}; the constants are for (images, {SIZE}, {SIZE}, 3), "
            "so give such a set"
        )


def check_severity(severity: int) -> None:
    """Refuse an unknown severity."""
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ValueError(f"severity is {severity!r}; it must be 1, 2, 3, 4 or 5")


def check_number(name: str, value: int) -> int:
    """A non-negative integer of any integer type."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} is {value!r}; it must be an integer from 0")
    return number
