"""Out-of-distribution images that need no download: digits, noise and textures.

Every set is determined by its generator. Images are floats in [0, 1] of any shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ensbridge.data.examples import ImageSet
from ensbridge.utils.extras import need

Shape = tuple[int, int, int]  # channels, height, width


def ood_images(
    name: str, count: int, shape: tuple[int, ...] = (3, 32, 32), *, generator: torch.Generator
) -> ImageSet:
    """Out-of-distribution images (count, *shape) from a set in `OOD_SETS`.

    digits are scikit-learn's hand-written ones, of which there are 1,797, resized to the shape;
    uniform and gaussian are independent pixels; textures are bands, checkers, blobs and clouds in turn.

    >>> noise = ood_images("uniform", 5, (3, 8, 8), generator=torch.Generator().manual_seed(0))
    >>> tuple(noise.images.shape), bool(noise.images.min() >= 0), noise.labels
    ((5, 3, 8, 8), True, None)
    """
    if name not in OOD_SETS:
        raise ValueError(f"{name!r} is not a known set; choose one of: {', '.join(OOD_SETS)}")
    if count < 1 or len(shape) != 3 or min(shape) < 1:
        raise ValueError(
            f"{count} images of shape {tuple(shape)} were requested; give, say, 100 of (3, 32, 32)"
        )
    channels, height, width = shape
    images = OOD_SETS[name](count, (channels, height, width), generator)
    return ImageSet(images.float().clamp(0, 1).contiguous())


def _digits(count: int, shape: Shape, generator: torch.Generator) -> Tensor:
    need("digits")
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    if count > len(bunch.images):
        raise ValueError(f"{count} digits were requested; there are {len(bunch.images)}")
    chosen = torch.randperm(len(bunch.images), generator=generator, device=generator.device)[:count].cpu()
    digits = torch.from_numpy(bunch.images).float()[chosen, None].to(generator.device) / 16
    return _resized(digits, shape).expand(-1, shape[0], -1, -1)


def _uniform(count: int, shape: Shape, generator: torch.Generator) -> Tensor:
    return _rand(generator, count, *shape)


def _gaussian(count: int, shape: Shape, generator: torch.Generator) -> Tensor:
    """Mean 1/2, standard deviation 1/4."""
    return 0.5 + 0.25 * torch.randn(count, *shape, generator=generator, device=generator.device)


def _bands(count: int, shape: Shape, generator: torch.Generator) -> Tensor:
    """Waves of 1 to 8 periods in any direction, between two colours."""
    across, _ = _rotated(count, shape, generator)
    return _coloured((2 * math.pi * _between(generator, count, 1, 8) * across).sin(), shape, generator)


def _checkers(count: int, shape: Shape, generator: torch.Generator) -> Tensor:
    """Rotated checkerboards of 1 to 6 periods, in two colours."""
    across, along = _rotated(count, shape, generator)
    periods = 2 * math.pi * _between(generator, count, 1, 6)
    return _coloured(((periods * across).sin() * (periods * along).sin()).sign(), shape, generator)


def _blobs(count: int, shape: Shape, generator: torch.Generator) -> Tensor:
    """Six Gaussian spots of different sizes on a plain background."""
    across, along = _grid(shape, generator)
    total = torch.zeros(count, *shape[1:], device=generator.device)
    for _ in range(6):
        x, y = _rand(generator, 2, count, 1, 1)
        radius = _between(generator, count, 0.05, 0.25)
        total += torch.exp(-((across - x).square() + (along - y).square()) / (2 * radius.square()))
    return _coloured(2 * total.clamp(max=1) - 1, shape, generator)


def _clouds(count: int, shape: Shape, generator: torch.Generator) -> Tensor:
    """Perlin-like noise: random grids of 2, 4, 8, … cells, interpolated, each half as strong as the last."""
    total = torch.zeros(count, 1, *shape[1:], device=generator.device)
    for octave in range(1, max(2, min(shape[1:]).bit_length() - 1)):
        grid = torch.randn(
            count, 1, 2**octave + 1, 2**octave + 1, generator=generator, device=generator.device
        )
        total += _resized(grid, shape) / 2**octave
    scaled = total / total.flatten(1).std(1, correction=0).clamp(min=1e-6).view(-1, 1, 1, 1)
    return _coloured(scaled[:, 0].tanh(), shape, generator)


_TEXTURES = (_bands, _checkers, _blobs, _clouds)


def _textures(count: int, shape: Shape, generator: torch.Generator) -> Tensor:
    """Bands, checkers, blobs and clouds in turn."""
    per_kind = -(-count // len(_TEXTURES))
    images = torch.stack([make(per_kind, shape, generator) for make in _TEXTURES], 1)
    return images.flatten(0, 1)[:count]


OOD_SETS: dict[str, Callable[[int, Shape, torch.Generator], Tensor]] = {
    "digits": _digits,
    "uniform": _uniform,
    "gaussian": _gaussian,
    "bands": _bands,
    "checkers": _checkers,
    "blobs": _blobs,
    "clouds": _clouds,
    "textures": _textures,
}


# ------------------------------------------------------------------------------ helpers


def _rand(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, device=generator.device)


def _between(generator: torch.Generator, count: int, low: float, high: float) -> Tensor:
    """A number for each image (count, 1, 1)."""
    return low + (high - low) * _rand(generator, count, 1, 1)


def _grid(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Columns (1, 1, W) and rows (1, H, 1) of the pixels, from 0 to 1."""
    rows, columns = (torch.linspace(0, 1, size, device=generator.device) for size in shape[1:])
    return columns.view(1, 1, -1), rows.view(1, -1, 1)


def _rotated(count: int, shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Coordinates (count, H, W) of the pixels, rotated and shifted for each image."""
    across, along = _grid(shape, generator)
    angle = _between(generator, count, 0, 2 * math.pi)
    x, y = _rand(generator, 2, count, 1, 1)
    across, along = across - x, along - y
    return angle.cos() * across + angle.sin() * along, angle.cos() * along - angle.sin() * across


def _coloured(pattern: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """A pattern (count, H, W) from -1 to 1 as images between two random colours."""
    one, other = _rand(generator, 2, len(pattern), shape[0], 1, 1)
    share = (pattern[:, None] + 1) / 2
    return one + (other - one) * share


def _resized(images: Tensor, shape: Shape) -> Tensor:
    return F.interpolate(images, shape[1:], mode="bilinear", align_corners=True)
