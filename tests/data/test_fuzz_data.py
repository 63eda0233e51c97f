"""Files with bytes changed at random: what is read is a valid set, and all else a ValueError of one line.

`ENSBRIDGE_FUZZ=3000 pytest tests/data/test_fuzz_data.py` tries so many changes per file, new ones each run.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

import _sets
from ensbridge.data import ImageSet, Splits, read_corrupted, read_npz
from ensbridge.data.cifar import read_cifar
from ensbridge.data.image_io import decode
from ensbridge.data.unpickling import read_pickle
from ensbridge.models.stored_network import load_weights

hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("PIL")
st = hypothesis.strategies
EXAMPLES = int(os.environ.get("ENSBRIDGE_FUZZ") or 40)
fuzzed = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize="ENSBRIDGE_FUZZ" not in os.environ,
    suppress_health_check=list(hypothesis.HealthCheck),
)
NUMBERS = [b"\0" * 4, b"\xff" * 4, b"\x7f" + b"\xff" * 7, b"\xff" * 8, b"\0\0\0\x80", b"(" * 40, b"9" * 20]


@st.composite
def edits(draw: Any) -> list[tuple[str, float, bytes]]:
    """Changes of bytes at places, which are shares of the file's length; most are near its ends."""
    ends = st.one_of(st.floats(0, 0.1), st.floats(0.9, 1), st.floats(0, 1))
    kinds = st.sampled_from(["put", "put", "put", "insert", "cut", "end", "again"])
    content = st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from(NUMBERS))
    return draw(st.lists(st.tuples(kinds, ends, content), min_size=1, max_size=4))


def changed(content: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    for kind, share, new in changes:
        place = int(share * len(content))
        start, end = content[:place], content[place:]
        match kind:
            case "put":
                content = start + new + end[len(new) :]
            case "insert":
                content = start + new + end
            case "cut":
                content = start + end[len(new) :]
            case "end":
                content = start
            case "again":
                content = start + end[:20] + end
    return content


def check(read: Callable[[], Any]) -> Any:
    """What is read, or None where it is refused as it should be."""
    try:
        return read()
    except ValueError as error:
        assert len(str(error).splitlines()) == 1, str(error)  # noqa: PT017
        return None


def check_set(found: Splits | ImageSet | None) -> None:
    for part in [found] if isinstance(found, ImageSet) else found or ():
        assert part.images.dtype == torch.uint8
        assert part.labels is not None
        assert len(part.images) == len(part.labels) > 0


# ------------------------------------------------------------------------------ images


@cache
def pictures() -> dict[str, bytes]:
    image = _sets.pixels(6, 7, 3)
    flat = {kind: _sets.picture(image, kind) for kind in ("PNG", "JPEG", "BMP", "WEBP", "PPM")}
    return {**flat, "deep": _sets.picture(image[..., 0].astype(np.uint16) * 200)}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "WEBP", "PPM", "deep"])
@fuzzed
@hypothesis.given(changes=edits(), repair=st.booleans())
def test_images(kind: str, changes: Any, repair: bool) -> None:
    content = changed(pictures()[kind], changes)
    content = _sets.with_checksums(content) if repair and kind in ("PNG", "deep") else content
    found = check(lambda: decode(content, "x"))
    assert found is None or (found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3)


# ------------------------------------------------------------------------------ arrays


ARRAYS = {
    "train_images": _sets.pixels(6, 4, 4, 3),
    "train_labels": np.array([1, 0, 1, 0, 1, 0]),
    "test_images": _sets.pixels(2, 4, 4, 3),
    "test_labels": np.array([0, 1]),
}


@cache
def npy(name: str) -> bytes:
    made = io.BytesIO()
    np.save(made, ARRAYS[name])
    return made.getvalue()


@cache
def npz(method: int) -> bytes:
    return zipped({name: npy(name) for name in ARRAYS}, method)


def zipped(members: dict[str, bytes], method: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return made.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]


@fuzzed
@hypothesis.given(changes=edits(), method=st.sampled_from(METHODS))
def test_npz(folder: Path, changes: Any, method: int) -> None:
    (folder / "x.npz").write_bytes(changed(npz(method), changes))
    check_set(check(lambda: read_npz(folder / "x.npz")))


@fuzzed
@hypothesis.given(changes=edits(), name=st.sampled_from(list(ARRAYS)), method=st.sampled_from(METHODS))
def test_the_arrays_of_an_npz(folder: Path, changes: Any, name: str, method: int) -> None:
    members = {each: npy(each) for each in ARRAYS}
    (folder / "x.npz").write_bytes(zipped({**members, name: changed(npy(name), changes)}, method))
    check_set(check(lambda: read_npz(folder / "x.npz")))


@fuzzed
@hypothesis.given(changes=edits(), spoilt=st.sampled_from(["fog", "labels"]))
def test_npy(folder: Path, changes: Any, spoilt: str) -> None:
    (folder / "manifest.json").write_text('{"severities": [1, 2]}')
    for name, array in (("fog", "train_images"), ("labels", "train_labels")):
        content = npy(array)
        (folder / f"{name}.npy").write_bytes(changed(content, changes) if name == spoilt else content)
    check_set(check(lambda: read_corrupted(folder, "fog", 2)))


# ------------------------------------------------------------------------------ pickles


LAYOUT = replace(_sets.CIFAR10, train={"data_batch_1": 3}, test={"test_batch": 1})


@cache
def batches(protocol: int) -> dict[str, bytes]:
    files = {}
    for name, count in (("data_batch_1", 3), ("test_batch", 1)):
        batch = {"labels": list(range(count)), "data": _sets.pixels(count, 3072), "batch_label": "x"}
        files[name] = pickle.dumps(batch, protocol) if protocol else _sets.python2(batch)
    return files


@fuzzed
@hypothesis.given(changes=edits(), protocol=st.sampled_from([0, 2, 4, 5]))
def test_batches_of_cifar(changes: Any, protocol: int) -> None:
    files = batches(protocol)
    files = {**files, "data_batch_1": changed(files["data_batch_1"], changes)}
    check_set(check(lambda: read_cifar(files.__getitem__, LAYOUT, "x")))


SMALL = {
    "labels": [1, 300, 70_000, -1, 2**40],
    "data": np.arange(6).reshape(2, 3),
    "names": ["a", b"b", None, True],
    "one": np.float32(1),
}


@fuzzed
@hypothesis.given(changes=edits(), protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_pickles(changes: Any, protocol: int) -> None:
    content = changed(pickle.dumps(SMALL, protocol), changes)
    found = check(lambda: read_pickle(content, "x"))
    assert found is None or isinstance(found, dict)


# ------------------------------------------------------------------------------ weights


@cache
def weights(way: str) -> bytes:
    state = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}
    if way == "safetensors":
        return save(state)
    made = io.BytesIO()
    wrapped = {"epoch": 3, "state_dict": state} if way == "wrapped" else state
    torch.save(wrapped, made, _use_new_zipfile_serialization=way != "old")
    return made.getvalue()


def with_pickle(content: bytes, changes: Any) -> bytes:
    """An archive of torch's with its pickle changed."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            inside = old.read(entry)
            new.writestr(entry, changed(inside, changes) if entry.filename.endswith("data.pkl") else inside)
    return made.getvalue()


@pytest.mark.filterwarnings("ignore")  # of torch, about the versions of pickles
@pytest.mark.parametrize("way", ["safetensors", "new", "old", "wrapped", "pickle"])
@fuzzed
@hypothesis.given(changes=edits())
def test_weights(way: str, folder: Path, changes: Any) -> None:
    path = folder / ("x.safetensors" if way == "safetensors" else "x.pt")
    content = weights(way)
    path.write_bytes(with_pickle(content, changes) if way == "pickle" else changed(content, changes))
    found = check(lambda: load_weights(nn.Linear(3, 2), path))
    assert found is None or isinstance(found, nn.Linear)
