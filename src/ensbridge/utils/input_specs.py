"""What a model's inputs are like, so that a saved model can be tried without its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from ensbridge.utils.inputs import Inputs, tensors_of

DType = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
LARGEST_WHOLE = 2**40  # what is kept of a range of whole numbers that goes beyond


@dataclass(frozen=True)
class InputSpec:
    """One tensor that a model is called with: by its name, or in its position where it has none."""

    shape: tuple[int, ...]  # of one example
    dtype: DType
    name: str | None = None
    low: int = 0  # the smallest and the largest whole number that was seen in it
    high: int = 0

    def __str__(self) -> str:
        return f"{self.name + ': ' if self.name else ''}{self.dtype} of shape {self.shape}"


def specs_of(inputs: Inputs) -> tuple[InputSpec, ...] | None:
    """What inputs are like; nothing of their values is kept but the range of whole numbers.

    None where one is of a type that no `InputSpec` has, or has no numbers.

    >>> specs_of({"ids": torch.tensor([[3, 7], [5, 2]])})
    (InputSpec(shape=(2,), dtype='int64', name='ids', low=2, high=7),)
    """
    if not all(tensor.numel() for tensor in tensors_of(inputs)):
        return None
    names = list(inputs) if isinstance(inputs, Mapping) else [None] * len(tensors_of(inputs))
    specs = [_spec(name, tensor) for name, tensor in zip(names, tensors_of(inputs), strict=True)]
    return tuple(specs) if all(spec.dtype in get_args(DType) for spec in specs) else None


def _spec(name: str | None, tensor: Tensor) -> InputSpec:
    low = high = 0
    if tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        low, high = (
            max(-LARGEST_WHOLE, min(LARGEST_WHOLE, int(number))) for number in (tensor.min(), tensor.max())
        )
    dtype = cast(DType, str(tensor.dtype).removeprefix("torch."))
    return InputSpec(tuple(tensor.shape[1:]), dtype, name, low, high)


def made_up_inputs(specs: Sequence[InputSpec], count: int) -> Inputs:
    """So many made-up examples, the same at every call.

    Floats are from 0 to 1, whole numbers in their range. Of a row of zeros and ones, as a mask is, the ones
    come first, and the first example has only ones.

    >>> made_up_inputs([InputSpec((4,), "int64", "mask", 0, 1)], 2)["mask"][0]
    tensor([1, 1, 1, 1])
    """
    generator = torch.Generator().manual_seed(0)
    tensors = [_made_up(spec, count, generator) for spec in specs]
    if all(spec.name is not None for spec in specs):
        return {str(spec.name): tensor for spec, tensor in zip(specs, tensors, strict=True)}
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _made_up(spec: InputSpec, count: int, generator: torch.Generator) -> Tensor:
    shape, dtype = (count, *spec.shape), getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator).to(dtype)
    if (spec.low, spec.high) == (0, 1) and len(spec.shape) == 1:
        ones = torch.randint(1, shape[1] + 1, (count, 1), generator=generator)
        ones[0] = shape[1]
        return (torch.arange(shape[1]) < ones).to(dtype)
    return torch.randint(spec.low, spec.high + 1, shape, generator=generator).to(dtype)
