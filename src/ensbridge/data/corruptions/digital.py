"""Colours, compression and distortion of an image (32, 32, 3) in [0, 1]."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image as Pillow
from scipy import ndimage

from ensbridge.data.corruptions.apply import Image
from ensbridge.data.corruptions.constants import SIZE


def contrast(image: Image, factor: float, rng: np.random.Generator) -> Image:
    """(x - mean) · factor + mean, with the mean of each colour."""
    mean = image.mean((0, 1))
    return (image - mean) * factor + mean


def brightness(image: Image, added: float, rng: np.random.Generator) -> Image:
    """Raise the value of HSV, clipped, at the same hue and saturation: all colours by one factor."""
    value = image.max(2, keepdims=True)
    raised = np.minimum(value + added, 1)
    # Black has no hue and becomes grey.
    return np.where(value > 0, image * raised / np.where(value > 0, value, 1), raised)


def saturate(image: Image, constant: tuple[float, float], rng: np.random.Generator) -> Image:
    """Saturation of HSV times a factor plus a term, clipped, at the same hue and value.

    In HSV a colour lies value · saturation · (1 - hue's own share) below the value, so that a new
    saturation scales that depth. A grey has hue 0, as published: what is added makes it red.
    """
    factor, added = constant
    value = image.max(2, keepdims=True)
    depth = value - image
    spread = depth.max(2, keepdims=True)  # value · saturation
    saturation = spread / np.where(value > 0, value, 1)
    wanted = np.clip(saturation * factor + added, 0, 1)
    share = np.where(spread > 0, depth / np.where(spread > 0, spread, 1), [0.0, 1.0, 1.0])
    return value - value * wanted * share


def jpeg_compression(image: Image, quality: int, rng: np.random.Generator) -> Image:
    """Write as JPEG of a quality and read back; colours at half the resolution, as Pillow's default is."""
    file = BytesIO()
    _picture(image).save(file, "JPEG", quality=quality)
    file.seek(0)
    return np.asarray(Pillow.open(file, formats=["JPEG"])) / 255


def pixelate(image: Image, share: float, rng: np.random.Generator) -> Image:
    """Resize to that share of the pixels, cut to a whole number, and back, both by Pillow's box filter."""
    small = (int(SIZE * share), int(SIZE * share))
    box = Pillow.Resampling.BOX
    return np.asarray(_picture(image).resize(small, box).resize((SIZE, SIZE), box)) / 255


def _picture(image: Image) -> Pillow.Image:
    return Pillow.fromarray(np.uint8(np.rint(image * 255)))


def elastic_transform(image: Image, constant: tuple[float, float, float], rng: np.random.Generator) -> Image:
    """Move three points at random, and the image with them; then every pixel by a smooth random field.

    Both parts interpolate linearly, one after the other. Beyond its edges the image is mirrored, about the
    border pixels in the first part and about their outer sides in the second, as published.
    """
    strength, smoothness, reach = (SIZE * factor for factor in constant)
    moved = TRIANGLE + rng.uniform(-reach, reach, TRIANGLE.shape)
    ones = np.ones((3, 1))
    # The new image looks up old places, so the map is from moved points to first ones: (3, 2).
    back = np.linalg.solve(np.hstack([moved, ones]), TRIANGLE)
    positions = np.stack([*GRID[::-1], np.ones_like(GRID[0])], axis=-1) @ back
    image = _look_up(image, positions[..., 1], positions[..., 0], "mirror")
    field = rng.uniform(-1, 1, (2, SIZE, SIZE))
    right, down = (
        strength * ndimage.gaussian_filter(part, smoothness, mode="reflect", truncate=3) for part in field
    )
    return _look_up(image, GRID[0] + down, GRID[1] + right, "reflect")


# The rows and columns of all pixels, and three points (column, row) that carry the affine part.
GRID = np.indices((SIZE, SIZE)).astype(np.float64)
TRIANGLE = SIZE // 2 + SIZE // 3 * np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])


def _look_up(image: Image, rows: np.ndarray, columns: np.ndarray, edges: str) -> Image:
    """The image at places between its pixels, linearly."""
    colours = [
        ndimage.map_coordinates(image[..., colour], (rows, columns), order=1, mode=edges)
        for colour in range(3)
    ]
    return np.stack(colours, axis=-1)
