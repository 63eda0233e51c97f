"""Image files in, a prediction each out: what a saved model says, and how far its source would agree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ensbridge.fast_ensemble import FastEnsemble

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names, by the channels of the model's images
_SLACK = 0.01  # pixels a little outside [0, 1] come from resampling and rounding
BATCH = 64


@dataclass(frozen=True)
class Prediction:
    """What a model makes of one image."""

    label: str
    class_index: int
    probability: float  # of the label
    source_label: str
    source_probability: float  # of the label, by the source alone
    entropy: float  # of the prediction, in nats
    disagreement: float  # total variation between source and model, from 0 (the same) to 1

    def to_json(self, image: str) -> str:
        """One line of JSON."""
        return json.dumps({"image": image, **asdict(self)})


@dataclass(frozen=True)
class Pixels:
    """How the pixels of files, from 0 to 1, become what a model was trained with: (pixel - mean) / std.

    >>> Pixels((0.5,), (0.5,))(torch.ones(1, 1, 2, 2)).unique().tolist()
    [1.0]
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}; it must be above 0 in each channel")

    def __call__(self, images: Tensor) -> Tensor:
        """The images (B, C, H, W), channel by channel."""
        mean, std = (images.new_tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
        for each in (mean, std):
            if len(each) not in (1, images.shape[1]):
                raise ValueError(
                    f"{len(each)} numbers were given for {images.shape[1]} channels; give one, or one each"
                )
        return (images - mean) / std

    @classmethod
    def of(cls, fast: FastEnsemble, mean: Sequence[float] | None, std: Sequence[float] | None) -> Pixels:
        """What the user said; without it pixels stay as they are, if the model was trained with such."""
        if mean is not None or std is not None:
            return cls(tuple(mean or (0.0,)), tuple(std or (1.0,)))
        low, high = fast.pixel_range or (0.0, 1.0)
        if low < -_SLACK or high > 1 + _SLACK:
            raise ValueError(
                f"this model was trained with pixels from {low:.3g} to {high:.3g}, files have 0 to 1; "
                "say how they are normalised with --mean and --std (0 and 1 leave them as they are)"
            )
        return cls()


@torch.no_grad()
def predict_images(fast: FastEnsemble, images: Tensor) -> list[Prediction]:
    """A prediction for each image (B, C, H, W) that the model can take, from one pass of the source.

    >>> from torch import nn
    >>> from ensbridge.methods import Bridge
    >>> from ensbridge.nets import TokenScore
    >>> source = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> bridge = Bridge(TokenScore(2, 8, 8)).one_step()
    >>> fast = FastEnsemble(source, [bridge], feature="1", class_names=["cat", "dog"]).eval()
    >>> (one,) = predict_images(fast, torch.rand(1, 1, 2, 2))
    >>> one.label in ("cat", "dog"), one.probability >= 0.5, 0 <= one.entropy <= 0.6932
    (True, True, True)
    """
    own, source = (each.double().log_softmax(-1).cpu() for each in fast.with_source(images))
    names = fast.class_names or tuple(map(str, range(own.shape[1])))
    if len(names) != own.shape[1]:
        raise ValueError(
            f"the model has {own.shape[1]} classes and {len(names)} class_names; save it again with one each"
        )
    found = []
    for ours, theirs in zip(own, source, strict=True):
        best = int(ours.argmax())
        found.append(
            Prediction(
                label=names[best],
                class_index=best,
                probability=float(ours[best].exp()),
                source_label=names[int(theirs.argmax())],
                source_probability=float(theirs[best].exp()),
                # A class without probability, of logarithm -inf, adds nothing.
                entropy=max(0.0, float(-(ours.exp() * ours.nan_to_num(neginf=0.0)).sum())),
                disagreement=float((ours.exp() - theirs.exp()).abs().sum() / 2),
            )
        )
    return found


def predict_files(
    fast: FastEnsemble, paths: Sequence[Path], shape: Sequence[int], pixels: Pixels
) -> Iterator[tuple[Path, Prediction | str]]:
    """For each file in turn its prediction, or the sentence that says why there is none."""
    like = next(fast.source.parameters(), torch.zeros(1))
    for first in range(0, len(paths), BATCH):
        some = paths[first : first + BATCH]
        opened: dict[int, Tensor | str] = {number: _try_open(path, shape) for number, path in enumerate(some)}
        good = {number: image for number, image in opened.items() if isinstance(image, Tensor)}
        made = {}
        if good:
            batch = pixels(torch.stack(list(good.values())).to(like.device, like.dtype))
            made = dict(zip(good, predict_images(fast, batch), strict=True))
        for number, path in enumerate(some):
            image = opened[number]
            yield path, image if isinstance(image, str) else made[number]


def open_image(path: Path, shape: Sequence[int]) -> Tensor:
    """An image file as floats (C, H, W) from 0 to 1: its middle, brought to the size that the model takes.

    The largest part of the model's proportions around the middle is taken and resampled; an image that has
    the size already stays as it is, pixel by pixel.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(shape) != 3 or shape[0] not in _MODES:
        raise ValueError(
            f"the model takes images of shape {tuple(shape)}; files can be read for 1, 3 or 4 channels only"
        )
    channels, height, width = shape
    try:
        with Image.open(path) as file:
            if file.mode[0] in "IF":  # which would be cut at 255
                raise ValueError("its pixels have more than 8 bits")
            image = ImageOps.exif_transpose(file).convert(_MODES[channels])
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is no image that can be read; give a PNG or JPEG") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path} cannot be read ({reason}); give a whole PNG or JPEG") from error
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    array = np.asarray(image, dtype=np.float32).reshape(height, width, channels)
    return torch.from_numpy(array / 255).permute(2, 0, 1)


def _try_open(path: Path, shape: Sequence[int]) -> Tensor | str:
    try:
        return open_image(path, shape)
    except ValueError as error:
        return str(error)
