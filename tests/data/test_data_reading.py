"""The front door: a set by its name, an .npz or a layout, known by a checksum that no order changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import _sets
from ensbridge.data import (
    DATASETS,
    ImageSet,
    Splits,
    checksum,
    class_names,
    list_sets,
    open_splits,
    read_npz,
    reading,
    write_npz,
)
from ensbridge.data import arrays as npz
from ensbridge.data.dataset_info import default_root

ARRAYS = _sets.arrays_of(_sets.cifar_files())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10 with 60 images."""
    monkeypatch.setattr(reading, "CIFAR10", _sets.CIFAR10)
    monkeypatch.setitem(
        DATASETS, "cifar10", replace(DATASETS["cifar10"], counts=_sets.COUNTS, checksum="", ordered="")
    )


def save(path: Path, arrays: Mapping[str, Any] = ARRAYS) -> Path:
    with open(path, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return path


def same(one: Splits, other: Splits) -> bool:
    return [part.fingerprint() for part in one] == [part.fingerprint() for part in other]


# ------------------------------------------------------------------------------ .npz


def test_an_npz_is_read_in_its_own_order(tmp_path: Path) -> None:
    splits = read_npz(save(tmp_path / "set.npz"))
    assert tuple(len(part) for part in splits) == _sets.COUNTS
    images = torch.cat([splits.train.images, splits.val.images]).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(images, ARRAYS["train_images"])
    np.testing.assert_array_equal(splits.test.images.permute(0, 2, 3, 1).numpy(), ARRAYS["test_images"])
    assert torch.cat([splits.train.labels, splits.val.labels]).tolist() == ARRAYS["train_labels"].tolist()
    assert splits.test.labels.tolist() == ARRAYS["test_labels"].tolist()


def test_channels_first_a_column_of_labels_and_compression_change_nothing(tmp_path: Path) -> None:
    turned = {name: array.transpose(0, 3, 1, 2) for name, array in ARRAYS.items() if array.ndim == 4}
    columns = {name: array[:, None].astype(np.uint8) for name, array in ARRAYS.items() if array.ndim == 1}
    np.savez_compressed(tmp_path / "other.npz", **turned, **columns)
    assert same(read_npz(tmp_path / "other.npz"), read_npz(save(tmp_path / "set.npz")))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    splits = read_npz(save(tmp_path / "set.npz"))
    write_npz(tmp_path / "joined.npz", splits)
    assert same(read_npz(tmp_path / "joined.npz"), splits)
    assert npz.shapes_in(tmp_path / "joined.npz")["train_images"] == (50, 32, 32, 3)
    other = Splits(splits.train, splits.test, splits.val)  # a validation set that follows no rule
    write_npz(tmp_path / "apart.npz", other, validation_apart=True)
    assert same(read_npz(tmp_path / "apart.npz"), other)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {**dict.fromkeys(ARRAYS), "x": np.zeros(3)},
            r"train_images, train_labels, test_images, test_labels.*\bx\b",
        ),
        (
            {"test_images": np.zeros((0, 32, 32, 3), np.uint8), "test_labels": np.zeros(0, int)},
            r"test_images.*no image",
        ),
        ({"test_labels": None}, r"no test_labels.*test_images, train_images, train_labels"),
        ({"train_images": np.zeros((50, 32, 32), np.uint8)}, r"train_images.*\(50, 32, 32\)"),
        ({"train_images": np.zeros((50, 3, 4, 3), np.uint8)}, r"\(50, 3, 4, 3\)"),
        ({"train_images": np.zeros((50, 32, 32, 3))}, r"train.*images.*float64.*uint8"),
        ({"train_labels": np.zeros(49, int)}, r"train.*50 images and 49 labels"),
        ({"train_labels": np.zeros(50)}, r"train.*labels.*float64"),
        ({"train_labels": np.arange(50) - 1}, r"train.*label -1"),
        ({"train_labels": np.arange(50) // 10}, r"class by class.*validation"),
        ({"test_labels": np.full(10, 12)}, r"label 12 in test_labels.*\b9\b"),
        ({"test_images": np.zeros((10, 28, 28, 3), np.uint8)}, r"\(3, 32, 32\).*test.*\(3, 28, 28\)"),
        ({"val_images": np.zeros((2, 32, 32, 3), np.uint8)}, "val_images and val_labels"),
        ({"train_labels": np.array([{}] * 50, object)}, "plain arrays"),
    ],
)
def test_a_bad_npz_is_refused_with_what_is_wrong(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    arrays = {name: array for name, array in {**ARRAYS, **changes}.items() if array is not None}
    with pytest.raises(ValueError, match=named) as refused:
        read_npz(save(tmp_path / "set.npz", arrays))
    assert str(refused.value).startswith(str(tmp_path / "set.npz"))


def test_a_cut_or_damaged_npz_is_refused(tmp_path: Path) -> None:
    content = save(tmp_path / "whole.npz").read_bytes()
    flipped = bytearray(content)
    flipped[5000] ^= 1
    for bad in (b"", content[:100], content[:-1], content[: len(content) // 2], bytes(flipped), b"hello"):
        (tmp_path / "set.npz").write_bytes(bad)
        with pytest.raises(ValueError, match=r"set\.npz.*cut short"):
            read_npz(tmp_path / "set.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "set.npz").write_bytes((tmp_path / "one.npy").read_bytes())
    with pytest.raises(ValueError, match=r"set\.npz.*cut short"):
        read_npz(tmp_path / "set.npz")


def test_a_crash_while_writing_leaves_nothing_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = read_npz(save(tmp_path / "set.npz"))

    def half(file: Any, **arrays: Any) -> None:
        file.write(b"PK")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(npz.np, "savez", half)
        with pytest.raises(KeyboardInterrupt):
            write_npz(tmp_path / "new.npz", splits)
    assert os.listdir(tmp_path) == ["set.npz"]


# ------------------------------------------------------------------------------ checksums


def test_the_checksum_is_the_one_that_is_described() -> None:
    images = _sets.pixels(6, 3, 2, 2)
    labels = np.array([4, 0, 4, 1, 2, 3])
    parts = [slice(0, 2), slice(2, 4), slice(4, 6)]
    splits = Splits(*(ImageSet(torch.from_numpy(images[p]), torch.from_numpy(labels[p])) for p in parts))
    each = [
        hashlib.sha256(image.tobytes() + int(label).to_bytes(8, "little")).digest()
        for image, label in zip(images, labels, strict=True)
    ]
    for in_order, order in ((False, sorted), (True, list)):
        text = (
            b"4 images (3, 2, 2):"
            + b"".join(order(each[:4]))
            + b"2 images (3, 2, 2):"
            + b"".join(order(each[4:]))
        )
        assert checksum(splits, in_order) == hashlib.sha256(text).hexdigest()


def test_the_checksum_knows_every_set_again_in_any_order_and_no_other(tmp_path: Path) -> None:
    splits = read_npz(save(tmp_path / "set.npz"))
    order = _sets.draws().permutation(50)
    turned = {name: array[order] if "train" in name else array for name, array in ARRAYS.items()}
    shuffled = read_npz(save(tmp_path / "turned.npz", turned))
    assert checksum(shuffled) == checksum(splits)
    assert checksum(shuffled, in_order=True) != checksum(splits, in_order=True)
    pixel, label, swapped = ({name: array.copy() for name, array in ARRAYS.items()} for _ in range(3))
    pixel["test_images"][3, 4, 5, 0] ^= 1
    label["train_labels"][7] = (label["train_labels"][7] + 1) % 10
    for name in ("images", "labels"):  # an image of the test changes places with one of training
        swapped[f"train_{name}"][0], swapped[f"test_{name}"][0] = (
            ARRAYS[f"test_{name}"][0],
            ARRAYS[f"train_{name}"][0],
        )
    others = [checksum(read_npz(save(tmp_path / "x.npz", arrays))) for arrays in (pixel, label, swapped)]
    assert len({checksum(splits), *others}) == 4


def test_a_known_set_is_verified_by_numbers_pixels_and_order(tmp_path: Path) -> None:
    splits = read_npz(save(tmp_path / "set.npz"))
    known = replace(DATASETS["cifar10"], counts=_sets.COUNTS, checksum=checksum(splits))
    known = replace(known, ordered=checksum(splits, in_order=True))
    known.verify(splits, "here", in_order=True)
    turned = splits._replace(test=splits.test.subset(torch.arange(9, -1, -1)))
    known.verify(turned, "here")
    with pytest.raises(ValueError, match=r"^here .*CIFAR-10.*order"):
        known.verify(turned, "here", in_order=True)
    wrong = splits._replace(test=ImageSet(splits.test.images, (splits.test.labels + 1) % 10))
    with pytest.raises(ValueError, match=r"^here .*pixels and labels of CIFAR-10"):
        known.verify(wrong, "here")
    with pytest.raises(ValueError, match=r"^here .*41 \+ 10 \+ 9 .*41 \+ 9 \+ 10"):
        known.check(Splits(splits.train, splits.test, splits.val), "here")
    with pytest.raises(ValueError, match=r"^here .*labels.*5 classes"):
        replace(known, classes=5).check(splits, "here")
    with pytest.raises(ValueError, match=r"^here .*10 classes.*100"):
        replace(known, classes=100).check(splits, "here")
    with pytest.raises(ValueError, match=r"\(3, 32, 32\).*\(3, 64, 64\)"):
        replace(known, shape=(3, 64, 64)).check(splits, "here")


def test_the_known_sets_are_whole() -> None:
    for name in ("cifar10", "cifar100"):
        assert sum(DATASETS[name].counts) == 60_000
        assert DATASETS[name].counts[1:] == (9_040, 10_000)
        assert len(DATASETS[name].checksum) == 64
        assert DATASETS[name].archive == f"cifar-{name[5:]}-python.tar.gz"
    for name, known in DATASETS.items():
        assert len(set(class_names(name))) == known.classes
    assert DATASETS["tiny-imagenet"].counts == (90_000, 10_000, 10_000)
    assert sum(DATASETS["imagenet64"].counts) == 1_281_167 + 50_000
    assert sum(DATASETS["svhn"].counts) == 73_257 + 26_032


# ------------------------------------------------------------------------------ the front door


@pytest.mark.usefixtures("small")
def test_a_set_is_found_by_name_by_path_and_as_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _sets.write(tmp_path / "cifar-10-batches-py", _sets.cifar_files())
    splits = open_splits(folder)
    assert same(open_splits("cifar10", tmp_path), splits)
    monkeypatch.setenv("ENSBRIDGE_DATA", str(tmp_path))
    assert same(open_splits("cifar10"), splits)
    assert same(open_splits(str(save(tmp_path / "mine.npz"))), splits)
    write_npz(tmp_path / "cifar10.npz", splits._replace(test=splits.test.subset(torch.arange(9, -1, -1))))
    assert not same(open_splits("cifar10"), splits)  # the .npz comes first
    write_npz(tmp_path / "cifar10.npz", splits._replace(test=splits.val))
    with pytest.raises(ValueError, match=r"cifar10\.npz.*41 \+ 9 \+ 9 .*41 \+ 9 \+ 10"):
        open_splits("cifar10")


def test_the_default_root_is_the_variable_or_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENSBRIDGE_DATA", raising=False)
    assert default_root() == Path("data")
    monkeypatch.setenv("ENSBRIDGE_DATA", "/sets")
    assert default_root() == Path("/sets")


@pytest.mark.parametrize(
    ("file", "title"),
    [
        ("test_batch", "CIFAR-10's batches"),
        ("train", "CIFAR-100's files"),
        ("wnids.txt", "Tiny ImageNet's folders"),
        ("train_data_batch_10", "ImageNet64's batches"),
        ("test_32x32.mat", "SVHN's files"),
        ("labels.npy", "CIFAR-10-C's arrays"),
    ],
)
def test_a_layout_is_recognised_by_any_file_and_the_missing_one_is_named(
    file: str, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "IMAGENET64", _sets.IMAGENET)
    _sets.write(tmp_path, {file: b""})
    layout = reading.layout_of(tmp_path)
    assert layout is not None
    assert layout.title == title
    with pytest.raises(ValueError, match=r"missing|cut short|0 classes|read_corrupted"):
        open_splits(tmp_path)


def test_what_is_no_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes\.txt.*\.npz"):
        open_splits(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"cifar11.*cifar10"):
        open_splits("cifar11")
    with pytest.raises(ValueError, match=r"imagenet64.*train_data_batch_1"):
        open_splits("imagenet64", tmp_path)
    with pytest.raises(ValueError, match=r"svhn.*train_32x32\.mat.*stanford"):
        open_splits("svhn", tmp_path)


# ------------------------------------------------------------------------------ what is there


@pytest.mark.usefixtures("small")
def test_the_list_shows_what_is_there_and_what_is_wrong(tmp_path: Path) -> None:
    _sets.write(tmp_path / "cifar-10-batches-py", _sets.cifar_files())
    save(tmp_path / "mine.npz")
    (tmp_path / "broken.npz").write_bytes(b"PK")
    (tmp_path / ".half.npz.tmp").write_bytes(b"PK")
    (tmp_path / "notes.txt").write_text("hello")
    found = {each.name: each for each in list_sets(tmp_path)}
    assert list(found) == [
        "cifar10",
        "cifar100",
        "tiny-imagenet",
        "imagenet64",
        "svhn",
        "broken.npz",
        "mine.npz",
    ]
    assert found["cifar10"].description == "CIFAR-10's batches"
    assert found["cifar100"].description.endswith(f"ensbridge data get cifar100 --root {tmp_path}")
    assert found["mine.npz"].description == "50 train + 10 test images, 0 MB"
    assert [each.name for each in found.values() if not each.valid] == ["broken.npz"]
    checked = {each.name: each for each in list_sets(tmp_path, check=True)}
    assert "41 train + 9 val + 10 test images" in checked["cifar10"].description
    assert checksum(open_splits(tmp_path / "mine.npz"))[:16] in checked["mine.npz"].description


def test_the_check_tells_the_official_order_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = read_npz(save(tmp_path / "cifar10.npz"))
    known = replace(DATASETS["cifar10"], counts=_sets.COUNTS, checksum=checksum(splits))
    monkeypatch.setitem(DATASETS, "cifar10", replace(known, ordered=checksum(splits, in_order=True)))
    assert list_sets(tmp_path, check=True)[0].description.endswith("the official order")
    write_npz(tmp_path / "cifar10.npz", splits._replace(test=splits.test.subset(torch.arange(9, -1, -1))))
    assert list_sets(tmp_path, check=True)[0].description.endswith("another order")
    monkeypatch.setitem(DATASETS, "cifar10", replace(known, checksum="0" * 64))
    assert not list_sets(tmp_path, check=True)[0].valid
