"""Image files, decoded by Pillow where it is installed."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from ensbridge.words import one_line

_MOST_PIXELS = 2**25  # more than any image of a set, or sheet of them, has


def pillow() -> Any:
    """Pillow's Image, or ValueError that says how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(
            "image files are read with Pillow, which is missing; pip install 'ensbridge[data]'"
        ) from error
    return Image


def upright(picture: Any, mode: str) -> Any:
    """A picture of Pillow's as it is meant to be seen, with 8 bits and the channels of `mode`.

    16 bits become 8, and transparency is left out unless the mode has it.
    """
    from PIL import ImageOps

    image = ImageOps.exif_transpose(picture)
    if image.mode.startswith("I;16") or (image.mode == "I" and picture.format == "PNG"):
        image = pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are numbers without a known white")
    if image.mode == "P":  # whose transparency Pillow wants to see on the way
        image = image.convert("RGBA")
    return image.convert(mode)


def decode(content: bytes, where: str) -> np.ndarray:
    """The pixels (H, W, 3) of an image file; grey ones become colour, transparency is left out."""
    image = pillow()
    from PIL import UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image.DecompressionBombWarning)
            with image.open(io.BytesIO(content)) as picture:
                width, height = picture.size
                if width * height > _MOST_PIXELS:
                    raise ValueError(f"{width}×{height} pixels are too many")
                return np.asarray(upright(picture, "RGB"))
    except Exception as error:  # Pillow's decoders fail in many ways on damaged files
        what = "of no known kind" if isinstance(error, UnidentifiedImageError) else one_line(error)
        raise ValueError(f"{where} is no whole image ({what}); restore it, or take it out") from error
