"""The kinds of steps: what a GPU would capture computes what an eager step computes; the fall-backs."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import _runs
from ensbridge.methods import DeepEnsemble, JointTraining
from ensbridge.training import fit
from ensbridge.training.compiled import (
    STEPS,
    CompiledStep,
    StepKind,
    _without_sharded_rng,
    in_bf16,
    step_kinds,
)
from ensbridge.training.optimizers import Average, Optimizers
from ensbridge.training.step import AbstractStep, EagerStep, ShardedRNG

KINDS = _runs.KINDS


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Networks that were to be compiled run as they are: what is tested is the step around them."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", KINDS)
def test_the_captured_function_learns_what_eager_steps_learn(kind: str, tmp_path: Path) -> None:
    eager, compiled = _runs.method(kind), _runs.method(kind)
    fit(eager, _runs.data(), _runs.config(kind), tmp_path / "eager")
    fit(compiled, _runs.data(), _runs.config(kind), tmp_path / "compiled", step="compiled")
    expected = eager.student.state_dict()
    for name, tensor in compiled.student.state_dict().items():
        # To float32's last digits: an average's share lives in float32 on the device.
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    logs = [json.loads(line) for line in (tmp_path / "eager/log.jsonl").read_text().splitlines()]
    own = [json.loads(line) for line in (tmp_path / "compiled/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in own] == [line["step"] for line in logs] == [3, 6, 9, 12]
    for line, other in zip(own, logs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", KINDS)
def test_spans_of_compiled_steps_go_on_from_a_checkpoint_to_the_bit(kind: str, tmp_path: Path) -> None:
    whole = _runs.method(kind)
    fit(whole, _runs.data(), _runs.config(kind), step="compiled")  # other spans: nothing is written
    with pytest.raises(_runs.Stopped):
        fit(
            _runs.method(kind),
            _runs.data(),
            _runs.config(kind),
            tmp_path,
            _runs.stop_at(9),
            step="compiled",
        )
    again = _runs.method(kind)
    assert fit(again, _runs.data(), _runs.config(kind), tmp_path, step="compiled").resumed_from == 8
    assert _runs.same(_runs.state(again.student), _runs.state(whole.student))


@pytest.mark.usefixtures("uncompiled")
def test_networks_are_left_as_they_were_found() -> None:
    method = _runs.bridge()
    before = _runs.state(method.ensemble)
    fit(method, _runs.data(), _runs.config("bridge"), step="compiled")
    assert method.bridge.score._compiled_call_impl is None
    assert all(not module._forward_hooks for module in method.ensemble.modules())
    assert _runs.same(_runs.state(method.ensemble), before)


@pytest.mark.usefixtures("uncompiled")
def test_a_span_with_a_step_that_is_not_finite_is_refused() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.net(images) * math.inf

    net = Broken()
    before = _runs.state(net)
    with pytest.raises(FloatingPointError, match="not finite at steps 1 to 3"):
        fit(DeepEnsemble([net]), _runs.data(), _runs.config("members"), step="compiled")
    assert _runs.same(_runs.state(net), before)
    fine = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    both = JointTraining({"good": DeepEnsemble([fine]), "bad": DeepEnsemble([Broken()])})
    with pytest.raises(FloatingPointError, match=r"bad.*not finite at steps 1 to"):
        fit(both, _runs.data(), _runs.config("members"), step="compiled")


class Failing(AbstractStep):
    """Steps that change everything they can reach while they are prepared, and then fail."""

    stride = 1
    closed = 0

    def prepare(self) -> None:
        EagerStep(self.method, _runs.data(), self.config, self.optimizers, self.average).run(0, 2)
        for module in self.method.student.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                module.running_mean.fill_(7.0)
        raise RuntimeError(f"{type(self).__name__} has no compiler\nand a long story")

    def run(self, start: int, stop: int) -> dict[str, float]:
        raise AssertionError("a step that could not be prepared was run")

    def close(self) -> None:
        Failing.closed += 1


class FailingToo(Failing):
    """Another that fails."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resumed", [False, True])
def test_what_fails_is_said_and_the_next_kind_goes_on_with_nothing_lost(
    kind: str, resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _runs.method(kind)
    fit(expected, _runs.data(), _runs.config(kind))
    if resumed:
        _runs.begin(kind, tmp_path)
    monkeypatch.setitem(STEPS, "captured", Failing)
    monkeypatch.setitem(STEPS, "compiled", FailingToo)
    monkeypatch.setattr(sys.modules["ensbridge.training.fit"], "step_kinds", lambda *_: tuple(STEPS))
    monkeypatch.setattr(Failing, "closed", 0)
    method = _runs.method(kind)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = fit(method, _runs.data(), _runs.config(kind), tmp_path)
    first, second = (str(each.message) for each in said)
    assert re.match(r"captured .*\(Failing has no compiler\).* compiled", first)
    assert re.match(r"compiled .*\(FailingToo has no compiler\).* eager", second)
    assert {each.filename for each in said} == {__file__}, "the warning names the caller's line"
    assert Failing.closed == 2
    assert result.resumed_from == (8 if resumed else 0)
    assert _runs.same(_runs.state(method.student), _runs.state(expected.student))


def test_a_kind_that_was_asked_for_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS, "compiled", Failing)
    with pytest.raises(RuntimeError, match="Failing has no compiler"):
        fit(_runs.method("members"), _runs.data(), _runs.config("members"), step="compiled")


def test_a_wish_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    wishes: dict[StepKind, str] = {
        "captured": "'captured'.*cpu",
        "fast": "'fast'.*'captured', 'compiled', 'eager'",  # type: ignore[dict-item]
    }
    for wish, named in wishes.items():
        with pytest.raises(ValueError, match=named):
            fit(_runs.method("members"), _runs.data(), _runs.config("members"), tmp_path / "run", step=wish)
        assert not (tmp_path / "run").exists()


def test_the_kinds_of_each_device() -> None:
    assert step_kinds(None, torch.device("cpu")) == ("eager",)
    assert step_kinds("eager", torch.device("cuda")) == ("eager",)
    assert list(step_kinds(None, torch.device("cuda", 1))) == list(STEPS)


def test_teachers_in_bf16_hold_the_weights_that_autocast_makes() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 3)).eval()
    own, images = in_bf16(net), torch.rand(4, 3, 4, 4)
    assert {each.dtype for each in net.state_dict().values()} == {torch.float32, torch.int64}
    assert own[1].running_mean.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert own(images).equal(net(images))


def test_compiled_networks_do_not_see_the_mode_in_which_losses_draw() -> None:
    one, other = (torch.Generator().manual_seed(0) for _ in range(2))
    with ShardedRNG(one, slice(1, 2), whole=2):
        drawn = _without_sharded_rng(torch.rand)(1, generator=one)
    assert drawn.equal(torch.rand(1, generator=other))


def test_compiled_steps_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trained network and each teacher is given to the compiler, once and for its shape alone."""
    given: list[tuple[nn.Module, object]] = []

    def compile(network: nn.Module, **options: object) -> nn.Module:
        given.append((network, options))
        return network

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: given.append((self, options)))
    method = _runs.bridge(members=3)
    config = _runs.config("bridge")
    average = Average(method.student, method.averages())
    steps = CompiledStep(method, _runs.data(), config, Optimizers(method, config, 12), average)
    steps.compile()
    assert [options for _, options in given] == [{"dynamic": False}] * 4
    assert given[0][0] is method.bridge.score
    assert set(steps.runners) == set(method.ensemble.members)
