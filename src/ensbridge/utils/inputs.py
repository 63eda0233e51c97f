"""What a classifier is called with: one tensor, a tuple of tensors, or tensors by name.

In each of them the first dimension counts examples. What is wrong with inputs that a network cannot take is
put in words that say what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
NO_VALUES = "has weights on the device 'meta', which hold no values; load them first"


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
    device = next((tensor.device for tensor in chain(net.parameters(), net.buffers())), None)
    return inputs if device is None else map_inputs(lambda tensor: tensor.to(device), inputs)


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


def kind_of(inputs: Inputs) -> str:
    """What the examples are called.

    >>> import torch
    >>> kind_of(torch.zeros(2, 3, 4, 4)), kind_of(torch.zeros(2, 3))
    ('images', 'inputs')
    """
    return "images" if are_images(inputs) else "inputs"


def checked_inputs(inputs: Inputs, shape: Sequence[int] | None) -> Inputs:
    """Inputs with uint8 images as floats from 0 to 1; refused where they are not of a model's dimensions.

    Sizes may be others than `shape` has them, where that is known at all, but for the channels of images:
    many networks take images of any height and width, and sequences of any length.
    """
    for part in tensors_of(inputs):
        if not isinstance(part, Tensor):
            raise ValueError(
                f"a model was called with {type(part).__name__}; give tensors, as torch.as_tensor makes them"
            )
    inputs = map_inputs(as_floats, inputs)
    if shape is None or not isinstance(inputs, Tensor):
        return inputs
    if inputs.ndim != len(shape) + 1 or (are_images(inputs) and inputs.shape[1] != shape[0]):
        given, takes = tuple(inputs.shape), ", ".join(map(str, ("B", *shape)))
        raise ValueError(
            f"{kind_of(inputs)} have shape {given}; this model takes ({takes}){_hint(inputs, shape)}"
        )
    return inputs


def _hint(inputs: Tensor, shape: Sequence[int]) -> str:
    given = tuple(inputs.shape)
    if given == tuple(shape):
        return ", so give one example as a batch, with [None]"
    if len(given) == len(shape) + 1 == 4 and given[3] == shape[0]:
        return ", so bring the channels to the front with .permute(0, 3, 1, 2)"
    return ""


def refusal(inputs: Inputs, net: nn.Module, shape: Sequence[int] | None = None) -> str | None:
    """Why a network failed on inputs, where their types, places or sizes tell it; None where they do not.

    `shape` is that of the examples it was trained on, where it is known.
    """
    remedy = remedy_for(inputs, net)
    if remedy is not None:
        return f"the model cannot take {kind_of(inputs)} of {shapes_of(inputs)}; {remedy}"
    if shape is None or not isinstance(inputs, Tensor) or inputs.shape[1:] == tuple(shape):
        return None
    given, trained = tuple(inputs.shape), ", ".join(map(str, ("B", *shape)))
    return f"{kind_of(inputs)} have shape {given}, which the model cannot take; it was trained on ({trained})"


def remedy_for(inputs: Inputs, net: nn.Module) -> str | None:
    """What mends a call that failed, where types, devices or the order of dimensions tell."""
    kind, tensors = kind_of(inputs), tensors_of(inputs)
    if any(weight.is_meta for weight in net.parameters()):
        return f"it {NO_VALUES}"
    weights = [weight for weight in net.parameters() if weight.is_floating_point()]
    floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if weights and floats and floats != {weight.dtype for weight in weights}:
        # One type for all: other members may well have yet another, and no images are of both.
        return f"bring every network and the {kind} to float32, each with .float()"
    if are_images(inputs) and not floats:
        return "give floats from 0 to 1, or uint8"
    if weights and any(tensor.device != weights[0].device for tensor in tensors):
        device = str(weights[0].device)
        return f"its weights are on {device}, so bring the {kind} there, with .to({device!r})"
    if not are_images(inputs):
        return None
    channels, last = tensors[0].shape[1::2]
    if last in (1, 3, 4) and channels not in (1, 3, 4):
        return "give images as (images, channels, height, width), with .permute(0, 3, 1, 2)"
    first = next((layer.in_channels for layer in net.modules() if isinstance(layer, nn.Conv2d)), channels)
    if first == channels:
        return None
    return f"its first convolution takes {first} channels, and these have {channels}"
