"""Methods that keep the members' distribution: samples have the mean and covariance that is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import _tiny
from ensbridge.bridge.sampler import sample
from ensbridge.bridge.schedule import BridgeSchedule
from ensbridge.methods import (
    AbstractMethod,
    Bridge,
    BridgeConfig,
    Flow,
    FlowConfig,
    FlowMatching,
    LatentFactorConfig,
    LatentFactorDistillation,
    StepDistillation,
)
from ensbridge.methods.latent_factor import expected_nll, factor_posterior
from ensbridge.models.ensemble import SampledEnsemble, random_member

MEAN = torch.tensor([0.5, -1.0, 0.5], dtype=torch.float64)
FACTOR = torch.tensor([[0.9, 0.0], [-0.3, 0.6], [0.2, -0.5]], dtype=torch.float64)
COVARIANCE = FACTOR @ FACTOR.T + 0.05 * torch.eye(3, dtype=torch.float64)
DRAWS = 20_000


def conditional_mean(z: Tensor, slope: float, offset: Tensor, noise: float) -> Tensor:
    """E[X | slope·X + offset + N(0, noise) = z] for X ~ N(MEAN, COVARIANCE)."""
    gain = slope * COVARIANCE @ torch.linalg.inv(slope**2 * COVARIANCE + noise * torch.eye(3).double())
    return MEAN + (z - offset - slope * MEAN) @ gain.T


def assert_moments(draws: Tensor, tolerance: float) -> None:
    assert draws.mean(0).allclose(MEAN, atol=tolerance)
    assert draws.T.cov().allclose(COVARIANCE, atol=tolerance)


@pytest.mark.parametrize("beta", [1e-2, 1.0])
def test_samples_of_the_bridge_have_the_members_mean_and_covariance(beta: float) -> None:
    """With the exact score E[(Z_t - Z_0) / σ_t | Z_t] of a Gaussian Z_0, as the time steps become small."""
    z1 = torch.tensor([2.0, 0.0, -2.0], dtype=torch.float64)
    schedule = BridgeSchedule(beta=beta, num_steps=300)

    def score(_: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        now = t[0].item()
        z0 = MEAN.expand_as(z_t)  # at t = 1 nothing is known of Z_0
        if now < 1:
            z0 = conditional_mean(z_t, 1 - now, now * z1, beta * now * (1 - now))
        return (z_t - z0) / math.sqrt(beta * now)

    # Where β is small, the noise that decides between members is all drawn close to t = 1.
    late = 1 - torch.logspace(-6, -2, 150, dtype=torch.float64)
    grid = sorted({*schedule.times().tolist(), *late.tolist()})
    draws = sample(score, schedule, z1.expand(DRAWS, 3), z1, grid, _tiny.generator())[-1]
    assert_moments(draws, 0.04)


def test_a_single_step_has_no_spread() -> None:
    bridge = Bridge(
        _tiny.score("informative"), BridgeConfig(z_input="informative", beta=1.0), (0.0, 1.0)
    ).eval()
    h, logits = torch.rand(4, 8, 8, 8), torch.randn(4, 3)
    draws = bridge.draw(h, logits, 3, _tiny.generator())
    assert draws[0].equal(draws[1])


def test_a_flow_has_the_members_mean_and_covariance() -> None:
    def velocity(_: Tensor, x: Tensor, t: Tensor) -> Tensor:
        now = t[0].item()
        x1 = conditional_mean(x, now, torch.zeros(3).double(), (1 - now) ** 2)
        return (x1 - x) / (1 - now)

    flow = Flow(velocity, FlowConfig(num_steps=200))
    nothing = torch.zeros(DRAWS, 3, dtype=torch.float64)
    assert_moments(flow.draw(nothing, nothing, 1, _tiny.generator())[0], 0.04)


def test_the_e_step_is_gaussian_conditioning() -> None:
    """Against the joint Gaussian of latent factors and observations, conditioned by brute force."""
    draws = _tiny.generator(3)
    factor = torch.randn(4, 3, 2, generator=draws, dtype=torch.float64)
    residual = torch.randn(5, 4, 3, generator=draws, dtype=torch.float64)
    noise = torch.tensor(0.3, dtype=torch.float64)
    mean, covariance = factor_posterior(residual, factor, noise)
    stacked = factor.reshape(12, 2)
    observed = stacked @ stacked.T + noise * torch.eye(12, dtype=torch.float64)
    gain = stacked.T @ torch.linalg.inv(observed)
    assert mean.allclose(residual.reshape(5, 12) @ gain.T)
    assert covariance.allclose(torch.eye(2, dtype=torch.float64) - gain @ stacked)


def test_the_latent_factor_model_ends_at_the_maximum_likelihood() -> None:
    """For one image it is probabilistic PCA, whose maximum is known from the covariance's eigenvalues."""
    draws = _tiny.generator(1)
    logits = (
        MEAN + torch.randn(300, 3, generator=draws, dtype=torch.float64) @ torch.linalg.cholesky(COVARIANCE).T
    )
    mean = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    factor = (0.3 * torch.randn(1, 3, 1, generator=draws, dtype=torch.float64)).requires_grad_()
    log_noise = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([mean, factor, log_noise], lr=0.03)
    for _ in range(800):
        optimizer.zero_grad()
        expected_nll(logits[:, None], mean, factor, log_noise).backward()
        optimizer.step()
    values, vectors = torch.linalg.eigh(logits.T.cov(correction=0))
    noise = values[:2].mean()
    assert mean[0].allclose(logits.mean(0), atol=0.01)
    assert log_noise.exp().item() == pytest.approx(noise.item(), rel=0.01)
    best = (values[2] - noise) * vectors[:, 2:] @ vectors[:, 2:].T
    assert (factor[0] @ factor[0].T).allclose(best, atol=0.01)


def test_a_random_member_is_one_of_them_for_each_image() -> None:
    logits = _tiny.logits(500, members=3)
    drawn = random_member(logits, _tiny.generator())
    centred = logits - logits.mean(-1, keepdim=True)
    which = (drawn == centred).all(-1)
    assert which.sum(0).eq(1).all()
    assert which.double().mean(1).allclose(torch.full((3,), 1 / 3).double(), atol=0.07)


def test_towards_a_member_the_mean_loss_is_that_towards_each() -> None:
    """Averaged over draws, the regression on random members is the mean of the regressions on each."""
    ensemble, seeds = _tiny.ensemble(2), range(150)
    config = BridgeConfig(temperature=_tiny.CONSTANT, num_steps=1)
    drawn = _tiny.bridge_to(ensemble, draw="member", config=config)
    with torch.no_grad():
        found = sum(drawn.loss(_tiny.batch(seed)).item() for seed in seeds) / len(seeds)
        alone = []
        for target in (0, 1):
            bridge = _tiny.bridge_to(ensemble, target=(target,), config=config)
            alone.append(bridge.loss(_tiny.batch()).item())
    assert found == pytest.approx(sum(alone) / 2, rel=0.04)


def test_samples_are_repeatable_and_their_mean_is_the_prediction() -> None:
    method = _tiny.bridge_to(
        _tiny.ensemble(), draw="member", config=BridgeConfig(beta=1.0, z_input="informative")
    )
    model = method.model().eval()
    assert isinstance(model, SampledEnsemble)
    images = _tiny.images()
    with torch.no_grad():
        draws = model.member_logits(images)
        assert draws.shape == (8, 6, 3)
        assert not draws[0].equal(draws[1])
        assert model.member_logits(images).equal(draws)
        assert model(images).softmax(-1).allclose(draws.softmax(-1).mean(0), atol=1e-6)


def test_what_cannot_carry_a_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="'member' with loss='kl'"):
        _tiny.bridge_to(_tiny.ensemble(), draw="member", loss="kl")
    with pytest.raises(ValueError, match="draw is 'member'"):
        StepDistillation(_tiny.bridge_to(_tiny.ensemble(), draw="member"))
    with pytest.raises(ValueError, match="samples is 0"):
        SampledEnsemble(_tiny.member(), Bridge(_tiny.score()), _tiny.FEATURE, samples=0)
    with pytest.raises(ValueError, match="num_steps is 0"):
        FlowConfig(num_steps=0)
    with pytest.raises(ValueError, match="rank is 0"):
        LatentFactorConfig(rank=0)


@pytest.mark.parametrize("kind", ["bridge", "flow", "latent factor"])
def test_training_brings_samples_nearer_to_the_members(kind: str) -> None:
    from ensbridge.training import FitConfig, fit

    ensemble, data = _tiny.ensemble(), _tiny.images(48)
    if kind == "bridge":
        config = BridgeConfig(beta=1.0, z_input="informative", ema=0.9)
        method: AbstractMethod = _tiny.bridge_to(ensemble, draw="member", config=config)
    elif kind == "latent factor":
        net, rank = _tiny.score(classes=9), LatentFactorConfig(rank=2, ema=0.9)
        method = LatentFactorDistillation(ensemble, net, _tiny.FEATURE, 3, rank)
    else:
        method = FlowMatching(ensemble, _tiny.score("informative"), _tiny.FEATURE, FlowConfig(ema=0.9))

    def distance() -> float:
        with torch.no_grad():
            model = method.model().eval()
            assert isinstance(model, SampledEnsemble)
            mean = model.member_logits(data).mean(0)
            want = torch.stack([member(data) for member in ensemble.members]).mean(0)
            return (mean - (want - want.mean(-1, keepdim=True))).square().mean().item()

    before = distance()
    fit(method, data, FitConfig(epochs=20, batch_size=16, lr=1e-2))
    assert distance() < before / 2
