"""A model as a graph for batches of any size, what it is tried on, and how far its logits may be off."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ensbridge.deploy.saving.description import LARGEST_BATCH
from ensbridge.models.fast_ensemble import AbstractFastEnsemble
from ensbridge.utils.inputs import Inputs, call_network, map_inputs, pack, tensors_of, unpack
from ensbridge.utils.text import one_line

# Of a logit's scale, by the type of images and weights. Runtimes fuse layers and sum in another order: in
# float32 2e-7 was measured for tiny networks and 1e-6 for ResNet-32×2; deeper ones are left a hundred times
# that. In half precision a dozen or two roundings fill it: there the check is a coarse one.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
BATCHES = (1, 3, 17)
VARIANTS = 7  # of made-up batches of each size


class _Graph(nn.Module):
    """A model with a parameter of its forward pass for each input, by which a graph names them."""

    def __init__(self, model: nn.Module, example: Inputs, with_source: bool) -> None:
        super().__init__()
        # Its weights are the model's and have the names that they have there.
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        names = self.names = input_names(example)

        def forward(*inputs: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
            batch = dict(zip(names, inputs, strict=False)) | named
            by_name = isinstance(example, Mapping)
            given = pack((), batch) if by_name else pack(tuple(batch.values()), {})
            if with_source:
                return cast(AbstractFastEnsemble, model).with_source(given)
            return call_network(model, given)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        vars(forward)["__signature__"] = inspect.Signature(parameters)
        self.forward = forward


def input_names(inputs: Inputs) -> list[str]:
    """What the inputs of an exported file are called.

    >>> input_names(torch.zeros(1, 2)), input_names((torch.zeros(1, 2), torch.zeros(1, 2)))
    (['images'], ['input_0', 'input_1'])
    """
    if isinstance(inputs, Mapping):
        return list(inputs)
    return [f"input_{number}" for number in range(len(inputs))] if isinstance(inputs, tuple) else ["images"]


def trace(model: nn.Module, example: Inputs, with_source: bool = False) -> ExportedProgram:
    """The model as a graph whose batch size is free; the source is in it once, its feature read inside.

    `with_source` makes the source's logits of a fast ensemble a second output.
    """
    # Random numbers in place of the example: the program keeps its inputs, and those may be private.
    # Two images: what is traced for one may hold for one only.
    generator = torch.Generator().manual_seed(0)
    images = map_inputs(lambda tensor: made_up(tensor, 2, generator)[0].to(tensor.device), example)
    graph = _Graph(model, example, with_source)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # whose fused layers no other runtime has
    batch = Dim("batch", min=1)
    arguments, named = unpack(images)
    try:
        program = torch.export.export(
            graph, arguments, named, dynamic_shapes={name: {0: batch} for name in graph.names}, strict=False
        )
    except Exception as error:  # of many kinds, none of them public
        if "specialized it to be a constant" in str(error):
            raise ValueError(
                "the network fixes the number of images in a batch, so that no graph can take others; use "
                "images.shape[0] in place of len(images) or int(…)"
            ) from error
        raise ValueError(
            f"torch.export cannot trace this model for any batch size ({one_line(error)}); rewrite the part "
            "of the source that depends on values or on a fixed batch size"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it has the paths of this machine
    return program


def inputs(example: Inputs) -> Iterator[Inputs]:
    """What an export is checked with: the example, then random and extreme batches of each size.

    Whole numbers, such as tokens and their masks, are those of examples drawn at random: others may mean
    nothing to a network, or not belong together.
    """
    yield map_inputs(lambda tensor: tensor[: max(BATCHES)], example)
    generator, tensors = torch.Generator().manual_seed(1), tensors_of(example)
    for count in batch_sizes(example):
        made = [made_up(part, count, generator) if part.is_floating_point() else None for part in tensors]
        for number in range(VARIANTS if any(made) else 1):
            rows = torch.randint(len(tensors[0]), (count,), generator=generator)
            parts = zip(tensors, made, strict=True)
            chosen = iter([part[rows] if kinds is None else kinds[number] for part, kinds in parts])
            yield map_inputs(lambda _, chosen=chosen: next(chosen), example)


def made_up(example: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """Random and extreme tensors like an example; of whole numbers random ones between its extremes."""
    shape = (count, *example.shape[1:])
    if not example.is_floating_point():
        low, high = int(example.min()), int(example.max())
        return [torch.randint(low, high + 1, shape, generator=generator).to(example.dtype)]
    images = torch.rand(shape, generator=generator)
    noise = torch.randn(shape, generator=generator)
    made = (images, noise, 0 * images, torch.ones_like(images), 1e3 * images, -images, -1e3 * noise)
    return [tensor.to(example.dtype) for tensor in made]


def batch_sizes(example: Inputs) -> tuple[int, ...]:
    """How many images a batch has; large ones, which a file may ask for, come in small batches."""
    numbers = sum(tensor[0].numel() for tensor in tensors_of(example))
    return tuple(count for count in BATCHES if count == 1 or count * numbers <= LARGEST_BATCH)


def difference(expected: Tensor, actual: Tensor) -> float:
    """The largest difference of logits (B, K) as a share of their scale, at least 1, in each row.

    >>> difference(torch.tensor([[100.0, -100.0]]), torch.tensor([[101.0, -100.0]]))
    0.01
    >>> difference(torch.tensor([[torch.nan, 0.0]]), torch.tensor([[0.0, 0.0]]))
    inf
    """
    if expected.shape != actual.shape:
        return math.inf
    finite = expected.isfinite()
    if not torch.equal(expected[~finite].nan_to_num(2.0), actual[~finite].nan_to_num(2.0)):
        return math.inf
    gaps = (
        (expected.double() - actual.double()).abs().where(finite, 0.0).nan_to_num(math.inf, posinf=math.inf)
    )
    scale = expected.double().abs().where(finite, 0.0).amax(-1, keepdim=True).clamp(min=1.0)
    return float((gaps / scale).max())


def tolerance(model: nn.Module, images: Inputs) -> float:
    """How far logits may be off, by the coarsest type of images and weights.

    >>> tolerance(nn.Linear(2, 3), torch.zeros(1, 2)), tolerance(nn.Linear(2, 3).half(), torch.zeros(1, 2))
    (0.0001, 0.02)
    """
    tensors = tensors_of(images)
    types = {tensor.dtype for tensor in (*tensors, *model.parameters())}
    if tensors[0].is_cuda:  # which multiplies float32 with fewer digits inside of convolutions
        types.add(torch.float16)
    return max(TOLERANCE.get(dtype, 0.0) for dtype in types)
