"""Collect examples from tensors, arrays, a Dataset, a DataLoader or any iterable of batches."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ensbridge.data.entries import (
    are_integers,
    are_tensors,
    as_tensors,
    pil_images,
    read_labels,
    split_entry,
    string_labels,
)
from ensbridge.data.examples import Examples, ExampleSet, ImageSet, check_storage, examples_of
from ensbridge.utils.inputs import Inputs, count_rows, map_inputs, tensors_of

Data = ExampleSet | Tensor | tuple[Any, ...] | Mapping[str, Any] | Iterable | Dataset
Batch = tuple[Inputs, Tensor | None]  # inputs and labels

BLOCK = 1 << 23  # bytes of inputs that are concatenated at a time


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
    if isinstance(data, tuple) and len(data) == 2 and are_tensors(data):
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
    """Examples in memory, from tensors, whatever `as_image_set` accepts, a Dataset, or an iterable.

    A Dataset or an iterable, such as a DataLoader, yields examples or batches: inputs alone, tuples that
    begin with images and labels, or dictionaries. In these, images are under one of `IMAGE_KEYS` and labels
    under one of `LABEL_KEYS`; without images, everything but the labels is passed to networks by name.
    Tuples of several inputs end with the labels, or have them beside a tuple or dictionary of the inputs; of
    three tensors of which the second and the last could be labels, it is the second if the first is images.
    Images become an ImageSet, anything else Examples. Unless `labelled`, labels are left out. `batched` says
    that entries are batches, as those of a DataLoader are, where their shape is ambiguous.

    >>> len(collect([(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))] * 3))
    6
    >>> collect([{"label": label, "image": torch.rand(1, 4, 4)} for label in (1, 0, 2)]).labels
    tensor([1, 0, 2])
    >>> list(collect({"input_ids": torch.ones(4, 8).long(), "labels": torch.arange(4)}).inputs)
    ['input_ids']
    """
    if isinstance(data, ImageSet | Examples):
        return data if labelled else data.without_labels()
    whole = type(data) is TensorDataset  # a subclass may do more with its tensors
    held = as_tensors(data.tensors if type(data) is TensorDataset else data)
    _check_pair(held)
    whole = whole or _is_whole(held)
    entries = iter([held]) if whole else iterate_entries(held, name)
    batched = whole or (is_batched(data) if batched is None else batched)
    labels: list[Tensor | None] = []

    def each_inputs() -> Iterator[Inputs]:
        for inputs, of_batch in as_batches(entries, name, labelled, batched):
            labels.append(of_batch)
            yield inputs

    inputs = _concatenate(each_inputs())
    if inputs is None:
        raise ValueError(f"{name} holds 0 images; give at least one (an iterator is empty after its use)")
    known = [of_batch for of_batch in labels if of_batch is not None]
    if known and len(known) != len(labels):
        raise ValueError(f"{len(known)} of the {len(labels)} entries of {name} have labels; give all or none")
    joined = torch.cat(known) if len(known) > 1 else known[0] if known else None
    return examples_of(inputs, joined if labelled else None)


def is_batched(data: Any) -> bool:
    """Whether data is known to yield batches, as a DataLoader with a batch size does."""
    return isinstance(data, DataLoader) and data.batch_size is not None


def iterate_entries(data: Any, name: str) -> Iterator[Any]:
    """The entries of a Dataset or an iterable; known errors of a DataLoader's collation are explained."""
    data = [data] if isinstance(data, Mapping) else data
    by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")  # may raise no IndexError at its end
    if isinstance(data, str | bytes) or not (isinstance(data, Iterable) or by_index):
        raise ValueError(
            f"{name} is a {type(data).__name__}; give images, a pair (images, labels), an ImageSet, a "
            "Dataset, or batches such as a DataLoader"
        )
    try:
        yield from data if isinstance(data, Iterable) else (data[index] for index in range(len(data)))
    except TypeError as error:
        if "PIL." in str(error):
            raise pil_images(name) from error
        raise
    except RuntimeError as error:
        if "to be equal size" in str(error):
            sizes = re.findall(r"\[([\d, ]*)\] at entry", str(error))
            images = all(size.count(",") == 2 for size in sizes)
            raise _shapes_differ(name, "different shapes", images) from error
        raise


def as_batches(
    entries: Iterable[Any], name: str, labelled: bool = True, batched: bool = False
) -> Iterator[Batch]:
    """Entries as batches of one shape and type; a single example becomes a batch of one."""
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
        elif len(tensors) == 1 and tensors[0].ndim < 2:
            raise ValueError(
                f"entry {number} of {name} has inputs of shape {tuple(tensors[0].shape)}; give images as "
                "(images, channels, height, width), or rows as (examples, numbers)"
            )
        first = inputs if first is None else first
        _check_alike(first, inputs, name)
        rows = len(tensors[0]) if tensors[0].ndim else 0
        if any(tensor.ndim == 0 or len(tensor) != rows for tensor in tensors):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise ValueError(
                f"entry {number} of {name} has inputs of {shapes}; give as many examples in each"
            )
        if labels is not None and labels.ndim == 0 and rows != 1 and not batched:
            raise ValueError(f"entry {number} of {name} has one label for {rows} images; give one each")
        yield inputs, labels if labels is None or labels.numel() != rows else labels.reshape(-1)


def _is_whole(data: Any) -> bool:
    """Whether this is all examples at once, and not a sequence of them."""
    if isinstance(data, Tensor | Mapping):
        return True
    if not isinstance(data, tuple) or len(data) < 2:
        return False
    first, second, *_ = data
    if isinstance(first, Mapping) or are_tensors(first):
        return len(data) == 2 and (second is None or getattr(second, "ndim", 0) == 1 or are_integers(second))
    if not are_tensors(data):
        return False
    if len(data) == 2:
        return True
    last, alike = data[-1], all(len(part) == len(first) for part in data if part.ndim)
    return alike and (all(part.ndim <= 2 for part in data) or last.shape == first.shape[:1])


def _check_pair(data: Any) -> None:
    """Refuse a pair of images and labels that are not one integer per image."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return
    images, labels = data
    if not isinstance(images, Tensor) or labels is None or isinstance(labels, Tensor):
        return
    sequence = isinstance(labels, tuple | list)
    parts = labels if sequence else [labels]
    if parts and isinstance(parts[0], str):
        raise ValueError(string_labels(parts[0]))
    more_images = any(isinstance(part, Mapping) or getattr(part, "ndim", 0) > 1 for part in parts)
    if images.ndim == 4 and not more_images:
        kind = f"{type(labels).__name__}{f' of {type(parts[0]).__name__}' if sequence and parts else ''}"
        raise ValueError(
            f"the labels of {len(images)} images are a {kind}; give an integer for each image, from 0, in a "
            "list or a tensor"
        )


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
        raise ValueError(f"{name} has entries of {names[0]} and {names[1]}; give all of one kind")
    for one, other in zip(tensors_of(first), tensors_of(inputs), strict=True):
        if one.shape[1:] != other.shape[1:]:
            shapes = f"shapes {tuple(one.shape[1:])} and {tuple(other.shape[1:])}"
            raise _shapes_differ(name, shapes, images=one.ndim == 4)
        if one.dtype != other.dtype:
            raise ValueError(f"{name} has images of {one.dtype} and {other.dtype}; give all of one type")


def _shapes_differ(name: str, shapes: str, images: bool) -> ValueError:
    if images:
        remedy = "resize them, such as by torchvision's transforms.Resize((64, 64))"
    else:
        remedy = "pad them, such as by torch.nn.utils.rnn.pad_sequence"
    return ValueError(f"{name} has {'images' if images else 'examples'} of {shapes}; {remedy}")


def _concatenate(batches: Iterator[Inputs]) -> Inputs | None:
    """Batches as one, block by block, so that little is ever held twice; None where there are none."""
    blocks: list[Inputs] = []
    pending: list[Inputs] = []
    held = 0
    for batch in batches:
        pending.append(batch)
        held += sum(tensor.nbytes for tensor in tensors_of(batch))
        if held >= BLOCK:
            blocks.append(_pop_all(pending))
            held = 0
    if pending:
        blocks.append(_pop_all(pending))
    return _pop_all(blocks) if blocks else None


def _pop_all(batches: list[Inputs]) -> Inputs:
    """The batches of a list as one; each is released as soon as it is copied."""
    if len(batches) == 1:
        return batches.pop()
    rows = sum(map(count_rows, batches))
    whole = map_inputs(lambda tensor: tensor.new_empty(rows, *tensor.shape[1:]), batches[0])
    batches.reverse()
    start = 0
    while batches:
        batch = batches.pop()
        for target, tensor in zip(tensors_of(whole), tensors_of(batch), strict=True):
            target[start : start + len(tensor)] = tensor
        start += count_rows(batch)
    return whole
