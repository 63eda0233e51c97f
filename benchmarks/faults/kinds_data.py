"""Files of data: images, pickled batches, arrays, tables of images."""

from __future__ import annotations

import io
import json
import pickle
import random
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.io import savemat

import _runs
import _sets
from ensbridge.data import read_corrupted, read_npz
from ensbridge.data.cifar import read_cifar
from ensbridge.data.image_io import decode
from ensbridge.data.svhn import read_svhn
from ensbridge.data.unpickling import read_pickle
from ensbridge.deploy.batch import open_image
from ensbridge.deploy.predict_inputs import Damaged, open_inputs
from ensbridge.training.output_cache import cache_outputs
from faults.kinds_models import Program
from faults.mutate import mutate_bytes, mutate_json
from faults.sandbox import AbstractKind

SCRIPT = (
    "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(%pipe%touch '{}') (w) file\n%%EOF\n"
)


class Images(AbstractKind):
    """PNG, JPEG, BMP, WebP and PPM, decoded as for data sets and as for predictions."""

    name = "images"

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        image = _sets.pixels(6, 7, 3)
        self.originals = [_sets.picture(image, kind) for kind in ("PNG", "JPEG", "BMP", "WEBP", "PPM")]
        self.originals.append(_sets.picture(image[..., 0].astype(np.uint16) * 200))

    def valid(self) -> list[bytes]:
        return self.originals

    def mutated(self, draws: random.Random) -> bytes:
        if draws.random() < 0.02:
            return mutate_bytes(SCRIPT.format(self.canary).encode(), draws)
        content = mutate_bytes(draws.choice(self.originals), draws, self.originals)
        return _sets.with_checksums(content) if draws.random() < 0.5 else content

    def read(self, content: bytes) -> None:
        path = self.folder / "image.png"
        path.write_bytes(content)
        pixels = decode(content, "image.png")
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 3
        assert tuple(open_image(path, (3, 8, 8)).shape) == (3, 8, 8)


LAYOUT = replace(_sets.CIFAR10, train={"data_batch_1": 3}, test={"test_batch": 1})
SMALL: dict[str, Any] = {"labels": [1, 300, 70_000, -1, 2**40], "data": np.arange(6).reshape(2, 3)}


class Pickles(AbstractKind):
    """Pickled batches of CIFAR in every protocol, and others; one in five is a program."""

    name = "pickles"

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        batch = {"labels": [0, 1, 2], "data": _sets.pixels(3, 3072), "batch_label": "x"}
        self.batches = [_sets.python2(batch), *(pickle.dumps(batch, protocol) for protocol in (2, 4, 5))]
        self.small = [pickle.dumps(SMALL, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
        test = {"labels": [0], "data": _sets.pixels(1, 3072), "batch_label": "x"}
        self.test = pickle.dumps(test, 2)

    def valid(self) -> list[bytes]:
        return [*self.batches, *self.small]

    def mutated(self, draws: random.Random) -> bytes:
        if draws.random() < 0.2:
            value = {**SMALL, "more": Program(self.canary, draws.randrange(3))}
            content = pickle.dumps(value, draws.randrange(pickle.HIGHEST_PROTOCOL + 1))
            return content if draws.random() < 0.5 else mutate_bytes(content, draws, self.small)
        return mutate_bytes(draws.choice((*self.batches, *self.small)), draws, self.small)

    def read(self, content: bytes) -> None:
        if len(content) < 3000:
            read_pickle(content, "batch")
        else:
            files = {"data_batch_1": content, "test_batch": self.test}
            read_cifar(files.__getitem__, LAYOUT, "folder")


ARRAYS = {
    "train_images": _sets.pixels(6, 4, 4, 3),
    "train_labels": np.array([1, 0, 1, 0, 1, 0]),
    "test_images": _sets.pixels(2, 4, 4, 3),
    "test_labels": np.array([0, 1]),
}


class Arrays(AbstractKind):
    """Data sets as .npz, packed or not, and corrupted images as .npy; some hold objects that are programs."""

    name = "npz and npy"

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        self.npy = {name: _npy(array) for name, array in ARRAYS.items()}
        self.npz = [_zipped(self.npy, method) for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)]
        (folder / "manifest.json").write_text('{"severities": [1, 2]}')
        (folder / "labels.npy").write_bytes(self.npy["train_labels"])

    def valid(self) -> list[bytes]:
        return [*self.npz, self.npy["train_images"]]

    def mutated(self, draws: random.Random) -> bytes:
        if draws.random() < 0.1:
            objects = _npy(np.array([Program(self.canary, draws.randrange(3))], object))
            return _zipped({**self.npy, "train_images": objects}, zipfile.ZIP_STORED)
        if draws.random() < 0.3:
            return mutate_bytes(self.npy["train_images"], draws, [*self.npy.values()])
        if draws.random() < 0.5:
            return mutate_bytes(draws.choice(self.npz), draws, self.npz)
        name = draws.choice(list(ARRAYS))
        changed = mutate_bytes(self.npy[name], draws, [*self.npy.values()])
        return _zipped({**self.npy, name: changed}, draws.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))

    def read(self, content: bytes) -> None:
        if content[:2] == b"PK":
            (self.folder / "set.npz").write_bytes(content)
            read_npz(self.folder / "set.npz")
        else:
            (self.folder / "fog.npy").write_bytes(content)
            read_corrupted(self.folder, "fog", 2)


class Matlab(AbstractKind):
    """SVHN's files in MATLAB's format, packed or not."""

    name = "MATLAB files"

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        arrays = {"X": _sets.pixels(32, 32, 3, 4), "y": np.array([[1], [10], [3], [4]], np.uint8)}
        self.originals = []
        for packed in (False, True):
            made = io.BytesIO()
            savemat(made, arrays, do_compression=packed)
            self.originals.append(made.getvalue())

    def valid(self) -> list[bytes]:
        return self.originals

    def mutated(self, draws: random.Random) -> bytes:
        return mutate_bytes(draws.choice(self.originals), draws, self.originals)

    def read(self, content: bytes) -> None:
        read_svhn(lambda _: content, "folder")


class Caches(AbstractKind):
    """What `compress --cache` keeps: outputs as .npy, and how many there are."""

    name = "caches of outputs"

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        self.cache, self.data, self.teachers = folder / "cache", _runs.data(), list(_runs.bridge().teachers())
        cache_outputs(self.data, self.teachers, self.cache)
        self.files = {path.name: path.read_bytes() for path in sorted(self.cache.glob("*.*"))}
        self.names = [name for name in self.files if name != ".lock"]
        self.changed = self.names[0]

    def valid(self) -> list[bytes]:
        return [self.files[self.changed]]

    def mutated(self, draws: random.Random) -> bytes:
        self.changed = draws.choice(self.names)
        content = self.files[self.changed]
        if self.changed.endswith(".json"):
            return mutate_json(json.loads(content), draws)
        return mutate_bytes(content, draws, [*self.files.values()])

    def read(self, content: bytes) -> None:
        for name, original in self.files.items():
            (self.cache / name).write_bytes(content if name == self.changed else original)
        cached = cache_outputs(self.data, self.teachers, self.cache)
        cached.check(self.teachers)
        cached.outputs(torch.arange(3))


def _npy(array: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.save(made, array, allow_pickle=True)
    return made.getvalue()


def _zipped(members: dict[str, bytes], method: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return made.getvalue()


class Tables(AbstractKind):
    """Many images in one file, as `ensbridge predict` takes them: parquet, tar, npz."""

    name = "tables of images"

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        images = [_sets.picture(image) for image in _sets.pixels(4, 6, 7, 3)]
        self.originals = [
            _tar(images),
            _parquet(images),
            _zipped({"images": _npy(_sets.pixels(4, 6, 7, 3))}, 0),
        ]

    def valid(self) -> list[bytes]:
        return self.originals

    def mutated(self, draws: random.Random) -> bytes:
        return mutate_bytes(draws.choice(self.originals), draws, self.originals)

    def read(self, content: bytes) -> None:
        kind = {b"PAR1": "parquet", b"PK\x03\x04": "npz"}.get(content[:4], "tar")
        path = self.folder / f"table.{kind}"
        path.write_bytes(content)
        for source in open_inputs([str(path)]):
            if isinstance(source, Damaged):
                raise ValueError(source.reason)
            for _ in source.read(0, len(source)):
                pass


def _tar(images: list[bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for number, content in enumerate(images):
            entry = tarfile.TarInfo(f"{number}.png")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def _parquet(images: list[bytes]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    made = io.BytesIO()
    parquet.write_table(pyarrow.table({"image": images, "label": list(range(len(images)))}), made)
    return made.getvalue()


KINDS: tuple[type[AbstractKind], ...] = (Images, Pickles, Arrays, Matlab, Tables, Caches)
