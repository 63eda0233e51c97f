"""The Bezier curve: its ends, its centre and every place between are what the formula says; it goes round
the barrier that the straight line climbs.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.data import ImageSet
from ensbridge.methods import Batch, BezierCurve, DeepEnsemble
from ensbridge.models import ResNet


@pytest.fixture
def ends() -> list[nn.Module]:
    return [_tiny.member(0), _tiny.member(1)]


def moved(curve: BezierCurve) -> BezierCurve:
    """With a control point away from the middle, as after training."""
    draws = _tiny.generator(5)
    with torch.no_grad():
        for weight in curve.student.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=draws)
    return curve


def test_what_is_compiled_is_what_the_loss_runs(ends: list[nn.Module]) -> None:
    curve = BezierCurve(*ends)
    (network,) = curve.networks()
    network._compiled_call_impl = lambda images, alpha: alpha * torch.zeros(len(images), 3)
    batch = Batch(_tiny.images(), torch.zeros(len(_tiny.images()), dtype=torch.long), _tiny.generator(0))
    assert curve.loss(batch).item() == pytest.approx(math.log(3))


# Places of the curve


def test_its_ends_are_the_members_to_the_bit(ends: list[nn.Module]) -> None:
    curve = moved(BezierCurve(*ends))
    for alpha, end in zip((0.0, 1.0), ends, strict=True):
        assert _tiny.same(_tiny.state(curve.at(alpha)), _tiny.state(end))
        assert curve.at(alpha)(_tiny.images()).equal(end(_tiny.images()))
        assert curve.at(int(alpha))(_tiny.images()).equal(end(_tiny.images()))


def test_its_centre_is_a_quarter_a_half_and_a_quarter(ends: list[nn.Module]) -> None:
    curve = moved(BezierCurve(*ends))
    start, end, control = (_tiny.state(net) for net in (*ends, curve.student))
    for name, weight in curve.at(0.5).state_dict().items():
        expected = start[name].double() / 4 + control[name].double() / 2 + end[name].double() / 4
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)
    assert _tiny.same(_tiny.state(curve.model()), _tiny.state(curve.at(0.5)))


@pytest.mark.parametrize("alpha", [0.1, 0.37, 0.8])
def test_any_place_is_the_stated_combination(alpha: float, ends: list[nn.Module]) -> None:
    ends = [end.double() for end in ends]
    curve = moved(BezierCurve(*ends))
    start, end, control = (_tiny.state(net) for net in (*ends, curve.student))
    shares = (1 - alpha) ** 2, 2 * alpha * (1 - alpha), alpha**2
    assert sum(shares) == pytest.approx(1)
    for name, weight in curve.at(alpha).state_dict().items():
        expected = shares[0] * start[name] + shares[1] * control[name] + shares[2] * end[name]
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)


def test_it_starts_as_the_straight_line(ends: list[nn.Module]) -> None:
    curve = BezierCurve(*ends)
    start, end = (_tiny.state(net) for net in ends)
    assert all(
        weight.equal((start[name] + end[name]) / 2) for name, weight in curve.student.named_parameters()
    )
    for alpha in (0.25, 0.5, 0.9):
        for name, weight in curve.at(alpha).state_dict().items():
            line = (1 - alpha) * start[name] + alpha * end[name]
            torch.testing.assert_close(weight, line, rtol=1e-5, atol=1e-6)


def test_a_place_is_a_network_of_its_own(ends: list[nn.Module]) -> None:
    curve = BezierCurve(*ends)
    before = [_tiny.state(net) for net in (*ends, curve.student)]
    place = curve.at(0.0).train()
    with torch.no_grad():
        for weight in place.parameters():
            weight.zero_()
    assert all(
        _tiny.same(_tiny.state(net), state) for net, state in zip((*ends, curve.student), before, strict=True)
    )
    assert not curve.at(0.5).training
    assert not any(weight.requires_grad for weight in curve.at(0.5).parameters())
    assert all(weight.requires_grad for weight in curve.student.parameters())


@pytest.mark.parametrize("alpha", [-0.1, 1.0001, float("nan")])
def test_outside_its_ends_there_is_nothing(alpha: float, ends: list[nn.Module]) -> None:
    with pytest.raises(ValueError, match=f"alpha.*{alpha}"):
        BezierCurve(*ends).at(alpha)


# Its loss


def test_the_loss_is_the_cross_entropy_at_a_random_place(ends: list[nn.Module]) -> None:
    curve, data = moved(BezierCurve(*ends)), _tiny.data(6)
    assert data.labels is not None
    for seed in range(3):
        alpha = torch.rand((), generator=_tiny.generator(seed)).item()
        expected = F.cross_entropy(curve.at(alpha)(data.images), data.labels)
        found = curve.loss(Batch(data.images, data.labels, _tiny.generator(seed)))
        torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-6)


def test_the_gradient_reaches_the_control_point_with_its_share(ends: list[nn.Module]) -> None:
    """d loss / dφ is 2α(1-α) times the gradient at θ(α)."""
    ends = [end.double() for end in ends]
    curve, data = moved(BezierCurve(*ends)), _tiny.data(6)
    assert data.labels is not None
    images, alpha = data.images.double(), torch.rand((), generator=_tiny.generator(2)).item()
    curve.loss(Batch(images, data.labels, _tiny.generator(2))).backward()
    place = curve.at(alpha).requires_grad_(True)
    F.cross_entropy(place(images), data.labels).backward()
    for control, weight in zip(curve.student.parameters(), place.parameters(), strict=True):
        assert control.grad is not None
        assert weight.grad is not None
        torch.testing.assert_close(control.grad, 2 * alpha * (1 - alpha) * weight.grad, rtol=1e-5, atol=1e-9)
    assert all(weight.grad is None for end in ends for weight in end.parameters())


# A barrier that is known


def points(count: int, seed: int) -> ImageSet:
    """Points of a square: a disc in the middle is one class, opposite corners are the two others."""
    xy = 2 * torch.rand(count, 2, 1, 1, generator=_tiny.generator(seed)) - 1
    x, y = xy[:, 0, 0, 0], xy[:, 1, 0, 0]
    outside = torch.where(x * y > 0, 1, 2)
    return ImageSet(xy, torch.where(x.square() + y.square() < 0.2, 0, outside))


def perceptron(seed: int) -> nn.Module:
    with _tiny.seeded(seed):
        return nn.Sequential(
            nn.Flatten(), nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
        )


def losses_along(curve: BezierCurve, data: ImageSet) -> list[float]:
    """The loss at 21 places from one end to the other."""
    labels = data.labels
    assert labels is not None
    return [F.cross_entropy(curve.at(place / 20)(data.images), labels).item() for place in range(21)]


def test_a_trained_curve_goes_round_the_barrier_of_the_straight_line() -> None:
    data, config = points(512, 0), eb.FitConfig(epochs=50, batch_size=128, lr=1e-2)
    ends = [perceptron(seed) for seed in (0, 1)]
    for end in ends:
        eb.fit(DeepEnsemble([end]), data, config)
    frozen = [_tiny.state(end) for end in ends]
    curve = BezierCurve(*ends)
    line = losses_along(curve, data)
    assert max(line[0], line[-1]) < 0.2  # the ends are good
    assert max(line) > 1.0  # and between them is a barrier
    for end in ends:
        end.zero_grad()
    eb.fit(curve, data, config)
    bent = losses_along(curve, data)
    assert max(bent) < 0.4 * max(line)
    assert (bent[0], bent[-1]) == (line[0], line[-1])
    assert max(abs(b - a) for a, b in pairwise(bent)) < 0.1  # nothing jumps between the places
    # The ends are as they were, and were given no gradient.
    assert all(_tiny.same(_tiny.state(end), state) for end, state in zip(ends, frozen, strict=True))
    assert all(weight.grad is None for end in ends for weight in end.parameters())
    centre = _tiny.predict(curve, data.images)
    assert F.nll_loss(centre, data.labels).item() == pytest.approx(bent[10], rel=1e-4)


# What is refused


def test_networks_that_cannot_be_joined_are_refused() -> None:
    narrow, wide = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.Linear(width, 3)) for width in (4, 5)
    )
    with pytest.raises(ValueError, match="different weights"):
        BezierCurve(narrow, wide)
    with pytest.raises(ValueError, match="one architecture"):
        BezierCurve(_tiny.member(0), _tiny.batch_norm_member(1))


def test_networks_with_running_statistics_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"1\.running_mean"):
        BezierCurve(_tiny.batch_norm_member(0), _tiny.batch_norm_member(1))


def test_a_curve_learns_from_labels(ends: list[nn.Module]) -> None:
    def fit(data: ImageSet | Tensor) -> None:
        eb.fit(BezierCurve(*ends), data, _tiny.FEW_STEPS)

    fit(_tiny.data())
    with pytest.raises(ValueError, match="labels"):
        fit(_tiny.images())


def test_a_description_knows_both_ends_and_their_order(ends: list[nn.Module]) -> None:
    curve, back = BezierCurve(*ends), BezierCurve(*reversed(ends))
    assert curve.describe()["ends"] == back.describe()["ends"][::-1]
    assert curve.describe() != back.describe()
    assert moved(BezierCurve(*ends)).describe() == curve.describe()


def test_ends_that_differ_in_more_than_their_weights_are_refused() -> None:
    tanh, relu = (nn.Sequential(nn.Linear(2, 3), kind()) for kind in (nn.Tanh, nn.ReLU))
    with pytest.raises(ValueError, match="one architecture"):
        BezierCurve(tanh, relu)
    dark, bright = (ResNet((1,), (8,), 3, stem=8, mean=(mean,), std=(0.3,)) for mean in (0.2, 0.7))
    with pytest.raises(ValueError, match="one architecture"):
        BezierCurve(dark, bright)


def test_members_that_change_later_leave_the_curve_alone() -> None:
    start, end = (nn.Sequential(nn.Linear(2, 3)) for _ in range(2))
    curve, images = BezierCurve(start, end), torch.rand(4, 2)
    before = curve.at(0.0)(images)
    nn.init.zeros_(start[0].weight)
    assert curve.at(0.0)(images).equal(before)
