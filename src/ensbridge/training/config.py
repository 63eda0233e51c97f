"""How a student is trained, and the order and randomness that its seed decides."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ensbridge.data.augment import Augment

# A file may ask for more than there is memory or time for.
MOST = {
    "epochs": 10**6,
    "batch_size": 2**16,
    "warmup_steps": 10**9,
    "checkpoint_every": 10**9,
    "log_every": 10**9,
}
MOST_STEPS = 10**9
Precision = Literal["auto", "float32", "bfloat16"]
Optimizer = Literal["adam", "sgd", "muon"]


@dataclass(frozen=True)
class FitConfig:
    """How to train: the rate falls along a cosine to 0 over all steps, after an optional linear warm-up.

    Args:
        epochs: Passes over the data, which need not be whole.
        batch_size: Images per step, of all processes together.
        lr: The highest learning rate.
        optimizer: "adam", "sgd" or "muon".
        momentum: Of SGD.
        weight_decay: Of the optimiser; of Muon for matrices alone.
        warmup_steps: Steps over which the rate rises.
        warmup_lr: Where it rises from.
        augment: What is done to each batch.
        precision: "auto" is bfloat16, where that is safe, in compiled steps on a GPU, and float32 elsewhere.
        seed: Decides the order of images and every draw.
        checkpoint_every: Steps between checkpoints, which may be changed between the runs on one folder.
        log_every: Steps between lines of the log, likewise.
        steps: In place of `epochs`, where nobody knows how many images there are.

    >>> FitConfig(epochs=2, batch_size=50, lr=0.1).total_steps(600)
    24
    """

    epochs: float
    batch_size: int
    lr: float
    optimizer: Optimizer = "adam"
    momentum: float = 0.9
    weight_decay: float = 0.0
    warmup_steps: int = 0
    warmup_lr: float = 0.0
    augment: Augment = field(default_factory=Augment)
    precision: Precision = "auto"
    seed: int = 0
    checkpoint_every: int = 200
    log_every: int = 20
    steps: int | None = None  # in place of epochs, where nobody knows how many images there are

    def __post_init__(self) -> None:
        if self.optimizer not in get_args(Optimizer):
            raise ValueError(f"optimizer is {self.optimizer!r}; it must be one of {get_args(Optimizer)}")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision is {self.precision!r}; it must be one of {get_args(Precision)}")
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int):
            raise ValueError(f"batch_size is {self.batch_size}; it must be a whole number, such as 128")
        for name in ("epochs", "lr", "momentum", "weight_decay", "warmup_lr"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a finite number")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at most {most:,}")
        for name in ("momentum", "weight_decay", "warmup_steps", "warmup_lr"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.steps is not None and (type(self.steps) is not int or not 0 < self.steps <= MOST_STEPS):
            raise ValueError(f"steps is {self.steps!r}; it must be a whole number from 1 to {MOST_STEPS:,}")
        for name in ("epochs", "batch_size", "lr", "checkpoint_every", "log_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    def other_batches(self, other: FitConfig) -> str | None:
        """The first field, of those that decide the batches, in which another configuration differs.

        >>> one = FitConfig(epochs=1, batch_size=2, lr=0.1)
        >>> one.other_batches(FitConfig(epochs=1, batch_size=3, lr=0.2))
        'batch_size'
        """
        names = ("epochs", "steps", "batch_size", "augment", "seed", "seeds")
        return next((name for name in names if getattr(self, name, ()) != getattr(other, name, ())), None)

    def total_steps(self, images: int) -> int:
        """How many steps a set of so many images is trained for."""
        if self.steps is not None:
            return self.steps
        return max(1, round(self.epochs * images / self.batch_size))

    def lr_at(self, step: int, total: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.warmup_lr + (self.lr - self.warmup_lr) * step / self.warmup_steps
        return self.lr * 0.5 * (1 + math.cos(math.pi * step / total))

    def indices(self, images: int, step: int) -> Tensor:
        """Which of so many images make the batch of a step: a function of the seed and the step alone.

        Epochs follow each other without a gap, each with every image once in an order of its own.

        >>> config = FitConfig(epochs=1, batch_size=2, lr=0.1)
        >>> sorted(torch.cat([config.indices(6, step) for step in range(3)]).tolist())
        [0, 1, 2, 3, 4, 5]
        """
        positions = torch.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = positions // images
        first, last = int(epochs[0]), int(epochs[-1])
        orders = torch.cat([_order(images, self.seed, epoch) for epoch in range(first, last + 1)])
        return orders[positions - first * images]


@dataclass(frozen=True)
class PerMemberShuffle(FitConfig):
    """How networks side by side are trained, each as a configuration says for one of them.

    A batch has `batch_size` images for each, one network's after the other's: those that it would see alone.

    >>> alone = FitConfig(epochs=1, batch_size=2, lr=0.1)
    >>> PerMemberShuffle.of(alone, seeds=(0, 5)).indices(6, 1)[:2].equal(alone.indices(6, 1))
    True
    """

    seeds: tuple[int, ...] = ()  # of the orders; the first is that of all else

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds[:1] != (self.seed,):
            raise ValueError(f"seeds are {self.seeds}; they must begin with the seed, {self.seed}")

    @classmethod
    def of(cls, config: FitConfig, seeds: Sequence[int]) -> PerMemberShuffle:
        """The configuration of as many networks as there are seeds."""
        settings = {field.name: getattr(config, field.name) for field in fields(config)}
        return cls(**settings | {"seed": seeds[0], "seeds": tuple(seeds)})

    def indices(self, images: int, step: int) -> Tensor:
        """The images of every network's own batch."""
        configs = [FitConfig(self.epochs, self.batch_size, self.lr, seed=seed) for seed in self.seeds]
        return torch.cat([config.indices(images, step) for config in configs])


def describe_config(config: FitConfig) -> dict[str, Any]:
    """What of a configuration decides the result; how often it is saved and logged does not.

    A switch that came later is left out where it is off, so that runs begun before it resume.

    >>> described = describe_config(FitConfig(epochs=1, batch_size=2, lr=0.1))
    >>> "log_every" in described, "cutmix" in described["augment"]
    (False, False)
    """
    described = asdict(config)
    del described["checkpoint_every"], described["log_every"]
    if not config.augment.cutmix:
        del described["augment"]["cutmix"]
    if config.steps is None:
        del described["steps"]
    return described


def derive_seed(*parts: int | str) -> int:
    """A seed that depends on every part, the same on every machine.

    >>> derive_seed(0, "member", 1) != derive_seed(0, "member", 2)
    True
    """
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little") >> 1


@lru_cache(maxsize=16)
def _order(images: int, seed: int, epoch: int) -> Tensor:
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(images, generator=generator)
