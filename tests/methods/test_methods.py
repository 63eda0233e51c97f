"""The contract that every method keeps, and what training may and may not touch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import _tiny
import ensbridge as eb
from ensbridge.methods import Batch, DiffusionBridge, EmaRule, StepDistillation
from ensbridge.models.ensemble import Ensemble

WITH_LABELS = ("members", "bezier")
AVERAGED = ("bridge", "kl", "direct", "progressive")


@pytest.fixture
def ensemble() -> Ensemble:
    return _tiny.ensemble(3)


def labelled(seed: int = 0) -> Batch:
    data = _tiny.data(6)
    return Batch(data.images, data.labels, _tiny.generator(seed))


@pytest.mark.parametrize("kind", _tiny.METHODS)
def test_the_loss_is_a_finite_scalar_with_gradients_for_the_student_alone(
    kind: str, ensemble: Ensemble
) -> None:
    method = _tiny.method(kind, ensemble)
    if isinstance(method, StepDistillation):
        method.student.score.head.bias.data += 1  # or its loss would be small at the start
    loss = method.loss(labelled())
    assert (loss.ndim, loss.dtype) == (0, torch.float32)
    assert loss.isfinite()
    loss.backward()
    gradients = {name: weight.grad for name, weight in method.student.named_parameters()}
    assert all(each is not None and each.isfinite().all() for each in gradients.values())
    assert any(each is not None and each.ne(0).any() for each in gradients.values())
    assert all(weight.grad is None for weight in ensemble.parameters())
    assert method.losses(labelled()).keys() == {"loss"}


@pytest.mark.parametrize("kind", _tiny.METHODS)
def test_a_loss_repeats_with_its_generator(kind: str, ensemble: Ensemble) -> None:
    method = _tiny.method(kind, ensemble)
    assert method.loss(labelled(3)).equal(method.loss(labelled(3)))
    draws = kind in ("bridge", "kl", "direct", "progressive", "bezier")
    assert method.loss(labelled(3)).equal(method.loss(labelled(4))) != draws


@pytest.mark.parametrize("kind", _tiny.METHODS)
def test_a_model_gives_finite_logits_of_each_image_alone(kind: str, ensemble: Ensemble) -> None:
    method, images = _tiny.method(kind, ensemble), _tiny.images()
    found = method.model().eval()(images).detach()
    assert (found.shape, found.dtype) == ((6, _tiny.CLASSES), torch.float32)
    torch.testing.assert_close(method.model()(images[2:3]).detach(), found[2:3], rtol=1e-4, atol=1e-5)
    assert found.isfinite().all()


@pytest.mark.parametrize("kind", _tiny.METHODS)
def test_training_changes_the_student_and_nothing_else(kind: str, ensemble: Ensemble) -> None:
    method = _tiny.method(kind, ensemble)
    teachers, student = _tiny.state(ensemble), _tiny.state(method.student)
    before = method.model().eval()(_tiny.images())
    result = eb.fit(method, _tiny.data(), _tiny.FEW_STEPS)
    assert result.steps == 4
    assert not method.model()(_tiny.images()).equal(before)
    assert not any(module.training for module in (*method.student.modules(), *ensemble.modules()))
    assert _tiny.same(_tiny.state(ensemble), teachers)
    assert all(weight.grad is None for weight in ensemble.parameters())
    assert not _tiny.same(_tiny.state(method.student), student)
    inside = {id(weight) for weight in method.student.parameters()}
    assert not inside & {id(weight) for weight in ensemble.parameters()}


@pytest.mark.parametrize("kind", _tiny.METHODS)
def test_only_members_and_curves_look_at_labels(kind: str, ensemble: Ensemble) -> None:
    method = _tiny.method(kind, ensemble)
    without = Batch(_tiny.images(), None, _tiny.generator(1))
    if kind in WITH_LABELS:
        with pytest.raises(ValueError, match=r"labels"):
            method.loss(without)
        return
    nonsense = Batch(_tiny.images(), torch.full((6,), -7), _tiny.generator(1))
    assert method.loss(without).equal(method.loss(nonsense))


@pytest.mark.parametrize("kind", _tiny.METHODS)
def test_a_description_is_json_that_knows_the_method_and_its_teachers(kind: str, ensemble: Ensemble) -> None:
    description = _tiny.method(kind, ensemble).describe()
    assert json.loads(json.dumps(description)) == description
    assert isinstance(description["method"], str)
    assert _tiny.method(kind, ensemble).describe() == description
    with torch.no_grad():
        ensemble.members[1].head.bias[0] += 1
    assert (_tiny.method(kind, ensemble).describe() != description) == (kind != "members")


def test_no_two_methods_have_one_description(ensemble: Ensemble) -> None:
    descriptions = [json.dumps(_tiny.method(kind, ensemble).describe()) for kind in _tiny.METHODS]
    assert len(set(descriptions)) == len(_tiny.METHODS)


@pytest.mark.parametrize("kind", _tiny.METHODS)
def test_a_description_does_not_change_with_training(kind: str, ensemble: Ensemble) -> None:
    """Or a run could not be resumed: it is known again by it."""
    method = _tiny.method(kind, ensemble)
    before = method.describe()
    eb.fit(method, _tiny.data(), _tiny.FEW_STEPS)
    assert method.describe() == before


@pytest.mark.parametrize("kind", _tiny.METHODS)
def test_the_average_is_of_the_whole_student_or_of_nothing(kind: str, ensemble: Ensemble) -> None:
    method = _tiny.method(kind, ensemble)
    assert list(method.averages()) == ([("", EmaRule(0.99995))] if kind in AVERAGED else [])


@pytest.mark.parametrize("kind", _tiny.METHODS)
def test_a_method_names_every_network_that_its_loss_runs(kind: str, ensemble: Ensemble) -> None:
    method = _tiny.method(kind, ensemble)
    named = {id(member) for teacher, _ in method.teachers() for member in teacher.members}
    calls = _tiny.count_runs(ensemble)
    method.loss(labelled())
    assert {id(ensemble.members[index]) for index in calls} == named
    assert set(calls.values()) <= {1}
    inside = {id(weight) for network in method.networks() for weight in network.parameters()}
    trained = {id(weight) for weight in method.student.parameters()}
    assert inside == trained


@pytest.mark.parametrize("kind", ["bridge", "kl", "direct", "progressive"])
def test_training_never_touches_the_members(kind: Any) -> None:
    members = [_tiny.batch_norm_member(0), _tiny.member(1), _tiny.batch_norm_member(2)]
    ensemble = Ensemble(members).train()  # as a user may have left it
    before = _tiny.state(ensemble)
    loss = "kl" if kind == "kl" else "bridge"
    method = DiffusionBridge(ensemble, _tiny.score(), "0", loss=loss)
    trained: Any = method
    if kind in ("direct", "progressive"):
        trained = StepDistillation(method, (0.0, 1.0), mode=kind)
    trained.loss(_tiny.batch()).backward()
    assert all(parameter.grad is None for parameter in ensemble.parameters())
    student = _tiny.state(trained.student)
    eb.fit(trained, _tiny.data(), _tiny.FEW_STEPS)
    _tiny.predict(method, _tiny.images())
    assert _tiny.same(_tiny.state(ensemble), before)
    assert not _tiny.same(_tiny.state(trained.student), student)
    assert not {id(p) for p in trained.student.parameters()} & {id(p) for p in ensemble.parameters()}


@pytest.mark.parametrize("kind", ["ed", "end2", "bn"])
def test_teachers_with_running_statistics_are_used_in_evaluation_mode(kind: str) -> None:
    members = [_tiny.member(0), _tiny.batch_norm_member(1), _tiny.batch_norm_member(2)]
    ensemble = Ensemble(members).train()
    before = _tiny.state(ensemble)
    method = _tiny.method(kind, ensemble)
    assert not any(module.training for teacher, _ in method.teachers() for module in teacher.modules())

    def loss() -> Tensor:
        return method.loss(labelled())

    first = loss()
    eb.fit(method, _tiny.data(), _tiny.FEW_STEPS)
    assert not loss().equal(first)
    assert _tiny.same(_tiny.state(ensemble), before)
