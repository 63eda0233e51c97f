"""`compress` ends near its minutes, however slow the machine becomes; the clock of these tests is a fake."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import _runs
import _tiny
import ensbridge as eb
from ensbridge.methods import DeepEnsemble
from ensbridge.training import FitConfig
from ensbridge.training.checkpoint import load_checkpoint
from ensbridge.training.forecast import MOST_TIMED, RESERVE, TIMED, epochs_within
from ensbridge.training.step import EagerStep

IMAGES = _tiny.images(32)
TRIAL = 1 + TIMED  # steps
FORECAST = (
    18  # steps of 3 seconds in a minute, of which 3 seconds are for getting ready and a twentieth spare
)
EPOCHS = "9.03"  # 18.05 steps of 16 of the 32 images
READ_CLOCKS = ("training.candidates", "training.checkpoint", "training.fit", "training.forecast")


class Clock:
    """Time that passes only in training steps: `step` seconds in each, `later` in those after the trial."""

    def __init__(self) -> None:
        self.now, self.steps, self.step = 1000.0, 0, 3.0
        self.later: float | None = None

    def monotonic(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += self.step if self.later is None or self.steps < TRIAL else self.later
        self.steps += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    for name in READ_CLOCKS:
        monkeypatch.setattr(import_module(f"ensbridge.{name}"), "time", fake)
    real = EagerStep._step

    def step(self: EagerStep, number: int) -> dict[str, float]:
        fake.tick()
        return real(self, number)

    monkeypatch.setattr(EagerStep, "_step", step)
    return fake


def compressed(**options: Any) -> eb.FastEnsemble:
    """Bridges of two tiny members, in epochs of 2 steps."""
    members = [_tiny.member(seed) for seed in range(2)]
    return eb.compress(
        members, IMAGES, **{"feature": _tiny.FEATURE, "budget": 30, "batch_size": 16, **options}
    )


def test_a_machine_that_stays_as_it_is_trains_as_many_epochs_as_fit(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = compressed(max_minutes=1)
    assert clock.steps == TRIAL + FORECAST
    said = capsys.readouterr().err
    assert f"{EPOCHS} epochs on the cpu" in said
    assert "time is up" not in said
    assert fast(IMAGES).equal(compressed(epochs=FORECAST / 2)(IMAGES))


@pytest.mark.parametrize(("options", "seconds"), [({"max_minutes": 1}, 60), ({}, 180)])
@pytest.mark.parametrize("slower", [4.0, 7.0, 20.0])
def test_a_machine_that_becomes_slower_ends_near_its_minutes(
    options: dict[str, float], seconds: int, slower: float, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.later = slower
    compressed(**options)
    steps, total = clock.steps - TRIAL, int(RESERVE * (seconds - 3) / 3)
    assert steps < total
    assert steps == math.ceil(round(1.1 * seconds / slower, 9))
    assert re.search(f"time is up.* step {steps} of {total},.*max_minutes", capsys.readouterr().err)


def test_the_model_then_has_its_averaged_weights(clock: Clock, tmp_path: Path) -> None:
    clock.later = 10.0
    fast = compressed(max_minutes=1, run_dir=tmp_path)
    newest = _runs.checkpoints(tmp_path)[-1]
    assert newest.name == "checkpoint-000000007.safetensors"
    tensors, _ = load_checkpoint(newest)
    weights = {name: tensors[f"student/T2-0.{name}"] for name in fast.each_bridge()[0].state_dict()}
    average = {name: tensors[f"average/T2-0.{name}"] for name in weights}
    assert _tiny.same(fast.each_bridge()[0].state_dict(), average)
    assert not _tiny.same(weights, average)
    assert not any(module.training for module in fast.modules())


def test_the_call_repeated_goes_on_until_the_epochs_of_the_first_are_done(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.later = 9.0
    for reached in (8, 16):
        compressed(max_minutes=1, run_dir=tmp_path)
        assert clock.steps == TRIAL + reached  # nothing is tried again
        assert f"{tmp_path} is at step {reached} of {FORECAST}" in capsys.readouterr().err
    done = compressed(max_minutes=1, run_dir=tmp_path)
    said = capsys.readouterr().err
    assert re.search(rf"resuming.* {EPOCHS} epochs .*1 minute", said)
    assert "time is up" not in said
    again = compressed(max_minutes=5, run_dir=tmp_path)
    assert clock.steps == TRIAL + FORECAST
    whole = compressed(epochs=FORECAST / 2)
    assert done(IMAGES).equal(whole(IMAGES))
    assert again(IMAGES).equal(whole(IMAGES))


@pytest.mark.parametrize("later", [3.0, 9.0, 40.0])
@pytest.mark.parametrize("source", ["distilled", "auto"])
def test_all_that_is_trained_keeps_to_the_minutes(source: str, later: float, clock: Clock) -> None:
    begun = clock.now
    clock.later = later
    compressed(source=source, max_minutes=4, val=_tiny.data(30), quiet=True)
    # A quarter of the minutes at most is for the trial; training ends a tenth late, and with a step.
    assert clock.now - begun <= (1.1 + 0.25) * 240 + later


def test_a_distillation_whose_time_was_up_resumes_with_its_bridges(clock: Clock, tmp_path: Path) -> None:
    options = {"source": "distilled", "run_dir": tmp_path, "quiet": True}
    clock.later = 9.0
    first = compressed(**options, max_minutes=1)
    clock.later = None
    done = compressed(**options, max_minutes=1)
    assert clock.steps == TRIAL + FORECAST
    assert not done.source(IMAGES).equal(first.source(IMAGES))
    whole = compressed(source="distilled", epochs=FORECAST / 2, quiet=True)
    assert done(IMAGES).equal(whole(IMAGES))
    assert compressed(**options, max_minutes=1)(IMAGES).equal(whole(IMAGES))


def test_epochs_have_no_limit(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    clock.step = 1e6
    compressed(epochs=2)
    assert clock.steps == 4
    assert "time is up" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step", "tried", "trained"),
    [
        (3.0, TRIAL, FORECAST),
        (10.0, 2, 5),  # a trial is over with a quarter of the time
        (30.0, 2, 1),
        (1e4, 2, 1),  # there is always a step
        (1e-6, 1 + MOST_TIMED, 800),  # and there are never more than 200 epochs
    ],
)
def test_a_trial_decides_the_steps_and_leaves_networks_as_they_were(
    step: float, tried: int, trained: int, clock: Clock
) -> None:
    clock.step = step
    net, data, config = _tiny.batch_norm_member(), _tiny.data(), FitConfig(1, 6, 0.1)
    before = _tiny.state(net)
    epochs = epochs_within(1, {"net": DeepEnsemble([net])}, data, config)
    assert (clock.steps, replace(config, epochs=epochs).total_steps(len(data))) == (tried, trained)
    assert _tiny.same(_tiny.state(net), before)
    assert not net.training
