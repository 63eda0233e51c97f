"""Filter response normalisation as Triton kernels: a program takes some channels of one image.

Maps lie channels last, so an image is a matrix of SIZE = H·W rows and C columns. Everything between reading
and writing is float32. A small map is read once and held; a large one is read twice. This needs Triton.
"""

# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # without Triton this can be read, but not used

    def jit(function: Callable[..., Any]) -> Callable[..., Any]:
        """Leave a kernel as it is."""
        return function


TILE, EACH = 8192, 32  # elements that a program aims at, and those of a thread
WHOLE, ROWS = 1024, 256  # rows held at once: all of a map up to the first number, else the second


@jit
def _read(pointer, start, columns, channels, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """A tile in float32, zero outside the map."""
    rows = start + tl.arange(0, ROWS)
    inside = (rows < SIZE)[:, None] & (columns < channels)[None, :]
    at = pointer + rows[:, None] * channels + columns[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@jit
def _write(pointer, tile, start, columns, channels, SIZE: tl.constexpr, ROWS: tl.constexpr):
    rows = start + tl.arange(0, ROWS)
    inside = (rows < SIZE)[:, None] & (columns < channels)[None, :]
    tl.store(pointer + rows[:, None] * channels + columns[None, :], tile, mask=inside)


@jit
def _channel(pointer, columns, channels):
    """A number for each channel."""
    return tl.load(pointer + columns, mask=columns < channels, other=0.0).to(tl.float32)


@jit
def _biased(x, b, start, columns, channels, BIAS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """x + bias, zero outside the map."""
    v = _read(x, start, columns, channels, SIZE, ROWS)
    if BIAS:
        v = tl.where((start + tl.arange(0, ROWS) < SIZE)[:, None], v + b[None, :], 0.0)
    return v


@jit
def _finish(
    v,
    residual,
    y,
    slope,
    shift,
    least,
    start,
    columns,
    channels,
    RESIDUAL: tl.constexpr,
    SWISH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write what becomes of v = x + bias."""
    u = v * slope[None, :] + shift[None, :]
    u = tl.maximum(u, tl.broadcast_to(least[None, :], u.shape), propagate_nan=tl.PropagateNan.ALL)
    if RESIDUAL:
        u += _read(residual, start, columns, channels, SIZE, ROWS)
    if SWISH:
        u = u * tl.sigmoid(u)
    _write(y, u, start, columns, channels, SIZE, ROWS)


@jit
def _forward_kernel(
    x,
    bias,
    residual,
    gamma,
    beta,
    tau,
    y,
    scale,
    channels,
    eps,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWISH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = image * SIZE * channels
    x, residual, y = x + here, residual + here, y + here
    b = _channel(bias, columns, channels) if BIAS else 0.0
    gain, shift = _channel(gamma, columns, channels), _channel(beta, columns, channels)
    least = _channel(tau, columns, channels)
    if SIZE <= ROWS:
        v = _biased(x, b, 0, columns, channels, BIAS, SIZE, ROWS)
        squares = tl.sum(v * v, 0)
    else:
        squares = tl.zeros((COLUMNS,), tl.float32)
        for start in range(0, SIZE, ROWS):
            v = _biased(x, b, start, columns, channels, BIAS, SIZE, ROWS)
            squares += tl.sum(v * v, 0)
    s = tl.rsqrt(squares / SIZE + eps)
    tl.store(scale + image * channels + columns, s, mask=columns < channels)
    if SIZE <= ROWS:
        _finish(v, residual, y, s * gain, shift, least, 0, columns, channels, RESIDUAL, SWISH, SIZE, ROWS)
    else:
        for start in range(0, SIZE, ROWS):
            v = _biased(x, b, start, columns, channels, BIAS, SIZE, ROWS)
            _finish(
                v, residual, y, s * gain, shift, least, start, columns, channels, RESIDUAL, SWISH, SIZE, ROWS
            )


@jit
def _slopes(
    v,
    grad,
    residual,
    slope,
    shift,
    least,
    start,
    columns,
    channels,
    RESIDUAL: tl.constexpr,
    SWISH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gradient before Swish, and what of it passes the threshold."""
    g = _read(grad, start, columns, channels, SIZE, ROWS)
    out = v * slope[None, :] + shift[None, :]
    passes = out > least[None, :]
    if SWISH:
        u = tl.where(passes, out, tl.broadcast_to(least[None, :], out.shape))
        if RESIDUAL:
            u += _read(residual, start, columns, channels, SIZE, ROWS)
        share = tl.sigmoid(u)
        g = g * share * (1 + u * (1 - share))
    return g, tl.where(passes, g, 0.0)


@jit
def _backward_kernel(
    grad,
    x,
    bias,
    residual,
    gamma,
    beta,
    tau,
    scale,
    grad_x,
    grad_residual,
    sums,
    channels,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWISH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = image * SIZE * channels
    grad, x, residual, grad_x, grad_residual = (
        grad + here,
        x + here,
        residual + here,
        grad_x + here,
        grad_residual + here,
    )
    b = _channel(bias, columns, channels) if BIAS else 0.0
    s = _channel(scale + image * channels, columns, channels)
    slope = s * _channel(gamma, columns, channels)
    shift, least = _channel(beta, columns, channels), _channel(tau, columns, channels)
    if SIZE <= ROWS:
        v = _biased(x, b, 0, columns, channels, BIAS, SIZE, ROWS)
        g, passed = _slopes(
            v, grad, residual, slope, shift, least, 0, columns, channels, RESIDUAL, SWISH, SIZE, ROWS
        )
        if RESIDUAL:
            _write(grad_residual, g, 0, columns, channels, SIZE, ROWS)
        all_g, sum_g, sum_gv, sum_v = tl.sum(g, 0), tl.sum(passed, 0), tl.sum(passed * v, 0), tl.sum(v, 0)
    else:
        all_g = tl.zeros((COLUMNS,), tl.float32)
        sum_g, sum_gv, sum_v = all_g, all_g, all_g
        for start in range(0, SIZE, ROWS):
            v = _biased(x, b, start, columns, channels, BIAS, SIZE, ROWS)
            g, passed = _slopes(
                v, grad, residual, slope, shift, least, start, columns, channels, RESIDUAL, SWISH, SIZE, ROWS
            )
            if RESIDUAL:
                _write(grad_residual, g, start, columns, channels, SIZE, ROWS)
            all_g += tl.sum(g, 0)
            sum_g += tl.sum(passed, 0)
            sum_gv += tl.sum(passed * v, 0)
            sum_v += tl.sum(v, 0)
    pull = slope * s * s * sum_gv / SIZE
    if SIZE <= ROWS:
        _write(grad_x, passed * slope[None, :] - v * pull[None, :], 0, columns, channels, SIZE, ROWS)
    else:
        for start in range(0, SIZE, ROWS):
            v = _biased(x, b, start, columns, channels, BIAS, SIZE, ROWS)
            g, passed = _slopes(
                v, grad, residual, slope, shift, least, start, columns, channels, RESIDUAL, SWISH, SIZE, ROWS
            )
            _write(grad_x, passed * slope[None, :] - v * pull[None, :], start, columns, channels, SIZE, ROWS)
    there, row = columns < channels, sums + image * channels + columns
    step = tl.num_programs(0).to(tl.int64) * channels
    tl.store(row, slope * sum_g - pull * sum_v, mask=there)
    tl.store(row + step, s * sum_gv, mask=there)
    tl.store(row + 2 * step, sum_g, mask=there)
    tl.store(row + 3 * step, all_g - sum_g, mask=there)


def _plan(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of programs and the shape of their tiles."""
    count, channels, height, width = x.shape
    size = height * width
    rows = triton.next_power_of_2(size) if size <= WHOLE else ROWS
    columns = min(max(TILE // rows, 16), triton.next_power_of_2(channels))
    warps = min(max(rows * columns // (32 * EACH), 1), 16)
    tiles = {"SIZE": size, "ROWS": rows, "COLUMNS": columns, "num_warps": warps}
    return (count, triton.cdiv(channels, columns)), tiles


def forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    tau: Tensor,
    y: Tensor,
    scale: Tensor,
    eps: float,
    swish: bool,
) -> None:
    """Fill `y` and `scale`; all maps channels last."""
    grid, tiles = _plan(x)
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "SWISH": swish}
    other = x if residual is None else residual
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _forward_kernel[grid](x, bias, other, gamma, beta, tau, y, scale, x.shape[1], eps, **flags, **tiles)


def backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    tau: Tensor,
    scale: Tensor,
    grad_x: Tensor,
    grad_residual: Tensor,
    sums: Tensor,
    swish: bool,
) -> None:
    """Fill the gradients of the maps, and each image's share (4, B, C) of those of bias, γ, β and τ."""
    grid, tiles = _plan(x)
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "SWISH": swish}
    other = x if residual is None else residual
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _backward_kernel[grid](
            grad,
            x,
            bias,
            other,
            gamma,
            beta,
            tau,
            scale,
            grad_x,
            grad_residual,
            sums,
            x.shape[1],
            **flags,
            **tiles,
        )
