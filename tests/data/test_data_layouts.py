"""Readers of what users have on disk: every image and label in its place, every bad file by its name."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import _sets
from ensbridge.data import CIFAR10_CLASSES, CIFAR100_CLASSES, ImageSet, Splits, corruptions_in, read_corrupted
from ensbridge.data.cifar import CifarLayout, read_cifar
from ensbridge.data.imagenet import read_imagenet64, read_tiny_imagenet
from ensbridge.data.sources import from_folder, from_tar


def sizes(splits: Splits) -> tuple[int, ...]:
    return tuple(len(part) for part in splits)


def whole(splits: Splits) -> dict[str, np.ndarray]:
    """Training and validation together, channels last, as an .npz has them."""
    parts = {"train": splits[:2], "test": splits[2:]}
    images = {f"{name}_images": torch.cat([part.images for part in each]) for name, each in parts.items()}
    labels = {f"{name}_labels": torch.cat([part.labels for part in each]) for name, each in parts.items()}
    found = {name: array.permute(0, 2, 3, 1).numpy() for name, array in images.items()}
    return found | {name: array.numpy() for name, array in labels.items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


# ------------------------------------------------------------------------------ CIFAR


@pytest.mark.parametrize("layout", [_sets.CIFAR10, _sets.CIFAR100], ids=["cifar10", "cifar100"])
def test_cifar_is_read_as_pythons_own_unpickler_reads_it(layout: CifarLayout, tmp_path: Path) -> None:
    files = _sets.cifar_files(layout)
    splits = read_cifar(from_folder(_sets.write(tmp_path, files)), layout, tmp_path)
    assert sizes(splits) == _sets.COUNTS
    assert all(part.images.dtype == torch.uint8 and part.images.is_contiguous() for part in splits)
    same(whole(splits), _sets.arrays_of(files, layout))


def test_the_split_of_cifar_is_the_last_9040_of_50000() -> None:
    from ensbridge.data.checks import hold_out_last

    train, val = hold_out_last(ImageSet(torch.zeros(50_000, 1, 1, 1), torch.arange(50_000)))
    assert (len(train), len(val)) == (40_960, 9_040)
    assert train.labels.equal(torch.arange(40_960))
    assert val.labels.equal(torch.arange(40_960, 50_000))


def test_classes_of_cifar_are_named_in_the_order_of_their_labels() -> None:
    assert len(CIFAR10_CLASSES) == 10
    assert CIFAR10_CLASSES[6] == "frog"  # of the first training image
    assert len(set(CIFAR100_CLASSES)) == 100
    assert list(CIFAR100_CLASSES) == sorted(CIFAR100_CLASSES)
    assert CIFAR100_CLASSES[19] == "cattle"


def batch(**changes: Any) -> bytes:
    found = {"data": _sets.pixels(10, 3072), "labels": [0] * 10, **changes}
    return _sets.python2({key: value for key, value in found.items() if value is not None})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "missing"),
        (b"", "damaged"),
        (batch()[:5000], "damaged"),
        (b"cos\nsystem\n(tR.", r"'os\.system'"),
        (batch(data=_sets.pixels(9, 3072)), r"data.*\(9, 3072\).*\(10, 3072\)"),
        (batch(data=[1, 2]), r"data.*not an array.*\(10, 3072\)"),
        (batch(data=_sets.pixels(10, 3072).astype(np.int32)), r"images.*int32.*uint8"),
        (batch(labels=[0] * 9), "10 images and 9 labels"),
        (batch(labels=[0] * 9 + [10]), r"label 10.*0 to 9"),
        (batch(labels=[0] * 9 + [-1]), "label -1"),
        (batch(labels=["cat"] * 10), r"str.*labels"),
        (batch(labels=[[0], [0, 1]]), r"list.*labels"),
        (batch(labels=None, fine_labels=[0] * 10), r"'labels'.*data, fine_labels"),
        (batch(data=None), "no 'data'"),
        (batch(batch_label="training batch 2 of 5"), "'training batch 2 of 5'"),
        (batch(batch_label="testing batch 1 of 1"), "'testing batch 1 of 1'"),
    ],
)
def test_a_bad_file_of_cifar_is_named(content: bytes | None, named: str, tmp_path: Path) -> None:
    _sets.write(tmp_path, _sets.cifar_files())
    place = tmp_path / "data_batch_3"
    place.unlink() if content is None else place.write_bytes(content)
    with pytest.raises(ValueError, match=named) as refused:
        read_cifar(from_folder(tmp_path), _sets.CIFAR10, tmp_path)
    assert str(place) in str(refused.value)


def test_an_archive_gives_only_the_files_that_are_asked_for(tmp_path: Path) -> None:
    files = {"a": b"1", "../../b": b"2", "c": b"3"}
    (tmp_path / "set.tar.gz").write_bytes(_sets.tar(files, "inside"))
    read = from_tar(tmp_path / "set.tar.gz", "inside", ("a", "d"))
    assert read("a") == b"1"
    for name in ("c", "d"):
        with pytest.raises(ValueError, match=rf"set\.tar\.gz.*inside/{name}"):
            read(name)
    assert [path.name for path in tmp_path.iterdir()] == ["set.tar.gz"]


def test_an_archive_that_is_cut_is_named(tmp_path: Path) -> None:
    content = _sets.tar({"a": bytes(_sets.pixels(9999))}, "inside")
    (tmp_path / "set.tar.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"set\.tar\.gz.*damaged"):
        from_tar(tmp_path / "set.tar.gz", "inside", ("a",))


# ------------------------------------------------------------------------------ CIFAR-10-C


def corrupted(folder: Path, count: int = 10) -> dict[str, np.ndarray]:
    folder.mkdir(exist_ok=True)
    arrays = {name: _sets.pixels(count, 4, 4, 3, seed=i) for i, name in enumerate(("fog", "snow"))}
    arrays["labels"] = np.tile(np.array([3, 1], np.uint8), count // 2)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return arrays


def test_a_corruption_is_read_one_severity_at_a_time(tmp_path: Path) -> None:
    arrays = corrupted(tmp_path)
    assert corruptions_in(tmp_path) == ("fog", "snow")
    for severity in range(1, 6):
        found = read_corrupted(tmp_path, "snow", severity)
        part = arrays["snow"][2 * severity - 2 : 2 * severity]
        np.testing.assert_array_equal(found.images.permute(0, 2, 3, 1).numpy(), part)
        assert found.labels.tolist() == [3, 1]


def test_a_manifest_says_which_severities_there_are(tmp_path: Path) -> None:
    arrays = corrupted(tmp_path)
    (tmp_path / "manifest.json").write_text('{"severities": [2, 4]}')
    found = read_corrupted(tmp_path, "fog", 4)
    np.testing.assert_array_equal(found.images.permute(0, 2, 3, 1).numpy(), arrays["fog"][5:])
    with pytest.raises(ValueError, match=r"severity 1.*2, 4"):
        read_corrupted(tmp_path, "fog", 1)


def spoil(name: str, array: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / name, array, allow_pickle=True)


@pytest.mark.parametrize(
    ("change", "severity", "named"),
    [
        (lambda folder: None, 6, "severity 6"),
        (lambda folder: (folder / "fog.npy").unlink(), 1, r"fog\.npy.*missing"),
        (lambda folder: (folder / "labels.npy").unlink(), 1, r"labels\.npy.*missing"),
        (lambda folder: (folder / "fog.npy").write_bytes(b"\x93NUMPY"), 1, r"fog\.npy.*cut short"),
        (spoil("fog.npy", np.array([{}], object)), 1, r"fog\.npy.*cut short"),
        (spoil("fog.npy", np.zeros((9, 4, 4, 3), np.uint8)), 1, r"fog\.npy.*\(9, 4, 4, 3\)"),
        (spoil("fog.npy", np.zeros((10, 4, 4, 3), np.float32)), 1, r"fog\.npy.*float32"),
        (spoil("labels.npy", np.zeros(9, np.uint8)), 1, r"labels.*\(9,\)"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), 1, r"manifest\.json.*severities"),
    ],
)
def test_a_bad_file_of_corruptions_is_named(
    change: Callable[[Path], None], severity: int, named: str, tmp_path: Path
) -> None:
    corrupted(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=named):
        read_corrupted(tmp_path, "fog", severity)


def test_a_cut_array_is_named(tmp_path: Path) -> None:
    corrupted(tmp_path)
    content = (tmp_path / "fog.npy").read_bytes()
    (tmp_path / "fog.npy").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"fog\.npy.*cut short"):
        read_corrupted(tmp_path, "fog", 1)


# ------------------------------------------------------------------------------ Tiny ImageNet, ImageNet64


def test_tiny_imagenet_has_the_last_of_each_class_for_validation(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    _sets.write(tmp_path, _sets.tiny_files())
    steps: list[int] = []
    train, val, test = read_tiny_imagenet(
        from_folder(tmp_path),
        tmp_path,
        lambda name, total, unit: steps.append(-total) or steps.append,
        _sets.TINY,
    )
    assert sum(steps) == 0  # progress ends at its total
    assert train.images.shape == (9, 3, 8, 8)
    assert train.images[:, 0, 0, 0].tolist() == [0, 5, 10, 40, 45, 50, 80, 85, 90]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert val.images[:, 2, 7, 7].tolist() == [15, 20, 55, 60, 95, 100]
    assert val.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert test.images[:, 1, 3, 3].tolist() == [200, 201, 202, 203]
    assert test.labels.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("wnids.txt", None, r"wnids\.txt.*missing"),
        ("wnids.txt", b"n01 n02", r"wnids\.txt.*2 classes.*\b3\b"),
        ("wnids.txt", b"\xff\xfe", r"wnids\.txt.*text"),
        ("wnids.txt", b"n01 n02 ../../n03", r"wnids\.txt.*'\.\./\.\./n03'"),
        ("train/n02/images/n02_4.JPEG", None, r"n02_4\.JPEG.*missing"),
        ("train/n02/images/n02_4.JPEG", b"", r"n02_4\.JPEG.*complete"),
        ("val/images/val_1.JPEG", b"hello", r"val_1\.JPEG.*complete"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn09\n", r"'val_0\.JPEG\\tn09'"),
        ("val/val_annotations.txt", b"../x.JPEG\tn01\n", r"'\.\./x\.JPEG"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn01\n", r"1 images.*\b4\b"),
    ],
)
def test_a_bad_file_of_tiny_imagenet_is_named(
    name: str, content: bytes | None, named: str, tmp_path: Path
) -> None:
    pytest.importorskip("PIL")
    files = {**_sets.tiny_files(), name: content}
    _sets.write(tmp_path, {each: value for each, value in files.items() if value is not None})
    with pytest.raises(ValueError, match=named):
        read_tiny_imagenet(from_folder(tmp_path), tmp_path, layout=_sets.TINY)


def test_an_image_of_another_size_is_named(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    wide = _sets.picture(np.zeros((8, 9, 3), np.uint8))
    _sets.write(tmp_path, {**_sets.tiny_files(), "train/n01/images/n01_0.JPEG": wide})
    with pytest.raises(ValueError, match=r"n01_0\.JPEG.*9×8.*8×8"):
        read_tiny_imagenet(from_folder(tmp_path), tmp_path, layout=_sets.TINY)


def test_imagenet64_counts_labels_from_one_and_holds_out_the_last_of_each_class(tmp_path: Path) -> None:
    _sets.write(tmp_path, _sets.imagenet_files())
    train, val, test = read_imagenet64(from_folder(tmp_path), tmp_path, layout=_sets.IMAGENET)
    assert (len(train), len(val), len(test)) == (34, 6, 6)
    data = np.concatenate(
        [pickle.loads(_sets.imagenet_files()[name])["data"] for name in _sets.IMAGENET.batches]
    )
    for part in (train, val):
        numbers = part.images[:, 0, 0, 0].tolist()
        assert part.labels.tolist() == [number % 3 for number in numbers]
        np.testing.assert_array_equal(part.images.flatten(1).numpy(), data[numbers])
    assert sorted(val.images[:, 0, 0, 0].tolist()) == [34, 35, 36, 37, 38, 39]
    assert sorted(train.images[:, 0, 0, 0].tolist()) == list(range(34))
    assert test.labels.tolist() == [2, 1, 0, 0, 1, 2]


def test_imagenet64_holds_out_each_class_also_where_they_lie_one_after_another(tmp_path: Path) -> None:
    files = {name: pickle.loads(content) for name, content in _sets.imagenet_files().items()}
    labels = np.sort(np.arange(40) % 3 + 1).reshape(10, 4)
    for name, four in zip(_sets.IMAGENET.batches, labels, strict=True):
        files[name]["labels"] = four.tolist()
    _sets.write(tmp_path, {name: pickle.dumps(content) for name, content in files.items()})
    train, val, _ = read_imagenet64(from_folder(tmp_path), tmp_path, layout=_sets.IMAGENET)
    assert sorted(val.images[:, 0, 0, 0].tolist()) == [12, 13, 25, 26, 38, 39]
    for part in (train, val):
        numbers = part.images[:, 0, 0, 0].tolist()
        assert part.labels.tolist() == [int(labels.reshape(-1)[number]) - 1 for number in numbers]


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("train_data_batch_7", None, r"train_data_batch_7.*missing"),
        ("val_data", None, r"val_data.*missing"),
        ("train_data_batch_7", {"data": _sets.pixels(4, 191)}, r"data.*\(4, 191\).*192"),
        ("train_data_batch_7", {"labels": [0, 1, 2, 3]}, r"labels.*0 to 3.*1 to 3"),
        ("train_data_batch_7", {"labels": [1, 2, 3, 4]}, r"labels.*1 to 4"),
        ("train_data_batch_7", {"labels": [1, 2]}, r"train_data_batch_7.*4 images and 2 labels"),
        ("train_data_batch_7", {"data": _sets.pixels(1, 192), "labels": [1]}, r"\b37\b.*\b40\b"),
        ("train_data_batch_10", {"data": _sets.pixels(5, 192), "labels": [1] * 5}, r"\b41\b"),
        ("val_data", {"data": _sets.pixels(5, 192), "labels": [1] * 5}, r"val_data.*5 images.*\b6\b"),
    ],
)
def test_a_bad_file_of_imagenet64_is_named(
    name: str, change: dict[str, Any] | None, named: str, tmp_path: Path
) -> None:
    files = _sets.imagenet_files()
    old = pickle.loads(files.pop(name))
    if change is not None:
        files[name] = pickle.dumps({**old, **change})
    _sets.write(tmp_path, files)
    with pytest.raises(ValueError, match=named):
        read_imagenet64(from_folder(tmp_path), tmp_path, layout=_sets.IMAGENET)
