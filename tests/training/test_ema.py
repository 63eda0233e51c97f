"""The average of a student's weights follows its rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _runs
import _tiny
import ensbridge as eb
from ensbridge.methods import (
    AbstractMethod,
    Batch,
    BridgeConfig,
    DiffusionBridge,
    EmaRule,
)
from ensbridge.methods.base import Teacher
from ensbridge.training import fit


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
        assert (keep == 0.5) == (step >= 8)  # both branches of the rule are taken
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


class Climber(AbstractMethod):
    """One weight from 0 that plain SGD raises by the learning rate at each step."""

    def __init__(self, rule: EmaRule) -> None:
        self.student = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.student.weight)
        self.ema = rule

    def loss(self, batch: Batch) -> Tensor:
        return -self.student.weight.sum()

    def model(self) -> nn.Module:
        return self.student

    def networks(self) -> list[nn.Module]:
        return [self.student]

    def teachers(self) -> list[Teacher]:
        return []

    def describe(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.99995])
def test_the_average_keeps_the_old_and_the_swapped_one_the_new(
    decay: float, warmup: bool, swapped: bool
) -> None:
    steps, config = 12, eb.FitConfig(epochs=3, batch_size=6, lr=1.0, optimizer="sgd", momentum=0.0)
    method = Climber(EmaRule(decay, warmup, swapped))
    eb.fit(method, _tiny.data(), config)
    weight = average = 0.0
    for step in range(steps):
        weight += config.lr_at(step, steps)
        right = min(decay, (1 + step) / (10 + step)) if warmup else decay
        kept = 1 - decay if swapped else right
        average = kept * average + (1 - kept) * weight
    assert method.student.weight.item() == pytest.approx(average, rel=1e-5)
    # The swapped average at the paper's decay is the weight itself but for a hair.
    assert (average == pytest.approx(weight, rel=1e-4)) == (
        (decay, swapped) in ((0.0, False), (0.99995, True))
    )


def test_early_on_the_average_forgets_its_start() -> None:
    rule = EmaRule(0.99995)
    assert [rule.decay_at(step) for step in (0, 1, 90)] == pytest.approx([0.1, 2 / 11, 0.91])
    assert rule.decay_at(10**7) == 0.99995


def test_a_bridge_follows_its_configurations_rule() -> None:
    config = replace(BridgeConfig(), ema=0.5, ema_swapped=True)
    assert _tiny.bridge_to(_tiny.ensemble(), config=config).ema == EmaRule(0.5, swapped=True)
    with pytest.raises(ValueError, match=r"-0\.1"):
        EmaRule(-0.1)
