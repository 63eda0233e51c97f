"""How far the logits of one model may differ between two ways to run it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ensbridge.utils.inputs import Inputs, tensors_of

# Of a logit's scale, by the type of images and weights. Runtimes fuse layers and sum in another order: in
# float32 2e-7 was measured for tiny networks and 1e-6 for ResNet-32×2; deeper ones are left a hundred times
# that. In half precision a dozen or two roundings fill it: there the check is a coarse one.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


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
