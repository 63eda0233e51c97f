"""A low-loss curve between two members: a quadratic Bezier curve in weights (Garipov et al., 2018).

θ(α) = (1-α)²·θ_start + 2α(1-α)·φ + α²·θ_end. The ends stay as they are, the control point φ is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ensbridge.methods.base import AbstractMethod, Batch, Teacher
from ensbridge.models.ensemble import at_least_float32, weights_digest


class _CurvePoint(nn.Module):
    """The network at a place α of the curve, as one function of images and α that can be compiled."""

    def __init__(self, start: dict[str, Tensor], control: nn.Module, end: dict[str, Tensor]) -> None:
        super().__init__()
        self.start, self.control, self.end = start, control, end

    def weights(self, alpha: Tensor | float) -> dict[str, Tensor]:
        """θ(α), through which gradients reach the control point."""
        a, b, c = (1 - alpha) ** 2, 2 * alpha * (1 - alpha), alpha**2
        return {
            name: a * self.start[name] + b * control + c * self.end[name]
            for name, control in self.control.named_parameters(remove_duplicate=False)
        }

    def forward(self, images: Tensor, alpha: Tensor | float) -> Tensor:
        return functional_call(self.control, self.weights(alpha), (images,))


class BezierCurve(AbstractMethod):
    """The curve between two networks of one architecture, trained by cross-entropy at α ~ U(0, 1).

    The control point starts at the middle of the ends, so that the curve starts as the straight line.
    `at(α)` is the network at a place of the curve, `model()` that at its centre.

    >>> ends = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)]
    >>> curve = BezierCurve(*ends)
    >>> images = torch.rand(5, 1, 2, 2)
    >>> curve.at(0.0)(images).equal(ends[0](images)), curve.at(1.0)(images).equal(ends[1](images))
    (True, True)
    """

    def __init__(self, start: nn.Module, end: nn.Module) -> None:
        weights = [dict(net.named_parameters(remove_duplicate=False)) for net in (start, end)]
        shapes = [{name: weight.shape for name, weight in state.items()} for state in weights]
        constants = [dict(net.named_buffers()) for net in (start, end)]
        if shapes[0] != shapes[1] or str(start) != str(end) or not _equal(*constants):
            raise ValueError("the curve's ends have different weights; give two networks of one architecture")
        running = [name for name in start.state_dict() if name not in weights[0]]
        if running:
            raise ValueError(
                f"{running[0]} is not a weight and has no value along the curve; give networks without "
                "running statistics, such as ones with filter response or group normalisation"
            )
        self.start, self.end = ({k: v.detach().clone() for k, v in state.items()} for state in weights)
        self.student = copy.deepcopy(start).requires_grad_(True)  # φ in the shape of a network
        with torch.no_grad():
            for name, weight in self.student.named_parameters(remove_duplicate=False):
                weight.copy_((self.start[name] + self.end[name]) / 2)
        self.curve_point = _CurvePoint(self.start, self.student, self.end)

    @torch.no_grad()
    def at(self, alpha: float) -> nn.Module:
        """A network of its own with the weights θ(α), in evaluation mode."""
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is {alpha}; the curve goes from 0 to 1")
        network = copy.deepcopy(self.student)
        network.load_state_dict(self.curve_point.weights(alpha))
        return network.eval().requires_grad_(False)

    def loss(self, batch: Batch) -> Tensor:
        """The cross-entropy with the labels at one random place of the curve."""
        if batch.labels is None:
            raise ValueError("a curve learns from labels and the data has none; give (images, labels)")
        images = cast(Tensor, batch.images)
        alpha = torch.rand((), generator=batch.generator, device=images.device)
        logits = at_least_float32(self.curve_point(images, alpha))
        mixed = batch.mixed is not None
        return F.cross_entropy(logits, batch.label_probs(logits.shape[-1]) if mixed else batch.labels)

    def model(self) -> nn.Module:
        """The network at the curve's centre."""
        return self.at(0.5)

    def networks(self) -> Sequence[nn.Module]:
        """The network at a place of the curve."""
        return [self.curve_point]

    def teachers(self) -> Sequence[Teacher]:
        """None: the labels teach."""
        return []

    def describe(self) -> dict[str, Any]:
        """The ends' weights and the architecture."""
        ends = []
        for weights in (self.start, self.end):
            network = copy.deepcopy(self.student)
            network.load_state_dict(weights)
            ends.append(weights_digest(network))
        return {"method": "bezier_curve", "ends": ends, "network": str(self.student)}


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of constants, such as an input normalisation, are the same."""
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
