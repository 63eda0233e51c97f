"""The inputs and the labels of one entry of a data set: a tensor, a tuple or a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ensbridge.data.examples import as_int64
from ensbridge.utils.inputs import Inputs

IMAGE_KEYS = ("pixel_values", "image", "images", "img", "x")
LABEL_KEYS = ("label", "labels", "y", "target", "targets", "fine_label")
LABEL_WORDS = ("label", "class", "target", "categor")  # a key with one of these in it may be that of labels


def split_entry(entry: Any, number: int, name: str, labelled: bool = True) -> tuple[Inputs, Any]:
    """The inputs of an entry as tensors, and its labels as they were given."""
    if isinstance(entry, Mapping):
        inputs, labels = _named_parts(entry, number, name, labelled)
    else:
        inputs, labels = _ordered_parts(entry)
        if isinstance(inputs, Mapping):
            inputs, _ = _named_parts(inputs, number, name, labelled=False)
    inputs = tuple(map(as_tensors, inputs)) if isinstance(inputs, tuple | list) else as_tensors(inputs)
    if type(inputs).__module__.startswith("PIL."):
        raise pil_images(name)
    if not (isinstance(inputs, Tensor | Mapping) or are_tensors(inputs)):
        raise ValueError(
            f"entry {number} of {name} is a {type(entry).__name__} that does not begin with a tensor; give "
            "images, or tuples that begin with images and labels"
        )
    return inputs, labels


def read_labels(labels: Any, number: int, name: str) -> Tensor | None:
    """Labels as int64, or None; labels that are not integers are refused."""
    labels = as_tensors(labels)
    if isinstance(labels, int | np.integer) or are_integers(labels):
        labels = torch.tensor(labels)
    if labels is None or isinstance(labels, Tensor):
        return None if labels is None else as_int64(labels)
    first = labels[0] if isinstance(labels, tuple | list) and labels else labels
    if isinstance(first, str):
        raise ValueError(f"entry {number} of {name}: {string_labels(first)}")
    raise ValueError(
        f"entry {number} of {name} has a {type(labels).__name__} as its label; give integers from 0"
    )


def as_tensors(data: Any) -> Any:
    """NumPy arrays as tensors, alone or in a pair of images and labels."""
    if isinstance(data, np.ndarray):
        if data.dtype.kind in "USO" and data.size and isinstance(data.flat[0], str):
            raise ValueError(string_labels(data.flat[0]))
        if data.dtype.kind not in "biuf":
            raise ValueError(f"an array is of {data.dtype}; give images as floats or uint8, labels as int64")
        return torch.from_numpy(np.asarray(data, order="C"))
    if isinstance(data, tuple | list) and len(data) == 2:
        images, labels = (as_tensors(part) for part in data)
        if isinstance(images, Tensor) and are_integers(labels):
            return images, torch.tensor(labels)
        if isinstance(images, Tensor) and isinstance(labels, Tensor) and labels.ndim <= 1:
            return images, labels
    return data


def are_tensors(data: Any) -> bool:
    """Whether this is a tuple that holds only tensors."""
    return isinstance(data, tuple) and bool(data) and all(isinstance(part, Tensor) for part in data)


def are_integers(labels: Any) -> bool:
    """Whether this is a list or tuple of integers."""
    if not isinstance(labels, tuple | list) or len(labels) == 0:
        return False
    return all(isinstance(label, int | np.integer) for label in labels)


def string_labels(label: str) -> str:
    """The message for labels that are names of classes."""
    return f"labels are strings such as {label[:40]!r}; give the number of each class, from 0, instead"


def pil_images(name: str) -> ValueError:
    """The error for images that were not converted to tensors."""
    return ValueError(
        f"the images of {name} are PIL images; give its Dataset a transform that makes tensors, such as "
        "torchvision's transforms.ToTensor()"
    )


def _ordered_parts(entry: Any) -> tuple[Any, Any]:
    """The inputs and the labels of a tuple: images and labels first, or several inputs with labels last."""
    if not isinstance(entry, tuple | list) or len(entry) == 0:
        return entry, None
    parts = [as_tensors(part) for part in entry]
    if len(parts) == 1:
        return parts[0], None
    if are_tensors(tuple(parts[:-1])) and len(parts) > 2 and _ends_with_classes(parts):
        return tuple(parts[:-1]), parts[-1]
    if isinstance(parts[0], tuple | list | Mapping) or _may_be_labels(parts[0], parts[1]):
        return parts[0], parts[1]
    if _may_be_labels(parts[0], parts[-1]):
        return tuple(parts[:-1]), parts[-1]
    return tuple(parts), None


def _ends_with_classes(parts: list[Any]) -> bool:
    """Whether the last of several parts is the labels, and not the second.

    Where either could be, images have their labels second, and other inputs last.
    """
    first, second, last = parts[0], parts[1], parts[-1]
    if not _are_classes(first, last) or not _are_classes(first, second):
        return _are_classes(first, last)
    if np.ndim(second) != np.ndim(last):
        return np.ndim(last) == 0  # a row beside the label of one example
    return first.ndim != (3 if np.ndim(last) == 0 else 4)


def _are_classes(first: Tensor, part: Any) -> bool:
    """Whether a part is one integer for each example, of which `first` has one or several."""
    if isinstance(part, Tensor):
        if part.is_floating_point() or part.is_complex() or part.dtype == torch.bool:
            return False
        return part.numel() == 1 if first.ndim == 1 else part.ndim == 0 or part.shape == first.shape[:1]
    return isinstance(part, int | np.integer) or (are_integers(part) and len(part) == len(first))


def _may_be_labels(first: Any, part: Any) -> bool:
    """Whether a part that follows the first is meant as labels, valid or not, rather than as an input."""
    if not isinstance(part, Tensor) or not isinstance(first, Tensor):
        return True
    if first.ndim == 1:  # one example
        return part.numel() == 1
    one_hot = part.ndim == 2 and bool(((part == 0) | (part == 1)).all() and (part.sum(1) == 1).all())
    return part.ndim < 2 or one_hot or (part.ndim == 2 and first.ndim == 4)


def _named_parts(entry: Mapping[str, Any], number: int, name: str, labelled: bool) -> tuple[Any, Any]:
    """The inputs of a dictionary, its images or all tensors by name, and its labels if any."""
    image, label = (next((key for key in keys if key in entry), None) for keys in (IMAGE_KEYS, LABEL_KEYS))
    likely = [str(key) for key in entry if any(word in str(key).lower() for word in LABEL_WORDS)]
    if labelled and label is None and likely:
        raise ValueError(
            f"entry {number} of {name} has {', '.join(likely)}, which may be its labels; rename them to "
            f"one of {', '.join(LABEL_KEYS)}"
        )
    labels = None if label is None else entry[label]
    if image is not None:
        return entry[image], labels
    inputs = {
        str(key): _as_tensor(value) for key, value in entry.items() if key != label and key not in likely
    }
    other = [key for key, value in inputs.items() if not isinstance(value, Tensor)]
    if not inputs or len(other) == len(inputs):
        raise ValueError(
            f"entry {number} of {name} has the keys {', '.join(map(str, entry))}; call its images one of "
            f"{', '.join(IMAGE_KEYS)}, and its labels one of {', '.join(LABEL_KEYS)}"
        )
    if other:
        raise ValueError(
            f"entry {number} of {name} has the keys {', '.join(map(str, entry))}, and no tensor under "
            f"{', '.join(other)}; leave these out, since networks are called with all but the labels"
        )
    return inputs, labels


def _as_tensor(value: Any) -> Any:
    """An array, or a list of integers such as tokens, as a tensor."""
    return torch.tensor(value) if are_integers(value) else as_tensors(value)
