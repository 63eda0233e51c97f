"""Images in memory, and batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


@dataclass(frozen=True)
class ImageSet:
    """Images (N, C, H, W), floats in [0, 1] or uint8, with labels (N,) where they are known.

    uint8 images stay so in memory and become floats in [0, 1] a batch at a time. Labels of any integers
    become int64.

    >>> labels = torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    >>> data = ImageSet(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), labels)
    >>> len(data), [tensor.dtype for tensor in data.batch(torch.tensor([1]))]
    (4, [torch.float32, torch.int64])
    """

    images: Tensor
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        _check_storage(self.images, "images")
        shape = tuple(self.images.shape)
        if self.images.ndim != 4:
            raise ValueError(f"images have shape {shape}; they must be (images, channels, height, width)")
        if self.images.numel() == 0:
            raise ValueError(f"the data is empty: its images have shape {shape}; give at least one image")
        if not (self.images.is_floating_point() or self.images.dtype == torch.uint8):
            raise ValueError(f"images are {self.images.dtype}; give floats in [0, 1] or uint8")
        # Whatever is not finite shows in the extremes, which take no memory to find.
        if self.images.is_floating_point() and not torch.stack(self.images.aminmax()).isfinite().all():
            raise ValueError("images hold NaN or infinite values; clean the data before it is used")
        if self.labels is not None:
            object.__setattr__(self, "labels", _checked_labels(self.labels, shape[0]))

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
                digest.update(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]


def _check_storage(tensor: Tensor, name: str) -> None:
    """Refuse tensors whose values cannot be looked up."""
    if tensor.is_meta:
        raise ValueError(
            f"{name} are on the device 'meta', which has no values; give them on the CPU or a GPU"
        )
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"{name} are a {kind} tensor; give them as a dense one, such as by .to_dense()")


def _checked_labels(labels: Tensor, images: int) -> Tensor:
    """Labels (N,) as int64."""
    labels = _as_int64(labels)
    if labels.dtype != torch.int64:
        convert = ".argmax(1)" if labels.ndim == 2 else ".long()"
        raise ValueError(f"labels are {labels.dtype}; they must be integers, so convert them with {convert}")
    if labels.shape != (images,):
        one_hot = ", so convert one-hot labels with .argmax(1)" if labels.ndim == 2 else ""
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}; {images} images need ({images},){one_hot}"
        )
    return labels


def _as_int64(labels: Tensor) -> Tensor:
    """Integers as int64; what is none stays as it is."""
    _check_storage(labels, "labels")
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    return labels.long() if integers else labels


def as_image_set(data: ImageSet | Tensor | tuple[Tensor, Tensor]) -> ImageSet:
    """An ImageSet of images alone, of a pair (images, labels), or of an ImageSet as it is.

    >>> len(as_image_set(torch.rand(3, 1, 2, 2)))
    3
    """
    if isinstance(data, ImageSet):
        return data
    data = _as_tensors(data)
    _check_pair(data)
    if isinstance(data, Tensor):
        return ImageSet(data)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return ImageSet(*data)
    raise ValueError(f"data is a {type(data).__name__}; give images, a pair (images, labels), or an ImageSet")


Data = ImageSet | Tensor | tuple[Tensor, Tensor] | Iterable | Dataset  # whatever holds images

IMAGE_KEYS = ("pixel_values", "image", "images", "img", "x")
LABEL_KEYS = ("label", "labels", "y", "target", "targets")
BLOCK = 1 << 23  # bytes of images that are put together at a time


def collect(data: Data, name: str = "data") -> ImageSet:
    """An ImageSet of anything that holds images: what `as_image_set` takes, a Dataset, or an iterable.

    The last two, a DataLoader among them, give images one by one or in batches: alone, in tuples that begin
    with images and labels, or in dictionaries with keys such as "image" and "label".

    >>> len(collect([(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))] * 3))
    6
    >>> collect([{"label": label, "image": torch.rand(1, 4, 4)} for label in (1, 0, 2)]).labels
    tensor([1, 0, 2])
    """
    if type(data) is TensorDataset:  # a class made from it may do more with its tensors
        data = data.tensors[0] if len(data.tensors) == 1 else data.tensors[:2]
    held = _as_tensors(data)
    _check_pair(held)
    if isinstance(held, ImageSet | Tensor) or _is_pair(held):
        return as_image_set(held)
    each_labels: list[Tensor | None] = []

    def each_images() -> Iterator[Tensor]:
        for images, labels in _batches(_entries(held, name), name):
            each_labels.append(labels)
            yield images

    images = _joined(each_images())
    if images is None:
        raise ValueError(f"{name} holds 0 images; give at least one (an iterator is empty after its use)")
    known = [labels for labels in each_labels if labels is not None]
    if known and len(known) != len(each_labels):
        raise ValueError(
            f"{len(known)} of the {len(each_labels)} entries of {name} have labels; give all or none"
        )
    return ImageSet(images, torch.cat(known) if known else None)


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)


def _as_tensors(data: Any) -> Any:
    """Arrays of numpy as tensors, alone or in a pair, which may be a list and have its labels in one."""
    if isinstance(data, np.ndarray):
        if data.dtype.kind not in "biuf":
            raise ValueError(f"an array is of {data.dtype}; give images as floats or uint8, labels as int64")
        return torch.from_numpy(np.asarray(data, order="C"))
    if isinstance(data, tuple | list) and len(data) == 2:
        images, labels = (_as_tensors(part) for part in data)
        if isinstance(images, Tensor) and _are_whole(labels):
            return images, torch.tensor(labels)
        if isinstance(images, Tensor) and isinstance(labels, Tensor) and labels.ndim <= 1:
            return images, labels
    return data


def _are_whole(labels: Any) -> bool:
    """Whether these are labels in a list."""
    if not isinstance(labels, tuple | list) or len(labels) == 0:
        return False
    return all(isinstance(label, int | np.integer) for label in labels)


def _check_pair(data: Any) -> None:
    """Refuse a pair of images and what can only be their labels, but is not a whole number for each."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return
    images, labels = data
    if labels is None or isinstance(labels, Tensor):
        return
    parts = labels if isinstance(labels, tuple | list) else [labels]
    more_images = any(isinstance(part, Mapping) or getattr(part, "ndim", 0) > 1 for part in parts)
    if isinstance(images, Tensor) and images.ndim == 4 and not more_images:
        raise ValueError(
            f"the labels of {len(images)} images are a {_kind_of(labels)}; give a whole number for each "
            "image, from 0, in a list or a tensor"
        )


def _kind_of(labels: Any) -> str:
    """What kind of thing labels are, and what they hold.

    >>> _kind_of([[0], [1]])
    'list of list'
    """
    kind = type(labels).__name__
    return f"{kind} of {type(labels[0]).__name__}" if isinstance(labels, tuple | list) and labels else kind


def _entries(data: Any, name: str) -> Iterator[Any]:
    """What data holds, one after the other; what a DataLoader cannot put together is said in plain words."""
    data = [data] if isinstance(data, Mapping) else data
    by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")  # a Dataset may not know its end
    if isinstance(data, str | bytes) or not (isinstance(data, Iterable) or by_index):
        raise ValueError(
            f"{name} is a {type(data).__name__}; give images, a pair (images, labels), an ImageSet, a "
            "Dataset, or batches such as a DataLoader"
        )
    try:
        yield from data if isinstance(data, Iterable) else (data[index] for index in range(len(data)))
    except TypeError as error:
        if "PIL." in str(error):
            raise _no_tensors(name) from error
        raise
    except RuntimeError as error:
        if "to be equal size" in str(error):
            raise _not_alike(name, "different shapes") from error
        raise


def _no_tensors(name: str) -> ValueError:
    return ValueError(
        f"the images of {name} are PIL's; give its Dataset a transform that makes tensors, such as "
        "torchvision's transforms.ToTensor()"
    )


def _not_alike(name: str, shapes: str) -> ValueError:
    return ValueError(
        f"{name} has images of {shapes}; bring them to one, such as by torchvision's "
        "transforms.Resize((64, 64))"
    )


def _batches(entries: Iterable[Any], name: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Entries as batches of images that are all alike; a single image is a batch of one."""
    first: Tensor | None = None
    for number, entry in enumerate(entries):
        images, labels = _split(entry, number, name)
        if images.ndim == 3 and (labels is None or labels.numel() == 1):
            images = images[None]
        if images.ndim != 4:
            raise ValueError(
                f"entry {number} of {name} has images of shape {tuple(images.shape)}; give (images, "
                "channels, height, width), or one image of (channels, height, width)"
            )
        first = images if first is None else first
        if images.shape[1:] != first.shape[1:]:
            raise _not_alike(name, f"shapes {tuple(first.shape[1:])} and {tuple(images.shape[1:])}")
        if images.dtype != first.dtype:
            raise ValueError(f"{name} has images of {first.dtype} and {images.dtype}; give them alike")
        if labels is not None and labels.ndim == 0 and len(images) != 1:
            raise ValueError(
                f"entry {number} of {name} has one label for {len(images)} images; give one each"
            )
        yield images, labels if labels is None or labels.numel() != len(images) else labels.reshape(-1)


def _split(entry: Any, number: int, name: str) -> tuple[Tensor, Tensor | None]:
    """The images and the labels of an entry, whatever else is in it."""
    parts = _chosen(entry, number, name) if isinstance(entry, Mapping) else entry
    parts = parts[:2] if isinstance(parts, tuple | list) else [parts]
    images, labels = (_as_tensors(part) for part in (*parts, None, None)[:2])
    if type(images).__module__.startswith("PIL."):
        raise _no_tensors(name)
    if not isinstance(images, Tensor):
        raise ValueError(
            f"entry {number} of {name} is a {type(entry).__name__} that does not begin with a tensor; give "
            "images, or tuples that begin with images and labels"
        )
    if isinstance(labels, int | np.integer) or _are_whole(labels):
        labels = torch.tensor(labels)
    if labels is not None and not isinstance(labels, Tensor):
        raise ValueError(
            f"entry {number} of {name} has a {type(labels).__name__} as its label; give classes as whole "
            "numbers, from 0"
        )
    return images, None if labels is None else _as_int64(labels)


def _chosen(entry: Mapping[str, Any], number: int, name: str) -> list[Any]:
    """The images of a dictionary and, where there are some, its labels."""
    image, label = (next((key for key in keys if key in entry), None) for keys in (IMAGE_KEYS, LABEL_KEYS))
    if image is None:
        raise ValueError(
            f"entry {number} of {name} has the keys {', '.join(map(str, entry))}; call its images one of "
            f"{', '.join(IMAGE_KEYS)}, and its labels one of {', '.join(LABEL_KEYS)}"
        )
    return [entry[image]] if label is None else [entry[image], entry[label]]


def _joined(parts: Iterable[Tensor]) -> Tensor | None:
    """One tensor of those that come one by one, little of which is ever held twice; None where none comes."""
    blocks: list[Tensor] = []
    few: list[Tensor] = []
    held = 0
    for part in parts:
        few.append(part)
        held += part.nbytes
        if held >= BLOCK:
            blocks.append(_emptied(few))
            held = 0
    if few:
        blocks.append(_emptied(few))
    return _emptied(blocks) if blocks else None


def _emptied(parts: list[Tensor]) -> Tensor:
    """The tensors of a list as one; each is let go as soon as it is copied."""
    if len(parts) == 1:
        return parts.pop()
    first = parts[0]
    whole = torch.empty(sum(map(len, parts)), *first.shape[1:], dtype=first.dtype, device=first.device)
    parts.reverse()
    start = 0
    while parts:
        part = parts.pop()
        whole[start : start + len(part)] = part
        start += len(part)
    return whole
