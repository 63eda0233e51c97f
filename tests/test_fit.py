"""`fit` can be killed anywhere and ends with the same weights; what it computes is what its formulas say."""

from __future__ import annotations

import json
import math
import os
import random
import stat
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import _runs
import _tiny
from ensbridge.data import Augment, ImageSet
from ensbridge.ensemble import Ensemble
from ensbridge.files import open_folder, write_atomically
from ensbridge.methods import AbstractMethod, Batch, DeepEnsemble, DiffusionBridge, EmaRule
from ensbridge.train import FitConfig, FitResult, fit
from ensbridge.train.checkpoint import RunFolder, load_checkpoint, save_checkpoint
from ensbridge.train.ema import Average

KINDS = ("members", "bridge")
Run = tuple[dict[str, Tensor], Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The weights and the folder of each kind's run that nothing interrupted."""
    runs = {}
    for kind in KINDS:
        method, folder = _runs.method(kind), tmp_path_factory.mktemp(kind) / "run"
        fit(method, _runs.data(), _runs.config(kind), folder)
        runs[kind] = (_runs.state(method.student), folder)
    return runs


class Stopped(Exception):
    """Raised out of a run on purpose."""


def stop_at(when: int) -> Callable[[int, int, float], None]:
    def progress(step: int, total: int, loss: float) -> None:
        if step == when:
            raise Stopped

    return progress


def unexpected(step: int, total: int, loss: float) -> None:
    raise AssertionError(f"step {step} was taken")


def begin(kind: str, folder: Path, until: int = 9, **options: Any) -> None:
    """A run that stops after so many of its 12 steps."""
    with pytest.raises(Stopped):
        fit(_runs.method(kind), _runs.data(), _runs.config(kind, **options), folder, stop_at(until))


def finish(kind: str, folder: Path, whole: dict[str, Run], **options: Any) -> FitResult:
    """Run again to the end, which must be where the uninterrupted run ended."""
    method = _runs.method(kind)
    result = fit(method, _runs.data(), _runs.config(kind, **options), folder)
    assert result.steps == _runs.STEPS
    assert _runs.same(_runs.state(method.student), whole[kind][0])
    return result


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.safetensors"))


# ------------------------------------------------------------------------------ killed, and run again


def test_the_tests_runs_do_train(whole: dict[str, Run]) -> None:
    for kind in KINDS:
        fresh = _runs.state(_runs.method(kind).student)
        assert not any(torch.equal(fresh[name], each) for name, each in whole[kind][0].items())
        steps = [json.loads(line)["step"] for line in (whole[kind][1] / "log.jsonl").read_text().splitlines()]
        assert steps == [3, 6, 9, 12]
        assert [path.name[-14:-12] for path in checkpoints(whole[kind][1])] == ["08", "12"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("where", "when", "resumed_from"),
    [
        ("half-written", 0, 0),  # config.json
        ("before-rename", 0, 0),
        ("after-step", 1, 0),
        ("after-step", 3, 0),
        ("half-written", 4, 0),
        ("after-rename", 4, 4),
        ("after-step", 4, 4),
        ("after-step", 5, 4),
        ("half-logged", 6, 4),
        ("half-written", 8, 4),
        ("before-rename", 8, 4),
        ("after-rename", 8, 8),
        ("after-step", 11, 8),
        ("before-rename", 12, 8),
        ("after-step", 12, 12),
    ],
)
def test_killed_anywhere_it_ends_the_same(
    kind: str, where: str, when: int, resumed_from: int, tmp_path: Path, whole: dict[str, Run]
) -> None:
    folder = tmp_path / "run"
    _runs.killed(kind, folder, where, when)
    assert finish(kind, folder, whole).resumed_from == resumed_from
    there, uninterrupted = _runs.contents(folder), _runs.contents(whole[kind][1])
    assert there.keys() == uninterrupted.keys()  # and so nothing temporary is left
    for name in ("log.jsonl", "config.json"):
        assert there[name].splitlines() == uninterrupted[name].splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again(kind: str, tmp_path: Path, whole: dict[str, Run]) -> None:
    for where, when in (("after-step", 2), ("after-step", 7), ("half-written", 8), ("half-logged", 12)):
        _runs.killed(kind, tmp_path, where, when)
    assert finish(kind, tmp_path, whole).resumed_from == 8
    assert (tmp_path / "log.jsonl").read_text() == (whole[kind][1] / "log.jsonl").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_run_is_only_read(kind: str, whole: dict[str, Run]) -> None:
    weights, folder = whole[kind]
    before = _runs.contents(folder)
    method = _runs.method(kind)
    result = fit(method, _runs.data(), _runs.config(kind), folder, unexpected)
    assert (result.steps, result.resumed_from) == (12, 12)
    assert _runs.same(_runs.state(method.student), weights)
    assert not method.student.training
    assert _runs.contents(folder) == before


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_logging_may_change_between_runs(kind: str, tmp_path: Path, whole: dict[str, Run]) -> None:
    begin(kind, tmp_path, until=7)
    assert finish(kind, tmp_path, whole, checkpoint_every=5, log_every=1).resumed_from == 4
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, *range(5, 13)]


def test_the_log_holds_the_mean_loss_and_the_images_seen(tmp_path: Path) -> None:
    method = Spoilt(_runs.method("members"), at=0, how="never")
    fit(method, _runs.data(), _runs.config("members", log_every=5), tmp_path)
    losses = method.losses
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    parts = [losses[:5], losses[5:10], losses[10:]]
    assert [line["loss"] for line in lines] == pytest.approx([sum(part) / len(part) for part in parts])
    assert [(line["step"], line["images"]) for line in lines] == [(5, 20), (10, 40), (12, 48)]


# ------------------------------------------------------------------------------ another run's folder


def wider(images: ImageSet) -> ImageSet:
    return ImageSet(images.images + 0.5, images.labels)


@pytest.mark.parametrize(
    ("field", "values", "config", "method", "data"),
    [
        ("fit.lr", ("0.1", "0.2"), {"lr": 0.2}, "members", _runs.data()),
        ("fit.seed", ("0", "3"), {"seed": 3}, "members", _runs.data()),
        ("fit.optimizer", ("'sgd'", "'adam'"), {"optimizer": "adam"}, "members", _runs.data()),
        ("fit.augment.crop", ("1", "2"), {"augment": Augment(crop=2, flip=True)}, "members", _runs.data()),
        ("method.method", ("'deep_ensemble'", "'diffusion_bridge'"), {}, "bridge", _runs.data()),
        (
            "data",
            (repr(_runs.data().fingerprint()), repr(wider(_runs.data()).fingerprint())),
            {},
            "members",
            wider(_runs.data()),
        ),
    ],
)
def test_another_run_is_refused_and_nothing_changes(
    field: str,
    values: tuple[str, str],
    config: dict[str, Any],
    method: str,
    data: ImageSet,
    tmp_path: Path,
    whole: dict[str, Run],
) -> None:
    begin("members", tmp_path)
    (tmp_path / "log.jsonl").open("a").write('{"step": 9, "lo')
    files, other = _runs.contents(tmp_path), _runs.method(method)
    weights = _runs.state(other.student)
    with pytest.raises(ValueError) as caught:
        fit(other, data, replace(_runs.config("members"), **config), tmp_path, unexpected)
    assert f"{field} is {values[0]} there and {values[1]} here" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert _runs.contents(tmp_path) == files
    assert _runs.same(_runs.state(other.student), weights)
    finish("members", tmp_path, whole)


def test_a_folder_whose_configuration_is_lost_or_broken_is_refused(tmp_path: Path) -> None:
    begin("members", tmp_path)
    config = (tmp_path / "config.json").read_bytes()
    for broken, words in ((None, "without their config.json"), (config[:50], "is not JSON")):
        (tmp_path / "config.json").unlink()
        if broken:
            (tmp_path / "config.json").write_bytes(broken)
        files = _runs.contents(tmp_path)
        with pytest.raises(ValueError, match=words):
            fit(_runs.method("members"), _runs.data(), _runs.config("members"), tmp_path, unexpected)
        assert _runs.contents(tmp_path) == files
        (tmp_path / "config.json").write_bytes(config)


@pytest.mark.parametrize("inner", ["", "runs/one"])
def test_a_file_where_the_folder_should_be_is_refused(inner: str, tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("mine")
    with pytest.raises(ValueError, match="taken is a file where a folder is expected"):
        fit(_runs.method("members"), _runs.data(), _runs.config("members"), file / inner, unexpected)
    assert _runs.contents(tmp_path) == {"taken": b"mine"}


# ------------------------------------------------------------------------------ damaged files


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = [truncate, empty, flip_last_bit]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_left_for_the_one_before(
    kind: str, damage: Callable[[Path], None], tmp_path: Path, whole: dict[str, Run]
) -> None:
    begin(kind, tmp_path)
    damage(checkpoints(tmp_path)[-1])
    with pytest.warns(UserWarning, match=r"checkpoint-000000008.*damaged") as warned:
        assert finish(kind, tmp_path, whole).resumed_from == 4
    assert len(warned) == 1
    assert (tmp_path / "log.jsonl").read_bytes() == (whole[kind][1] / "log.jsonl").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_when_all_are_damaged_it_starts_over(kind: str, tmp_path: Path, whole: dict[str, Run]) -> None:
    begin(kind, tmp_path)
    for path in checkpoints(tmp_path):
        flip_last_bit(path)
    with pytest.warns(UserWarning, match="damaged") as warned:
        assert finish(kind, tmp_path, whole).resumed_from == 0
    assert [str(each.message)[:20] for each in warned] == ["checkpoint-000000008", "checkpoint-000000004"]
    assert (tmp_path / "log.jsonl").read_bytes() == (whole[kind][1] / "log.jsonl").read_bytes()


def test_new_checkpoints_outlive_damaged_ones_of_later_steps(tmp_path: Path, whole: dict[str, Run]) -> None:
    begin("bridge", tmp_path)
    for path in checkpoints(tmp_path):
        truncate(path)
    with pytest.warns(UserWarning, match="damaged"):
        begin("bridge", tmp_path, until=3, checkpoint_every=2)
    assert finish("bridge", tmp_path, whole).resumed_from == 2


def test_any_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    # Header and tensors alike: names, types, shapes, the step and the checksum itself.
    path = tmp_path / "checkpoint-000000021.safetensors"
    tensors = {"student/weight": torch.arange(6.0).view(2, 3), "optimizer/0/step": torch.tensor(21.0)}
    save_checkpoint(path, tensors, {"step": "21", "loss_sum": "1.5"})
    content = path.read_bytes()
    loaded, metadata = load_checkpoint(path)
    assert _runs.same(loaded, tensors)
    assert (metadata["step"], metadata["loss_sum"]) == ("21", "1.5")
    unnoticed = []
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                load_checkpoint(path)
            except ValueError as error:
                assert path.name in str(error)  # noqa: PT017
            else:
                unnoticed.append((place, bit, bytes(content[place - 5 : place + 5])))
    assert not unnoticed


@pytest.mark.parametrize(("true", "false"), [(b'"F32"', b'"I32"'), (b"[2,3]", b"[3,2]"), (b"head", b"tail")])
def test_another_type_shape_or_name_for_the_same_numbers_is_noticed(
    true: bytes, false: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint-000000001.safetensors"
    save_checkpoint(path, {"student/head": torch.arange(6.0).view(2, 3)}, {"step": "1"})
    assert path.read_bytes().count(true) == 1
    path.write_bytes(path.read_bytes().replace(true, false))
    with pytest.raises(ValueError, match="does not match its checksum"):
        load_checkpoint(path)


def test_any_truncation_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-000000001.safetensors"
    save_checkpoint(path, {"student/weight": torch.arange(6.0)}, {"step": "1"})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged"):
            load_checkpoint(path)


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_line_and_later_lines_of_the_log_are_dropped(
    kind: str, tmp_path: Path, whole: dict[str, Run]
) -> None:
    begin(kind, tmp_path, until=9)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 7, "im')
    finish(kind, tmp_path, whole)
    assert (tmp_path / "log.jsonl").read_bytes() == (whole[kind][1] / "log.jsonl").read_bytes()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scores.json"
    write_atomically(path, b"old")
    for function in ("os.fsync", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(function, lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
            with pytest.raises(OSError, match="the disk is full"):
                write_atomically(path, b"new")
        assert _runs.contents(tmp_path) == {"scores.json": b"old"}
    write_atomically(path, b"new")
    assert _runs.contents(tmp_path) == {"scores.json": b"new"}


def test_a_file_reaches_the_disk_before_its_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        file = os.fstat(descriptor)
        events.append("folder" if stat.S_ISDIR(file.st_mode) else f"{file.st_size} bytes")
        fsync(descriptor)

    def noted_rename(source: Path, destination: Path) -> None:
        events.append("rename")
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_rename)
    write_atomically(tmp_path / "file", b"12345")
    assert events == ["5 bytes", "rename", "folder"]


def test_open_folder_makes_parents_and_takes_what_is_there(tmp_path: Path) -> None:
    made = open_folder(tmp_path / "a" / "b")
    assert made.is_dir()
    assert open_folder(str(made)) == made


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    for step in (1, 2, 10, 100):
        folder.save(step, {"weight": torch.tensor(float(step))}, {"step": str(step)})
    assert [int(path.stem.split("-")[1]) for path in checkpoints(tmp_path)] == [10, 100]
    found = folder.newest()
    assert found is not None
    assert found[0]["weight"] == 100


# ------------------------------------------------------------------------------ what is not finite


class Spoilt(AbstractMethod):
    """A method whose loss, or its gradient, goes wrong at one step; otherwise it is the method inside."""

    def __init__(self, inner: AbstractMethod, at: int, how: str) -> None:
        self.inner, self.at, self.how = inner, at, how
        self.losses: list[float] = []
        self.student, self.ema = inner.student, inner.ema

    def loss(self, batch: Batch) -> Tensor:
        loss = self.inner.loss(batch)
        self.losses.append(loss.item())
        if len(self.losses) != self.at:
            return loss
        if self.how == "gradient":
            weight = next(iter(self.student.parameters()))
            return loss + (weight - weight.detach()).sum().sqrt()  # 0, with an infinite slope
        return loss * float(self.how)

    def log_probs(self, images: Tensor) -> Tensor:
        return self.inner.log_probs(images)

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("how", "words"), [("nan", "nan"), ("inf", "inf"), ("gradient", "gradient")])
def test_a_step_that_is_not_finite_changes_nothing(
    kind: str, how: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Run]
) -> None:
    seen: dict[str, Any] = {}

    def remember(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
        def make(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
            seen["optimizer"] = kind(*args, **kwargs)
            return seen["optimizer"]

        return make

    for optimizer in (torch.optim.SGD, torch.optim.Adam):
        monkeypatch.setattr(torch.optim, optimizer.__name__, remember(optimizer))
    init = Average.__init__
    monkeypatch.setattr(Average, "__init__", lambda self, *a: init(seen.setdefault("average", self), *a))

    def snapshot() -> dict[str, Tensor]:
        taken = {name: each.detach().clone() for name, each in method.student.named_parameters()}
        for index, memory in seen["optimizer"].state_dict()["state"].items():
            taken |= {f"{index}/{key}": value.clone() for key, value in memory.items()}
        if kind == "bridge":
            taken |= {f"average/{name}": each.clone() for name, each in seen["average"].tensors.items()}
        return taken

    def progress(step: int, total: int, loss: float) -> None:
        if step == 6:
            seen["before"] = snapshot()
            seen["files"] = _runs.contents(tmp_path)

    method = Spoilt(_runs.method(kind), at=7, how=how)
    with pytest.raises(FloatingPointError, match=rf"{words}.* at step 7"):
        fit(method, _runs.data(), _runs.config(kind), tmp_path, progress)
    assert len(seen["before"]) > len(list(method.student.parameters()))
    assert _runs.same(snapshot(), seen["before"])
    assert _runs.contents(tmp_path) == seen["files"]
    monkeypatch.undo()
    assert finish(kind, tmp_path, whole).resumed_from == 4
    assert (tmp_path / "log.jsonl").read_bytes() == (whole[kind][1] / "log.jsonl").read_bytes()


# ------------------------------------------------------------------------------ what a step computes


class Recorder(AbstractMethod):
    """Its loss is the sum of one weight per class, so each step is the learning rate; it notes its images."""

    def __init__(self, ema: EmaRule | None = None) -> None:
        self.student = nn.Linear(1, 2, bias=False).double()
        nn.init.zeros_(self.student.weight)
        self.ema = ema
        self.images: list[int] = []

    def loss(self, batch: Batch) -> Tensor:
        assert self.student.training
        self.images += [round(value) for value in batch.images[:, 0, 0, 0].tolist()]
        return self.student.weight.sum()

    def log_probs(self, images: Tensor) -> Tensor:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        return {"method": "recorder"}


def numbered(count: int) -> Tensor:
    """Images that are their own number."""
    return torch.arange(float(count))[:, None, None, None].expand(count, 1, 2, 2).clone()


def rates(config: FitConfig, images: int) -> list[float]:
    """The learning rates that plain gradient descent on the recorder's weight shows."""
    recorder, weights = Recorder(), [0.0]
    plain = replace(config, optimizer="sgd", momentum=0.0)
    fit(
        recorder,
        numbered(images),
        plain,
        progress=lambda *_: weights.append(recorder.student.weight[0, 0].item()),
    )
    return [before - after for before, after in pairwise(weights)]


def test_the_rate_falls_along_a_cosine_to_zero() -> None:
    expected = [0.3 * (1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert rates(FitConfig(epochs=4, batch_size=2, lr=0.3), 5) == pytest.approx(expected, rel=1e-9)


def test_the_rate_warms_up_in_a_straight_line() -> None:
    config = FitConfig(epochs=4, batch_size=2, lr=0.3, warmup_steps=4, warmup_lr=0.1)
    expected = [0.1, 0.15, 0.2, 0.25, *(0.3 * (1 + math.cos(math.pi * n / 10)) / 2 for n in range(4, 10))]
    assert rates(config, 5) == pytest.approx(expected, rel=1e-9)


def test_sgd_is_momentum_with_l2_in_the_gradient() -> None:
    data = _runs.data(images=6)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    images, labels = data.images.double(), data.labels
    assert labels is not None
    weights = [each.detach().clone().requires_grad_() for each in net.parameters()]
    memory = [torch.zeros_like(each) for each in weights]
    config = FitConfig(epochs=2, batch_size=6, lr=0.5, optimizer="sgd", momentum=0.8, weight_decay=0.1)
    for step in range(2):  # batches are the whole set, so their order does not matter
        rate = 0.5 * (1 + math.cos(math.pi * step / 2)) / 2
        F.cross_entropy(images.flatten(1) @ weights[0].T + weights[1], labels).backward()
        with torch.no_grad():
            for weight, speed in zip(weights, memory, strict=True):
                assert weight.grad is not None
                speed.mul_(0.8).add_(weight.grad + 0.1 * weight)
                weight.sub_(rate * speed)
                weight.grad = None
    assert fit(DeepEnsemble([net]), ImageSet(images, labels), config).steps == 2
    for trained, expected in zip(net.parameters(), weights, strict=True):
        # Members' logits are made float32 unless they are float64, so that all of this is in double.
        torch.testing.assert_close(trained, expected, rtol=1e-10, atol=1e-12)


def test_adam_takes_steps_of_the_rate_without_weight_decay() -> None:
    recorder = Recorder()
    fit(recorder, numbered(4), FitConfig(epochs=3, batch_size=4, lr=0.1))
    expected = -sum(0.1 * (1 + math.cos(math.pi * n / 3)) / 2 for n in range(3))
    assert recorder.student.weight[0].item() == pytest.approx(expected, rel=1e-6)


def drawn(images: int, batch: int, epochs: float, seed: int = 0) -> list[int]:
    recorder = Recorder()
    fit(recorder, numbered(images), FitConfig(epochs=epochs, batch_size=batch, lr=0.1, seed=seed))
    return recorder.images


@pytest.mark.parametrize("batch", [1, 3, 7, 14, 20])
def test_each_image_is_seen_once_an_epoch_in_a_new_order(batch: int) -> None:
    seen = drawn(7, batch, epochs=20)
    assert len(seen) == batch * round(140 / batch)
    epochs = [tuple(seen[start : start + 7]) for start in range(0, len(seen) - 6, 7)]
    assert len(epochs) >= 19
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(epochs)) == len(epochs)


def test_the_order_belongs_to_the_seed_and_not_to_the_batch_size() -> None:
    assert drawn(9, 3, 2, seed=1) == drawn(9, 3, 2, seed=1) == drawn(9, 2, 2, seed=1)
    assert drawn(9, 3, 2, seed=1) != drawn(9, 3, 2, seed=2)


def test_draws_differ_between_steps_and_seeds_but_not_between_runs() -> None:
    class Draws(Recorder):
        def loss(self, batch: Batch) -> Tensor:
            assert batch.generator is not None
            self.images.append(int(torch.randint(1 << 40, (), generator=batch.generator)))
            return self.student.weight.sum()

    def draws(seed: int) -> list[int]:
        method = Draws()
        fit(method, numbered(4), FitConfig(epochs=5, batch_size=2, lr=0.1, seed=seed))
        return method.images

    assert draws(0) == draws(0)
    assert len({*draws(0), *draws(1)}) == 20


def test_a_batch_may_be_larger_than_the_set() -> None:
    seen = drawn(5, 12, epochs=24)
    assert len(seen) == 120
    assert all(seen.count(image) == 24 for image in range(5))
    assert len(drawn(5, 64, epochs=1)) == 64  # one step at the least


def test_augmentation_reaches_the_method() -> None:
    class Pixels(Recorder):
        def loss(self, batch: Batch) -> Tensor:
            self.pixels = batch.images
            return self.student.weight.sum()

    method = Pixels()
    images = torch.zeros(4, 1, 3, 3)
    fit(method, images, FitConfig(epochs=1, batch_size=4, lr=0.1, augment=Augment(noise=1.0)))
    assert method.pixels.std() > 0.3
    assert torch.equal(images, torch.zeros(4, 1, 3, 3))


# ------------------------------------------------------------------------------ the average


def averaged(bridge: DiffusionBridge) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The student's state at the end of a run, and its states before the first step and after each."""
    states = [_runs.state(bridge.student)]
    fit(
        bridge,
        _runs.data(),
        _runs.config("bridge"),
        progress=lambda *_: states.append(_runs.state(bridge.student)),
    )
    return _runs.state(bridge.student), states


def test_the_average_follows_its_rule() -> None:
    final, (average, *states) = averaged(_runs.bridge(ema=0.5))
    for step, weights in enumerate(states):
        keep = min(0.5, (1 + step) / (10 + step))
        assert (keep == 0.5) == (step >= 8)  # both branches of the rule are walked
        average = {name: keep * average[name].double() + (1 - keep) * weights[name] for name in average}
    counters = [name for name in final if name.endswith("num_batches_tracked")]
    assert counters
    for name, value in final.items():
        if name in counters:
            assert value == _runs.STEPS
        else:
            torch.testing.assert_close(value.double(), average[name], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(final["score.head.weight"], states[-1]["score.head.weight"], atol=1e-4)


def test_the_swapped_average_is_the_weights_but_for_a_hair() -> None:
    final, states = averaged(_runs.bridge(ema=0.99995, ema_swapped=True))
    for name, value in final.items():
        torch.testing.assert_close(value, states[-1][name], rtol=1e-3, atol=1e-5)


def test_without_a_rule_the_weights_are_the_last() -> None:
    method, last = _runs.method("members"), {}
    fit(
        method,
        _runs.data(),
        _runs.config("members"),
        progress=lambda *_: last.update(_runs.state(method.student)),
    )
    assert _runs.same(_runs.state(method.student), last)


# ------------------------------------------------------------------------------ manners


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_a_folder_leaves_no_trace(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Run]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    method, data = _runs.method(kind), _runs.data()
    images = data.images.clone()
    result = fit(method, data, _runs.config(kind))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert list(tmp_path.iterdir()) == []
    assert not any(module.training for module in method.student.modules())
    assert torch.equal(data.images, images)
    assert _runs.same(_runs.state(method.student), whole[kind][0])  # nor does a folder change the weights
    assert (result.steps, result.resumed_from) == (12, 0)


def test_teachers_are_left_alone() -> None:
    bridge = _runs.bridge()
    before = _runs.state(bridge.ensemble)
    fit(bridge, _runs.data(), _runs.config("bridge"))
    assert _runs.same(_runs.state(bridge.ensemble), before)
    assert all(weight.grad is None for weight in bridge.ensemble.parameters())


def test_progress_is_told_each_step() -> None:
    told = []
    method = Spoilt(_runs.method("members"), at=0, how="never")
    fit(method, _runs.data(), _runs.config("members"), progress=lambda *each: told.append(each))
    assert [each[:2] for each in told] == [(step, 12) for step in range(1, 13)]
    assert all(min(method.losses) <= each[2] <= max(method.losses) for each in told)


def test_members_need_labels() -> None:
    with pytest.raises(ValueError, match="the data has none"):
        fit(_runs.method("members"), _runs.data().images, _runs.config("members"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"checkpoint_every": 0},
        {"log_every": -1},
        {"optimizer": "lamb"},
    ],
)
def test_a_senseless_configuration_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is {wrong[name]!r}"):
        FitConfig(**{"epochs": 1, "batch_size": 2, "lr": 0.1, **wrong})


@pytest.mark.parametrize("foreign", ["scores.json", "report.html"])
def test_a_folder_with_foreign_results_is_refused_and_left_as_it_is(foreign: str, tmp_path: Path) -> None:
    (tmp_path / foreign).write_text("mine")
    with pytest.raises(ValueError, match=r"results without their config\.json"):
        fit(_runs.method("members"), _runs.data(), _runs.config("members"), tmp_path, unexpected)
    assert _runs.contents(tmp_path) == {foreign: b"mine"}


def test_networks_that_flatten_with_view_train_and_work_afterwards() -> None:
    class Viewing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Linear(4 * 64, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(images).view(len(images), -1))

    net, images = Viewing(), torch.rand(6, 3, 8, 8)
    config = FitConfig(epochs=1, batch_size=3, lr=0.01, augment=Augment(crop=1, flip=True, mixup=0.4))
    fit(DeepEnsemble([net]), (images, torch.tensor([0, 1, 2, 0, 1, 2])), config)
    assert net(images).shape == (6, 3)


def test_a_refused_step_leaves_running_statistics_as_they_were() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(192, 3), torch.nn.BatchNorm1d(3)
            )

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.net(images) * math.nan

    net = Broken()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1"):
        fit(DeepEnsemble([net]), (torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])), FitConfig(1, 4, 0.1))
    assert all(tensor.equal(before[name]) for name, tensor in net.state_dict().items())


def test_members_of_different_classes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    members = [_tiny.member(0, classes) for classes in (3, 4)]
    method = DiffusionBridge(Ensemble(members), _tiny.score())
    with pytest.raises(ValueError, match="different shapes"):
        fit(method, _tiny.data(), FitConfig(1, 4, 0.1), tmp_path / "run", unexpected)
    assert not (tmp_path / "run").exists()
