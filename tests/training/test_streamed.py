"""Training on streams and on cached outputs: the same numbers as from memory, and it resumes to the bit."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import _runs
import ensbridge as eb
from ensbridge.data import Augment, ImageSet, Stream
from ensbridge.methods.base import JointTraining
from ensbridge.training import FitConfig, fit
from ensbridge.training import candidates as candidates_module
from ensbridge.training.batches import CachedBatches, StreamedBatches, open_batches
from ensbridge.training.forecast import epochs_within, steps_within
from ensbridge.training.output_cache import cache_outputs
from ensbridge.training.step import TimeSplit
from ensbridge.utils.files import locked

IMAGES = torch.rand(48, 1, 4, 4, generator=torch.Generator().manual_seed(0))
VAL = (IMAGES, torch.arange(48) % 3)
QUICK: dict[str, Any] = {"feature": "1", "budget": 60.0, "batch_size": 16, "source": "frozen"}


class Items(Dataset[Tensor]):
    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> Tensor:
        return IMAGES[index] + self.noise * torch.rand(1, 4, 4)


class Endless(IterableDataset[Tensor]):
    """Single images, as many as there are in a pass that nobody knows the length of."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from IMAGES


class Ordered(torch.utils.data.Sampler[list[int]]):
    """The order of images in memory."""

    def __init__(self, config: FitConfig, images: int) -> None:
        self.config, self.images = config, images

    def __iter__(self) -> Iterator[list[int]]:
        return (self.config.indices(self.images, step).tolist() for step in range(_runs.STEPS))

    def __len__(self) -> int:
        return _runs.STEPS


def members() -> list[nn.Module]:
    return [_runs.member(seed) for seed in range(3)]


def weights(fast: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in fast.state_dict().items()}


def ordered_stream(kind: str) -> Stream:
    """The images of the runs, in the batches in which they are taken from memory."""
    data, config = _runs.data(), _runs.config(kind)
    first = config if isinstance(config, FitConfig) else config["ed"]
    assert data.labels is not None
    sampler = Ordered(first, len(data))
    return Stream(
        DataLoader(TensorDataset(data.images, data.labels), batch_sampler=sampler), length=len(data)
    )


# ------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("step", ["eager", "compiled"])
@pytest.mark.parametrize("kind", _runs.KINDS)
def test_a_stream_trains_what_memory_trains_on_the_same_batches(kind: str, step: Any) -> None:
    memory, streamed = _runs.method(kind), _runs.method(kind)
    with torch.compiler.set_stance("force_eager"):
        fit(memory, _runs.data(), _runs.config(kind), step=step)
        fit(streamed, ordered_stream(kind), _runs.config(kind), step=step)
    assert _runs.same(_runs.state(memory.student), _runs.state(streamed.student))


def test_a_dataset_that_does_not_fit_gives_the_model_that_memory_gives() -> None:
    memory = eb.compress(members(), IMAGES, VAL, epochs=2, quiet=True, **QUICK)
    for data in (Items(), Stream(Items())):
        streamed = eb.compress(members(), data, VAL, epochs=2, memory=0, quiet=True, **QUICK)
        assert _runs.same(weights(streamed), weights(memory))
        assert streamed.temperature == memory.temperature


def test_the_datas_own_augmentation_runs_anew_in_every_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(Items(0.5), 16, shuffle=True)
    fast = eb.compress(members(), loader, VAL, epochs=2, **QUICK)
    said = capsys.readouterr().err
    assert "train is streamed" in said
    assert re.search(r"data \d+ %, teachers \d+ %, bridge \d+ %", said)
    assert fast(IMAGES).isfinite().all()
    again = eb.compress(members(), loader, VAL, epochs=2, quiet=True, **QUICK)
    assert _runs.same(weights(again), weights(fast))  # by the seed alone


def test_members_on_disk_learn_from_a_stream(tmp_path: Path) -> None:
    nets = members()
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for net, path in zip(nets, paths, strict=True):
        save_file(net.state_dict(), path)
    stored = eb.Ensemble.from_files(paths, lambda: _runs.member(9))
    options = {**QUICK, "epochs": 1, "memory": 0, "quiet": True}
    fast, expected = (eb.compress(each, Items(), VAL, **options) for each in (stored, nets))
    assert _runs.same(weights(fast), weights(expected))


# ------------------------------------------------------------------------------ how long


def test_an_epoch_is_one_pass_which_is_counted_where_nobody_knows_its_length(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    eb.compress(members(), Endless(), VAL, epochs=2, run_dir=tmp_path, **QUICK)
    said = capsys.readouterr().err
    assert "counted in one pass" in said
    assert [path.name for path in _runs.checkpoints(tmp_path)] == ["checkpoint-000000006.safetensors"]


def test_minutes_need_no_length(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = FitConfig(epochs=1, batch_size=16, lr=1e-3)
    methods = {"bridge": _runs.bridge()}
    before = _runs.state(methods["bridge"].student)
    assert steps_within(1e-4, methods, Stream(Endless()), config) >= 1
    assert 0 < epochs_within(1e-4, methods, Stream(Items()), config) <= 200
    assert _runs.same(_runs.state(methods["bridge"].student), before)
    with pytest.raises(ValueError, match="does not say how many"):
        fit(JointTraining(methods), Stream(Endless()), config)
    monkeypatch.setattr(candidates_module, "steps_within", lambda *_: 5)
    eb.compress(members(), Endless(), VAL, max_minutes=1, **QUICK)
    assert "training for 5 steps on the cpu" in capsys.readouterr().err


# ------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("step", ["eager", "compiled"])
@pytest.mark.parametrize("data", [Endless(), Items(0.5), DataLoader(Items(0.5), 5, shuffle=True)])
def test_a_killed_run_on_a_stream_ends_with_the_same_weights(data: Any, step: Any, tmp_path: Path) -> None:
    config = FitConfig(epochs=1, batch_size=16, lr=0.02, checkpoint_every=4, log_every=3, steps=12)
    with torch.compiler.set_stance("force_eager"):
        whole, stopped, again = (_runs.bridge() for _ in range(3))
        fit(whole, Stream(data), config, step=step)
        with pytest.raises(_runs.Stopped):
            fit(stopped, Stream(data), config, tmp_path, _runs.stop_at(9), step=step)
        said: list[str] = []
        assert fit(again, Stream(data, say=said.append), config, tmp_path, step=step).resumed_from == 8
    assert _runs.same(_runs.state(again.student), _runs.state(whole.student))
    assert len(said) == (not isinstance(data, Items))
    assert all("skipping" in line for line in said)


# ------------------------------------------------------------------------------ time


def test_the_time_is_split_among_data_teachers_and_bridge() -> None:
    timing = TimeSplit()
    fit(_runs.bridge(), Stream(Items()), FitConfig(epochs=1, batch_size=16, lr=0.01), timing=timing)
    assert all(seconds > 0 for seconds in timing.seconds.values())
    assert sum(timing.shares().values()) == pytest.approx(1)
    timing.seconds |= {"data": 3.0, "teachers": 3.0, "total": 4.0}  # where a GPU works while data is read
    assert timing.shares() == {"data": 0.75, "teachers": 0.25, "bridge": 0.0}


# ------------------------------------------------------------------------------ cached outputs


def count_images(nets: list[nn.Module]) -> Counter[int]:
    """How many images each network has been given since."""
    seen: Counter[int] = Counter()
    for number, net in enumerate(nets):

        def count(_: nn.Module, inputs: tuple[Tensor, ...], number: int = number) -> None:
            seen[number] += len(inputs[0])

        net.register_forward_pre_hook(count)
    return seen


@pytest.mark.parametrize("memory", ["512MB", 0])
def test_the_second_run_with_a_cache_needs_no_teacher_pass(memory: Any, tmp_path: Path) -> None:
    options = {**QUICK, "epochs": 3, "memory": memory, "quiet": True}
    plain = eb.compress(members(), Items(), VAL, cache=tmp_path, **options)
    nets = members()
    seen = count_images(nets)
    again = eb.compress(nets, Items(), VAL, cache=tmp_path, lr=2e-3, **options)
    assert seen[1] == seen[2] == 8 + 1  # the images that they are tried with, and one to check the cache
    assert _runs.same(weights(again), weights(plain))


def test_cached_outputs_are_the_teachers_outputs(tmp_path: Path) -> None:
    bridge, data = _runs.bridge(), ImageSet(IMAGES)
    cached = cache_outputs(data, list(bridge.teachers()), tmp_path)
    indices = torch.tensor([5, 0, 47])
    logits, feature = cached.outputs(indices)[bridge.source]
    expected = bridge.source(IMAGES[indices])
    torch.testing.assert_close(logits, expected)
    assert feature.shape == (3, 8, 4, 4)
    config = FitConfig(epochs=2, batch_size=16, lr=0.02)
    for step in ("eager", "compiled"):
        with torch.compiler.set_stance("force_eager"):
            one, other = _runs.bridge(), _runs.bridge()
            fit(one, data, config, step=step)
            kept = cache_outputs(data, list(other.teachers()), tmp_path)
            fit(other, kept, config, step=step)
        for (
            name,
            tensor,
        ) in one.student.state_dict().items():  # batches of other sizes differ in the last digits
            torch.testing.assert_close(other.student.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    assert isinstance(open_batches(kept, config), CachedBatches)
    assert isinstance(open_batches(Stream(Items()), config), StreamedBatches)


def test_a_cache_is_resumed_and_other_outputs_are_refused(tmp_path: Path) -> None:
    bridge, data = _runs.bridge(), ImageSet(IMAGES)
    cache_outputs(data, list(bridge.teachers()), tmp_path)
    for path in tmp_path.glob("*.json"):
        path.write_text('{"images": 30}')
    told: list[int] = []
    cached = cache_outputs(data, list(bridge.teachers()), tmp_path, told.append)
    assert sorted(told) == [18, 18, 30, 30]
    cached.check(list(bridge.teachers()))
    for path in tmp_path.glob("*-0.npy"):
        np.load(path, mmap_mode="r+")[:] += 1
    with pytest.raises(ValueError, match="other outputs"):
        fit(bridge, cached, FitConfig(epochs=1, batch_size=16, lr=0.02))
    for path in tmp_path.glob("*.json"):
        path.write_text('{"images": 3000}')
    with pytest.raises(ValueError, match="damaged"):
        cache_outputs(data, list(bridge.teachers()), tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("*.json", b"[30]"),
        ("*.json", b"{}"),
        ("*.json", b'{"images": "48"}'),
        ("*-0.npy", b""),
        ("*-0.npy", b"PK\x03\x04"),
        ("*-0.npy", b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'shape': (48"),
    ],
)
def test_a_damaged_cache_is_a_sentence(file: str, content: bytes, tmp_path: Path) -> None:
    bridge, data = _runs.bridge(), ImageSet(IMAGES)
    cache_outputs(data, list(bridge.teachers()), tmp_path)
    for path in tmp_path.glob(file):
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}.* is damaged.*delete") as error:
        cache_outputs(data, list(bridge.teachers()), tmp_path)
    assert type(error.value) is ValueError
    assert len(str(error.value).splitlines()) == 1


def test_a_cache_takes_its_room_before_it_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk a write into a mapped file of holes would end the process without a word."""
    bridge, data = _runs.bridge(), _runs.data(images=40)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=f"No space left.*{tmp_path}") as error:
            cache_outputs(data, list(bridge.teachers()), tmp_path)
    assert error.value.errno == errno.ENOSPC
    assert not [*tmp_path.glob("*.npy")]
    cache_outputs(data, list(bridge.teachers()), tmp_path)
    for path in tmp_path.glob("*.npy"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_a_cache_is_filled_by_one_process_and_read_by_many(tmp_path: Path) -> None:
    bridge, data = _runs.bridge(), _runs.data(images=40)
    with locked(tmp_path), pytest.raises(ValueError, match="in use by another process"):
        cache_outputs(data, list(bridge.teachers()), tmp_path)
    cache_outputs(data, list(bridge.teachers()), tmp_path)
    told: list[int] = []
    with locked(tmp_path):
        cache_outputs(data, list(bridge.teachers()), tmp_path, told.append)
    assert sum(told) == 2 * 40


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (IMAGES, {"augment": Augment(flip=True)}, "flip=True.*random"),
        (Items(0.5), {}, "differ when they are read again"),
        (Endless(), {}, "Endless.*order is not known"),
    ],
)
def test_random_views_are_not_cached(data: Any, options: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        eb.compress(members(), data, VAL, cache=tmp_path, epochs=1, quiet=True, **QUICK, **options)


# ------------------------------------------------------------------------------ inputs by name


class TextNet(nn.Module):
    """Words and a mask, called by name."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.words = nn.Embedding(20, 8)
            self.layer = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
            self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.words(input_ids) * attention_mask[..., None]
        return self.head(self.layer(words.mean(1)))


class Texts(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(20, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones(6), "label": index % 3}


def test_inputs_by_name_are_streamed_and_cached_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "feature": "layer",
        "budget": 60.0,
        "batch_size": 16,
        "epochs": 2,
        "quiet": True,
    }
    options["source"] = "frozen"

    def run(data: Any, **more: Any) -> dict[str, Tensor]:
        return weights(eb.compress([TextNet(seed) for seed in range(3)], data, Texts(), **options, **more))

    memory = run(Texts())
    assert _runs.same(run(Texts(), memory=0), memory)
    assert _runs.same(run(DataLoader(Texts(), 7)), memory)  # which fits
    loader = DataLoader(Texts(), 7, shuffle=True)
    assert run(loader, memory=0).keys() == memory.keys()
    cached = [run(Texts(), memory=size, cache=tmp_path) for size in (0, "512MB")]
    for name, tensor in cached[0].items():
        torch.testing.assert_close(tensor, cached[1][name], rtol=1e-4, atol=1e-5)
