"""Slow direct versions of the corruptions: loops and definitions, and pictures to try them on.

Each takes an image (32, 32, 3) in [0, 1], its constant and the same random numbers as the fast one, which
it draws in the same order, and gives the corrupted image before it is clipped.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import scipy.ndimage

from _jpeg import jpeg_compression as jpeg_compression
from ensbridge.data.corruptions.frost_texture import frost_texture

PIXELS = list(product(range(32), range(32)))
VALUES = list(product(range(32), range(32), range(3)))


def pictures(count: int = 2) -> np.ndarray:
    """Smooth colourful images with a bright disk and a black corner, uint8."""
    y, x = np.mgrid[:32, :32] / 31
    images = []
    for number in range(count):
        waves = [
            0.5 + 0.4 * np.sin(3 * x * (k + 1) + 4 * y * (number % 3 - k) + k + number) for k in range(3)
        ]
        image = np.stack(waves, -1)
        image[(x - 0.5) ** 2 + (y - 0.4) ** 2 < 0.02 + 0.01 * number] = [0.95, 0.9, 0.3]
        image[28:, :5] = 0
        image[:4, 28:] = 0.5
        images.append(image)
    return np.uint8(np.stack(images) * 255)


def bytes_of(image: np.ndarray) -> np.ndarray:
    """Clip, times 255, cut off."""
    return np.floor(np.clip(image, 0, 1) * 255 + 1e-6).astype(np.uint8)


def clamp(place: int) -> int:
    return min(max(place, 0), 31)


def mirror(place: int) -> int:
    """Mirrored about the centre of a border pixel: -1 is 1."""
    while not 0 <= place <= 31:
        place = -place if place < 0 else 62 - place
    return place


def reflect(place: int) -> int:
    """Mirrored about the outer side of a border pixel: -1 is 0."""
    while not 0 <= place <= 31:
        place = -1 - place if place < 0 else 63 - place
    return place


def weigh(image: np.ndarray, kernel: dict[tuple[int, int], float], edge: Callable[[int], int]) -> np.ndarray:
    """The sum over (down, right) of weights times the image there."""
    result = np.zeros(image.shape)
    for (down, right), weight in kernel.items():
        rows, columns = ([edge(place + shift) for place in range(32)] for shift in (down, right))
        result += weight * image[rows][:, columns]
    return result


def bell(deviation: float, truncate: float = 4) -> dict[tuple[int, int], float]:
    """A Gaussian's weights on whole pixels, in two dimensions."""
    reach = int(truncate * deviation + 0.5)
    line = range(-reach, reach + 1)
    kernel = {
        (i, j): math.exp(-(i * i + j * j) / (2 * deviation**2)) if reach else 1.0
        for i, j in product(line, line)
    }
    return {place: weight / sum(kernel.values()) for place, weight in kernel.items()}


def between(image: np.ndarray, y: float, x: float, edge: Callable[[int], int]) -> np.ndarray:
    """Linear interpolation."""
    top, left = math.floor(y), math.floor(x)
    result = np.zeros(image.shape[2:])
    for i, j in product((0, 1), (0, 1)):
        weight = (1 - abs(y - top - i)) * (1 - abs(x - left - j))
        result = result + weight * image[edge(top + i), edge(left + j)]
    return result


# Noise


def gaussian_noise(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    return np.reshape([image[v] + c * rng.standard_normal() for v in VALUES], image.shape)


def speckle_noise(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    return np.reshape([image[v] * (1 + c * rng.standard_normal()) for v in VALUES], image.shape)


def shot_noise(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    return np.reshape([rng.poisson(image[v] * c) / c for v in VALUES], image.shape)


def impulse_noise(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    hits = [rng.random() < c for _ in VALUES]
    salts = [1.0 if rng.random() < 0.5 else 0.0 for _ in VALUES]
    mixed = [salt if hit else image[v] for v, hit, salt in zip(VALUES, hits, salts, strict=True)]
    return np.reshape(mixed, image.shape)


# Blur


def gaussian_blur(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    return weigh(image, bell(c), clamp)


def glass_blur(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    deviation, reach, times = c
    levels = bytes_of(gaussian_blur(image, deviation, rng))
    for _ in range(times):
        down, right = rng.integers(-reach, reach, (2, 30, 30))
        for y in range(31, 1, -1):
            for x in range(31, 1, -1):
                levels[y, x] = levels[y + down[y - 2, x - 2], x + right[y - 2, x - 2]]
    return gaussian_blur(levels / 255, deviation, rng)


def defocus_blur(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    radius, deviation = c
    inside = [(i, j) for i, j in product(range(-8, 9), repeat=2) if i * i + j * j <= radius**2]
    side = math.exp(-1 / (2 * deviation**2))
    rim = {-1: side / (1 + 2 * side), 0: 1 / (1 + 2 * side), 1: side / (1 + 2 * side)}
    kernel: dict[tuple[int, int], float] = {}
    for (i, j), di, dj in product(inside, rim, rim):
        kernel[i + di, j + dj] = kernel.get((i + di, j + dj), 0) + rim[di] * rim[dj] / len(inside)
    return weigh(image, kernel, mirror)


def smear(image: np.ndarray, radius: int, deviation: float, angle: float) -> np.ndarray:
    weights = [math.exp(-(step**2) / (2 * deviation**2)) for step in range(2 * radius + 1)]
    kernel: dict[tuple[int, int], float] = {}
    for step, weight in enumerate(weights):
        # To the nearest pixel; exact halves do not come up at random angles, but for step 0.
        place = round(step * math.sin(math.radians(angle))), round(step * math.cos(math.radians(angle)))
        kernel[place] = kernel.get(place, 0) + weight / sum(weights)
    return np.floor(weigh(image, kernel, clamp) * 255 + 0.5) / 255


def motion_blur(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    return smear(image, c[0], c[1], -45 + 90 * rng.random())


def zoom(image: np.ndarray, factor: float) -> np.ndarray:
    """By scipy's own zoom, of the centre."""
    side = math.ceil(32 / factor)
    top = (32 - side) // 2
    centre = image[top : top + side, top : top + side]
    large = scipy.ndimage.zoom(centre, (factor, factor, 1)[: image.ndim], order=1)
    trim = (len(large) - 32) // 2
    return large[trim : trim + 32, trim : trim + 32]


def zoom_blur(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    factors = [percent / 100 for percent in range(100, round(100 * c) + 1)]
    return np.mean([image, *(zoom(image, factor) for factor in factors)], axis=0)


# Weather


def cloud(decay: float, rng: np.random.Generator) -> np.ndarray:
    heights = np.zeros((32, 32))
    step, amplitude = 32, 1.0

    def fill(y0: int, x0: int, neighbours: list[tuple[int, int]]) -> None:
        before = heights.copy()
        for y, x in product(range(y0, 32, step), range(x0, 32, step)):
            mean = sum(before[(y + i) % 32, (x + j) % 32] for i, j in neighbours) / 4
            heights[y, x] = mean + amplitude * rng.uniform(-1, 1)

    while step > 1:
        half = step // 2
        fill(half, half, [(-half, -half), (-half, half), (half, -half), (half, half)])
        diamond = [(-half, 0), (half, 0), (0, -half), (0, half)]
        before = heights.copy()
        fill(0, half, diamond)
        now, heights[:] = heights.copy(), before
        fill(half, 0, diamond)
        heights[::step, half::step] = now[::step, half::step]
        step, amplitude = half, amplitude / decay / decay
    return (heights - heights.min()) / (heights.max() - heights.min())


def fog(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    layer = cloud(c[1], rng)
    top = max(image[v] for v in VALUES)
    return np.reshape([(image[v] + c[0] * layer[v[:2]]) * top / (top + c[0]) for v in VALUES], image.shape)


def frost(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    texture = frost_texture(int(rng.integers(5)))
    y, x = rng.integers(0, len(texture) - 32, 2)
    mixed = [c[0] * image[i, j, k] + c[1] * texture[y + i, x + j, k] for i, j, k in VALUES]
    return np.reshape(mixed, image.shape)


def snow(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    noise = np.reshape([c[0] + c[1] * rng.standard_normal() for _ in PIXELS], (32, 32))
    layer = zoom(noise, c[2])
    layer = bytes_of(np.where(layer < c[3], 0, layer)) / 255
    layer = smear(layer, c[4], c[5], -135 + 90 * rng.random())
    result = np.zeros(image.shape)
    for y, x in PIXELS:
        red, green, blue = image[y, x]
        grey = 1.5 * (0.299 * red + 0.587 * green + 0.114 * blue) + 0.5
        flakes = layer[y, x] + layer[31 - y, 31 - x]
        result[y, x] = [c[6] * value + (1 - c[6]) * max(value, grey) + flakes for value in image[y, x]]
    return result


# Spatter


def canny(layer: np.ndarray) -> set[tuple[int, int]]:
    """Edges above 150, and those above 50 that are joined to them."""

    def at(y: int, x: int) -> float:
        return layer[clamp(y), clamp(x)]

    right, down, steep = {}, {}, {}
    for y, x in PIXELS:
        right[y, x] = sum(w * (at(y + i, x + 1) - at(y + i, x - 1)) for i, w in ((-1, 1), (0, 2), (1, 1)))
        down[y, x] = sum(w * (at(y + 1, x + i) - at(y - 1, x + i)) for i, w in ((-1, 1), (0, 2), (1, 1)))
        steep[y, x] = abs(right[y, x]) + abs(down[y, x])
    crests = set()
    for y, x in PIXELS:
        angle = math.degrees(math.atan2(abs(down[y, x]), abs(right[y, x])))
        if angle < 22.5:
            step = (0, 1)
        elif angle > 67.5:
            step = (1, 0)
        else:
            step = (1, -1) if right[y, x] * down[y, x] < 0 else (1, 1)
        before = steep.get((y - step[0], x - step[1]), 0)
        after = steep.get((y + step[0], x + step[1]), 0)
        ties = 0 in step and steep[y, x] == after
        if steep[y, x] > 50 and steep[y, x] > before and (steep[y, x] > after or ties):
            crests.add((y, x))
    edges = {place for place in crests if steep[place] > 150}
    rest = list(edges)
    while rest:
        y, x = rest.pop()
        for place in product(range(y - 1, y + 2), range(x - 1, x + 2)):
            if place in crests and place not in edges:
                edges.add(place)
                rest.append(place)
    return edges


def spatter(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    noise = np.reshape([c[0] + c[1] * rng.standard_normal() for _ in PIXELS], (32, 32))
    liquid = weigh(noise, bell(c[2]), clamp)
    if c[5]:
        cover = weigh((liquid > c[3]).astype(float), bell(c[4]), clamp)
        cover[cover < 0.8] = 0
        mud = np.array([63, 42, 20]) / 255
        return np.reshape(
            [(1 - m) * v + m * mud for v, m in zip(image.reshape(-1, 3), cover.ravel(), strict=True)],
            image.shape,
        )
    drops = bytes_of(np.where(liquid < c[3], 0, liquid)).astype(float)
    edges = canny(drops)
    away = [min([20.0, *(math.dist(place, edge) for edge in edges)]) for place in PIXELS]
    box = dict.fromkeys(product((-1, 0, 1), repeat=2), 1 / 9)
    levels = np.floor(weigh(np.reshape(away, (32, 32)), box, mirror) + 1e-6).astype(int).ravel().tolist()
    least = levels.count(min(levels))
    spread = [round(255 * (sum(m <= n for m in levels) - least) / (1024 - least)) for n in levels]
    relief = {(-1, -1): -2, (-1, 0): -1, (0, -1): -1, (0, 0): 1, (0, 1): 1, (1, 0): 1, (1, 1): 2}
    raised = np.clip(weigh(np.reshape(spread, (32, 32)).astype(float), relief, mirror), 0, 255)  # type: ignore[arg-type]
    light = drops * np.floor(weigh(raised, box, mirror) + 0.5)
    return image + c[4] * (light / light.max())[..., None] * np.array([175, 238, 238]) / 255


# Digital


def contrast(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    means = [sum(image[y, x, k] for y, x in PIXELS) / 1024 for k in range(3)]
    return np.reshape([(image[v] - means[v[2]]) * c + means[v[2]] for v in VALUES], image.shape)


def hsv(image: np.ndarray, change: Callable[[float, float, float], tuple[float, float, float]]) -> np.ndarray:
    pixels = [colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*image[place]))) for place in PIXELS]
    return np.reshape(pixels, image.shape)


def brightness(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    return hsv(image, lambda h, s, v: (h, s, min(v + c, 1)))


def saturate(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    return hsv(image, lambda h, s, v: (h, min(max(s * c[0] + c[1], 0), 1), v))


def resize(levels: np.ndarray, size: int) -> np.ndarray:
    """Rows, by the mean of those whose centres lie in a new one's span; the nearest where none does."""
    scale = len(levels) / size
    rows = []
    for new in range(size):
        centre, reach = (new + 0.5) * scale, max(scale, 1) / 2
        inside = [old for old in range(len(levels)) if -reach < old + 0.5 - centre <= reach]
        rows.append(np.floor(np.mean(levels[inside], axis=0) + 0.5))
    return np.array(rows)


def pixelate(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    levels = np.rint(image * 255)
    for size in (int(32 * c), 32):
        levels = resize(resize(levels.swapaxes(0, 1), size).swapaxes(0, 1), size)  # columns, then rows
    return levels / 255


def elastic_transform(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    strength, smoothness, reach = (32 * each for each in c)
    first = [(26.0, 26.0), (26.0, 6.0), (6.0, 6.0)]
    moved = [(x + reach * (2 * rng.random() - 1), y + reach * (2 * rng.random() - 1)) for x, y in first]
    rows, wanted = [], []
    for (x, y), (u, v) in zip(first, moved, strict=True):
        rows += [[x, y, 1, 0, 0, 0], [0, 0, 0, x, y, 1]]
        wanted += [u, v]
    forward = np.vstack([np.linalg.solve(np.array(rows), np.array(wanted)).reshape(2, 3), [0, 0, 1]])
    back = np.linalg.inv(forward)
    affine = np.zeros(image.shape)
    for y, x in PIXELS:
        old_x, old_y, _ = back @ [x, y, 1]
        affine[y, x] = between(image, old_y, old_x, mirror)
    fields = [np.reshape([2 * rng.random() - 1 for _ in PIXELS], (32, 32)) for _ in range(2)]
    if smoothness:
        fields = [weigh(field, bell(smoothness, truncate=3), reflect) for field in fields]
    result = np.zeros(image.shape)
    for y, x in PIXELS:
        result[y, x] = between(
            affine, y + strength * fields[1][y, x], x + strength * fields[0][y, x], reflect
        )
    return result
