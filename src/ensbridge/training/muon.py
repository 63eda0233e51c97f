"""Muon (Jordan et al., 2024): momentum whose matrices are orthogonalised before each update.

On CIFAR-10 a network distilled with it for 40 epochs has a lower NLL than with SGD for 320.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# pyright: reportPrivateImportUsage=false
import torch
from torch import Tensor, nn

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic that drives singular values towards 1
SMALLEST_MATRIX = 16  # rows and columns from which a weight is orthogonalised
ADAM_SHARE, ADAM_BETAS, EPS = 0.1, (0.9, 0.999), 1e-8  # for all other weights; the rate as a share of Muon's


def is_matrix(weight: Tensor) -> bool:
    """Whether a weight is orthogonalised: a layer's, as outputs × all that an output reads.

    >>> [is_matrix(layer.weight) for layer in (nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3, groups=32))]
    [True, False]
    """
    return weight.ndim >= 2 and min(weight.flatten(1).shape) >= SMALLEST_MATRIX


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices (N, rows, columns) with their singular values brought near 1, by Newton–Schulz iterations.

    >>> values = torch.linalg.svdvals(orthogonalised(torch.randn(1, 16, 64, generator=torch.manual_seed(0))))
    >>> bool(values.min() > 0.5), bool(values.max() < 1.3)
    (True, True)
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + EPS)).to(torch.bfloat16 if x.is_cuda else x.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def _channels_last(weight: Tensor) -> Tensor:
    """A filter as it lies in memory, outputs first, so that a matrix of it needs no copy."""
    return weight.permute(0, *range(2, weight.ndim), 1)


class Muon(torch.optim.Optimizer):
    """Muon for matrices with decoupled weight decay, and Adam for biases, depthwise filters and the like.

    Adam trains `tables` too, whose rows are each looked up alone, such as embeddings.

    As with fused kernels, nothing changes in a step where `found_inf`, a number on the device, is not 0; and
    `lr` may be a tensor there. Nothing waits for the device, so that a CUDA graph can hold a step.

    >>> net = nn.Linear(16, 16)
    >>> optimizer = Muon(net.parameters(), lr=0.1)
    >>> before = net.weight.detach().clone()
    >>> net(torch.randn(4, 16)).square().sum().backward()
    >>> optimizer.step()
    >>> 0.05 < torch.linalg.matrix_norm(net.weight - before, 2).item() < 0.15
    True
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        lr: float | Tensor,
        weight_decay: float = 0.0,
        tables: Iterable[Tensor] = (),
    ) -> None:
        # Capturable, so that loaded counts of steps are brought to where the weights are.
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "capturable": True})
        self.tables = {id(table) for table in tables}

    def orthogonalises(self, weight: Tensor) -> bool:
        """Whether it is Muon that updates a weight, and not Adam."""
        return is_matrix(weight) and id(weight) not in self.tables

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all weights that have a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            taken = weights[0].new_ones(()) if self.found_inf is None else (self.found_inf == 0).float()
            gradients = [weight.grad for weight in weights]
            if self.found_inf is not None:  # a gradient may hold anything where the step is not taken
                gradients = [torch.where(taken > 0, gradient, taken * 0) for gradient in gradients]
            rate = group["lr"] * taken
            shapes: dict[torch.Size, list[int]] = {}  # equal matrices in one stack
            others = []
            for index, weight in enumerate(weights):
                if self.orthogonalises(weight):
                    shapes.setdefault(weight.shape, []).append(index)
                else:
                    others.append(index)
            for indices in shapes.values():
                chosen = [weights[index] for index in indices], [gradients[index] for index in indices]
                self._update_matrices(*chosen, rate, rate * group["weight_decay"], taken)
            if others:
                chosen = [weights[index] for index in others], [gradients[index] for index in others]
                self._update_others(*chosen, rate * ADAM_SHARE, taken)

    def _update_matrices(
        self, weights: list[Tensor], gradients: list[Tensor], rate: Tensor, decay: Tensor, taken: Tensor
    ) -> None:
        """Matrices of one shape: Nesterov's momentum, orthogonalised."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_mul_(momenta, 1 - (1 - MOMENTUM) * taken)
        torch._foreach_add_(momenta, gradients)
        ahead = torch._foreach_add(gradients, momenta, alpha=MOMENTUM)
        rows, columns = weights[0].flatten(1).shape
        updates = orthogonalised(torch.stack([_channels_last(step).reshape(rows, columns) for step in ahead]))
        updates = updates * (-rate * max(1.0, rows / columns) ** 0.5)
        torch._foreach_mul_(weights, 1 - decay)
        torch._foreach_add_(
            [_channels_last(weight) for weight in weights],
            [*updates.view(-1, *_channels_last(weights[0]).shape)],
        )

    def _update_others(
        self, weights: list[Tensor], gradients: list[Tensor], rate: Tensor, taken: Tensor
    ) -> None:
        """Adam, without weight decay."""
        for weight in weights:
            if not (memory := self.state[weight]):
                memory["step"] = torch.zeros((), device=weight.device)
                memory["exp_avg"], memory["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        steps, means, squares = (
            [self.state[weight][key] for weight in weights] for key in ("step", "exp_avg", "exp_avg_sq")
        )
        torch._foreach_add_(steps, [taken] * len(steps))
        for averages, values, beta in zip(
            (means, squares), (gradients, torch._foreach_mul(gradients, gradients)), ADAM_BETAS, strict=True
        ):
            changes = torch._foreach_sub(values, averages)
            torch._foreach_mul_(changes, (1 - beta) * taken)
            torch._foreach_add_(averages, changes)
        step = steps[0].clamp(min=1)  # 0 where the first of all is not taken
        first, second = (1 - beta**step for beta in ADAM_BETAS)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, EPS)
        changes = torch._foreach_div(means, roots)
        torch._foreach_mul_(changes, rate * second.sqrt() / first)
        torch._foreach_sub_(weights, changes)
