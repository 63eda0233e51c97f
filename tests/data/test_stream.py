"""Streams: what is kept in memory and what is not, and how batches are cut and found again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from ensbridge.data import ImageSet, Stream
from ensbridge.data.stream import collect_within, load_or_stream, views_differ
from ensbridge.data.stream_reader import AbstractReader, LoaderReader, decode_state, encode_state, open_reader
from ensbridge.training.config import derive_seed

COUNT = 10
IMAGES = torch.arange(COUNT, dtype=torch.float32)[:, None, None, None].expand(COUNT, 1, 2, 2).contiguous()
LABELS = torch.arange(COUNT) % 3
SEED = partial(derive_seed, 0, "stream")


class Items(Dataset[tuple[Tensor, int]]):
    """Examples by index; with `noise`, others at each reading."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return IMAGES[index] + self.noise * torch.rand(1), int(LABELS[index])


class Batches(IterableDataset[Tensor]):
    """Batches of three, the last of one, that are known from nowhere beforehand."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from IMAGES.split(3)


class Stateful(Batches):
    """The same, from a state; it counts what it reads."""

    def __init__(self) -> None:
        self.next, self.reads = 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        parts = IMAGES.split(3)
        start, self.next = self.next, 0
        for number in range(start, len(parts)):
            self.reads += 1
            self.at = number + 1
            yield parts[number]

    def state_dict(self) -> dict[Any, Any]:
        return {"at": torch.tensor(self.at), 3: b"bytes"}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state[3] == b"bytes"
        self.next = int(state["at"])


def reader_of(data: Any, rows: int = 4, **options: Any) -> AbstractReader:
    return open_reader(
        Stream(data, **options), slice(0, rows), SEED, lambda step: (torch.arange(rows) + step) % COUNT
    )


def values(reader: AbstractReader, start: int, stop: int) -> list[int]:
    """The examples of some steps by their number."""
    return [int(image[0, 0, 0]) for step in range(start, stop) for image in reader.read(step)[0]]


# ------------------------------------------------------------------------------ in memory, or not

LOADER = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=3)
KINDS: dict[str, tuple[Callable[[], Any], type]] = {
    "tensor": (lambda: IMAGES, ImageSet),
    "pair": (lambda: (IMAGES, LABELS), ImageSet),
    "list of batches": (lambda: list(IMAGES.split(3)), ImageSet),
    "dataset": (Items, ImageSet),
    "dataset with random views": (lambda: Items(1.0), Stream),
    "loader": (lambda: LOADER, ImageSet),
    "loader with random views": (lambda: DataLoader(Items(1.0), 3), Stream),
    "loader of unknown length": (lambda: DataLoader(Batches(), batch_size=None), Stream),
    "iterable dataset": (Batches, Stream),
    "iterator that fits": (lambda: iter(IMAGES.split(3)), ImageSet),
    "stream that was asked for": (lambda: Stream(LOADER), Stream),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_of_known_size_and_fixed_is_kept_in_memory(kind: str) -> None:
    make, expected = KINDS[kind]
    said: list[str] = []
    placed = load_or_stream(make(), "512MB", "train", said.append)
    assert type(placed) is expected
    loader = make()
    ordered = isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler)  # said, too
    assert len(said) == (expected is Stream and "asked" not in kind) * (1 + ordered)


def test_what_is_larger_than_memory_is_streamed_but_for_what_is_there_already() -> None:
    assert IMAGES.nbytes == 160  # and 80 bytes of labels
    for data in (Items(), LOADER):
        assert isinstance(load_or_stream(data, 240, "train", print), ImageSet)
        assert isinstance(load_or_stream(data, 159, "train", print), Stream)
    assert isinstance(load_or_stream(IMAGES, 0, "train", print), ImageSet)
    assert views_differ(Items(1.0), "train")
    assert not views_differ(LOADER, "train")


def test_an_iterator_has_to_fit_since_it_can_be_read_only_once() -> None:
    placed = load_or_stream(iter(IMAGES.split(3)), 160, "train", print)
    assert isinstance(placed, ImageSet)
    assert placed.images.equal(IMAGES)
    with pytest.raises(ValueError, match=r"train is a tuple_iterator.*read only once.*memory=159"):
        load_or_stream(iter(IMAGES.split(3)), 159, "train", print)
    with pytest.raises(ValueError, match="read only once"):
        Stream(iter(IMAGES.split(3)))


def test_of_validation_data_as_much_is_read_as_fits() -> None:
    said: list[str] = []
    assert len(collect_within(Batches(), 160, "val", said.append)) == COUNT
    assert not said
    assert len(collect_within(Batches(), 100, "val", said.append)) == 6  # of 16 bytes each, in threes
    assert "the first 6 images" in said[0]
    assert len(collect_within((IMAGES, LABELS), 0, "val", said.append)) == COUNT


def test_a_length_is_known_or_counted_in_one_pass() -> None:
    assert Stream(LOADER).length == Stream(Items()).length == Stream(list(IMAGES.split(5))).length == COUNT
    assert Stream(DataLoader(Items(), 3, drop_last=True)).length == 9
    stream, told = Stream(Batches()), []
    assert stream.length is None
    assert stream.counted(told.append).length == sum(told) == COUNT
    with pytest.raises(ValueError, match="0 images"):
        Stream(DataLoader(TensorDataset(IMAGES[:0]), 3))


# ------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 13])
def test_batches_follow_each_other_without_a_gap_over_passes(rows: int) -> None:
    reader = reader_of(Batches(), rows)
    assert values(reader, 0, 9) == [number % COUNT for number in range(9 * rows)]


def test_the_same_step_is_the_same_batch_and_no_step_is_left_out() -> None:
    reader = reader_of(Batches())
    assert reader.read(0)[0] is reader.read(0)[0]
    assert values(reader, 1, 2) == [4, 5, 6, 7]
    assert values(reader, 1, 3) == [4, 5, 6, 7, 8, 9, 0, 1]
    with pytest.raises(ValueError, match=r"batch 7 .* batch 2"):
        reader.read(7)


def test_bytes_become_floats_and_labels_come_along() -> None:
    data = DataLoader(TensorDataset((25 * IMAGES).byte(), LABELS), 4)
    images, labels = reader_of(data).read(0)
    assert images.equal((25 * IMAGES[:4]).byte().float() / 255)
    assert labels is not None
    assert labels.equal(LABELS[:4])


def test_batches_may_be_dictionaries() -> None:
    batches = [{"ids": torch.arange(6).view(3, 2), "mask": torch.ones(3, 2)}] * 2
    ids = reader_of(batches).read(0)[0]["ids"]
    assert ids.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_passes_of_different_shapes_are_refused() -> None:
    class Grows(IterableDataset[Tensor]):
        size = 1

        def __iter__(self) -> Iterator[Tensor]:
            self.size += 1
            yield torch.ones(3, 1, self.size, self.size)

    with pytest.raises(ValueError, match="different shapes"):
        reader_of(Grows()).read(0)


@pytest.mark.parametrize("size", [2, 3])
def test_each_of_several_processes_reads_entries_of_its_own(size: int) -> None:
    seen = []
    for part in range(size):
        reader = LoaderReader(Stream(IMAGES.split(1)), 1, SEED, part, size)
        steps = len(range(part, COUNT, size))
        seen += values(reader, 0, steps)
        assert reader.begins[steps].passes == 0
    assert sorted(seen) == list(range(COUNT))


def test_at_most_two_batches_are_held_whatever_the_stream_is_long() -> None:
    living: set[int] = set()
    most = 0

    class Long(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            nonlocal most
            for number in range(500):
                batch = torch.full((4, 1, 2, 2), float(number))
                living.add(number)
                weakref.finalize(batch, living.discard, number)
                most = max(most, len(living))
                yield batch
                del batch

    reader = reader_of(Long(), 4)
    for step in range(500):
        reader.read(step)
    gc.collect()
    assert most <= 3  # the one that is used, the next, and what the generator holds
    assert len(living) <= 3


# ------------------------------------------------------------------------------ randomness and resuming


@pytest.mark.parametrize(
    "data", [DataLoader(Items(1.0), 3, shuffle=True), Items(1.0)], ids=["loader", "items"]
)
def test_shuffles_and_views_depend_on_the_seed_and_the_step_alone(data: Any) -> None:
    before = torch.random.get_rng_state()
    one = [reader_of(data).read(0)[0]]
    reader, other = reader_of(data), reader_of(data)
    batches = [reader.read(step)[0] for step in range(6)]
    torch.rand(7)
    for step in range(6):
        torch.rand(1)  # as dropout may draw between two batches
        assert other.read(step)[0].equal(batches[step])
    assert one[0].equal(batches[0])
    assert not any(one.equal(two) for one, two in pairwise(batches))
    torch.random.set_rng_state(before)
    reader_of(data).read(0)
    assert torch.random.get_rng_state().equal(before)


RESUMED: dict[str, Callable[[], Any]] = {
    "skipping": lambda: DataLoader(Items(1.0), 3, shuffle=True),
    "state": Stateful,
    "step": lambda: Items(1.0),
}


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("way", RESUMED)
def test_a_reader_resumes_where_another_was(way: str, step: int) -> None:
    first = reader_of(RESUMED[way]())
    whole = [first.read(number)[0] for number in range(12)]
    stopped = reader_of(RESUMED[way]())
    for number in range(step):
        stopped.read(number)
    said: list[str] = []
    data = RESUMED[way]()

    def order(step: int) -> Tensor:
        return (torch.arange(4) + step) % COUNT

    again = open_reader(Stream(data, say=said.append), slice(0, 4), SEED, order)
    again.resume(step, stopped.position(step))
    reads = data.reads if isinstance(data, Stateful) else 0
    for number in range(step, 12):
        assert again.read(number)[0].equal(whole[number])
    assert [way in line for line in said] == ([] if way == "step" else [True])
    assert reads <= 1  # nothing was read for it but what is used


def test_a_position_before_the_last_batch_is_kept_for_steps_that_read_ahead() -> None:
    reader, again = reader_of(Batches()), reader_of(Batches())
    for step in range(4):
        reader.read(step)
    again.resume(3, reader.position(3))
    assert values(again, 3, 5) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_states_survive_json() -> None:
    state = {"a": [1, None, 2.5, "x"], "b": {3: b"\x00\xff"}, "c": torch.tensor([[1, 2]], dtype=torch.uint8)}
    again = decode_state(encode_state(state))
    assert again["c"].equal(state["c"])
    assert {key: again[key] for key in "ab"} == {key: state[key] for key in "ab"}


# ------------------------------------------------------------------------------ other libraries


def test_hugging_faces_data_sets_are_read_and_resume() -> None:
    datasets = pytest.importorskip("datasets")
    held = datasets.Dataset.from_dict({"image": IMAGES.numpy(), "label": LABELS.tolist()}).with_format(
        "torch"
    )
    assert isinstance(load_or_stream(held, "512MB", "train", print), ImageSet)
    stream = load_or_stream(held, 0, "train", print)
    assert isinstance(stream, Stream)
    assert stream.is_indexed
    assert reader_of(held).read(2)[0].equal(IMAGES[2:6])

    streaming = held.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=4)
    assert isinstance(load_or_stream(streaming, "512MB", "train", print), Stream)
    whole = values(reader_of(streaming), 0, 5)
    assert sorted(whole[:10]) == list(range(10))
    plain = held.to_iterable_dataset(num_shards=2)
    first, said = reader_of(plain), []
    numbers = values(first, 0, 6)
    for step in (1, 4):
        stopped = reader_of(plain)
        values(stopped, 0, step)
        again = reader_of(plain, say=said.append)
        again.resume(step, stopped.position(step))
        assert values(again, step, 6) == numbers[4 * step :]
    assert all("its own state" in line for line in said)
    assert values(reader_of(plain), 0, 6) == numbers  # the user's own is as it was


def test_webdatasets_are_streamed(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    path = str(tmp_path / "shard.tar")
    with webdataset.TarWriter(path) as writer:
        for number in range(COUNT):
            writer.write({"__key__": f"{number:03d}", "npy": IMAGES[number].numpy(), "cls": number % 3})
    data = webdataset.WebDataset(path, shardshuffle=False).decode().to_tuple("npy", "cls")
    placed = load_or_stream(data, "512MB", "train", print)
    assert isinstance(placed, Stream)
    assert placed.length is None
    assert values(reader_of(data), 0, 5) == [number % COUNT for number in range(20)]
    assert Stream(data.with_length(COUNT)).length == COUNT


def test_labels_that_training_does_not_need_are_not_looked_at() -> None:
    class Named(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
            return IMAGES[index % len(IMAGES)], "cat"

    for memory in ("512MB", 0):
        placed = load_or_stream(Named(), memory, "train", print, labelled=False)
        if isinstance(placed, Stream):
            placed = placed.sample(8)
        assert (len(placed), placed.labels) == (8, None)
    with pytest.raises(ValueError, match="'cat'"):
        load_or_stream(Named(), "512MB", "train", print)
