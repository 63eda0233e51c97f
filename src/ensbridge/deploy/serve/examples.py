"""Example images for the page, drawn by code: simple scenes, and two that nothing can be sure of."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIZE = 192
_SCALE = 4  # drawn larger, then shrunk: smooth edges


def _canvas(top: str, bottom: str, horizon: float) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    side = SIZE * _SCALE
    image = Image.new("RGB", (side, side), top)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, horizon * side, side, side), fill=bottom)
    return image, draw


def _points(*pairs: tuple[float, float]) -> list[tuple[float, float]]:
    return [(x * SIZE * _SCALE, y * SIZE * _SCALE) for x, y in pairs]


def _ship() -> Image.Image:
    image, draw = _canvas("#a9cbe8", "#2f6690", 0.62)
    draw.polygon(_points((0.08, 0.55), (0.94, 0.55), (0.84, 0.74), (0.17, 0.74)), fill="#8c2f2f")
    draw.polygon(_points((0.08, 0.55), (0.94, 0.55), (0.92, 0.60), (0.10, 0.60)), fill="#23303c")
    draw.rectangle(_points((0.24, 0.40), (0.74, 0.55)), fill="#f2f2ee")
    draw.rectangle(_points((0.32, 0.29), (0.62, 0.40)), fill="#e3e3dd")
    draw.rectangle(_points((0.42, 0.12), (0.52, 0.29)), fill="#c94f3d")
    draw.rectangle(_points((0.42, 0.12), (0.52, 0.16)), fill="#20272e")
    for number in range(7):
        x = 0.27 + 0.065 * number
        draw.rectangle(_points((x, 0.45), (x + 0.03, 0.49)), fill="#3b5064")
    for number in range(9):
        x, y = 0.02 + 0.11 * number, 0.80 + 0.05 * (number % 3)
        draw.line(_points((x, y), (x + 0.08, y)), fill="#7fa9cc", width=2 * _SCALE)
    return image


def _aeroplane() -> Image.Image:
    image, draw = _canvas("#8fc1ea", "#8fc1ea", 1.0)
    for x, y in ((0.18, 0.20), (0.80, 0.78), (0.30, 0.88)):
        for step in range(4):
            box = _points((x - 0.12 + 0.05 * step, y - 0.04), (x + 0.02 + 0.05 * step, y + 0.05))
            draw.ellipse([*box[0], *box[1]], fill="#dcecf8")
    draw.polygon(_points((0.46, 0.48), (0.62, 0.48), (0.40, 0.84), (0.30, 0.84)), fill="#a8b2bd")
    draw.polygon(_points((0.46, 0.44), (0.62, 0.44), (0.48, 0.16), (0.39, 0.16)), fill="#8f9aa6")
    draw.polygon(_points((0.08, 0.22), (0.16, 0.22), (0.28, 0.45), (0.14, 0.45)), fill="#c2473a")
    draw.polygon(
        _points((0.08, 0.42), (0.80, 0.39), (0.93, 0.47), (0.80, 0.54), (0.14, 0.51)), fill="#f4f6f8"
    )
    draw.polygon(_points((0.82, 0.41), (0.90, 0.455), (0.82, 0.455)), fill="#33485c")
    for number in range(9):
        box = _points((0.26 + 0.055 * number, 0.44), (0.285 + 0.055 * number, 0.465))
        draw.rectangle([*box[0], *box[1]], fill="#4a6178")
    return image


def _car() -> Image.Image:
    image, draw = _canvas("#c7d6df", "#6f7479", 0.66)
    draw.rectangle(_points((0.0, 0.50), (1.0, 0.66)), fill="#93a58c")
    draw.polygon(_points((0.28, 0.46), (0.36, 0.27), (0.66, 0.27), (0.78, 0.46)), fill="#b3262d")
    draw.polygon(_points((0.33, 0.45), (0.39, 0.31), (0.50, 0.31), (0.50, 0.45)), fill="#bcd3e2")
    draw.polygon(_points((0.53, 0.45), (0.53, 0.31), (0.64, 0.31), (0.72, 0.45)), fill="#bcd3e2")
    draw.rounded_rectangle(
        [*_points((0.06, 0.44))[0], *_points((0.95, 0.70))[0]], 0.07 * SIZE * _SCALE, fill="#c92f36"
    )
    for x in (0.26, 0.75):
        for radius, colour in ((0.115, "#1d1f22"), (0.06, "#c9ccd0")):
            box = _points((x - radius, 0.70 - radius), (x + radius, 0.70 + radius))
            draw.ellipse([*box[0], *box[1]], fill=colour)
    draw.ellipse([*_points((0.88, 0.50))[0], *_points((0.95, 0.57))[0]], fill="#ffe9a8")
    draw.line(_points((0.515, 0.46), (0.515, 0.66)), fill="#8e1f25", width=2 * _SCALE)
    return image


def _frog() -> Image.Image:
    image, draw = _canvas("#6f7f45", "#51602f", 0.55)

    def ellipse(left: float, top: float, right: float, bottom: float, colour: str) -> None:
        draw.ellipse([*_points((left, top))[0], *_points((right, bottom))[0]], fill=colour)

    for x in (0.05, 0.63):
        ellipse(x, 0.58, x + 0.32, 0.90, "#4c8a35")
    ellipse(0.16, 0.38, 0.84, 0.88, "#5fa443")
    ellipse(0.28, 0.60, 0.72, 0.90, "#c9d79a")
    ellipse(0.20, 0.26, 0.80, 0.66, "#69b04b")
    for x in (0.22, 0.58):
        ellipse(x, 0.14, x + 0.20, 0.36, "#69b04b")
        ellipse(x + 0.04, 0.17, x + 0.16, 0.31, "#f3e9a2")
        ellipse(x + 0.075, 0.20, x + 0.125, 0.28, "#15180f")
    box = [*_points((0.30, 0.36))[0], *_points((0.70, 0.58))[0]]
    draw.arc(box, 20, 160, fill="#2c4a1d", width=3 * _SCALE)
    return image


def _noise() -> Image.Image:
    draws = np.random.default_rng(0).integers(0, 256, (SIZE // 6, SIZE // 6, 3), dtype=np.uint8)
    return Image.fromarray(draws).resize((SIZE, SIZE), Image.Resampling.NEAREST)


def _blend() -> Image.Image:
    """Half a ship, half a car: a picture that a good model is unsure of."""
    return Image.blend(_ship(), _car(), 0.5)


EXAMPLES: dict[str, Callable[[], Image.Image]] = {
    "ship": _ship,
    "aeroplane": _aeroplane,
    "car": _car,
    "frog": _frog,
    "blend": _blend,
    "noise": _noise,
}


@cache
def draw_example(name: str) -> bytes:
    """An example as a PNG.

    >>> draw_example("ship")[:4]
    b'\\x89PNG'
    """
    image = EXAMPLES[name]().resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    if name != "noise":
        image = image.filter(ImageFilter.GaussianBlur(0.6))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
