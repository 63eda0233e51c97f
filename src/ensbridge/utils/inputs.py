"""What a classifier is called with: one tensor, a tuple of tensors, or tensors by name.

In each of them the first dimension counts examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]


def pack(arguments: tuple[Any, ...], named: Mapping[str, Tensor]) -> Inputs:
    """The arguments of a call as one value, from which `call_network` makes the same call.

    >>> pack((1,), {}), pack((1, 2), {}), pack((), {"a": 1})
    (1, (1, 2), {'a': 1})
    """
    if named and arguments:
        raise ValueError(
            f"a model was called with {len(arguments)} inputs in their order and {', '.join(named)} by name; "
            "give all in one of the two ways"
        )
    if named:
        return dict(named)
    if len(arguments) == 1:
        return arguments[0]
    if not arguments:
        raise ValueError("a model was called without inputs; give a batch of them")
    return tuple(arguments)


def unpack(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """The arguments that a network is called with for inputs, in their order and by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def call_network(net: Callable[..., Any], inputs: Inputs) -> Any:
    """`net(x)`, `net(*batch)` or `net(**batch)`, whichever the inputs are for."""
    arguments, named = unpack(inputs)
    return net(*arguments, **named)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Every tensor of the inputs, in their order."""
    if isinstance(inputs, Mapping):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The same kind of inputs, of what a function makes of each tensor.

    >>> map_inputs(lambda tensor: tensor + 1, {"a": torch.zeros(2)})
    {'a': tensor([1., 1.])}
    """
    if isinstance(inputs, Mapping):
        return {name: function(tensor) for name, tensor in inputs.items()}
    return tuple(map(function, inputs)) if isinstance(inputs, tuple) else function(inputs)


def count_rows(inputs: Inputs) -> int:
    """How many examples there are."""
    return len(tensors_of(inputs)[0])


def to_network(inputs: Inputs, net: nn.Module) -> Inputs:
    """The inputs on the device of a network's first weight; as they are, where it has no weights.

    >>> to_network(torch.zeros(2), nn.Linear(2, 2, device="meta")).device
    device(type='meta')
    """
    weight = next(net.parameters(), None)
    if weight is None:
        weight = next(net.buffers(), None)
    if weight is None:
        return inputs
    device = weight.device
    return map_inputs(lambda tensor: tensor.to(device), inputs)


def shapes_of(inputs: Inputs) -> str:
    """Types and shapes without the number of examples, in words.

    >>> shapes_of(torch.zeros(8, 3, 4, 4)), shapes_of({"ids": torch.zeros(8, 5).long()})
    ('torch.float32 and shape (3, 4, 4)', 'ids: torch.int64 and shape (5,)')
    """
    if isinstance(inputs, Mapping):
        return "; ".join(f"{name}: {shapes_of(tensor)}" for name, tensor in inputs.items())
    if isinstance(inputs, tuple):
        return "; ".join(map(shapes_of, inputs))
    return f"{inputs.dtype} and shape {tuple(inputs.shape[1:])}"


def are_images(inputs: Inputs) -> bool:
    """Whether the inputs are one tensor of images (B, C, H, W)."""
    return isinstance(inputs, torch.Tensor) and inputs.ndim == 4


def as_floats(tensor: Tensor) -> Tensor:
    """uint8 images (B, C, H, W) as floats from 0 to 1; anything else as it is.

    >>> as_floats(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8)).item()
    1.0
    """
    return tensor.float() / 255 if tensor.dtype == torch.uint8 and tensor.ndim == 4 else tensor
