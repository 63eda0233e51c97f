"""What is wrong with inputs that a network cannot take, in words that say what to do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ensbridge.utils.inputs import Inputs, are_images, as_floats, map_inputs, shapes_of, tensors_of

NO_VALUES = "has weights on the device 'meta', which hold no values; load them first"


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
    return (
        None
        if first == channels
        else f"its first convolution takes {first} channels, and these have {channels}"
    )
