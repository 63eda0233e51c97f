"""`distill_steps` makes a bridge of one step out of one of five, and leaves the teacher as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import _runs
import _tiny
from ensbridge.data import Augment
from ensbridge.methods import DiffusionBridge
from ensbridge.training import FitConfig, distill_steps, distill_together, fit

STAGES = {"direct": ["5-to-1"], "progressive": ["2-to-1", "3-to-2", "5-to-3"]}
CONFIG = FitConfig(epochs=2, batch_size=5, lr=1e-2, augment=Augment(mixup=0.4), checkpoint_every=2)


def folders(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


@pytest.fixture
def teacher() -> DiffusionBridge:
    """A bridge that has learnt a little, so that its five steps are not one."""
    bridge = _runs.bridge()
    fit(bridge, _runs.data(), _runs.config("bridge"))
    bridge.bridge.zero_grad()
    return bridge


@pytest.mark.parametrize("mode", ["direct", "progressive"])
def test_stages_have_folders_and_the_teacher_stays(
    mode: Any, teacher: DiffusionBridge, tmp_path: Path
) -> None:
    before, times = _runs.state(teacher.bridge), teacher.bridge.times
    steps: list[int] = []
    one = distill_steps(
        teacher, _runs.data(), CONFIG, tmp_path, mode=mode, progress=lambda step, *_: steps.append(step)
    )
    assert folders(tmp_path) == STAGES[mode]
    assert steps == [1, 2, 3, 4] * len(STAGES[mode])
    assert (one.bridge.steps, one.bridge.times) == (1, (0.0, 1.0))
    assert (teacher.bridge.steps, teacher.bridge.times) == (5, times)
    assert _runs.same(_runs.state(teacher.bridge), before)
    assert one is not teacher
    pairs = zip(one.bridge.parameters(), teacher.bridge.parameters(), strict=True)
    assert not any(torch.equal(student, weight) for student, weight in pairs)
    assert one.ensemble is teacher.ensemble
    assert not one.bridge.training
    assert all(weight.grad is None for weight in teacher.bridge.parameters())


@pytest.mark.parametrize("mode", ["direct", "progressive"])
def test_run_again_it_takes_no_step(mode: Any, teacher: DiffusionBridge, tmp_path: Path) -> None:
    first = distill_steps(teacher, _runs.data(), CONFIG, tmp_path, mode=mode)
    files = _runs.contents(tmp_path)
    again = distill_steps(teacher, _runs.data(), CONFIG, tmp_path, mode=mode, progress=_runs.unexpected)
    assert _runs.same(_runs.state(again.bridge), _runs.state(first.bridge))
    assert again.bridge.times == first.bridge.times
    assert _runs.contents(tmp_path) == files


def test_stopped_in_the_middle_it_goes_on(teacher: DiffusionBridge, tmp_path: Path) -> None:
    calls = 0

    def stop(step: int, total: int, loss: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:  # in the second stage
            raise InterruptedError

    whole = distill_steps(teacher, _runs.data(), CONFIG, mode="progressive")
    with pytest.raises(InterruptedError):
        distill_steps(teacher, _runs.data(), CONFIG, tmp_path, mode="progressive", progress=stop)
    steps: list[int] = []
    resumed = distill_steps(
        teacher,
        _runs.data(),
        CONFIG,
        tmp_path,
        mode="progressive",
        progress=lambda step, *_: steps.append(step),
    )
    assert steps == [4, 3, 4, 1, 2, 3, 4]  # the end of the first stage, which was complete, then steps
    assert _runs.same(_runs.state(resumed.bridge), _runs.state(whole.bridge))


def test_each_stage_starts_from_the_last(teacher: DiffusionBridge) -> None:
    # With a rate of almost nothing every stage hands on what it was given.
    still = FitConfig(epochs=1, batch_size=5, lr=1e-12)
    one = distill_steps(teacher, _runs.data(), still, mode="progressive")
    for student, weight in zip(one.bridge.parameters(), teacher.bridge.parameters(), strict=True):
        torch.testing.assert_close(student, weight, rtol=0, atol=1e-6)


def test_the_student_approaches_the_teachers_five_steps(teacher: DiffusionBridge) -> None:
    images = _runs.data(images=40).images

    def ends(bridge: DiffusionBridge) -> Tensor:
        seen = _tiny.teacher_outputs(bridge.ensemble, bridge.feature, images)
        with torch.no_grad():
            return bridge.bridge.eval()(seen.feature, seen.logits[0])

    untrained = teacher.with_bridge(teacher.bridge.one_step())
    config = FitConfig(epochs=20, batch_size=20, lr=1e-2)
    for mode in ("direct", "progressive"):
        one = distill_steps(teacher, images, config, mode=mode, weight=1.0)
        before, after = ((ends(each) - ends(teacher)).square().mean() for each in (untrained, one))
        assert after < 0.5 * before, mode


def test_several_are_distilled_side_by_side(teacher: DiffusionBridge, tmp_path: Path) -> None:
    other = DiffusionBridge(
        teacher.ensemble, _runs.score(8), _runs.FEATURE, target=(0,), config=teacher.bridge.config
    )
    states = [_runs.state(each.bridge) for each in (teacher, other)]
    named = distill_together({"bridge": teacher, "control": other}, _runs.data(), CONFIG, tmp_path)
    assert list(named) == ["bridge", "control"]
    assert folders(tmp_path) == ["5-to-1"]
    assert [each.bridge.steps for each in named.values()] == [1, 1]
    assert [each.target for each in named.values()] == [(0, 1), (0,)]
    assert all(
        _runs.same(_runs.state(each.bridge), state)
        for each, state in zip((teacher, other), states, strict=True)
    )
    # The first draws before the second, and so learns to the bit what it learns alone.
    alone = distill_steps(teacher, _runs.data(), CONFIG)
    assert _runs.same(_runs.state(named["bridge"].bridge), _runs.state(alone.bridge))
    assert not _runs.same(_runs.state(named["control"].bridge), _runs.state(alone.bridge))


@pytest.mark.parametrize("mode", ["direct", "progressive"])
def test_the_mode_is_the_bridges_own_unless_given(mode: str, tmp_path: Path) -> None:
    bridge = _runs.bridge(distillation=mode)
    distill_steps(bridge, _runs.data(), CONFIG, tmp_path / "own")
    assert folders(tmp_path / "own") == STAGES[mode]
    distill_steps(bridge, _runs.data(), CONFIG, tmp_path / "given", mode="direct")
    assert folders(tmp_path / "given") == STAGES["direct"]


def test_a_bridge_of_one_step_is_returned_as_it_is(tmp_path: Path) -> None:
    bridge = _runs.bridge(num_steps=1)
    assert distill_steps(bridge, _runs.data(), CONFIG, tmp_path, progress=_runs.unexpected) is bridge
    assert folders(tmp_path) == []


def test_labels_are_not_used(teacher: DiffusionBridge) -> None:
    with_labels = distill_steps(teacher, _runs.data(), CONFIG)
    without = distill_steps(teacher, _runs.data().images, CONFIG)
    assert _runs.same(_runs.state(with_labels.bridge), _runs.state(without.bridge))


def test_the_weight_decides_between_teacher_and_ensemble(teacher: DiffusionBridge) -> None:
    half, default, all_teacher = (
        _runs.state(distill_steps(teacher, _runs.data(), CONFIG, **options).bridge)
        for options in ({"weight": 0.5}, {}, {"weight": 1.0})
    )
    assert _runs.same(half, default)
    assert not _runs.same(half, all_teacher)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "quick"}, r"mode.*'quick'"),
        ({"weight": 1.5}, r"weight.*1\.5"),
        ({"weight": -1}, r"weight.*-1"),
    ],
)
def test_senseless_options_are_refused_before_a_folder_is_made(
    options: dict[str, Any], named: str, teacher: DiffusionBridge, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        distill_steps(teacher, _runs.data(), CONFIG, tmp_path / "run", progress=_runs.unexpected, **options)
    assert folders(tmp_path) == []


def test_bridges_on_other_times_are_not_distilled_together(teacher: DiffusionBridge, tmp_path: Path) -> None:
    shorter = teacher.with_bridge(teacher.bridge.on_times((0.0, 0.4, 1.0)))
    with pytest.raises(ValueError, match=r"times.*long, short"):
        distill_together({"long": teacher, "short": shorter}, _runs.data(), CONFIG, tmp_path / "run")
    assert folders(tmp_path) == []


def test_another_mode_has_another_folder_and_another_weight_is_refused(
    teacher: DiffusionBridge, tmp_path: Path
) -> None:
    distill_steps(teacher, _runs.data(), CONFIG, tmp_path, mode="direct")
    distill_steps(teacher, _runs.data(), CONFIG, tmp_path, mode="progressive")
    assert folders(tmp_path) == sorted(STAGES["direct"] + STAGES["progressive"])
    files = _runs.contents(tmp_path)
    with pytest.raises(ValueError, match=r"weight.*0\.5.*0\.25"):
        distill_steps(teacher, _runs.data(), CONFIG, tmp_path, mode="direct", weight=0.25)
    assert _runs.contents(tmp_path) == files
