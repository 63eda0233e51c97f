"""Examples out of whatever holds them: tensors, arrays, a Dataset, batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ensbridge.data.examples import Examples, ExampleSet, ImageSet, as_int64, check_storage, examples_of
from ensbridge.utils.inputs import Inputs, map_inputs, tensors_of

Data = (
    ExampleSet | Tensor | tuple[Any, ...] | Mapping[str, Any] | Iterable | Dataset
)  # whatever holds examples

IMAGE_KEYS = ("pixel_values", "image", "images", "img", "x")
LABEL_KEYS = ("label", "labels", "y", "target", "targets", "fine_label")
LABEL_WORDS = ("label", "class", "target")  # what a key with labels is likely to hold
BLOCK = 1 << 23  # bytes of images that are put together at a time


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


def as_examples(data: ExampleSet | Tensor | tuple[Any, Any]) -> ExampleSet:
    """What `as_image_set` makes of images, or Examples of other inputs and their labels.

    >>> type(as_examples((torch.rand(3, 8), torch.tensor([0, 1, 0])))).__name__
    'Examples'
    """
    if isinstance(data, Examples):
        return data
    held = _as_tensors(data)
    first = held[0] if isinstance(held, tuple) and held else held
    return as_image_set(data) if isinstance(first, Tensor) and first.ndim == 4 else collect(data)  # type: ignore[arg-type]


def collect(data: Data, name: str = "data", labelled: bool = True, batched: bool | None = None) -> ExampleSet:
    """Examples of anything that holds some: tensors, what `as_image_set` takes, a Dataset, or an iterable.

    The last two, a DataLoader among them, give examples one by one or in batches: alone, in tuples that begin
    with images and labels, or in dictionaries. Of these, images are under one of `IMAGE_KEYS` and labels
    under one of `LABEL_KEYS`; without images all but the labels is for networks that are called by name.
    Tuples of several inputs end with the labels, or have them beside a tuple or dictionary of the inputs.
    Images become an ImageSet, anything else Examples. Unless `labelled`, labels are left out. `batched` says
    that entries are batches, as those of a DataLoader are, where a shape alone does not tell.

    >>> len(collect([(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))] * 3))
    6
    >>> collect([{"label": label, "image": torch.rand(1, 4, 4)} for label in (1, 0, 2)]).labels
    tensor([1, 0, 2])
    >>> list(collect({"input_ids": torch.ones(4, 8).long(), "labels": torch.arange(4)}).inputs)
    ['input_ids']
    """
    if isinstance(data, ImageSet | Examples):
        return data if labelled else data.without_labels()
    whole = type(data) is TensorDataset  # a class made from it may do more with its tensors
    held = _as_tensors(data.tensors if type(data) is TensorDataset else data)
    _check_pair(held)
    whole = whole or _is_whole(held)
    entries = iter([held]) if whole else _entries(held, name)
    batched = whole or (is_batched(data) if batched is None else batched)
    each_labels: list[Tensor | None] = []

    def each_inputs() -> Iterator[Inputs]:
        for inputs, labels in _batches(entries, name, labelled, batched):
            each_labels.append(labels)
            yield inputs

    inputs = _joined_inputs(each_inputs())
    if inputs is None:
        raise ValueError(f"{name} holds 0 images; give at least one (an iterator is empty after its use)")
    known = [labels for labels in each_labels if labels is not None]
    if known and len(known) != len(each_labels):
        raise ValueError(
            f"{len(known)} of the {len(each_labels)} entries of {name} have labels; give all or none"
        )
    joined = torch.cat(known) if len(known) > 1 else known[0] if known else None
    return examples_of(inputs, joined if labelled else None)


def is_batched(data: Any) -> bool:
    """Whether data is known to give batches: a DataLoader that puts them together does."""
    return isinstance(data, DataLoader) and data.batch_size is not None


def _is_whole(data: Any) -> bool:
    """Whether this is all examples at once, and not a sequence of them."""
    if isinstance(data, Tensor | Mapping):
        return True
    if not isinstance(data, tuple) or len(data) < 2:
        return False
    first, second, *_ = data
    if isinstance(first, Mapping) or _are_tensors(first):
        return len(data) == 2 and (second is None or getattr(second, "ndim", 0) == 1 or _are_whole(second))
    if not _are_tensors(data):
        return False
    return len(data) == 2 or all(part.ndim <= 2 and len(part) == len(first) for part in data if part.ndim)


def _are_tensors(data: Any) -> bool:
    return isinstance(data, tuple) and bool(data) and all(isinstance(part, Tensor) for part in data)


def _as_tensors(data: Any) -> Any:
    """Arrays of numpy as tensors, alone or in a pair, which may be a list and have its labels in one."""
    if isinstance(data, np.ndarray):
        if data.dtype.kind in "USO" and data.size and isinstance(data.flat[0], str):
            raise ValueError(_no_numbers(data.flat[0]))
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
    if isinstance(images, Tensor) and parts and isinstance(parts[0], str):
        raise ValueError(_no_numbers(parts[0]))
    more_images = any(isinstance(part, Mapping) or getattr(part, "ndim", 0) > 1 for part in parts)
    if isinstance(images, Tensor) and images.ndim == 4 and not more_images:
        raise ValueError(
            f"the labels of {len(images)} images are a {_kind_of(labels)}; give a whole number for each "
            "image, from 0, in a list or a tensor"
        )


def _no_numbers(label: str) -> str:
    return f"labels are strings such as {label[:40]!r}; give the number of each class, from 0, in their place"


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


def _batches(
    entries: Iterable[Any], name: str, labelled: bool = True, batched: bool = False
) -> Iterator[tuple[Inputs, Tensor | None]]:
    """Entries as batches that are all alike; a single example is a batch of one, unless all are `batched`."""
    first: Inputs | None = None
    for number, entry in enumerate(entries):
        inputs, given = _split(entry, number, name, labelled)
        labels = _read_labels(given, number, name) if labelled else None
        tensors = tensors_of(inputs)
        for tensor in tensors:
            check_storage(tensor, "images")
        if not batched and _is_single(tensors, given):
            inputs = map_inputs(lambda tensor: tensor[None], inputs)
            tensors = tensors_of(inputs)
        elif any(tensor.ndim < 2 for tensor in tensors) and len(tensors) == 1:
            raise ValueError(
                f"entry {number} of {name} has inputs of shape {tuple(tensors[0].shape)}; give images as "
                "(images, channels, height, width), or rows as (examples, numbers)"
            )
        first = inputs if first is None else first
        _check_alike(first, inputs, name)
        if labels is not None and labels.ndim == 0 and len(tensors[0]) != 1 and not batched:
            raise ValueError(
                f"entry {number} of {name} has one label for {len(tensors[0])} images; give one each"
            )
        yield inputs, labels if labels is None or labels.numel() != len(tensors[0]) else labels.reshape(-1)


def _is_single(tensors: list[Tensor], labels: Any) -> bool:
    """Whether an entry is one example: images of three dimensions, rows and tokens of one, or with one label.

    Labels are as they were given, read or not: several of them are those of a batch.
    """
    shape = tuple(labels.shape) if isinstance(labels, Tensor | np.ndarray) else np.shape(labels)
    if labels is not None and math.prod(shape) != 1:
        return False
    scalar = labels is not None and shape == ()
    return all(tensor.ndim in (0, 1, 3) or (scalar and tensor.ndim == 2) for tensor in tensors)


def _check_alike(first: Inputs, inputs: Inputs, name: str) -> None:
    names = [list(part) if isinstance(part, Mapping) else type(part).__name__ for part in (first, inputs)]
    if names[0] != names[1] or len(tensors_of(first)) != len(tensors_of(inputs)):
        raise ValueError(f"{name} has entries of {names[0]} and {names[1]}; give them alike")
    for one, other in zip(tensors_of(first), tensors_of(inputs), strict=True):
        if one.shape[1:] != other.shape[1:]:
            raise _not_alike(name, f"shapes {tuple(one.shape[1:])} and {tuple(other.shape[1:])}")
        if one.dtype != other.dtype:
            raise ValueError(f"{name} has images of {one.dtype} and {other.dtype}; give them alike")


def _split(entry: Any, number: int, name: str, labelled: bool = True) -> tuple[Inputs, Any]:
    """The inputs and the labels of an entry as they were given, whatever else is in it."""
    if isinstance(entry, Mapping):
        inputs, labels = _named_parts(entry, number, name, labelled)
    else:
        inputs, labels = _ordered_parts(entry)
        if isinstance(inputs, Mapping):
            inputs, _ = _named_parts(inputs, number, name, labelled=False)
    inputs = tuple(map(_as_tensors, inputs)) if isinstance(inputs, tuple | list) else _as_tensors(inputs)
    if type(inputs).__module__.startswith("PIL."):
        raise _no_tensors(name)
    if not (isinstance(inputs, Tensor | Mapping) or _are_tensors(inputs)):
        raise ValueError(
            f"entry {number} of {name} is a {type(entry).__name__} that does not begin with a tensor; give "
            "images, or tuples that begin with images and labels"
        )
    return inputs, labels


def _read_labels(labels: Any, number: int, name: str) -> Tensor | None:
    labels = _as_tensors(labels)
    if isinstance(labels, int | np.integer) or _are_whole(labels):
        labels = torch.tensor(labels)
    if labels is None or isinstance(labels, Tensor):
        return None if labels is None else as_int64(labels)
    first = labels[0] if isinstance(labels, tuple | list) and labels else labels
    if isinstance(first, str):
        raise ValueError(f"entry {number} of {name}: {_no_numbers(first)}")
    raise ValueError(
        f"entry {number} of {name} has a {type(labels).__name__} as its label; give classes as whole "
        "numbers, from 0"
    )


def _ordered_parts(entry: Any) -> tuple[Any, Any]:
    """The inputs and the labels of a tuple: images and labels first, or several inputs with labels last."""
    if not isinstance(entry, tuple | list) or len(entry) == 0:
        return entry, None
    parts = [_as_tensors(part) for part in entry]
    if len(parts) == 1 or isinstance(parts[0], tuple | list | Mapping) or _may_be_labels(parts[0], parts[1]):
        return parts[0], parts[1] if len(parts) > 1 else None
    if _may_be_labels(parts[0], parts[-1]):
        return tuple(parts[:-1]), parts[-1]
    return tuple(parts), None


def _may_be_labels(first: Any, part: Any) -> bool:
    """Whether a part that follows others is labels, be they right or wrong ones, and no further input."""
    if not isinstance(part, Tensor) or not isinstance(first, Tensor):
        return True
    if first.ndim == 1:  # one example
        return part.numel() == 1
    one_hot = part.ndim == 2 and bool(((part == 0) | (part == 1)).all() and (part.sum(1) == 1).all())
    return part.ndim < 2 or one_hot or (part.ndim == 2 and first.ndim == 4)


def _named_parts(entry: Mapping[str, Any], number: int, name: str, labelled: bool) -> tuple[Any, Any]:
    """The inputs of a dictionary, images alone or all of it by name, and its labels where there are some."""
    image, label = (next((key for key in keys if key in entry), None) for keys in (IMAGE_KEYS, LABEL_KEYS))
    likely = [str(key) for key in entry if any(word in str(key).lower() for word in LABEL_WORDS)]
    if labelled and label is None and likely:
        raise ValueError(
            f"entry {number} of {name} has {', '.join(likely)}, which may be its labels; call them one of "
            f"{', '.join(LABEL_KEYS)}"
        )
    labels = None if label is None else entry[label]
    if image is not None:
        return entry[image], labels
    inputs = {str(key): _numbers(value) for key, value in entry.items() if key != label and key not in likely}
    other = [key for key, value in inputs.items() if not isinstance(value, Tensor)]
    if not inputs or len(other) == len(inputs):
        raise ValueError(
            f"entry {number} of {name} has the keys {', '.join(map(str, entry))}; call its images one of "
            f"{', '.join(IMAGE_KEYS)}, and its labels one of {', '.join(LABEL_KEYS)}"
        )
    if other:
        raise ValueError(
            f"entry {number} of {name} has the keys {', '.join(map(str, entry))}, and no tensor under "
            f"{', '.join(other)}; leave that out, since networks are called with all but the labels"
        )
    return inputs, labels


def _numbers(value: Any) -> Any:
    """An array, or a list of whole numbers such as tokens, as a tensor."""
    return torch.tensor(value) if _are_whole(value) else _as_tensors(value)


def _joined_inputs(parts: Iterator[Inputs]) -> Inputs | None:
    """Batches as one; None where none comes."""
    first = next(parts, None)
    if first is None or isinstance(first, Tensor):
        rest = (part for part in parts if isinstance(part, Tensor))
        return None if first is None else _joined(chain([first], rest))
    columns: list[list[Tensor]] = [[tensor] for tensor in tensors_of(first)]
    for part in parts:
        for column, tensor in zip(columns, tensors_of(part), strict=True):
            column.append(tensor)
    whole = iter([_emptied(column) for column in columns])
    return map_inputs(lambda _: next(whole), first)


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
