"""ED: its loss against scipy, its gradient in the limit, and what a student learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import nn

import _tiny
import ensbridge as eb
from ensbridge.methods import EmaRule, EnsembleDistillation
from ensbridge.methods.ensemble_distillation import distillation_loss
from ensbridge.models.ensemble import Ensemble


@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("members", [1, 3])
def test_the_loss_is_tau_squared_times_the_members_mean_cross_entropy(members: int, tau: float) -> None:
    logits, teachers = _tiny.logits(seed=1), _tiny.logits(seed=2, members=members)
    q = scipy.special.softmax(logits.numpy() / tau, axis=-1)
    each = []
    for z_m in teachers.numpy():
        p = scipy.special.softmax(z_m / tau, axis=-1)
        # CE(p, q) = H(p) + KL(p ‖ q), by two routes of scipy
        cross = scipy.stats.entropy(p, axis=-1) + scipy.special.rel_entr(p, q).sum(-1)
        np.testing.assert_allclose(cross, -(p * np.log(q)).sum(-1), rtol=1e-12)
        each.append(cross.mean())
    found = distillation_loss(logits, teachers, tau)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(tau**2 * np.mean(each), rel=1e-12)


def test_the_methods_loss_is_that_of_its_networks() -> None:
    ensemble, student = _tiny.ensemble(3), _tiny.member(9)
    method = EnsembleDistillation(ensemble, student)
    logits = student(_tiny.images())
    expected = distillation_loss(logits, ensemble.member_logits(_tiny.images()), 4.0)  # the default τ
    assert method.loss(_tiny.batch()).equal(expected)
    other = EnsembleDistillation(ensemble, student, tau=1.5)
    assert other.loss(_tiny.batch()).equal(
        distillation_loss(logits, ensemble.member_logits(_tiny.images()), 1.5)
    )


def test_a_student_that_is_its_only_teacher_has_the_least_loss_and_no_gradient() -> None:
    logits = _tiny.logits(seed=1).requires_grad_()
    loss = distillation_loss(logits, logits.detach()[None], 3.0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().max() < 1e-12
    elsewhere = distillation_loss(logits + _tiny.logits(seed=2), logits.detach()[None], 3.0)
    assert elsewhere > loss


def test_at_a_high_temperature_the_gradient_is_that_of_matching_logits() -> None:
    """Hinton et al.: (z - mean_m z_m) / K for centred logits, and τ² keeps it of one size."""
    logits, teachers = _tiny.logits(seed=1).requires_grad_(), _tiny.logits(seed=2, members=3)
    (gradient,) = torch.autograd.grad(distillation_loss(logits, teachers, 1e4), logits)
    away = logits.detach() - teachers.mean(0)
    expected = (away - away.mean(-1, keepdim=True)) / (logits.shape[1] * logits.shape[0])
    torch.testing.assert_close(gradient, expected, rtol=5e-3, atol=1e-5)


def test_the_gradient_is_that_of_finite_differences() -> None:
    logits, teachers = _tiny.logits(seed=1).requires_grad_(), _tiny.logits(seed=2, members=3)
    assert torch.autograd.gradcheck(lambda z: distillation_loss(z, teachers, 4.0), (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_give_a_finite_loss(dtype: torch.dtype) -> None:
    signs = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, 1.0]], dtype=dtype)
    logits = (1e4 * signs).requires_grad_()
    loss = distillation_loss(logits, -1e4 * signs[None], 4.0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@torch.no_grad()
def test_the_prediction_is_the_students_at_temperature_one() -> None:
    method = EnsembleDistillation(_tiny.ensemble(2), _tiny.member(9))
    found = _tiny.predict(method, _tiny.images())
    assert found.equal(_tiny.member(9)(_tiny.images()).log_softmax(-1))
    assert method.model() is method.student


def test_a_student_of_the_teachers_kind_learns_their_mean() -> None:
    """Linear members of one class boundary apart: the student can agree with them, and does."""
    with _tiny.seeded(0):
        members = [nn.Sequential(nn.Flatten(), nn.Linear(12, 3)) for _ in range(3)]
        student = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    images = torch.rand(64, 3, 2, 2, generator=_tiny.generator())
    method = EnsembleDistillation(Ensemble(members), student)
    mean = torch.stack([member(images).softmax(-1) for member in members]).mean(0)

    def away() -> float:
        return (_tiny.predict(method, images).exp() - mean).abs().max().item()

    assert away() > 0.2
    eb.fit(method, images, eb.FitConfig(epochs=100, batch_size=64, lr=0.5, optimizer="sgd"))
    assert away() < 0.03


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan])
def test_a_senseless_temperature_is_refused(tau: float) -> None:
    with pytest.raises(ValueError, match=f"tau is {tau};"):
        EnsembleDistillation(_tiny.ensemble(2), _tiny.member(9), tau=tau)


def test_with_an_average_the_student_ends_with_averaged_weights() -> None:
    """With a decay of 0 and with none at all the steps are the same; between them lies the average."""
    data, ends = _tiny.data().without_labels(), {}
    for decay in (None, 0.0, 0.9):
        student = _tiny.member(9)
        ema = None if decay is None else EmaRule(decay, warmup=False)
        method = EnsembleDistillation(_tiny.ensemble(3), student, tau=1.0, ema=ema)
        eb.fit(method, data, _tiny.FEW_STEPS)
        ends[decay] = _tiny.state(student)
    start, last = _tiny.state(_tiny.member(9)), ends[None]
    for name, weight in last.items():
        torch.testing.assert_close(ends[0.0][name], weight)
    moved, averaged = (
        sum((ends[decay][name] - start[name]).square().sum() for name in start) for decay in (None, 0.9)
    )
    assert 0 < averaged < moved
    assert "ema" not in EnsembleDistillation(_tiny.ensemble(3), student).describe()  # as runs before had it


def test_a_student_may_return_an_object_with_logits() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _tiny.member(9)

        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.net(images)}

    student = Wrapped()
    plain, wrapped = (EnsembleDistillation(_tiny.ensemble(3), each) for each in (student.net, student))
    assert wrapped.loss(_tiny.batch()).equal(plain.loss(_tiny.batch()))
