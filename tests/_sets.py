"""Made-up sets in the layouts of public ones, a few images each; used as `import _sets`."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ensbridge.data import cifar, imagenet

CIFAR10 = replace(cifar.CIFAR10, train=dict.fromkeys(cifar.CIFAR10.train, 10), test={"test_batch": 10})
CIFAR100 = replace(cifar.CIFAR100, train={"train": 50}, test={"test": 10})
COUNTS = (41, 9, 10)  # 9,040 of 50,000 are 9 of 50
TINY = imagenet.TinyLayout(classes=3, per_class=5, validation=2, test=4, size=8)
IMAGENET = imagenet.ImageNetLayout(train=40, test=6, classes=3, validation=2, size=8)


def draws(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def pixels(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return draws(seed).integers(0, 256, (count, *shape), np.uint8)


# ------------------------------------------------------------------------------ pickles of Python 2


def python2(value: Any) -> bytes:
    """A pickle as Python 2's cPickle and NumPy 1 wrote them: strings of bytes, protocol 2."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: Any) -> bytes:
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        short = len(value) < 256
        return (b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))) + value
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_python2(key) + _python2(each) for key, each in value.items()) + b"u"
    assert isinstance(value, np.ndarray)
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    shape = b"(" + b"".join(_python2(size) for size in value.shape) + b"t"
    kind, order = value.dtype.str[1:].encode(), value.dtype.str[:1].encode()
    dtype = b"cnumpy\ndtype\n" + _python2(kind) + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + _python2(order) + b"NNN" + _python2(-1) * 2 + b"K\x00tb"
    return empty + b"(K\x01" + shape + dtype + b"\x89" + _python2(value.tobytes()) + b"tb"


# ------------------------------------------------------------------------------ layouts


def cifar_files(layout: cifar.CifarLayout = CIFAR10) -> dict[str, bytes]:
    """The content of each file, with the dictionary of the official ones."""
    files = {}
    for part in (layout.train, layout.test):
        word = "training" if part is layout.train else "testing"
        for number, (name, size) in enumerate(part.items(), 1):
            data = pixels(size, 3072, seed=len(files))
            labels = [int(each) for each in draws(len(files)).integers(0, layout.classes, size)]
            said = f"{word} batch {number} of {len(part)}"
            files[name] = python2(
                {
                    "batch_label": said,
                    layout.labels: labels,
                    "data": data,
                    "filenames": [f"image_{i}.png" for i in range(size)],
                }
            )
    return files


def arrays_of(files: Mapping[str, bytes], layout: cifar.CifarLayout = CIFAR10) -> dict[str, np.ndarray]:
    """What is in such files, by Python's own unpickler: images (N, 32, 32, 3) and labels of both parts."""
    found = {}
    for part, names in (("train", layout.train), ("test", layout.test)):
        batches = [pickle.loads(files[name], encoding="latin1") for name in names]
        data = np.concatenate([batch["data"] for batch in batches])
        found[f"{part}_images"] = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        found[f"{part}_labels"] = np.array([label for batch in batches for label in batch[layout.labels]])
    return found


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tar(files: Mapping[str, bytes], inside: str, mode: str = "w:gz") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def picture(array: np.ndarray, kind: str = "PNG") -> bytes:
    from PIL import Image

    made = io.BytesIO()
    Image.fromarray(array).save(made, kind)
    return made.getvalue()


def npm_files(arrays: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """The files of the npm package with these images: sheets of which each row is an image."""
    train = arrays["train_images"].reshape(5, -1, 1024, 3)
    files = {f"data_batch_{number}.png": picture(sheet) for number, sheet in enumerate(train, 1)}
    files["test_batch.png"] = picture(arrays["test_images"].reshape(-1, 1024, 3))
    for part in ("train", "test"):
        files[f"{part}_lables.json"] = str(arrays[f"{part}_labels"].tolist()).encode()
    return files


def tiny_files() -> dict[str, bytes]:
    """Tiny ImageNet's layout; the pixels of image i of class c are all 40·c + 5·i."""
    names, files = ("n03", "n01", "n02"), {}
    for label, name in enumerate(sorted(names)):
        for i in range(TINY.per_class):
            flat = np.full((8, 8, 3), 40 * label + 5 * i, np.uint8)
            files[f"train/{name}/images/{name}_{i}.JPEG"] = picture(flat, "PNG")
    for i in range(TINY.test):
        files[f"val/images/val_{i}.JPEG"] = picture(np.full((8, 8), 200 + i, np.uint8), "PNG")  # grey
    lines = [f"val_{i}.JPEG\tn0{i % 3 + 1}\t0\t0\t7\t7\n" for i in range(TINY.test)]
    return {
        **files,
        "wnids.txt": "\n".join(names).encode(),
        "val/val_annotations.txt": "".join(lines).encode(),
    }


def imagenet_files() -> dict[str, bytes]:
    """ImageNet64's layout, labels from 1; the first pixel of each image is its number."""
    labels, data = np.arange(40) % 3 + 1, pixels(40, 192)
    data[:, 0] = np.arange(40)
    files = {}
    for number, name in enumerate(IMAGENET.batches):
        part = slice(4 * number, 4 * number + 4)
        batch = {"data": data[part], "labels": labels[part].tolist(), "mean": data.mean(0)}
        files[name] = pickle.dumps(batch, protocol=4)
    files["val_data"] = pickle.dumps({"data": data[:6], "labels": [3, 2, 1, 1, 2, 3]}, protocol=2)
    return files


def with_checksums(content: bytes) -> bytes:
    """A PNG whose pieces have their right checksums again, as far as there are pieces."""
    made, rest = content[:8], content[8:]
    while len(rest) >= 12:
        size = struct.unpack(">I", rest[:4])[0]
        if size + 12 > len(rest):
            break
        made += rest[: 8 + size] + zlib.crc32(rest[4 : 8 + size]).to_bytes(4, "big")
        rest = rest[12 + size :]
    return made + rest
