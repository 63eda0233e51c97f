"""Image files in, a prediction each out: what a saved model says, and how far its source would agree."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ensbridge.data.image_io import LARGEST_FILE, MOST_PIXELS, picture, pillow
from ensbridge.deploy.saving.description import LARGEST_IMAGE
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.named import ImageInput, input_of
from ensbridge.utils.files import read_file
from ensbridge.utils.inputs import Inputs, to_network
from ensbridge.utils.text import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's names, by the channels of the model's images
_SLACK = 0.01  # pixels a little outside [0, 1] come from resampling and rounding
BATCH = 64


class Unreadable(NamedTuple):
    """What stands in place of an image that cannot be read."""

    reason: str


Row = tuple[np.ndarray, ...]  # what a model that takes no images is called with, for one example
Content = Path | bytes | np.ndarray | Unreadable | Row
Entry = tuple[str, Content]  # an image's name, and its file, that file's content or its pixels
NAMED = 5  # of the images without a prediction


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
    top_k: tuple[tuple[str, float], ...] | None = None  # the likeliest classes, where they were asked for

    def to_row(self, name: str, kind: str = "image") -> dict[str, Any]:
        """A row of a table, in JSON's types; `kind` is what is named."""
        row = {kind: name, **asdict(self)}
        best = row.pop("top_k")
        if best is not None:
            row["top_k"] = [{"label": label, "probability": value} for label, value in best]
        return row

    def to_json(self, name: str, kind: str = "image") -> str:
        """One line of JSON."""
        return json.dumps(self.to_row(name, kind), allow_nan=False)


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
        mean, std = (images.new_tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        for name, numbers in (("mean", mean), ("std", std)):
            if len(numbers) not in (1, images.shape[1]):
                raise ValueError(
                    f"{name} has {len(numbers)} numbers for {images.shape[1]} channels; give one, or one each"
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
                f"{_remedy(low, high)}"
            )
        return cls()


def _remedy(low: float, high: float) -> str:
    if low >= 0 and 200 < high <= 255:
        return f"give --std {1 / 255:.9f}, which brings them to 0 to 255"
    options = "the --mean and --std of its training"
    if low >= -1 - _SLACK and high <= 1 + _SLACK:
        return f"give {options}, such as --mean 0.5 --std 0.5 for -1 to 1"
    return (
        f"give {options}, such as --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 (--mean 0 --std 1 leaves "
        "pixels as they are)"
    )


def predict_images(fast: FastEnsemble, images: Tensor) -> list[Prediction]:
    """A prediction for each image (B, C, H, W) that the model can take, from one pass of the source.

    Images for which the model's or its source's logits are not finite raise ValueError that names them; -inf
    alone is let through, for a class that is ruled out.

    >>> from torch import nn
    >>> from ensbridge.methods import Bridge
    >>> from ensbridge.models import TokenScore
    >>> source = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> bridge = Bridge(TokenScore(2, 8, 8)).one_step()
    >>> fast = FastEnsemble(source, [bridge], feature="1", class_names=["cat", "dog"]).eval()
    >>> (one,) = predict_images(fast, torch.rand(1, 1, 2, 2))
    >>> one.label in ("cat", "dog"), one.probability >= 0.5, 0 <= one.entropy <= 0.6932
    (True, True, True)
    """
    predictions = each_prediction(fast, images)
    failed = [f"images[{number}]" for number, prediction in enumerate(predictions) if prediction is None]
    if failed:
        more = f" and {len(failed) - NAMED} more" if len(failed) > NAMED else ""
        raise ValueError(_not_finite(f"{', '.join(failed[:NAMED])}{more}"))
    return [prediction for prediction in predictions if prediction is not None]


@torch.no_grad()
def each_prediction(fast: FastEnsemble, inputs: Inputs, top_k: int | None = None) -> list[Prediction | None]:
    """A prediction for each example, None where logits are not finite."""
    both = fast.with_source(to_network(inputs, fast))
    log_probs, source = (logits.double().log_softmax(-1).cpu() for logits in both)
    names = class_names_of(fast, log_probs.shape[1])
    predictions: list[Prediction | None] = []
    for ours, theirs in zip(log_probs, source, strict=True):
        if ours.isnan().any() or theirs.isnan().any():  # as log_softmax makes of infinity, too
            predictions.append(None)
            continue
        best = int(ours.argmax())
        predictions.append(
            Prediction(
                label=names[best],
                class_index=best,
                probability=float(ours[best].exp()),
                source_label=names[int(theirs.argmax())],
                source_probability=float(theirs[best].exp()),
                # A class without probability, of logarithm -inf, adds nothing.
                entropy=max(0.0, float(-(ours.exp() * ours.nan_to_num(neginf=0.0)).sum())),
                disagreement=float((ours.exp() - theirs.exp()).abs().sum() / 2),
                top_k=None if top_k is None else _best_classes(ours, names, top_k),
            )
        )
    return predictions


def class_names_of(fast: FastEnsemble, classes: int) -> tuple[str, ...]:
    """The names of a model's classes, or their numbers where it has no names."""
    names = fast.class_names or tuple(map(str, range(classes)))
    if len(names) != classes:
        raise ValueError(
            f"the model has {classes} classes and {len(names)} class_names; save it again with one each"
        )
    return names


def _best_classes(log_probs: Tensor, names: Sequence[str], count: int) -> tuple[tuple[str, float], ...]:
    """The likeliest classes with their probabilities, the first before others that are as likely."""
    order: list[int] = log_probs.sort(descending=True, stable=True).indices[:count].tolist()
    return tuple((names[index], float(log_probs[index].exp())) for index in order)


def predict_entries(
    fast: FastEnsemble,
    entries: Iterable[Entry],
    shape: Sequence[int],
    pixels: Pixels,
    *,
    batch: int = BATCH,
    top_k: int | None = None,
) -> Iterator[tuple[str, Prediction | str]]:
    """For each named image its prediction, or the sentence that says why there is none, in their order."""
    pillow()  # what is missing for all of them is said once
    _check_shape(shape)
    like, takes = next(fast.source.parameters(), torch.zeros(1)), input_of(fast.source)
    # A batch of large images needs no more memory than the largest image alone.
    size = max(1, min(batch, LARGEST_IMAGE // max(1, math.prod(shape))))
    left, open_entry = iter(entries), partial(_try_open, shape=shape, takes=takes)
    # Each is decoded as it is read, so that one file's content is held at a time.
    while some := list(map(open_entry, islice(left, size))):
        good = {number: image for number, (_, image) in enumerate(some) if isinstance(image, Tensor)}
        made = {}
        if good:
            images = pixels(torch.stack(list(good.values())).to(like.device, like.dtype))
            try:
                made = dict(zip(good, each_prediction(fast, images, top_k), strict=True))
            except RuntimeError as error:  # whatever a network makes of an image that is not for it
                raise ValueError(
                    f"the model cannot take images of shape {tuple(images.shape[1:])} ({one_line(error)}); "
                    "give theirs, such as --image-shape 3,32,32"
                ) from error
        for number, (name, image) in enumerate(some):
            outcome = image if isinstance(image, str) else made[number]
            yield name, _not_finite(name) if outcome is None else outcome


def open_image(path: Path, shape: Sequence[int], takes: ImageInput | None = None) -> Tensor:
    """An image file as floats (C, H, W) from 0 to 1: its middle, brought to the size that the model takes.

    The largest part of the model's proportions around the middle is taken and resampled, or what the model's
    source is known to take; an image that has the size already stays as it is, pixel by pixel. Grey and
    colour become what the model takes, 16 bits become 8, and transparency is left out, as the readers of
    data sets leave it out.
    """
    _check_shape(shape)
    if path.parts[:1] in (("http:",), ("https:",)):
        address = str(path).replace(":/", "://", 1)
        raise ValueError(f"{address} is an address; save the image, and give its file")
    if os.path.isdir(path):  # False, too, for a name that the system does not take
        raise ValueError(f"{path} is a folder without images; give one that has some")
    try:
        content = read_file(path, LARGEST_FILE)
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; check its name") from error
    try:
        return decode_image(content, shape, takes).float() / 255
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); give a whole PNG or JPEG of 8 bits") from error


def decode_image(content: bytes, shape: Sequence[int], takes: ImageInput | None = None) -> Tensor:
    """The content of an image file as uint8 (C, H, W), likewise; ValueError says what is wrong with it."""
    _check_shape(shape)
    return fit_picture(picture(content, MODES[shape[0]]), shape, takes)


def fit_picture(image: Image, shape: Sequence[int], takes: ImageInput | None) -> Tensor:
    """A decoded picture of the model's channels as uint8 (C, H, W), fitted to its size."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    if image.size != (width, height):
        way = takes or ImageInput((height, width), channels, (0.0,), (1.0,))
        resample = Image.Resampling[way.interpolation.upper()]
        if way.squash:
            image = image.resize((width, height), resample)
        else:
            image = ImageOps.fit(image, (width, height), resample, bleed=(1 - way.crop) / 2)
    array = np.array(image, dtype=np.uint8).reshape(height, width, channels)
    return torch.from_numpy(array).permute(2, 0, 1)


def _check_shape(shape: Sequence[int]) -> None:
    if len(shape) != 3 or shape[0] not in MODES:
        raise ValueError(
            f"files cannot be read as images of shape {tuple(shape)}; they have 1, 3 or 4 channels, a height "
            "and a width, such as --image-shape 3,32,32"
        )


def _try_open(entry: Entry, shape: Sequence[int], takes: ImageInput | None) -> tuple[str, Tensor | str]:
    """The name as text, with the image as floats or what is wrong with it."""
    name, content = entry
    text = as_text(name)
    if isinstance(content, Unreadable):
        return text, as_text(content.reason)
    if isinstance(content, tuple):
        return text, f"{text} is a row of numbers and no image"
    try:
        if isinstance(content, Path):
            return text, open_image(content, shape, takes)
        read = _from_array if isinstance(content, np.ndarray) else decode_image
        return text, read(content, shape, takes).float() / 255  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        reason = as_text(str(error))
        if isinstance(content, Path) and reason.startswith((text, as_text(str(content)))):
            return text, reason
        return text, f"{text} cannot be read ({reason}); give a whole image"


def as_text(name: str) -> str:
    r"""A file's name as text that can be written anywhere, also where its bytes are not UTF-8.

    >>> as_text("caf\udce9.png"), as_text("café.png")
    ('caf\\xe9.png', 'café.png')
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def check_pixels(shape: Sequence[int]) -> None:
    """Refuse what cannot be the pixels (H, W), (H, W, C) or (C, H, W) of an image."""
    *sides, channels = (*shape, 1) if len(shape) == 2 else shape
    if channels not in MODES and sides and sides[0] in MODES:
        sides = [*sides[1:], channels]
    elif channels not in MODES or len(sides) != 2:
        raise ValueError(f"its shape is {tuple(shape)}, where (H, W), (H, W, 3) or (3, H, W) is expected")
    if not 0 < math.prod(sides) <= MOST_PIXELS:
        raise ValueError(f"it has {math.prod(sides):,} pixels, where 1 to {MOST_PIXELS:,} are read")


def _from_array(array: np.ndarray, shape: Sequence[int], takes: ImageInput | None) -> Tensor:
    """Pixels (C, H, W) or (H, W, C) or (H, W) of uint8, likewise."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise ValueError(f"it is {array.dtype} of shape {array.shape}, where uint8 pixels are expected")
    check_pixels(array.shape)
    if array.ndim == 3 and array.shape[0] in MODES and array.shape[2] not in MODES:
        array = array.transpose(1, 2, 0)
    plain = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    image = pillow().fromarray(np.ascontiguousarray(plain)).convert(MODES[shape[0]])
    return fit_picture(image, shape, takes)


def _not_finite(images: str) -> str:
    return f"the model has no finite prediction for {images}; check the pixels and --std, or train it again"
