"""Uploaded image files as tensors; what is decoded is bounded before memory is taken for it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ensbridge.data.image_io import picture
from ensbridge.deploy.batch import MODES, fit_picture
from ensbridge.deploy.serve.limits import Limits, Refused, busy
from ensbridge.deploy.serve.served import ServedModel
from ensbridge.models.named import input_of
from ensbridge.utils.text import visible


def read_uploads(
    model: ServedModel, files: Sequence[tuple[str, bytes]], limits: Limits, until: float
) -> Tensor:
    """Named image files as one batch that the model takes; `Refused` that names the file that is wrong.

    Nothing more is decoded once `time.monotonic()` has reached `until`: nobody waits for it any longer.
    """
    images, decoded = [], 0
    for number, (name, content) in enumerate(files, start=1):
        if time.monotonic() >= until:
            raise busy(503, "the images could not be decoded in time; send fewer or smaller ones")
        try:
            image = picture(content, MODES[model.shape[0]], limits.pixels)
        except ValueError as error:
            sentence = (
                f"image {number} ({name}) cannot be read: {visible(str(error))}; send a PNG or JPEG of 8 bits"
            )
            raise Refused(422, sentence) from error
        decoded += image.width * image.height
        if decoded > limits.request_pixels:
            raise Refused(
                413,
                f"the images up to number {number} ({name}) have {decoded:,} pixels, where a request may "
                f"have {limits.request_pixels:,}; send fewer or smaller ones",
            )
        images.append(fit_picture(image, model.shape, input_of(model.fast.source)).float() / 255)
    return model.pixels(torch.stack(images).to(model.dtype))


def file_name(name: str | None, number: int) -> str:
    """What an uploaded file is called in answers.

    >>> file_name("a/b\\ncat.png", 1), file_name("", 2)
    ('b\\\\ncat.png', 'image 2')
    """
    return visible((name or "").replace("\\", "/").rpartition("/")[2][:100]) or f"image {number}"
