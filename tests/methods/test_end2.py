"""Proxy-EnD²: the Dirichlet's terms against torch.distributions and numeric integrals; the guards."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from scipy.integrate import dblquad, quad
from torch import Tensor, nn
from torch.distributions import Dirichlet, kl_divergence

import _tiny
import ensbridge as eb
from ensbridge.methods import DirichletClassifier, ProxyEnD2
from ensbridge.methods.end2 import (
    S_MAX,
    concentrations,
    end2_loss,
    expected_log,
    kl_to_flat,
    proxy_precision,
)
from ensbridge.models.ensemble import Ensemble

F64 = torch.float64
ALPHAS_2 = [[1.5, 3.0], [2.0, 2.0], [6.5, 1.2]]
ALPHAS_3 = [[1.5, 3.0, 2.2], [4.0, 1.3, 2.0]]


def density(alpha: list[float], p: list[float]) -> float:
    """Dir(p; α), from its definition."""
    if min(p) <= 0:
        return 0.0
    log_beta = sum(map(math.lgamma, alpha)) - math.lgamma(sum(alpha))
    return math.exp(sum((a - 1) * math.log(x) for a, x in zip(alpha, p, strict=True)) - log_beta)


def integral(alpha: list[float], value: Any) -> float:
    """∫ Dir(p; α)·value(p) dp over the simplex of two or three classes."""
    if len(alpha) == 2:
        found = quad(lambda x: density(alpha, [x, 1 - x]) * value([x, 1 - x]), 0, 1, epsabs=1e-9)
    else:
        found = dblquad(
            lambda y, x: (
                density(alpha, [x, y, 1 - x - y]) * value([x, y, 1 - x - y])
                if min(x, y, 1 - x - y) > 0
                else 0.0
            ),
            0,
            1,
            0,
            lambda x: 1 - x,
            epsabs=1e-6,
            epsrel=1e-6,
        )
    return found[0]


def kl_by_integral(alpha: list[float], beta: list[float]) -> float:
    return integral(alpha, lambda p: math.log(density(alpha, p) / density(beta, p)) if min(p) > 0 else 0.0)


def proxy_by_hand(teachers: Tensor, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """π̄ (B, K) and s (B,), one image at a time."""
    pi = scipy.special.softmax(teachers.numpy() / tau, axis=-1)
    mean = pi.mean(0)
    members, images, classes = pi.shape
    s = np.empty(images)
    for b in range(images):
        spread = 0.0
        for k in range(classes):
            spread += mean[b, k] * (np.log(mean[b, k]) - sum(np.log(pi[:, b, k])) / members)
        s[b] = (classes - 1) / (2 * spread)
    return mean, s


# Term by term


def test_the_kl_to_the_flat_dirichlet_is_torchs() -> None:
    for classes in (2, 3, 10):
        draws = torch.rand(20, classes, generator=_tiny.generator(), dtype=F64)
        alpha = 1 + (8 * draws - 4).exp()
        expected = kl_divergence(Dirichlet(alpha), Dirichlet(torch.ones_like(alpha)))
        torch.testing.assert_close(kl_to_flat(alpha), expected, rtol=1e-11, atol=1e-11)
    flat = torch.ones(1, 5, dtype=F64)
    assert kl_to_flat(flat).abs().item() < 1e-14


@pytest.mark.parametrize("alpha", [*ALPHAS_2, ALPHAS_3[0]])
def test_the_expected_logarithm_and_the_kl_are_integrals(alpha: list[float]) -> None:
    tensor = torch.tensor([alpha], dtype=F64)
    assert integral(alpha, lambda p: 1.0) == pytest.approx(1, abs=1e-6)
    for k in range(len(alpha)):
        found = integral(alpha, lambda p, k=k: math.log(p[k]) if p[k] > 0 else 0.0)
        assert expected_log(tensor)[0, k].item() == pytest.approx(found, abs=1e-5)
    assert kl_to_flat(tensor).item() == pytest.approx(kl_by_integral(alpha, [1.0] * len(alpha)), abs=1e-5)


def test_the_precision_is_its_formula() -> None:
    for members, tau in ((2, 1.0), (5, 2.0)):
        teachers = _tiny.logits(8, seed=3, members=members)
        found = proxy_precision((teachers / tau).log_softmax(-1))
        np.testing.assert_allclose(found.numpy(), proxy_by_hand(teachers, tau)[1], rtol=1e-11)
    near = _tiny.logits(8, seed=3) + 0.1 * _tiny.logits(8, seed=4, members=3)
    assert (proxy_precision(near.log_softmax(-1)) > 10 * found).all()  # those who agree are precise


# The whole loss


@pytest.mark.parametrize(("alphas"), [ALPHAS_2, ALPHAS_3])
def test_with_divisor_s_it_is_the_reverse_kl_to_the_proxy_but_for_a_constant(alphas: list[Any]) -> None:
    """KL(Dir(α) ‖ Dir(1 + s·π̄)) = s·loss + log B(1 + s·π̄) - log B(1)."""
    classes, tau = len(alphas[0]), 2.0
    teachers = 1.5 * torch.randn(3, 1, classes, generator=_tiny.generator(5), dtype=F64)
    mean, s = proxy_by_hand(teachers, tau)
    beta = (1 + s[0] * mean[0]).tolist()
    constant = sum(map(math.lgamma, beta)) - math.lgamma(sum(beta)) + math.lgamma(classes)
    for alpha in alphas:
        logits = tau * (torch.tensor([alpha], dtype=F64) - 1).log()
        scaled = s[0] * end2_loss(logits, teachers, tau, "s").item()
        pair = [Dirichlet(torch.tensor(each, dtype=F64)) for each in (alpha, beta)]
        assert scaled + constant == pytest.approx(kl_divergence(*pair).item(), rel=1e-10)
        assert scaled + constant == pytest.approx(kl_by_integral(alpha, beta), abs=2e-5)


def test_with_divisor_s_the_proxy_itself_is_the_minimum_and_with_beta0_it_is_not() -> None:
    tau, teachers = 2.0, _tiny.logits(seed=3, members=4)
    mean, s = proxy_by_hand(teachers, tau)
    logits = (tau * torch.from_numpy(np.log(s[:, None] * mean))).requires_grad_()
    torch.testing.assert_close(concentrations(logits, tau), torch.from_numpy(1 + s[:, None] * mean))
    (exact,) = torch.autograd.grad(end2_loss(logits, teachers, tau, "s"), logits)
    assert exact.abs().max() < 1e-12
    (papers,) = torch.autograd.grad(end2_loss(logits, teachers, tau, "beta0"), logits)
    assert papers.abs().max() > 1e-3


@pytest.mark.parametrize(("divisor", "more"), [("beta0", 3), ("s", 0)])
def test_the_loss_is_the_papers_form(divisor: Any, more: int) -> None:
    tau, logits, teachers = 2.0, _tiny.logits(seed=1), _tiny.logits(seed=2, members=3)
    mean, s = proxy_by_hand(teachers, tau)
    alpha = 1 + np.exp(logits.numpy() / tau)
    total = alpha.sum(-1, keepdims=True)
    logs = scipy.special.psi(alpha) - scipy.special.psi(total)
    flat = scipy.special.gammaln(total[:, 0]) - scipy.special.gammaln(alpha).sum(-1) - math.log(2)
    flat = flat + ((alpha - 1) * logs).sum(-1)
    expected = (-(mean * logs).sum(-1) + flat / (s + more)).mean()
    assert end2_loss(logits, teachers, tau, divisor).item() == pytest.approx(expected, rel=1e-11)
    if divisor == "beta0":
        assert end2_loss(logits, teachers, tau).item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("divisor", ["beta0", "s"])
def test_the_gradient_is_that_of_finite_differences(divisor: Any) -> None:
    logits, teachers = _tiny.logits(seed=1).requires_grad_(), _tiny.logits(seed=2, members=3)

    def loss(z: Tensor) -> Tensor:
        return end2_loss(z, teachers, 2.0, divisor)

    assert torch.autograd.gradcheck(loss, (logits,))
    (gradient,) = torch.autograd.grad(loss(logits), logits)
    step, plain = 1e-5, logits.detach()
    for b in range(plain.shape[0]):
        for k in range(plain.shape[1]):
            unit = torch.zeros_like(plain)
            unit[b, k] = step
            slope = (loss(plain + unit) - loss(plain - unit)).item() / (2 * step)
            assert gradient[b, k].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_float32_is_near_float64_where_students_go() -> None:
    teachers = _tiny.logits(50, seed=2, members=3)
    for scale in (1.0, 5.0, 10.0):  # logits up to about 30, α up to about a million
        logits = _tiny.logits(50, seed=1, scale=scale).requires_grad_()
        single = logits.detach().float().requires_grad_()
        exact, found = end2_loss(logits, teachers, 2.0), end2_loss(single, teachers.float(), 2.0)
        assert found.item() == pytest.approx(exact.item(), rel=1e-3)
        (expected,), (gradient,) = torch.autograd.grad(exact, logits), torch.autograd.grad(found, single)
        torch.testing.assert_close(gradient.double(), expected, rtol=0.02, atol=2e-3)


# Guards


CERTAIN = [[1e4, 0.0, 0.0]]
EXTREME: dict[str, list[list[list[float]]]] = {
    "agreeing": [[[1.0, 2.0, -1.0]]] * 3,
    "agreeing and certain": [CERTAIN] * 3,
    "opposed": [[[1e4, -1e4, -1e4]], [[-1e4, 1e4, -1e4]], [[-1e4, -1e4, 1e4]]],
    "one certain": [CERTAIN, [[0.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]],
    "flat": [[[0.0, 0.0, 0.0]]] * 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", ["beta0", "s"])
@pytest.mark.parametrize("case", EXTREME)
def test_extreme_members_and_students_leave_loss_and_gradients_finite(
    case: str, divisor: Any, dtype: torch.dtype
) -> None:
    teachers = torch.tensor(EXTREME[case], dtype=dtype)
    s = proxy_precision((teachers / 2).log_softmax(-1))
    assert s.isfinite().all()
    assert (s > 0).all()
    assert (s <= S_MAX * (1 + 1e-5)).all()
    if case in ("agreeing", "agreeing and certain", "flat"):
        assert s.item() == pytest.approx(S_MAX, rel=1e-5)
    for scale in (0.0, 1.0, 30.0, 1e4):
        logits = (scale * torch.tensor([[1.0, -1.0, 0.5]], dtype=dtype)).requires_grad_()
        loss = end2_loss(logits, teachers, 2.0, divisor)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.isfinite(), (scale, loss)
        assert gradient.isfinite().all(), (scale, gradient)


# Predictions


@torch.no_grad()
def test_both_predictions_are_their_formulas() -> None:
    net, images = _tiny.member(4).double(), _tiny.images().double()
    logits = net(images).numpy()
    for tau in (1.0, 2.0):
        alpha = 1 + np.exp(logits / tau)
        mean = DirichletClassifier(net, tau)(images).exp()
        np.testing.assert_allclose(mean.numpy(), alpha / alpha.sum(-1, keepdims=True), rtol=1e-12)
        plain = DirichletClassifier(net, tau, "softmax")(images)
        np.testing.assert_allclose(plain.numpy(), logits, rtol=0, atol=0)
        for predict, expected in (("dirichlet", mean), ("softmax", plain.softmax(-1))):
            method = ProxyEnD2(_tiny.ensemble(2), net, tau=tau, predict=predict)  # type: ignore[arg-type]
            torch.testing.assert_close(_tiny.predict(method, images).exp(), expected)
    assert ProxyEnD2(_tiny.ensemble(2), net).model().predict == "dirichlet"
    assert plain.softmax(-1).max() > mean.max()  # the softmax is the surer one


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("predict", ["dirichlet", "softmax"])
def test_extreme_logits_give_normalised_predictions(predict: Any, dtype: torch.dtype) -> None:
    class Says(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            rows = [[1e4, -1e4, 0.0], [1e4, 1e4, 1e4], [-1e4, -1e4, -1e4], [80.0, 120.0, -3.0]]
            return torch.tensor(rows, dtype=dtype)

    log_probs = _tiny.predict(ProxyEnD2(_tiny.ensemble(2), Says(), predict=predict), _tiny.images(4))
    assert log_probs.isfinite().all()
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(4, dtype=dtype), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_probs[1].exp(), torch.full((3,), 1 / 3, dtype=dtype))


def test_the_methods_loss_is_that_of_its_networks_and_switches() -> None:
    ensemble, student = _tiny.ensemble(3), _tiny.member(9)
    logits, teachers = student(_tiny.images()), ensemble.member_logits(_tiny.images())
    for divisor in ("beta0", "s"):
        method = ProxyEnD2(ensemble, student, tau=1.5, divisor=divisor)  # type: ignore[arg-type]
        found = method.loss(_tiny.batch())
        assert found.equal(end2_loss(logits, teachers, 1.5, divisor))  # type: ignore[arg-type]
    assert ProxyEnD2(ensemble, student).loss(_tiny.batch()).equal(end2_loss(logits, teachers, 2.0, "beta0"))


def test_a_student_learns_the_proxys_mean_and_precision() -> None:
    with _tiny.seeded(0):
        members = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(3)]
        student = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    image = torch.ones(8, 1, 2, 2)  # eight times the same: its proxy can be learnt exactly
    method = ProxyEnD2(Ensemble(members), student, divisor="s")
    eb.fit(method, image, eb.FitConfig(epochs=600, batch_size=8, lr=0.1))
    with torch.no_grad():
        teachers = torch.stack([member(image[:1]) for member in members])
        mean, s = proxy_by_hand(teachers.double(), 2.0)
        alpha = concentrations(student(image[:1]), 2.0)
    np.testing.assert_allclose(alpha.numpy(), 1 + s[:, None] * mean, rtol=0.02)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tau": 0.0}, r"tau.*0\.0"),
        ({"predict": "mean"}, r"predict.*'mean'.*'dirichlet' or 'softmax'"),
        ({"divisor": "K"}, r"divisor.*'K'.*'beta0' or 's'"),
    ],
)
def test_senseless_switches_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ProxyEnD2(_tiny.ensemble(2), _tiny.member(9), **arguments)


def test_one_member_has_no_spread() -> None:
    with pytest.raises(ValueError, match=r"1 member.*at least 2"):
        ProxyEnD2(_tiny.ensemble(1), _tiny.member(9))


def test_a_student_far_too_sure_is_measured_right_and_finds_its_way_back() -> None:
    teachers = torch.tensor([[[2.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]]])
    exact = end2_loss(torch.tensor([[40.0, 0.0, 0.0]], dtype=torch.float64), teachers.double(), tau=2.0)
    assert end2_loss(torch.tensor([[40.0, 0.0, 0.0]]), teachers, tau=2.0).item() == pytest.approx(
        exact.item()
    )
    logits = torch.tensor([[120.0, 0.0, 0.0]], requires_grad=True)  # beyond what α can hold
    end2_loss(logits, teachers, tau=2.0).backward()
    assert logits.grad is not None
    assert logits.grad[0, 0] > 0
