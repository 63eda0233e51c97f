"""Example images on which source and ensemble disagree, and the bridge's path between them."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor

from ensbridge.bridge.bridge import Bridge
from ensbridge.data.loader import ImageSet
from ensbridge.evaluation.scores import Transition
from ensbridge.models.ensemble import at_least_float32
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.features import forward_with_features, joined


def find_transitions(
    fast: FastEnsemble, source: Tensor, target: Tensor, test: ImageSet, count: int = 6
) -> tuple[Transition, ...]:
    """The images whose labels source and ensemble disagree on most, and what the first bridge makes of them.

    The bridge has no say in the choice: images are ranked by the total variation between the probabilities
    (N, K) of `source` and `target`, the ensemble, among those where they name different classes.
    """
    bridge = fast.each_bridge()[0]
    if test.labels is None or not isinstance(bridge, Bridge):
        return ()
    apart = (source - target).abs().sum(-1) * (source.argmax(-1) != target.argmax(-1))
    chosen = [int(index) for index in apart.argsort(descending=True, stable=True)[:count] if apart[index] > 0]
    transitions = []
    for index in chosen:
        image = test.batch(torch.tensor([index], device=test.images.device))[0]
        transitions.append(
            Transition(
                image=base64.b64encode(png(image[0])).decode(),
                label=int(test.labels[index]),
                source=_rounded(source[index]),
                times=tuple(reversed(bridge.times)),
                path=tuple(map(_rounded, _path(fast, bridge, image))),
                ensemble=_rounded(target[index]),
                index=index,
            )
        )
    return tuple(transitions)


@torch.no_grad()
def _path(fast: FastEnsemble, bridge: Bridge, image: Tensor) -> list[Tensor]:
    logits, *read = forward_with_features(fast.source, image, *fast.features)
    return [stop[0].softmax(-1) for stop in bridge.path(joined(read), at_least_float32(logits))]


def _rounded(probabilities: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in probabilities.tolist())


def png(image: Tensor) -> bytes:
    """An image (C, H, W) of one or three channels as a PNG; values are clipped to [0, 1].

    >>> png(torch.zeros(1, 8, 8))[:4]
    b'\\x89PNG'
    """
    channels, height, width = image.shape
    if channels not in (1, 3):
        raise ValueError(f"an image of {channels} channels cannot be shown; it must have 1 or 3")
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy()
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )
