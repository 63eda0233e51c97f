"""What `fit` computes is what its formulas say, and it keeps its manners."""

from __future__ import annotations

import json
import math
import random
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
from ensbridge.methods import AbstractMethod, Batch, DeepEnsemble, DiffusionBridge, EmaRule
from ensbridge.methods.base import Teacher
from ensbridge.models.ensemble import Ensemble
from ensbridge.training import FitConfig, fit

KINDS = _runs.KINDS
Run = _runs.Run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The weights and the folder of each kind's run that nothing interrupted."""
    return {kind: _runs.whole(kind, tmp_path_factory.mktemp(kind) / "run") for kind in KINDS}


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

    def model(self) -> nn.Module:
        return self.student

    def networks(self) -> list[nn.Module]:
        return [self.student]

    def teachers(self) -> list[Teacher]:
        return []

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
    method = _runs.Spoilt(_runs.method("members"))
    fit(method, _runs.data(), _runs.config("members"), progress=lambda *each: told.append(each))
    assert [each[:2] for each in told] == [(step, 12) for step in range(1, 13)]
    assert all(min(method.seen) <= each[2] <= max(method.seen) for each in told)


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
    with pytest.raises(ValueError, match=f"{name}.*{wrong[name]!r}"):
        FitConfig(**{"epochs": 1, "batch_size": 2, "lr": 0.1, **wrong})


@pytest.mark.parametrize("foreign", ["scores.json", "report.html"])
def test_a_folder_with_foreign_results_is_refused_and_left_as_it_is(foreign: str, tmp_path: Path) -> None:
    (tmp_path / foreign).write_text("mine")
    with pytest.raises(ValueError, match=r"results without their config\.json"):
        fit(_runs.method("members"), _runs.data(), _runs.config("members"), tmp_path, _runs.unexpected)
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


def test_members_of_different_classes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    members = [_tiny.member(0, classes) for classes in (3, 4)]
    method = DiffusionBridge(Ensemble(members), _tiny.score())
    with pytest.raises(ValueError, match="different shapes"):
        fit(method, _tiny.data(), FitConfig(1, 4, 0.1), tmp_path / "run", _runs.unexpected)
    assert not (tmp_path / "run").exists()


def test_the_log_holds_the_mean_loss_and_the_images_seen(tmp_path: Path) -> None:
    method = _runs.Spoilt(_runs.method("members"))
    fit(method, _runs.data(), _runs.config("members", log_every=5), tmp_path)
    losses = method.seen
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    parts = [losses[:5], losses[5:10], losses[10:]]
    assert [line["loss"] for line in lines] == pytest.approx([sum(part) / len(part) for part in parts])
    assert [(line["step"], line["images"]) for line in lines] == [(5, 20), (10, 40), (12, 48)]
