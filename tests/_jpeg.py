"""JPEG of a 32×32 image by its definition, colours at half the resolution, without the coding of its bits."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np

# The tables of the JPEG standard (Annex K) for brightness and for colour.
BRIGHT = """16 11 10 16 24 40 51 61 12 12 14 19 26 58 60 55 14 13 16 24 40 57 69 56 14 17 22 29 51 87 80 62
18 22 37 56 68 109 103 77 24 35 55 64 81 104 113 92 49 64 78 87 103 121 120 101 72 92 95 98 112 100 103 99"""
COLOUR = [[17, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]]


def jpeg_compression(image: np.ndarray, c: Any, rng: np.random.Generator) -> np.ndarray:
    """Quantised cosines of 8×8 blocks, of brightness and of colours at half the resolution."""
    percent = 200 - 2 * c if c >= 50 else 5000 / c
    bright = np.array(BRIGHT.split(), float).reshape(8, 8)
    colour = np.full((8, 8), 99.0)
    colour[:4, :4] = COLOUR
    weights = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
    planes = np.rint(np.rint(image * 255) @ weights.T)
    decoded = []
    for index, table in enumerate((bright, colour, colour)):
        table = np.clip(np.floor((table * percent + 50) / 100), 1, 255)
        plane, middle = planes[..., index], 0 if index else 128
        if index:
            bias = 1 + np.arange(16) % 2  # the halves of neighbours are rounded down and up
            plane = (plane.reshape(16, 2, 16, 2).sum((1, 3)) + bias) // 4
        plane = np.rint(quantised(plane - middle, table)) + middle
        decoded.append(triangle(triangle(plane).T).T if index else plane)
    return np.rint(np.stack(decoded, -1) @ np.linalg.inv(weights).T) / 255


def quantised(plane: np.ndarray, table: np.ndarray) -> np.ndarray:
    basis = np.array(
        [
            [math.cos((2 * n + 1) * k * math.pi / 16) * (0.5 if k else 8**-0.5) for n in range(8)]
            for k in range(8)
        ]
    )
    result = np.zeros(plane.shape)
    for y, x in product(range(0, len(plane), 8), repeat=2):
        waves = basis @ plane[y : y + 8, x : x + 8] @ basis.T
        result[y : y + 8, x : x + 8] = basis.T @ (half_away(waves / table) * table) @ basis
    return result


def half_away(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.floor(np.abs(values) + 0.5)


def triangle(plane: np.ndarray) -> np.ndarray:
    """Twice the rows, each three quarters of its nearest and a quarter of the next."""
    last = len(plane) - 1
    rows = []
    for y in range(2 * len(plane)):
        near = y // 2
        other = min(max(near + (1 if y % 2 else -1), 0), last)
        rows.append(0.75 * plane[near] + 0.25 * plane[other])
    return np.array(rows)
