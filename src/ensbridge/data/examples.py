"""Examples in memory: images, or other inputs of classifiers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ensbridge.utils.inputs import Inputs, as_floats, count_rows, map_inputs, tensors_of

if TYPE_CHECKING:
    from typing_extensions import Self


class AbstractExamples:
    """Inputs of a classifier, with labels (N,) where they are known, and their batches.

    Subclasses are dataclasses whose first field holds the inputs.
    """

    inputs: Any  # of all examples
    labels: Tensor | None

    def __len__(self) -> int:
        return count_rows(self.inputs)

    @property
    def device(self) -> torch.device:
        """The device of the examples."""
        return tensors_of(self.inputs)[0].device

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each input of one example."""
        return [tuple(tensor.shape[1:]) for tensor in tensors_of(self.inputs)]

    def to(self, device: torch.device | str) -> Self:
        """The same set on a device."""
        return self._map(lambda tensor: tensor.to(device))

    def subset(self, indices: Tensor) -> Self:
        """The examples at `indices`, in their order."""
        return self._map(lambda tensor: tensor[indices])

    def first(self, count: int) -> Self:
        """The first `count` examples, or all where there are fewer."""
        return self._map(lambda tensor: tensor[:count])

    def without_labels(self) -> Self:
        """The same examples without labels."""
        return replace(self, labels=None)  # type: ignore[type-var]

    def batch(self, indices: Tensor) -> tuple[Any, Tensor | None]:
        """The inputs at `indices`, uint8 images as floats, with their labels."""
        inputs = map_inputs(lambda tensor: as_floats(tensor[indices]), self.inputs)
        return inputs, None if self.labels is None else self.labels[indices]

    def batches(self, size: int) -> Iterator[tuple[Any, Tensor | None]]:
        """Every example once, in order."""
        for start in range(0, len(self), size):
            yield self.batch(torch.arange(start, min(start + size, len(self)), device=self.device))

    def fingerprint(self) -> str:
        """A short digest of shapes, values and labels, which identifies the data of a run."""
        digest = hashlib.sha256()
        if isinstance(self.inputs, Mapping):
            digest.update(repr(list(self.inputs)).encode())
        for part in (*tensors_of(self.inputs), self.labels):
            if part is not None:
                digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
                digest.update(part.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        labels = None if self.labels is None else function(self.labels)
        return type(self)(map_inputs(function, self.inputs), labels)  # type: ignore[call-arg]


@dataclass(frozen=True)
class ImageSet(AbstractExamples):
    """Images (N, C, H, W), floats in [0, 1] or uint8, with labels (N,) where they are known.

    uint8 images stay uint8 in memory and become floats in [0, 1] a batch at a time. Labels of any integer
    type become int64.

    >>> labels = torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    >>> data = ImageSet(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), labels)
    >>> len(data), [tensor.dtype for tensor in data.batch(torch.tensor([1]))]
    (4, [torch.float32, torch.int64])
    """

    images: Tensor
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        check_storage(self.images, "images")
        shape = tuple(self.images.shape)
        if self.images.ndim != 4:
            raise ValueError(f"images have shape {shape}; they must be (images, channels, height, width)")
        if self.images.numel() == 0:
            raise ValueError(f"the data is empty: its images have shape {shape}; give at least one image")
        if not (self.images.is_floating_point() or self.images.dtype == torch.uint8):
            raise ValueError(f"images are {self.images.dtype}; give floats in [0, 1] or uint8")
        _check_finite(self.images, "images")
        if self.labels is not None:
            object.__setattr__(self, "labels", _checked_labels(self.labels, shape[0], "images"))

    @property
    def inputs(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The images."""
        return self.images


@dataclass(frozen=True)
class Examples(AbstractExamples):
    """Inputs of any kind, N examples each, with labels (N,) where they are known.

    `inputs` is a tensor, such as rows of a table (N, D) or tokens (N, L), or a tuple or mapping of tensors:
    networks are called as `net(x)`, `net(*inputs)` or `net(**inputs)`.

    >>> tokens = {"input_ids": torch.zeros(4, 8).long(), "attention_mask": torch.ones(4, 8).long()}
    >>> data = Examples(tokens, torch.tensor([0, 1, 0, 1]))
    >>> len(data), data.batch(torch.tensor([1, 2]))[0]["input_ids"].shape
    (4, torch.Size([2, 8]))
    """

    inputs: Inputs
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        names = list(self.inputs) if isinstance(self.inputs, Mapping) else None
        tensors = tensors_of(self.inputs)
        if not tensors:
            raise ValueError("the examples have 0 inputs; give at least one tensor")
        for number, tensor in enumerate(tensors):
            name = f"inputs[{names[number] if names else number}]" if len(tensors) > 1 else "inputs"
            check_storage(tensor, name)
            if tensor.ndim == 0 or len(tensor) == 0 or len(tensor) != len(tensors[0]):
                raise ValueError(
                    f"{name} have shape {tuple(tensor.shape)}; give as many examples in each, at least one"
                )
            _check_finite(tensor, name)
        if self.labels is not None:
            object.__setattr__(self, "labels", _checked_labels(self.labels, len(tensors[0]), "examples"))


ExampleSet: TypeAlias = ImageSet | Examples


def examples_of(inputs: Inputs, labels: Tensor | None = None) -> ExampleSet:
    """Images as an ImageSet, other inputs as Examples.

    >>> type(examples_of(torch.zeros(2, 1, 4, 4))).__name__, type(examples_of(torch.zeros(2, 4))).__name__
    ('ImageSet', 'Examples')
    """
    if isinstance(inputs, Tensor) and inputs.ndim == 4:
        return ImageSet(inputs, labels)
    return Examples(inputs, labels)


def _check_finite(tensor: Tensor, name: str) -> None:
    # NaN and infinity show in the extremes, which take no memory to find.
    if tensor.is_floating_point() and not torch.stack(tensor.aminmax()).isfinite().all():
        raise ValueError(f"{name} hold NaN or infinite values; clean the data before it is used")


def check_storage(tensor: Tensor, name: str) -> None:
    """Refuse meta, nested and sparse tensors."""
    if tensor.is_meta:
        raise ValueError(
            f"{name} are on the device 'meta', which has no values; give them on the CPU or a GPU"
        )
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"{name} are a {kind} tensor; convert it, such as by .to_dense()")


def _checked_labels(labels: Tensor, count: int, kind: str) -> Tensor:
    """Labels (N,) as int64."""
    labels = as_int64(labels)
    if labels.dtype != torch.int64:
        convert = ".argmax(1)" if labels.ndim == 2 else ".long()"
        raise ValueError(f"labels are {labels.dtype}; they must be integers, so convert them with {convert}")
    if labels.shape != (count,):
        one_hot = ", so convert one-hot labels with .argmax(1)" if labels.ndim == 2 else ""
        raise ValueError(f"labels have shape {tuple(labels.shape)}; {count} {kind} need ({count},){one_hot}")
    return labels


def as_int64(labels: Tensor) -> Tensor:
    """Integer labels as int64; others unchanged."""
    check_storage(labels, "labels")
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    return labels.long() if integers else labels
