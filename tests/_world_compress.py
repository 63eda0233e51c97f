"""What two processes compress together; used as `import _world_compress`."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import _runs
import ensbridge as eb
from ensbridge.data import ImageSet, Stream
from ensbridge.metrics import nll
from ensbridge.training import FitConfig, fit
from ensbridge.training.compiled import StepKind
from ensbridge.training.distributed import Engine

COUNT = 96


@cache
def images(seed: int, count: int = COUNT) -> ImageSet:
    """Images of three classes that a small network can learn, though not all of them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    patterns = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(99))
    noise = 0.45 * torch.randn(count, 1, 4, 4, generator=generator)
    return ImageSet((patterns[labels] + noise).contiguous(), labels)


class Items(Dataset[Tensor]):
    """Training images by index, which remembers what was asked for."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        self.seen.append(int(index))
        return images(0).images[index]


class Entries(IterableDataset[Tensor]):
    """The same one by one, without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from images(0).images


class Part(IterableDataset[Tensor]):
    """A part of the images, by the rank of the process."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from images(0).images[int(os.environ.get("RANK", "0")) :: 2]


def data_of(kind: str) -> Any:
    """Training data of a kind."""
    if kind == "sharded":
        return Stream(Part(), sharded=True)
    if kind == "items":
        return Items()
    if kind == "loader":
        return DataLoader(Items(), 8, shuffle=True)
    return Entries() if kind == "entries" else images(0).images


def members() -> list[nn.Module]:
    """Three networks, trained."""
    nets = [_runs.member(seed) for seed in range(3)]
    for seed, net in enumerate(nets):
        config = FitConfig(epochs=5, batch_size=16, lr=0.03, seed=seed)
        fit(eb.methods.DeepEnsemble([net]), images(seed), config)
    return nets


class Compressed(NamedTuple):
    weights: dict[str, Tensor]
    nll: float
    temperature: float
    said: str
    mode: bool


def compress(engine: Engine | None, kind: str, seed: int = 0, **options: Any) -> Compressed:
    """Compress in this process, or in all of them."""
    said, test = io.StringIO(), images(7, 400)
    chosen = {"feature": "1", "budget": 60.0, "batch_size": 16, "source": "frozen", "epochs": 4, "memory": 0}
    nets = members()
    with redirect_stderr(said):
        fast = eb.compress(nets, data_of(kind), images(5), seed=seed, **(chosen | options))
    with torch.no_grad():
        log_probs = fast(test.images).log_softmax(-1)
    assert test.labels is not None
    loss = nll(log_probs, test.labels)
    return Compressed(_runs.state(fast), loss, fast.temperature, said.getvalue(), nets[1].training)


def compress_auto(engine: Engine | None, kind: str, folder: Path) -> list[Compressed]:
    """By minutes and with everything that can be chosen, twice in the same folder."""
    options = {"max_minutes": 0.02, "epochs": None, "source": "auto", "run_dir": folder}
    return [compress(engine, kind, **options) for _ in range(2)]


def read_part(engine: Engine, kind: str) -> list[int]:
    """Which images this process reads in one epoch."""
    data = data_of(kind)
    stream = Stream(data)
    items: Any = data.dataset if isinstance(data, DataLoader) else data
    items.seen.clear()
    method = _runs.bridge()
    fit(method, stream, FitConfig(epochs=1, batch_size=16, lr=0.01), engine=engine)
    return items.seen[1:]  # without the one that the teachers are tried with


def train(
    engine: Engine, kind: str, folder: Path, die: int = 0, step: StepKind | None = None
) -> tuple[dict[str, Tensor], int]:
    """A run of 12 steps on a stream; at step `die` every process is killed."""

    def progress(step: int, total: int, loss: float) -> None:
        if step == die:
            os.kill(os.getpid(), signal.SIGKILL)

    method = _runs.bridge()
    config = FitConfig(epochs=1, batch_size=10, lr=0.02, steps=12, checkpoint_every=4)
    with torch.compiler.set_stance("force_eager"):
        result = fit(method, Stream(data_of(kind)), config, folder, progress, step=step, engine=engine)
    return _runs.state(method.student), result.resumed_from


def refuse_cache(engine: Engine, folder: Path) -> None:
    """Several processes have no cache."""
    eb.compress(members(), images(0).images, cache=folder, epochs=1, quiet=True)
