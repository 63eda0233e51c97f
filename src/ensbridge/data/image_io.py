"""Image files, decoded by Pillow, only here.

Only the decoders of a few formats are allowed: Pillow also has one that runs Ghostscript. The size is checked
before memory is allocated for the pixels.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from ensbridge.utils.text import one_line

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM")  # Pillow's names
LARGEST_FILE = 2**28  # bytes of an image file: MOST_PIXELS in 16 bits with transparency
MOST_PIXELS = 2**25  # more than any image of a set has


def pillow() -> Any:
    """Pillow's Image module, imported on first use."""
    from PIL import Image

    return Image


def picture(content: bytes, mode: str, most_pixels: int = MOST_PIXELS) -> Any:
    """The Pillow image in a file, upright and in `mode`; ValueError where it cannot be decoded.

    16 bits become 8, and transparency is dropped unless the mode has it.
    """
    image = pillow()
    from PIL import UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters is an error
            with image.open(io.BytesIO(content), formats=FORMATS) as file:
                width, height = file.size
                if width * height > most_pixels:
                    raise ValueError(f"{width}×{height} pixels, where at most {most_pixels:,} are read")
                return _upright(file, mode)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is not one of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders fail in many ways on damaged files, also for want of memory
        raise ValueError(one_line(error)) from error


def _upright(file: Any, mode: str) -> Any:
    from PIL import ImageOps

    image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I;16") or (image.mode == "I" and file.format == "PNG"):
        image = pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are numbers without a known white")
    if image.mode == "P":  # whose transparency Pillow wants to see on the way
        image = image.convert("RGBA")
    return image.convert(mode)


def decode(content: bytes, where: str) -> np.ndarray:
    """The pixels (H, W, 3) of an image file; grey ones become colour, transparency is dropped."""
    try:
        return np.asarray(picture(content, "RGB"))
    except ValueError as error:
        raise ValueError(f"{where} is not a complete image ({error}); restore or remove it") from error
