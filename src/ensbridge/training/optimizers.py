"""The optimisers of a run, one for the whole student or for each of its parts, and its averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

# pyright: reportPrivateImportUsage=false
import torch
from torch import Tensor, nn

from ensbridge.methods.base import AbstractTrainable, EmaRule
from ensbridge.training.config import FitConfig
from ensbridge.training.muon import Muon
from ensbridge.utils.text import short

Configs = FitConfig | Mapping[str, FitConfig]
_ADAM, _MOMENTUM = {"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}  # what is kept of each weight


def shared_config(method: AbstractTrainable, config: Configs) -> FitConfig:
    """The configuration whose batches all methods share; several that do not share them are refused."""
    if isinstance(config, FitConfig):
        return config
    names = list(method.parts)
    if not config or set(config) != set(names):
        raise ValueError(
            f"configurations are for {', '.join(config)}; the methods are {', '.join(names) or 'one'}: "
            "give each method of JointTraining one, or one for all"
        )
    first = config[names[0]]
    for name in names:
        if field := first.other_batches(config[name]):
            raise ValueError(
                f"{names[0]} and {name} are trained together and differ in {field}; make it the same"
            )
    return first


class Optimizers:
    """Optimisers with their rates; a captured step needs rates on the device and fused kernels.

    >>> from ensbridge.methods import DeepEnsemble
    >>> method = DeepEnsemble([nn.Linear(2, 2)])
    >>> optimizers = Optimizers(method, FitConfig(epochs=1, batch_size=1, lr=0.5), total=2)
    >>> optimizers.set_rates(1)
    >>> round(optimizers.rate, 3)
    0.25
    """

    def __init__(
        self, method: AbstractTrainable, config: Configs, total: int, captured: bool = False
    ) -> None:
        self.total = total
        configs = {"": config} if isinstance(config, FitConfig) else config
        self.parts = {
            name: (_optimizer(fit, method.student.get_submodule(name), captured), fit)
            for name, fit in configs.items()
        }

    @property
    def rate(self) -> float:
        """The first optimiser's learning rate."""
        optimizer, _ = next(iter(self.parts.values()))
        return float(optimizer.param_groups[0]["lr"])

    def set_rates(self, step: int) -> None:
        """Set the rates of a step, in place where they live on a device."""
        for optimizer, config in self.parts.values():
            rate = config.lr_at(step, self.total)
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer, _ in self.parts.values():
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Update the weights."""
        for optimizer, _ in self.parts.values():
            optimizer.step()

    def updates(self, refuse: Tensor) -> list[Callable[[], None]]:
        """What updates the weights of each part, unless `refuse`, a number on the device, is not 0."""
        for optimizer, _ in self.parts.values():
            # Fused kernels take these as a gradient scaler would set them, and skip the update.
            optimizer.found_inf, optimizer.grad_scale = refuse, None  # type: ignore[attr-defined]
        return [optimizer.step for optimizer, _ in self.parts.values()]  # type: ignore[misc]

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients."""
        groups = [group for optimizer, _ in self.parts.values() for group in optimizer.param_groups]
        return nn.utils.get_total_norm(
            [weight.grad for group in groups for weight in group["params"] if weight.grad is not None]
        )

    def tensors(self) -> dict[str, Tensor]:
        """The optimisers' memory under names of its parts."""
        return {
            f"{name}/{index}/{key}": value
            for name, (optimizer, _) in self.parts.items()
            for index, memory in optimizer.state_dict()["state"].items()
            for key, value in memory.items()
            if value is not None
        }

    def check(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Refuse, with ValueError, tensors that cannot be the memory of these optimisers at a step."""
        weights = {
            (name, str(index)): (weight, _memory(optimizer, weight))
            for name, (optimizer, _) in self.parts.items()
            for index, weight in enumerate(optimizer.param_groups[0]["params"])
        }
        for slot, memory in _by_weight(tensors).items():
            weight, keys = weights.get(slot, (None, set()))
            if weight is None or memory.keys() != keys:
                raise ValueError(f"optimizer{'/'.join(slot)} has {short(sorted(memory))}")
            for key, tensor in memory.items():
                fits = (tensor.shape, tensor.dtype) == (weight.shape, weight.dtype)
                if key == "step":
                    fits = tensor.is_floating_point() and tensor.ndim == 0 and 0 <= float(tensor) <= step
                if not fits:
                    raise ValueError(f"optimizer{'/'.join(slot)}/{key} does not fit its weight")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load saved memory, in place where there is some: a captured step keeps using it."""
        saved = _by_weight(tensors)
        for name, (optimizer, _) in self.parts.items():
            there = optimizer.state_dict()
            if not there["state"]:
                state = {int(index): memory for (part, index), memory in saved.items() if part == name}
                optimizer.load_state_dict({"state": state, "param_groups": there["param_groups"]})
            for index, memory in there["state"].items():
                old = saved.get((name, str(index)), {})
                for key, tensor in memory.items():
                    if isinstance(tensor, Tensor):
                        tensor.copy_(old[key]) if key in old else tensor.zero_()


def _by_weight(tensors: Mapping[str, Tensor]) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Saved memory of each weight, which a part's name and a number stand for."""
    memories: dict[tuple[str, str], dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, index, key = ["", "", *path.rsplit("/", 2)][-3:]
        memories.setdefault((name, index), {})[key] = tensor
    return memories


def _memory(optimizer: torch.optim.Optimizer, weight: Tensor) -> set[str]:
    """The names of what an optimiser keeps of a weight."""
    if isinstance(optimizer, Muon):
        return _MOMENTUM if optimizer.orthogonalises(weight) else _ADAM
    return _MOMENTUM if isinstance(optimizer, torch.optim.SGD) else _ADAM


def _optimizer(config: FitConfig, student: nn.Module, captured: bool) -> torch.optim.Optimizer:
    parameters = [weight for weight in student.parameters() if weight.requires_grad]
    lr = torch.tensor(config.lr, device=parameters[0].device) if captured else config.lr
    decay, fused = config.weight_decay, captured or None
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=decay, fused=fused, capturable=captured)
    if config.optimizer == "muon":
        tables = (module.weight for module in student.modules() if isinstance(module, nn.Embedding))
        return Muon(parameters, lr, decay, tables)
    return torch.optim.SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=decay, fused=fused)


class Average:
    """Exponential moving averages of parts of a student, weights and running statistics alike.

    `rules` names the parts by prefix ("" is the whole student), each with its own rule.

    >>> student = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    >>> sorted(Average(student, [("a", EmaRule(0.9))]).tensors)
    ['a.bias', 'a.weight']
    """

    def __init__(self, student: nn.Module, rules: Sequence[tuple[str, EmaRule]]) -> None:
        self.rules = [rule for _, rule in rules]
        self.tensors: dict[str, Tensor] = {}
        live = student.state_dict(keep_vars=True)
        self._parts: list[list[tuple[list[Tensor], list[Tensor]]]] = []  # of each rule: floats, whole numbers
        for prefix, _ in rules:
            names = [name for name in live if name.startswith(f"{prefix}." if prefix else "")]
            self.tensors |= {name: live[name].detach().clone() for name in names}
            kinds = [
                [name for name in names if live[name].is_floating_point() == floats] for floats in (1, 0)
            ]
            self._parts.append([([self.tensors[n] for n in kind], [live[n] for n in kind]) for kind in kinds])

    def decays(self, step: int) -> list[float]:
        """The decay at a step, for each rule."""
        return [rule.decay_at(step) for rule in self.rules]

    @torch.no_grad()
    def update(self, decays: Sequence[Tensor | float]) -> None:
        """average ← decay·average + (1 - decay)·student; a decay may live on the device."""
        for decay, ((averages, lives), (counts, counted)) in zip(decays, self._parts, strict=True):
            # All tensors in a few kernels: a captured step would be long with three for each.
            if averages:
                changes = torch._foreach_sub(lives, averages)
                torch._foreach_mul_(changes, 1 - decay)
                torch._foreach_add_(averages, changes)
            if counts:
                torch._foreach_copy_(counts, counted)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the average of a checkpoint, in place."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
