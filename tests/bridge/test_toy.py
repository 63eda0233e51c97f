"""Bridges whose answer is known: points in a plane, members with known logits, a mixture of two ends."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.bridge.bridge import Bridge
from ensbridge.bridge.sampler import sample
from ensbridge.methods import BridgeConfig, DiffusionBridge

# Three members that see a point (x, y) of the square [-1, 1]² and lean towards three different corners.
WEIGHTS = np.array(
    [
        [[4.0, 0.0], [-2.0, 3.5], [-2.0, -3.5]],
        [[1.0, 4.0], [-4.0, 0.0], [3.0, -4.0]],
        [[0.0, -3.0], [3.0, 3.0], [-3.0, 0.0]],
    ]
)
TEMPERATURE = 2.0


class Member(nn.Module):
    """A linear classifier of points; its `point` is the feature that bridges read."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None = None) -> None:
        super().__init__()
        self.point = nn.Flatten()
        self.head = nn.Linear(2, 3)
        with torch.no_grad():
            self.head.weight.copy_(torch.from_numpy(weight))
            self.head.bias.copy_(torch.zeros(3) if bias is None else torch.from_numpy(bias))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.point(images))


class PlaneScore(nn.Module):
    """A small score ε(h, z_t, t) that is no ScoreNet: `sees` is "h" or "z"."""

    def __init__(self, sees: str) -> None:
        super().__init__()
        self.sees = sees
        self.mlp = nn.Sequential(
            nn.Linear(3 if sees == "h" else 4, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 3)
        )

    def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        return self.mlp(torch.cat([h if self.sees == "h" else z_t, t[:, None]], dim=1))


def points(count: int, seed: int) -> Tensor:
    """Random points of the square as images (count, 2, 1, 1)."""
    return 2 * torch.rand(count, 2, 1, 1, generator=_tiny.generator(seed)) - 1


def centred(z: np.ndarray) -> np.ndarray:
    return z - z.mean(-1, keepdims=True)


def error(found: Tensor, truth: np.ndarray, start: np.ndarray) -> float:
    """What is left of the way from Z_1 to the true Z_0, as a share of it."""
    return float(np.linalg.norm(found.numpy() - truth) / np.linalg.norm(start - truth))


def trained(method: DiffusionBridge, steps: int, lr: float) -> DiffusionBridge:
    eb.fit(method, points(2048, 0), eb.FitConfig(epochs=steps / 16, batch_size=128, lr=lr))
    return method


CONFIG = BridgeConfig(temperature=eb.TemperatureLaw(TEMPERATURE, spread=0.0))
UNSEEN = points(500, 9)
XY = UNSEEN.flatten(1).double().numpy()


@pytest.fixture(scope="module")
def plane_bridge() -> DiffusionBridge:
    """A bridge trained with the paper's loss to three linear members."""
    with _tiny.seeded(0):
        score = PlaneScore("h")
    members = eb.Ensemble([Member(weight) for weight in WEIGHTS])
    return trained(DiffusionBridge(members, score, "point", config=CONFIG), steps=600, lr=3e-2)


def true_plane_ends() -> tuple[np.ndarray, np.ndarray]:
    """Z_0 and Z_1 of the unseen points, straight from the members' weights."""
    logits = np.einsum("mkd,bd->mbk", WEIGHTS, XY)
    mean = scipy.special.softmax(logits, axis=-1).mean(0)
    return centred(np.log(mean)), centred(logits[0] / TEMPERATURE)


def test_a_trained_bridge_recovers_the_known_ensemble(plane_bridge: DiffusionBridge) -> None:
    z0, z1 = true_plane_ends()
    logits = plane_bridge.ensemble.source(UNSEEN).detach()
    found = plane_bridge.bridge(UNSEEN.flatten(1), logits).detach()
    assert error(found, z0, z1) < 0.08
    # The same through the method's model, as probabilities.
    truth = scipy.special.softmax(z0, axis=-1)
    np.testing.assert_allclose(_tiny.predict(plane_bridge, UNSEEN).exp().numpy(), truth, rtol=0, atol=0.08)


def test_one_distilled_step_lands_where_many_steps_land(plane_bridge: DiffusionBridge) -> None:
    teacher, (z0, z1) = plane_bridge.bridge, true_plane_ends()
    before = copy.deepcopy(teacher.state_dict())
    feature, logits = UNSEEN.flatten(1), plane_bridge.ensemble.source(UNSEEN).detach()
    many = teacher(feature, logits).detach()
    undistilled = error(teacher.one_step()(feature, logits).detach(), many.numpy(), z1)
    for mode, weight in (("direct", 1.0), ("progressive", 0.5)):
        config = eb.FitConfig(epochs=8, batch_size=128, lr=2e-3)
        student = eb.distill_steps(plane_bridge, points(2048, 0), config, mode=mode, weight=weight)
        assert (teacher.steps, student.bridge.steps) == (5, 1)
        one = student.bridge(feature, logits).detach()
        assert error(one, many.numpy(), z1) < min(0.035, 0.75 * undistilled)
        assert error(one, z0, z1) < 0.08
    assert all(tensor.equal(before[name]) for name, tensor in teacher.state_dict().items())


def test_a_bridge_that_sees_only_its_state_learns_an_affine_map() -> None:
    """Z_0 = A Z_1 + b: the score has nothing but Z_t and t to know it from."""
    matrix = np.array([[0.2, -0.9, 0.0], [0.8, 0.3, 0.1], [0.0, 0.3, 1.2]])
    shift = np.array([1.0, -0.5, 0.2])
    # The second member says A z_1/T + b of the first one's centred logits z_1.
    source = centred(WEIGHTS[0].T).T
    members = [Member(source), Member(matrix @ source / TEMPERATURE, shift)]
    with _tiny.seeded(1):
        score = PlaneScore("z")
    method = DiffusionBridge(eb.Ensemble(members), score, "point", target=(1,), config=CONFIG)
    trained(method, steps=500, lr=5e-3)
    z1 = XY @ source.T / TEMPERATURE
    z0 = centred(z1 @ matrix.T + shift)
    found = method.bridge(torch.zeros(500, 2), members[0](UNSEEN).detach()).detach()
    assert error(found, z0, z1) < 0.06


def test_an_exact_score_of_a_random_end_reproduces_its_distribution() -> None:
    """Z_0 is +1 or -1 by chance and nobody knows which: noisy samples must end on each in its share.

    Given Z_t the chance of +1 follows from Bayes and q(Z_t | Z_0, Z_1), so the exact score is known.
    """
    share, beta, z1, samples = 0.7, 4.0, 0.5, 20_000
    schedule = eb.BridgeSchedule(beta, num_steps=100)

    def score(h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        time = t[:, None].clamp(max=1 - 1e-9)
        # log q(z | +1) - log q(z | -1) with means ±(1 - t) + t z1 and variance beta t (1 - t)
        log_odds = math.log(share / (1 - share)) + 2 * (z_t - time * z1) / (beta * time)
        return (z_t - torch.tanh(log_odds / 2)) / (beta * time).sqrt()

    start = torch.full((samples, 1), z1, dtype=torch.float64)
    end = sample(score, schedule, start, start, generator=_tiny.generator())[-1]
    assert (end.abs() - 1).abs().mean() < 0.01
    found = (end > 0).double().mean().item()
    assert abs(found - share) < 4.5 * math.sqrt(share * (1 - share) / samples)


def test_a_bridge_of_any_module_keeps_its_score() -> None:
    score = PlaneScore("h")
    bridge = Bridge(score)
    assert bridge.score is score
    assert bridge.one_step().score is not score
