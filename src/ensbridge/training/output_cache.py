"""Teachers' outputs on disk, for images that are always seen the same way: the next run needs no teacher."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ensbridge.data.augment import Augment
from ensbridge.data.examples import ExampleSet, examples_of
from ensbridge.data.npy import open_npy
from ensbridge.data.stream import Stream, views_differ
from ensbridge.data.stream_reader import IndexedReader
from ensbridge.methods.base import Teacher, feature_names_of
from ensbridge.models.ensemble import weights_digest
from ensbridge.models.features import forward_with_features
from ensbridge.utils.files import errors_name, locked, open_folder, read_json, write_atomically
from ensbridge.utils.inputs import map_inputs
from ensbridge.utils.progress import Advance, ignore
from ensbridge.utils.text import one_line

FILLED = 256  # images at a time
SAMPLED = 16  # examples by which a Dataset is known again


@dataclass(frozen=True)
class CachedData:
    """Training data with the outputs of the networks that have been kept for it.

    `arrays` has, of each network, its logits and then the features that were asked for, a row for each image.
    """

    data: ExampleSet | Stream
    arrays: Mapping[nn.Module, tuple[np.ndarray, ...]]
    folder: Path

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.data.device

    def __len__(self) -> int:
        return length_of(self.data)

    def fingerprint(self) -> str:
        """That of the data."""
        return self.data.fingerprint()

    def outputs(self, indices: Tensor) -> dict[nn.Module, tuple[Tensor, ...]]:
        """Each network's outputs for the images at `indices`."""
        rows = indices.cpu().numpy()
        return {
            network: tuple(torch.from_numpy(array[rows]).to(self.device) for array in arrays)
            for network, arrays in self.arrays.items()
        }

    @torch.no_grad()
    def check(self, teachers: list[Teacher]) -> None:
        """Refuse what is not what the teachers say today, as with another preprocessing, by one image."""
        image = next(_in_order(self.data, 1, start=0))
        for network, names in feature_names_of(teachers).items():
            now = forward_with_features(network.eval(), map_inputs(torch.clone, image), *names)
            kept = self.outputs(torch.zeros(1, dtype=torch.long))[network]
            for one, other in zip(now, kept, strict=True):
                alike = one.shape == other.shape
                if not alike or not torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-2):
                    raise ValueError(f"{self.folder} holds other outputs than the members give; delete it")


def check_fixed_views(data: ExampleSet | Stream, augment: Augment) -> None:
    """Refuse to keep outputs for images that will be seen otherwise."""
    if augment != Augment():
        raise ValueError(f"cache= was given with {augment}, whose views are random; leave one of the two out")
    if isinstance(data, ExampleSet):
        return
    if not data.is_indexed:
        raise ValueError(
            f"cache= was given and {data.name} is a {data.kind}, whose order is not known; give a Dataset or "
            "tensors, or leave cache out"
        )
    if views_differ(data.data, data.name):
        raise ValueError(
            f"cache= was given and the images of {data.name} differ when they are read again; leave out "
            "their random augmentation, or cache"
        )


def cache_outputs(
    data: ExampleSet | Stream, teachers: list[Teacher], folder: Path | str, advance: Advance = ignore
) -> CachedData:
    """Data with its teachers' outputs, from a folder, where those that are missing are put first.

    `advance` counts images times networks. What was half done when it was killed is resumed.
    """
    path, known = open_folder(folder), _fingerprint(data)
    arrays = {
        network: _Entry(path, data, known, network, names).filled(advance)
        for network, names in feature_names_of(teachers).items()
    }
    return CachedData(data, arrays, path)


class _Entry:
    """One network's outputs on disk: an array for its logits and one for each feature."""

    def __init__(
        self, path: Path, data: ExampleSet | Stream, known: str, network: nn.Module, names: tuple[str, ...]
    ) -> None:
        self.data, self.network, self.names = data, network.eval(), names
        key = hashlib.sha256(json.dumps([known, weights_digest(network), names]).encode()).hexdigest()[:24]
        self.path, self.count = path, length_of(data)
        self.files = [path / f"{key}-{number}.npy" for number in range(1 + len(names))]
        self.progress = path / f"{key}.json"

    def filled(self, advance: Advance) -> tuple[np.ndarray, ...]:
        """The arrays, with what was missing in them."""
        if self._done() == self.count:
            advance(self.count)
        else:
            with locked(self.path):  # two that fill one array would cut it short under each other
                self._fill(advance)
        return tuple(map(open_npy, self.files))

    @torch.no_grad()
    def _fill(self, advance: Advance) -> None:
        done = self._done()
        advance(done)
        arrays: list[np.ndarray] = [np.load(file, mmap_mode="r+") for file in self.files] if done else []
        for images in _in_order(self.data, FILLED, done):
            outputs = forward_with_features(self.network, images, *self.names)
            parts = [(part.float() if part.dtype == torch.bfloat16 else part).cpu() for part in outputs]
            if not arrays:
                arrays = [
                    _reserved(file, part.numpy().dtype, (self.count, *part.shape[1:]))
                    for file, part in zip(self.files, parts, strict=True)
                ]
            rows = slice(done, done + len(parts[0]))
            for array, part in zip(arrays, parts, strict=True):
                array[rows] = part.numpy()
                array.flush()  # type: ignore[attr-defined]
            done = rows.stop
            write_atomically(self.progress, json.dumps({"images": done}).encode())
            advance(len(parts[0]))

    def _done(self) -> int:
        """How many images are there already."""
        if not self.progress.exists() or not all(file.exists() for file in self.files):
            return 0
        try:
            done = read_json(self.progress)["images"]
            counts = {open_npy(file).shape[0] for file in self.files}
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(
                f"{self.path} is damaged ({one_line(error)}); delete it and run again"
            ) from error
        if type(done) is not int or not 0 <= done <= self.count or counts != {self.count}:
            raise ValueError(f"{self.progress} is damaged; delete {self.path} and run again")
        return done


def _reserved(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A new array on disk with all its room; in a mapped file a full disk would end the process later."""
    with errors_name(path):
        array = np.lib.format.open_memmap(path, "w+", dtype, shape)
        if hasattr(os, "posix_fallocate"):  # not on macOS
            try:
                with open(path, "rb+") as file:
                    os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError:
                path.unlink()
                raise
    return array


def length_of(data: ExampleSet | Stream | CachedData) -> int:
    """How many examples there are; 0 where a stream does not say."""
    return data.length or 0 if isinstance(data, Stream) else len(data)


def _in_order(data: ExampleSet | Stream, size: int, start: int) -> Iterator[Any]:
    """Batches of all images from one on."""
    count = length_of(data)

    def indices(step: int) -> Tensor:
        return torch.arange(start + step * size, min(start + (step + 1) * size, count))

    steps = range(-(-(count - start) // size))
    if isinstance(data, ExampleSet):
        yield from (data.batch(indices(step).to(data.device))[0] for step in steps)
    else:
        reader = IndexedReader(data, size, lambda *_: 0, indices)
        yield from (reader.read(step)[0] for step in steps)


def _fingerprint(data: ExampleSet | Stream) -> str:
    """What the values are known by; of what does not fit into memory, some of them."""
    if isinstance(data, ExampleSet):
        return data.fingerprint()
    spread = torch.linspace(0, length_of(data) - 1, SAMPLED).long()
    images, _ = IndexedReader(data.to("cpu"), SAMPLED, lambda *_: 0, lambda _: spread).read(0)
    return f"{data.fingerprint()} {examples_of(images).fingerprint()}"
