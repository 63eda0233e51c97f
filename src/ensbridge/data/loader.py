"""Examples out of whatever holds them: tensors, arrays, a Dataset, batches."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ensbridge.data.entries import (
    are_numbers,
    are_tensors,
    as_tensors,
    no_numbers,
    no_tensors,
    read_labels,
    split_entry,
)
from ensbridge.data.examples import Examples, ExampleSet, ImageSet, check_storage, examples_of
from ensbridge.utils.inputs import Inputs, map_inputs, tensors_of

Data = (
    ExampleSet | Tensor | tuple[Any, ...] | Mapping[str, Any] | Iterable | Dataset
)  # whatever holds examples

BLOCK = 1 << 23  # bytes of images that are put together at a time


def as_image_set(data: ImageSet | Tensor | tuple[Tensor, Tensor]) -> ImageSet:
    """An ImageSet of images alone, of a pair (images, labels), or of an ImageSet as it is.

    >>> len(as_image_set(torch.rand(3, 1, 2, 2)))
    3
    """
    if isinstance(data, ImageSet):
        return data
    data = as_tensors(data)
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
    held = as_tensors(data)
    first = held[0] if isinstance(held, tuple) and held else held
    return as_image_set(data) if isinstance(first, Tensor) and first.ndim == 4 else collect(data)  # type: ignore[arg-type]


def collect(data: Data, name: str = "data", labelled: bool = True, batched: bool | None = None) -> ExampleSet:
    """Examples of anything that holds some: tensors, what `as_image_set` takes, a Dataset, or an iterable.

    The last two, a DataLoader among them, give examples one by one or in batches: alone, in tuples that begin
    with images and labels, or in dictionaries. Of these, images are under one of `IMAGE_KEYS` and labels
    under one of `LABEL_KEYS`; without images all but the labels is for networks that are called by name.
    Tuples of several inputs end with the labels, or have them beside a tuple or dictionary of the inputs; of
    three tensors of which the second and the last could be labels, it is the second if the first is images.
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
    held = as_tensors(data.tensors if type(data) is TensorDataset else data)
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
    if isinstance(first, Mapping) or are_tensors(first):
        return len(data) == 2 and (second is None or getattr(second, "ndim", 0) == 1 or are_numbers(second))
    if not are_tensors(data):
        return False
    if len(data) == 2:
        return True
    last, alike = data[-1], all(len(part) == len(first) for part in data if part.ndim)
    return alike and (all(part.ndim <= 2 for part in data) or last.shape == first.shape[:1])


def _check_pair(data: Any) -> None:
    """Refuse a pair of images and what can only be their labels, but is not a whole number for each."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return
    images, labels = data
    if labels is None or isinstance(labels, Tensor):
        return
    parts = labels if isinstance(labels, tuple | list) else [labels]
    if isinstance(images, Tensor) and parts and isinstance(parts[0], str):
        raise ValueError(no_numbers(parts[0]))
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
            raise no_tensors(name) from error
        raise
    except RuntimeError as error:
        if "to be equal size" in str(error):
            sizes = re.findall(r"\[([\d, ]*)\] at entry", str(error))
            raise _not_alike(name, "different shapes", all(size.count(",") == 2 for size in sizes)) from error
        raise


def _not_alike(name: str, shapes: str, images: bool) -> ValueError:
    if images:
        remedy = "bring them to one, such as by torchvision's transforms.Resize((64, 64))"
    else:
        remedy = "pad them to one, such as by torch.nn.utils.rnn.pad_sequence"
    return ValueError(f"{name} has {'images' if images else 'examples'} of {shapes}; {remedy}")


def _batches(
    entries: Iterable[Any], name: str, labelled: bool = True, batched: bool = False
) -> Iterator[tuple[Inputs, Tensor | None]]:
    """Entries as batches that are all alike; a single example is a batch of one, unless all are `batched`."""
    first: Inputs | None = None
    for number, entry in enumerate(entries):
        inputs, given = split_entry(entry, number, name, labelled)
        labels = read_labels(given, number, name) if labelled else None
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
            shapes = f"shapes {tuple(one.shape[1:])} and {tuple(other.shape[1:])}"
            raise _not_alike(name, shapes, images=one.ndim == 4)
        if one.dtype != other.dtype:
            raise ValueError(f"{name} has images of {one.dtype} and {other.dtype}; give them alike")


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
