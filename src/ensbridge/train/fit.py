"""`fit`: one flat loop that can be killed at any step and goes on when run again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ensbridge.data.augment import Augment
from ensbridge.data.loader import ImageSet, as_image_set
from ensbridge.methods.method import AbstractMethod, Batch
from ensbridge.train.checkpoint import RunFolder
from ensbridge.train.ema import Average

Progress = Callable[[int, int, float], None]
"""Called as progress(step, total_steps, loss) after each step."""


@dataclass(frozen=True)
class FitConfig:
    """How to train: the rate falls along a cosine to 0 over all steps, after an optional linear warm-up.

    `seed` decides the order of images and every draw. `checkpoint_every` and `log_every` count steps and
    may be changed between the runs on one folder.

    >>> FitConfig(epochs=2, batch_size=50, lr=0.1).total_steps(600)
    24
    """

    epochs: float
    batch_size: int
    lr: float
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup_steps: int = 0
    warmup_lr: float = 0.0
    augment: Augment = field(default_factory=Augment)
    seed: int = 0
    checkpoint_every: int = 200
    log_every: int = 20

    def __post_init__(self) -> None:
        if self.optimizer not in ("adam", "sgd"):
            raise ValueError(f"optimizer is {self.optimizer!r}; it must be 'adam' or 'sgd'")
        for name in ("epochs", "batch_size", "lr", "checkpoint_every", "log_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    def total_steps(self, images: int) -> int:
        """How many steps a set of so many images is trained for."""
        return max(1, round(self.epochs * images / self.batch_size))

    def lr_at(self, step: int, total: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.warmup_lr + (self.lr - self.warmup_lr) * step / self.warmup_steps
        return self.lr * 0.5 * (1 + math.cos(math.pi * step / total))


@dataclass(frozen=True)
class FitResult:
    """What a call of `fit` did."""

    steps: int
    resumed_from: int
    loss: float  # mean since the last log line, nan when nothing was left to do


def fit(
    method: AbstractMethod,
    train: ImageSet | Tensor | tuple[Tensor, Tensor],
    config: FitConfig,
    run_dir: Path | str | None = None,
    progress: Progress | None = None,
) -> FitResult:
    """Train a method's student in place; on a folder that holds a part of the run, go on from there.

    Killed at any moment and run again, it ends on the CPU with the same weights to the bit. The student is
    left in evaluation mode, with its averaged weights where the method asks for an average.

    >>> from ensbridge.methods import DeepEnsemble
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> images = torch.rand(32, 1, 2, 2)
    >>> data = (images, (images.mean((1, 2, 3)) > 0.5).long())
    >>> fit(DeepEnsemble([net]), data, FitConfig(epochs=4, batch_size=8, lr=0.1)).steps
    16
    """
    data = as_image_set(train)
    total = config.total_steps(len(data))
    student = method.student
    student.train()
    optimizer = _make_optimizer(config, student)
    average = Average(method.ema, student) if method.ema else None
    state = _State(student, optimizer, average)
    folder = None if run_dir is None else RunFolder(run_dir, _describe(method, data, config))
    if folder:
        state.restore(folder)
    begun = state.step

    while state.step < total:
        for group in optimizer.param_groups:
            group["lr"] = config.lr_at(state.step, total)
        loss = train_step(method, draw_batch(data, config, state.step), optimizer, state.step)
        if average:
            average.update(state.step)
        state.step += 1
        state.loss_sum, state.loss_count = state.loss_sum + loss, state.loss_count + 1
        last = state.step == total
        if folder and (last or state.step % config.log_every == 0):
            mean = state.loss_sum / state.loss_count
            folder.log({"step": state.step, "images": state.step * config.batch_size, "loss": mean})
            state.loss_sum, state.loss_count = (state.loss_sum, state.loss_count) if last else (0.0, 0)
        if folder and (last or state.step % config.checkpoint_every == 0):
            state.save(folder)
        if progress:
            progress(state.step, total, loss)

    if average:
        student.load_state_dict(average.tensors)
    student.eval()
    return FitResult(total, begun, state.loss_sum / state.loss_count if state.loss_count else math.nan)


def train_step(method: AbstractMethod, batch: Batch, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One update, refused before any weight is touched when the loss or a gradient is not finite."""
    loss = method.loss(batch)
    value = loss.item()
    optimizer.zero_grad(set_to_none=True)
    if math.isfinite(value):
        loss.backward()
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        finite = math.isfinite(torch.stack(torch._foreach_norm(gradients)).sum().item())
    if not math.isfinite(value) or not finite:
        what = f"the loss is {value}" if not math.isfinite(value) else "a gradient is not finite"
        raise FloatingPointError(
            f"{what} at step {step + 1}; the weights are as they were before it: lower lr "
            f"(now {optimizer.param_groups[0]['lr']:.3g}) or look at the data, then run again"
        )
    optimizer.step()
    return value


def draw_batch(data: ImageSet, config: FitConfig, step: int) -> Batch:
    """The batch of a step: a function of the seed and the step alone, so that a resumed run draws the same."""
    device = data.images.device
    start = step * config.batch_size
    positions = range(start, start + config.batch_size)
    orders = {epoch: _order(len(data), config.seed, epoch) for epoch in {p // len(data) for p in positions}}
    indices = torch.tensor([orders[p // len(data)][p % len(data)] for p in positions], device=device)
    images, labels = data.batch(indices)
    generator = torch.Generator(device).manual_seed(derive_seed(config.seed, "step", step))
    return Batch(config.augment(images, generator), labels, generator)


def derive_seed(*parts: int | str) -> int:
    """A seed that depends on every part, the same on every machine."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little") >> 1


_orders: dict[tuple[int, int, int], list[int]] = {}


def _order(images: int, seed: int, epoch: int) -> list[int]:
    """The order of images in an epoch; the latest few are remembered."""
    key = (images, seed, epoch)
    if key not in _orders:
        if len(_orders) > 8:
            _orders.clear()
        generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
        _orders[key] = torch.randperm(images, generator=generator).tolist()
    return _orders[key]


def _make_optimizer(config: FitConfig, student: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = list(student.parameters())
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )


def _describe(method: AbstractMethod, data: ImageSet, config: FitConfig) -> dict[str, object]:
    """What makes a run this run; how often it is saved and logged does not."""
    fit_config = {k: v for k, v in asdict(config).items() if k not in ("checkpoint_every", "log_every")}
    return {"fit": fit_config, "data": data.fingerprint(), "method": method.describe()}


class _State:
    """Everything that a resumed run needs: weights, their average, the optimiser's memory, the step."""

    def __init__(
        self, student: torch.nn.Module, optimizer: torch.optim.Optimizer, average: Average | None
    ) -> None:
        self.student, self.optimizer, self.average = student, optimizer, average
        self.step, self.loss_sum, self.loss_count = 0, 0.0, 0

    def save(self, folder: RunFolder) -> None:
        tensors = {f"student/{name}": tensor for name, tensor in self.student.state_dict().items()}
        if self.average:
            tensors |= {f"average/{name}": tensor for name, tensor in self.average.tensors.items()}
        for index, memory in self.optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer/{index}/{key}": value for key, value in memory.items() if value is not None
            }
        counts = {"step": self.step, "loss_sum": self.loss_sum, "loss_count": self.loss_count}
        folder.save(self.step, tensors, {name: repr(value) for name, value in counts.items()})

    def restore(self, folder: RunFolder) -> None:
        found = folder.newest()
        if found is not None:
            tensors, metadata = found
            parts: dict[str, dict[str, Tensor]] = {"student": {}, "average": {}, "optimizer": {}}
            for name, tensor in tensors.items():
                part, _, rest = name.partition("/")
                parts[part][rest] = tensor
            self.student.load_state_dict(parts["student"])
            if self.average:
                self.average.load(parts["average"])
            memory: dict[int, dict[str, Tensor]] = {}
            for name, tensor in parts["optimizer"].items():
                index, _, key = name.partition("/")
                memory.setdefault(int(index), {})[key] = tensor
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": memory, "param_groups": groups})
            self.step, self.loss_count = int(metadata["step"]), int(metadata["loss_count"])
            self.loss_sum = float(metadata["loss_sum"])
        folder.rewind_log(self.step)
