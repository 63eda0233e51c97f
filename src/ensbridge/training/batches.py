"""What each step is given: images from memory, from a stream, or with outputs that teachers once gave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.data.examples import ExampleSet
from ensbridge.data.stream import Stream
from ensbridge.data.stream_reader import AbstractReader, open_reader
from ensbridge.training.config import FitConfig, PerMemberShuffle, derive_seed
from ensbridge.training.distributed import Engine
from ensbridge.training.output_cache import CachedData, length_of
from ensbridge.utils.inputs import map_inputs, tensors_of

TrainData = ExampleSet | Stream | CachedData


@dataclass(frozen=True)
class Inputs:
    """The images of a step and, where they are known, the teachers' outputs: logits, then features.

    `mixed` has the labels of the images that were mixed in, and each image's own share, both (B,).
    """

    images: Any
    labels: Tensor | None
    outputs: Mapping[nn.Module, tuple[Tensor, ...]] = field(default_factory=dict)
    mixed: tuple[Tensor, Tensor] | None = None

    def tensors(self) -> list[Tensor]:
        """All of it in one list."""
        outputs = [tensor for output in self.outputs.values() for tensor in output]
        labels = [] if self.labels is None else [self.labels]
        return [*tensors_of(self.images), *labels, *(self.mixed or ()), *outputs]

    def clone(self) -> Inputs:
        """The same in memory of its own."""
        outputs = {net: tuple(tensor.clone() for tensor in output) for net, output in self.outputs.items()}
        labels = None if self.labels is None else self.labels.clone()
        mixed = self.mixed and (self.mixed[0].clone(), self.mixed[1].clone())
        return Inputs(map_inputs(torch.clone, self.images), labels, outputs, mixed)


class AbstractBatches(ABC):
    """The batches of a run, by step."""

    device: torch.device
    start: int = 0  # the first step
    known: Collection[nn.Module] = ()  # networks whose outputs come with them

    @abstractmethod
    def read(self, step: int) -> Inputs:
        """The batch of a step, on the device."""

    def position(self, step: int) -> str | None:
        """Where a stream's batch of a step begins, for a checkpoint; None where the step says it."""
        return None

    def close(self) -> None:  # noqa: B027 - most have opened nothing
        """Let go of what was opened."""


class MemoryBatches(AbstractBatches):
    """Batches of images in memory, of which each process has all."""

    def __init__(self, data: ExampleSet, config: FitConfig) -> None:
        self.data, self.config, self.device = data, config, data.device

    def indices(self, step: int) -> Tensor:
        """Which images make the batch of a step."""
        return self.config.indices(len(self.data), step)

    def read(self, step: int) -> Inputs:
        """The images at the step's indices."""
        return Inputs(*self.data.batch(self.indices(step).to(self.device)))


class StreamedBatches(AbstractBatches):
    """Batches as a stream gives them; of several processes each reads rows of its own."""

    def __init__(self, reader: AbstractReader, device: torch.device) -> None:
        self.reader, self.device, self.rows = reader, device, reader.rows

    def read(self, step: int) -> Inputs:
        """The stream's next batch."""
        return Inputs(*self.reader.read(step))

    def position(self, step: int) -> str | None:
        """The reader's."""
        return self.reader.position(step)

    def close(self) -> None:
        """End the pass."""
        self.reader.close()


class CachedBatches(AbstractBatches):
    """Batches with their teachers' outputs, which lie on disk."""

    def __init__(self, cached: CachedData, config: FitConfig) -> None:
        self.cached, self.config, self.device = cached, config, cached.device
        self.images, self.known = open_batches(cached.data, config), cached.arrays

    def read(self, step: int) -> Inputs:
        """The images at the step's indices, and what was kept for them."""
        inputs, indices = self.images.read(step), self.config.indices(len(self.cached), step)
        return Inputs(inputs.images, inputs.labels, self.cached.outputs(indices))


def open_batches(
    data: TrainData,
    config: FitConfig,
    step: int = 0,
    position: str | None = None,
    engine: Engine | None = None,
) -> AbstractBatches:
    """The batches of a run from a step on; `position` is a checkpoint's."""
    if isinstance(data, CachedData):
        batches: AbstractBatches = CachedBatches(data, config)
    elif isinstance(data, ExampleSet):
        batches = MemoryBatches(data, config)
    elif isinstance(config, PerMemberShuffle):
        raise ValueError("networks with their own shuffle each cannot share a stream; train them separately")
    else:
        rows, part, parts = slice(0, config.batch_size), 0, 1
        if engine:
            rows, part, parts = engine.rows(config.batch_size), engine.rank, engine.size
            data = engine.shard(data)
        seed, indices = partial(derive_seed, config.seed, "stream"), partial(config.indices, length_of(data))
        reader = open_reader(data, rows, seed, indices, part, parts)
        reader.resume(step, position)
        batches = StreamedBatches(reader, data.device)
    batches.start = step
    return batches


def total_steps(config: FitConfig, data: TrainData) -> int:
    """How many steps a run has; one on a stream of unknown length must say so itself."""
    if config.steps is None and isinstance(data, Stream) and data.length is None:
        raise ValueError(
            f"{data.name} does not say how many examples it has, so {config.epochs:g} epochs are no number "
            "of steps; give FitConfig(steps=…), or a stream that is counted"
        )
    return config.total_steps(length_of(data))
