"""Image files, decoded by Pillow. Nothing else here opens one.

What comes from a file is decoded by the few decoders that are meant, never by whichever its content asks for:
Pillow has one that runs Ghostscript. Its size is looked at before memory is taken for its pixels.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from ensbridge.utils.text import one_line

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM")  # Pillow's names
LARGEST_FILE = 2**28  # bytes of an image file: as many as the most pixels take in 16 bits with transparency
MOST_PIXELS = 2**25  # more than any image of a set, or sheet of them, has


def pillow() -> Any:
    """Pillow's Image, or ValueError that says how to install it."""
    from PIL import Image

    return Image


def picture(content: bytes, mode: str, most_pixels: int = MOST_PIXELS) -> Any:
    """The picture of Pillow's in a file, upright and in `mode`; ValueError that says what is wrong.

    16 bits become 8, and transparency is left out unless the mode has it.
    """
    image = pillow()
    from PIL import UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is odd about a file is either an error or no matter
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
    """The pixels (H, W, 3) of an image file; grey ones become colour, transparency is left out."""
    try:
        return np.asarray(picture(content, "RGB"))
    except ValueError as error:
        raise ValueError(f"{where} is not a complete image ({error}); restore it, or take it out") from error
