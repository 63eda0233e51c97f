"""Images come in any way that holds them, once in memory; what holds none is refused in a clear sentence."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import _tiny
from ensbridge.data import ImageSet, entries, loader
from ensbridge.data.loader import collect
from ensbridge.utils.inputs import tensors_of

IMAGES = _tiny.images(32)
LABELS = torch.arange(32) % 3


class Items(Dataset):
    """A data set of single items that, like many, does not say where it ends."""

    def __init__(self, item: Callable[[int], Any], length: int = 32) -> None:
        self.item, self.length = item, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Stream(IterableDataset):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Any]:
        return zip(IMAGES, LABELS.tolist(), strict=True)


class Bare:
    """What has a length and items, and is nobody's subclass."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return IMAGES[index], LABELS[index]


def items(*keys: str, **extra: Any) -> list[dict[str, Any]]:
    """Dictionaries of single images and labels under two keys, in their order."""
    return [
        {key: image if key in entries.IMAGE_KEYS else label for key in keys} | extra
        for image, label in zip(IMAGES, LABELS.tolist(), strict=True)
    ]


HALVES = slice(0, 20), slice(20, 32)
ALONE = {
    "tensor": IMAGES,
    "array": IMAGES.numpy(),
    "batches": [IMAGES[:20], IMAGES[20:]],
    "images": list(IMAGES),
    "set of images": Items(lambda index: IMAGES[index]),
    "dictionaries": [{"images": IMAGES[half], "path": ["cat.png"]} for half in HALVES],
}
LABELLED = {
    "pair": (IMAGES, LABELS),
    "image set": ImageSet(IMAGES, LABELS),
    "loader": DataLoader(TensorDataset(IMAGES, LABELS), batch_size=5),
    "loader without batches": DataLoader(TensorDataset(IMAGES, LABELS), batch_size=None),
    "loader with worker": DataLoader(TensorDataset(IMAGES, LABELS), batch_size=5, num_workers=1),
    "arrays": (IMAGES.numpy(), LABELS.numpy()),
    "list": [IMAGES, LABELS],
    "labels in a list": (IMAGES, LABELS.tolist()),
    "tensor dataset": TensorDataset(IMAGES, LABELS),
    "tensor dataset and more": TensorDataset(IMAGES, LABELS, torch.arange(32)),
    "dataset": Items(lambda index: (IMAGES[index], int(LABELS[index]))),
    "dataset of arrays": Items(lambda index: (IMAGES[index].numpy(), np.int64(LABELS[index]))),
    "dataset of short vectors": Items(lambda index: (IMAGES[index], np.array([LABELS[index]]))),
    "dataset of dictionaries": Items(lambda index: items("image", "label")[index]),
    "subset": Subset(TensorDataset(IMAGES, LABELS), range(32)),
    "stream": Stream(),
    "items": list(zip(IMAGES, LABELS.tolist(), strict=True)),
    "generator": zip(IMAGES, LABELS, strict=True),
    "bare": Bare(),
    "extra fields": [(IMAGES[half], LABELS[half], torch.arange(32)[half], "path") for half in HALVES],
    "columns": [(IMAGES[half], LABELS[half, None]) for half in HALVES],
    "lists of labels": [(IMAGES[half], LABELS[half].tolist()) for half in HALVES],
    "one dictionary": {"x": IMAGES, "y": LABELS},
    "dictionaries": [{"images": IMAGES[half], "labels": LABELS[half]} for half in HALVES],
    "labels first": [{"labels": LABELS[half], "pixel_values": IMAGES[half]} for half in HALVES],
    "dictionaries of items": items("target", "image", idx=7),
}


@pytest.mark.parametrize("way", ALONE)
def test_images_come_in_any_way(way: str) -> None:
    found = collect(ALONE[way])
    assert found.images.equal(IMAGES)
    assert found.labels is None


@pytest.mark.parametrize("way", LABELLED)
def test_images_come_with_labels_in_any_way(way: str) -> None:
    found = collect(LABELLED[way])
    assert found.images.equal(IMAGES)
    assert found.labels is not None
    assert found.labels.equal(LABELS)


def picture(_: int) -> tuple[Image.Image, int]:
    return Image.new("RGB", (8, 8)), 0


def grows(index: int) -> tuple[Tensor, int]:
    return torch.rand(3, 8 + index // 2, 8), 0


def lengthens(index: int) -> tuple[Tensor, int]:
    return torch.ones(8 + index // 2), 0


PICTURES = r"train.*PIL.*transform"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (7, r"train.*int"),
        ("digits", r"train.*str"),
        ([], r"train.*0 images"),
        (iter(()), r"train.*0 images"),
        (Items(picture, 0), r"train.*0 images"),
        (DataLoader(Items(picture, 0)), r"train.*0 images"),
        ([IMAGES, (IMAGES, LABELS)], r"1 of the 2.*train.*labels"),
        (["cat.png"], r"entry 0 of train.*str.*tensor"),
        ([()], r"entry 0 of train.*tuple.*tensor"),
        ([(IMAGES, LABELS), (IMAGES, "cat")], r"entry 1 of train.*labels.*'cat'"),
        (np.array([{}]), "object"),
        ([{"path": "cat.png", "pixels": IMAGES}], r"entry 0 of train.*path, pixels"),
        (Items(picture), PICTURES),
        ([Image.new("L", (8, 8))], PICTURES),
        ([{"image": Image.new("L", (8, 8)), "label": 3}], PICTURES),
        (DataLoader(Items(picture), batch_size=2), PICTURES),
        ([IMAGES, IMAGES[:, :, 1:]], r"train.*\(3, 8, 8\).*\(3, 7, 8\)"),
        (Items(grows), r"train.*\(3, 8, 8\).*\(3, 9, 8\)"),
        (DataLoader(Items(grows), batch_size=4), r"train.*shapes.*Resize"),
        (DataLoader(Items(lengthens), batch_size=4), r"train.*shapes.*pad"),
        (Items(lengthens), r"train.*\(8,\).*\(9,\).*pad"),
        ([IMAGES, IMAGES.double()], r"train.*float32.*float64"),
        ([torch.tensor(3.0), IMAGES], r"train.*\(\).*\(3, 8, 8\)"),
    ],
)
def test_what_holds_no_images_is_refused(data: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        collect(data, "train")


def test_other_errors_of_the_users_data_stay_what_they_are() -> None:
    for error in (TypeError, RuntimeError, OSError):
        with pytest.raises(error, match="the disk is gone"):
            collect(Items(lambda _, error=error: (_ for _ in ()).throw(error("the disk is gone"))))


ROWS, SIZES, TOKENS = torch.rand(32, 4), torch.arange(32) % 5, torch.arange(32 * 6).reshape(32, 6) % 9
SEVERAL: dict[str, tuple[Tensor, ...]] = {
    "an image and a row": (IMAGES, ROWS, LABELS),
    "an image and a number": (IMAGES, ROWS[:, 0], LABELS),
    "an image and whole numbers": (IMAGES, TOKENS[:, :3], LABELS),
    "an image and a mask": (IMAGES, IMAGES[:, 0], LABELS),
    "an image, a row and a number": (IMAGES, ROWS, ROWS[:, 0], LABELS),
    "tokens and how many there are": (TOKENS, SIZES, LABELS),
    "tokens, their mask and how many there are": (TOKENS, TOKENS, SIZES, LABELS),
    "sequences and how long they are": (torch.rand(32, 7, 4), SIZES, LABELS),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_labels_come_last_behind_several_inputs(kind: str) -> None:
    parts = SEVERAL[kind]
    loader_of_all = DataLoader(TensorDataset(*parts), batch_size=5)
    ways = [parts, [tuple(part[half] for part in parts) for half in HALVES], loader_of_all]
    if parts[0].ndim != 3:  # one sequence with its label could be an image with two
        ways.append(Items(lambda index: tuple(part[index] for part in parts)))
        ways.append(Items(lambda index: (*(part[index] for part in parts[:-1]), int(parts[-1][index]))))
    for way in ways:
        found = collect(way)
        assert found.labels is not None
        assert found.labels.equal(LABELS)
        assert len(tensors_of(found.inputs)) == len(parts) - 1
        assert all(map(torch.equal, tensors_of(found.inputs), parts))


def test_three_inputs_of_one_example_have_no_labels() -> None:
    found = collect(Items(lambda index: (TOKENS[index], TOKENS[index], TOKENS[index])))
    assert found.labels is None
    assert len(tensors_of(found.inputs)) == 3


# ------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    "way", ["tensor", "array", "pair", "arrays", "list", "tensor dataset", "one dictionary"]
)
def test_what_is_one_tensor_is_not_copied(way: str) -> None:
    assert collect((ALONE | LABELLED)[way]).images.data_ptr() == IMAGES.data_ptr()


@pytest.mark.parametrize("block", [1, 2000, 5000, 1 << 20])
def test_parts_are_put_together_in_their_order_and_let_go(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "BLOCK", block)
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal most
        for start in range(32):
            most = max(most, sum(each() is not None for each in alive))
            images = IMAGES[start : start + 1].clone()
            alive.append(weakref.ref(images))
            yield images, LABELS[start : start + 1]
            del images

    found = collect(batches())
    assert found.images.equal(IMAGES)
    assert not any(each() is not None for each in alive)
    if 1 < block < IMAGES.nbytes:  # a block of one part is that part
        assert most <= block / IMAGES[:1].nbytes + 2


def test_a_fingerprint_is_that_of_the_bytes_whatever_the_layout() -> None:
    turned = IMAGES.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not turned.is_contiguous()
    assert ImageSet(turned).fingerprint() == ImageSet(IMAGES).fingerprint()


# ------------------------------------------------------------------------------ labels


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32]
)
def test_labels_of_any_integers_become_int64(dtype: torch.dtype) -> None:
    labels = LABELS.to(dtype)
    ways: list[Any] = [
        (IMAGES, labels),
        (IMAGES.numpy(), labels.numpy()),
        (IMAGES, list(labels.numpy())),
        (IMAGES, tuple(labels.tolist())),
        [(IMAGES[:8], labels[:8]), (IMAGES[8:], labels[8:])],
        [(IMAGES[:8], LABELS[:8]), (IMAGES[8:], labels[8:])],
        Items(lambda index: (IMAGES[index], labels[index])),
        ImageSet(IMAGES, labels),
    ]
    for way in ways:
        found = collect(way)
        assert found.labels is not None
        assert found.labels.dtype == torch.int64
        assert found.labels.equal(LABELS)
        assert found.fingerprint() == ImageSet(IMAGES, LABELS).fingerprint()


PAIRS: dict[str, tuple[Any, str]] = {
    "0-d": (torch.tensor(1), r"shape \(\)"),
    "0-d of numpy": (np.array(1), r"shape \(\)"),
    "number": (3, "int"),
    "fraction": (0.5, "float"),
    "lists": ([[0], [1]] * 16, "list of list"),
    "tensors": (list(LABELS), "list of Tensor"),
    "names": (["cat"] * 32, "'cat'"),
    "none at all": ([], "list"),
    "complex": (LABELS.to(torch.complex64), "complex64"),
    "meta": (LABELS.to("meta"), "meta"),
    "sparse": (LABELS.to_sparse(), "sparse"),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_labels_that_are_no_number_for_each_image_are_refused(kind: str) -> None:
    labels, named = PAIRS[kind]
    for data in ((IMAGES, labels), [(IMAGES, labels)] * 2, [(IMAGES, labels)] * 3):
        with pytest.raises(ValueError, match=named if isinstance(data, tuple) else "label"):
            collect(data)


def test_one_image_may_have_one_label_however_it_is_written() -> None:
    for label in (2, np.int32(2), np.array(2), torch.tensor(2), torch.tensor([2]), [2]):
        for count in (2, 3):  # two of them look like a pair
            entries = [(IMAGES[:1], label)] * count
            assert collect(entries).labels.tolist() == [2] * count  # type: ignore[union-attr]
    assert collect([(IMAGES, None), (IMAGES, None)]).labels is None
    assert len(collect([IMAGES, {"image": IMAGES}])) == 64
