"""The corruptions of one image (32, 32, 3) in [0, 1], each a function of (image, constant, generator).

Noise, blur, weather and digital ones, in this order; spatter and the textures of frost have their own files.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from scipy import ndimage

from ensbridge.data.corruptions.apply import SIZE, Image
from ensbridge.data.corruptions.frost_texture import TEXTURES, frost_texture
from ensbridge.data.corruptions.spatter import spatter as spatter

GREY = np.array([0.299, 0.587, 0.114])  # luma weights of red, green and blue
# The rows and columns of all pixels, and three points (column, row) that carry the affine part.
GRID = np.indices((SIZE, SIZE)).astype(np.float64)
TRIANGLE = SIZE // 2 + SIZE // 3 * np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])


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


def _look_up(image: Image, rows: np.ndarray, columns: np.ndarray, edges: str) -> Image:
    """The image at places between its pixels, linearly."""
    colours = [
        ndimage.map_coordinates(image[..., colour], (rows, columns), order=1, mode=edges)
        for colour in range(3)
    ]
    return np.stack(colours, axis=-1)
