"""Images in memory, and batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageSet:
    """Images (N, C, H, W), floats in [0, 1] or uint8, with labels (N,) where they are known.

    uint8 images stay so in memory and become floats in [0, 1] a batch at a time.

    >>> data = ImageSet(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]))
    >>> len(data), data.batch(torch.tensor([1]))[0].dtype
    (4, torch.float32)
    """

    images: Tensor
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.images.shape)
        if self.images.ndim != 4:
            raise ValueError(f"images have shape {shape}; they must be (images, channels, height, width)")
        if len(self.images) == 0:
            raise ValueError(f"the data is empty: its images have shape {shape}; give at least one image")
        if not (self.images.is_floating_point() or self.images.dtype == torch.uint8):
            raise ValueError(f"images are {self.images.dtype}; give floats in [0, 1] or uint8")
        if self.images.is_floating_point() and not bool(self.images.isfinite().all()):
            raise ValueError("images hold NaN or infinite values; clean the data before it is used")
        if self.labels is not None and (self.labels.is_floating_point() or self.labels.dtype == torch.bool):
            raise ValueError(
                f"labels are {self.labels.dtype}; they must be integers, so convert them with .long()"
            )
        if self.labels is not None and self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels have shape {tuple(self.labels.shape)}; {shape[0]} images need ({shape[0]},)"
            )

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set on a device."""
        return ImageSet(self.images.to(device), None if self.labels is None else self.labels.to(device))

    def subset(self, indices: Tensor) -> ImageSet:
        """The images at `indices`, in their order."""
        return ImageSet(self.images[indices], None if self.labels is None else self.labels[indices])

    def without_labels(self) -> ImageSet:
        """The images alone."""
        return ImageSet(self.images)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """The images at `indices` as floats, with their labels."""
        images = self.images[indices]
        images = images.float() / 255 if images.dtype == torch.uint8 else images
        return images, None if self.labels is None else self.labels[indices]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Every image once, in order."""
        for start in range(0, len(self), size):
            yield self.batch(torch.arange(start, min(start + size, len(self)), device=self.images.device))

    def fingerprint(self) -> str:
        """A short digest of shapes, pixels and labels, by which a run knows its data again."""
        digest = hashlib.sha256()
        for part in (self.images, self.labels):
            if part is not None:
                digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
                digest.update(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def as_image_set(data: ImageSet | Tensor | tuple[Tensor, Tensor]) -> ImageSet:
    """An ImageSet of images alone, of a pair (images, labels), or of an ImageSet as it is.

    >>> len(as_image_set(torch.rand(3, 1, 2, 2)))
    3
    """
    if isinstance(data, ImageSet):
        return data
    data = _as_tensors(data)
    if isinstance(data, Tensor):
        return ImageSet(data)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return ImageSet(*data)
    raise ValueError(f"data is a {type(data).__name__}; give images, a pair (images, labels), or an ImageSet")


Data = ImageSet | Tensor | tuple[Tensor, Tensor] | Iterable  # whatever holds images


def _as_tensors(data: Any) -> Any:
    """Arrays of numpy as tensors, alone, in a pair, or in a pair that came as a list."""
    if isinstance(data, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(data))
    if isinstance(data, tuple | list) and len(data) == 2:
        parts = [_as_tensors(part) for part in data]
        if all(isinstance(part, Tensor) for part in parts) and parts[1].ndim == 1:
            return tuple(parts)
    return data


def collect(data: Data, name: str = "data") -> ImageSet:
    """An ImageSet of anything that holds images: what `as_image_set` takes, or batches, as of a DataLoader.

    Batches are images, or pairs or dictionaries of images and labels; all must be the one or the other.

    >>> len(collect([(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))] * 3))
    6
    """
    data = _as_tensors(data)
    if isinstance(data, ImageSet | Tensor) or (isinstance(data, tuple) and len(data) == 2):
        return as_image_set(data)
    if not isinstance(data, Iterable):
        raise ValueError(
            f"{name} is a {type(data).__name__}; give images, a pair (images, labels), an ImageSet, or "
            "batches of them such as a DataLoader"
        )
    images, labels = [], []
    for number, batch in enumerate(data):
        parts = list(batch.values()) if isinstance(batch, Mapping) else batch
        parts = [_as_tensors(part) for part in ([parts] if isinstance(parts, Tensor | np.ndarray) else parts)]
        if not 1 <= len(parts) <= 2 or not all(isinstance(part, Tensor) for part in parts):
            raise ValueError(f"batch {number} of {name} is no tensor of images, nor a pair with their labels")
        images.append(parts[0])
        labels += parts[1:]
    if not images:
        raise ValueError(
            f"{name} holds 0 batches; give at least one image (an iterator is empty after its use)"
        )
    if labels and len(labels) != len(images):
        raise ValueError(
            f"{len(labels)} of the {len(images)} batches of {name} have labels; give all or none"
        )
    shapes = {tuple(each.shape[1:]) for each in images}
    if len(shapes) > 1:
        raise ValueError(f"the batches of {name} have images of shapes {sorted(shapes)}; give them alike")
    return ImageSet(torch.cat(images), torch.cat(labels) if labels else None)
