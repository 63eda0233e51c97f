"""Step distillation: each loss against a computation by hand, and where its target lands."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.bridge.sampler import sample
from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.methods import (
    Batch,
    BridgeConfig,
    StepDistillation,
)
from ensbridge.methods.step_distillation import halved
from ensbridge.models.ensemble import Ensemble


@pytest.fixture
def ensemble() -> Ensemble:
    return _tiny.ensemble(3)


def test_halving_five_steps_goes_by_three_and_two_to_one() -> None:
    grid = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    stages = [halved(grid), halved(halved(grid)), halved(halved(halved(grid)))]
    assert stages == [(0.0, 0.2, 0.6, 1.0), (0.0, 0.2, 1.0), (0.0, 1.0)]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 8, 10])
def test_halving_keeps_both_ends_and_half_of_the_steps(steps: int) -> None:
    grid = tuple(n / steps for n in range(steps + 1))
    half = halved(grid)
    assert (half[0], half[-1], len(half) - 1) == (0, 1, math.ceil(steps / 2))
    assert set(half) <= set(grid)
    assert list(half) == sorted(half)


def distillation(ensemble: Ensemble, **arguments: Any) -> StepDistillation:
    """A student whose weights are no longer its teacher's."""
    teacher = _tiny.bridge_to(ensemble, config=BridgeConfig(beta=0.3))
    method = StepDistillation(teacher, **arguments)
    nn.init.ones_(method.student.score.head.bias)
    return method


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_direct_loss_mixes_the_teachers_sample_with_the_truth(ensemble: Ensemble, weight: float) -> None:
    """Draws are made in the order temperature, teacher's sample; √beta·ε of one step is Z_1 - Z_0."""
    method = distillation(ensemble, weight=weight)
    found = method.loss(_tiny.batch(4))
    teacher, draws = method.teacher.bridge, _tiny.generator(4)
    seen = _tiny.teacher_outputs(ensemble)
    z1 = seen.logits[0] / TemperatureLaw().sample((6, 1), draws)
    z1 = z1 - z1.mean(-1, keepdim=True)
    sampled = sample(teacher.epsilon, teacher.schedule, z1, seen.feature, generator=draws)[-1]
    residual = method.student.score(seen.feature, z1, torch.ones(6))
    errors = [(residual - (z1 - z0)).square().sum(-1).mean() for z0 in (sampled, ensemble(_tiny.images()))]
    torch.testing.assert_close(found, weight * errors[0] + (1 - weight) * errors[1], rtol=1e-4, atol=0)
    assert (errors[0] - errors[1]).abs() > 1e-2


def test_the_weights_extremes_are_the_teacher_alone_and_the_truth_alone(ensemble: Ensemble) -> None:
    def losses(weight: float) -> tuple[float, float]:
        """Before and after the teacher has changed."""
        method = distillation(ensemble, weight=weight)
        first = method.loss(_tiny.batch(4)).item()
        nn.init.constant_(method.teacher.bridge.score.head.bias, 9.0)
        return first, method.loss(_tiny.batch(4)).item()

    before, after = losses(0.0)
    assert before == after
    before, after = losses(1.0)
    assert before != after
    # And the truth changes nothing at weight 1: another target, the same loss.
    alone = distillation(ensemble, weight=1.0)
    found = alone.loss(_tiny.batch(4)).item()
    alone.teacher.target = (1,)
    assert alone.loss(_tiny.batch(4)).item() == found


class Probe(nn.Module):
    """A score that answers a constant and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = torch.zeros(3)
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        self.asked.append((h, z_t, t))
        return self.answer.to(z_t.dtype).expand_as(z_t)


@pytest.mark.parametrize("times", [(0.0, 0.2, 0.6, 1.0), (0.0, 0.2, 1.0), (0.0, 1.0)])
def test_a_progressive_target_lands_where_the_teacher_lands(times: tuple[float, ...]) -> None:
    """The loss ‖r - target‖² tells its target when r is 0 and each unit vector in turn."""
    ensemble = _tiny.ensemble(3).double()
    config = BridgeConfig(beta=0.3, z_input="informative", temperature=_tiny.CONSTANT)
    teacher = _tiny.bridge_to(ensemble, config=config)
    teacher.bridge.double()
    method = StepDistillation(teacher, times, mode="progressive")
    method.student.score = probe = Probe()
    image = _tiny.images(1).double()
    steps_seen = set()
    for seed in range(4 * len(times[1:])):

        def loss(answer: Tensor, seed: int = seed) -> float:
            probe.answer = answer
            with _tiny.seeded(seed):  # without a generator the teacher follows its means
                return method.loss(Batch(image, None)).item()

        zero = loss(torch.zeros(3))
        target = torch.tensor([(zero - loss(unit) + 1) / 2 for unit in torch.eye(3)], dtype=torch.float64)
        h, z_t, now = probe.asked[-1]
        assert all(asked[1].equal(z_t) for asked in probe.asked[-4:])
        t = now.item()
        before = times[times.index(t) - 1]
        # One noiseless step with √beta·ε = target, from the definitions.
        z0_hat = z_t - math.sqrt(t) * target
        landed = z0_hat + before / t * (z_t - z0_hat)
        grid = [time for time in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0) if before <= time <= t]
        expected = sample(teacher.bridge.epsilon, config.schedule, z_t, h, grid, noise=False)[-1]
        torch.testing.assert_close(landed, expected.detach(), rtol=1e-5, atol=1e-6)
        steps_seen.add(t)
    assert steps_seen == set(times[1:])


def test_a_progressive_student_starts_on_the_bridge(ensemble: Ensemble) -> None:
    """At t = 1 the state is Z_1; below it, it is spread about the line between both ends."""
    method = StepDistillation(_tiny.bridge_to(ensemble), (0.0, 0.2, 1.0), mode="progressive")
    method.student.score = probe = Probe()
    for seed in range(8):
        one = _tiny.batch(seed)
        method.loss(one)
        z0, z1, _ = method.teacher.ends(Batch(one.images, None, _tiny.generator(seed)))
        _, z_t, t = probe.asked[-1]
        assert len(t.unique()) == 1
        deviation = math.sqrt(1e-4 * t[0] * (1 - t[0]))
        away = (z_t - (1 - t[:, None]) * z0 - t[:, None] * z1).abs().max()
        assert away < 5 * deviation + 1e-6
    assert len({t[0].item() for _, _, t in probe.asked}) == 2


def test_the_students_prediction_is_its_own_and_starts_as_the_teachers(ensemble: Ensemble) -> None:
    teacher = _tiny.bridge_to(ensemble)
    before = _tiny.state(teacher.bridge)
    method = StepDistillation(teacher)
    assert method.student.times == (0.0, 1.0)
    assert _tiny.same(_tiny.state(method.student), before)
    one_step = _tiny.predict(teacher.with_bridge(teacher.bridge.one_step()), _tiny.images())
    torch.testing.assert_close(_tiny.predict(method, _tiny.images()), one_step)
    eb.fit(method, _tiny.data(), _tiny.FEW_STEPS)
    assert _tiny.same(_tiny.state(teacher.bridge), before)
    assert not _tiny.predict(method, _tiny.images()).allclose(one_step)
    assert teacher.bridge.steps == 5
    assert method.ema == teacher.ema


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mode": "at once"}, "mode is 'at once'"),
        ({"weight": 1.5}, "weight is 1.5"),
        ({"weight": -0.5}, "weight is -0.5"),
        ({"weight": math.nan}, "weight is nan"),
        ({"times": (0.0, 0.5, 1.0), "mode": "progressive"}, "times are (0.0, 0.5, 1.0)"),
        ({"times": (0.0, 0.2, 1.0), "mode": "direct"}, "times are (0.0, 0.2, 1.0)"),
    ],
)
def test_a_bad_distillation_is_refused_with_its_value(
    ensemble: Ensemble, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        StepDistillation(_tiny.bridge_to(ensemble), **arguments)


@pytest.mark.parametrize("mode", ["direct", "progressive"])
def test_no_gradient_reaches_a_students_teacher(ensemble: Ensemble, mode: Any) -> None:
    method = StepDistillation(_tiny.bridge_to(ensemble), mode=mode)
    method.loss(_tiny.batch()).backward()
    assert all(parameter.grad is None for parameter in method.teacher.bridge.parameters())
    assert any(parameter.grad is not None for parameter in method.student.parameters())
