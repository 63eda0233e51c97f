"""The fast ensemble: the mean of its bridges, with one pass of its source."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

import _tiny
from ensbridge.methods import Bridge, BridgeNetwork, DiffusionBridge
from ensbridge.models.ensemble import Ensemble, member_groups
from ensbridge.models.fast_ensemble import FastEnsemble


@pytest.fixture
def ensemble() -> Ensemble:
    return _tiny.ensemble(3)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_fast_ensemble_is_the_mean_of_its_bridges_and_runs_its_source_once(
    ensemble: Ensemble, count: int
) -> None:
    methods = [_tiny.bridge_to(ensemble, seed) for seed in range(count)]
    images = _tiny.images()
    feature, logits = _tiny.teacher_outputs(ensemble)
    expected = torch.stack([method.bridge(feature, logits[0]).softmax(-1) for method in methods]).mean(0)
    fast, calls = FastEnsemble.of(*methods).eval(), _tiny.count_runs(ensemble)
    torch.testing.assert_close(fast(images).softmax(-1), expected, rtol=1e-5, atol=1e-6)
    assert calls == {0: 1}
    assert fast.source is ensemble.source
    assert [each.score for each in fast.each_bridge()] == [method.bridge.score for method in methods]


@torch.no_grad()
def test_a_methods_model_is_its_bridge_beside_its_source(ensemble: Ensemble) -> None:
    source, centre, _ = ensemble.members
    for method in (_tiny.bridge_to(ensemble), _tiny.bridge_network(source, [centre])):
        one, other = method.model().eval(), FastEnsemble.of(method).eval()
        assert one.source is source
        assert one.each_bridge() == [method.bridge]
        assert one.members == other.members
        assert one(_tiny.images()).equal(other(_tiny.images()))
        assert one(_tiny.images()).equal(one.with_source(_tiny.images())[0])


@torch.no_grad()
def test_a_temperature_divides_the_fast_ensembles_logits(ensemble: Ensemble) -> None:
    bridges = [_tiny.bridge_to(ensemble, seed).bridge for seed in range(2)]
    plain, hot = (
        FastEnsemble(ensemble.source, bridges, _tiny.FEATURE, temperature=t).eval()(_tiny.images())
        for t in (1.0, 1.7)
    )
    torch.testing.assert_close(plain, 1.7 * hot)


@torch.no_grad()
def test_a_share_of_the_sources_logits_is_added_before_that(ensemble: Ensemble) -> None:
    bridges = [_tiny.bridge_to(ensemble, seed).bridge for seed in range(2)]
    plain, shared = (
        FastEnsemble(ensemble.source, bridges, _tiny.FEATURE, temperature=t, source_logit_weight=w).eval()
        for t, w in ((1.0, 0.0), (1.7, -0.3))
    )
    images = _tiny.images()
    expected = (plain(images) - 0.3 * ensemble.source(images)).log_softmax(-1)
    torch.testing.assert_close((1.7 * shared(images)).log_softmax(-1), expected)
    torch.testing.assert_close(shared(images).mean(-1), torch.zeros(len(images)), atol=1e-6, rtol=0)


def test_a_fast_ensemble_knows_how_many_members_it_stands_for() -> None:
    ensemble = _tiny.ensemble(5)
    targets = [(0, 1, 2), (0, 3)]
    assert FastEnsemble.of(*(_tiny.bridge_to(ensemble, target=t) for t in targets)).members == 4
    assert FastEnsemble.of(_tiny.bridge_to(ensemble)).members == 5
    apart = [Ensemble([ensemble.members[index] for index in group]) for group in ((0, 1, 2), (0, 3, 4))]
    assert FastEnsemble.of(*(_tiny.bridge_to(each) for each in apart)).members == 5


class Exact(nn.Module):
    """A score that knows the images and so the answer of the ensemble of a group of members."""

    def __init__(self, group: Ensemble) -> None:
        super().__init__()
        self.answer = group(_tiny.images()).detach()

    def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        return (z_t - self.answer) / t.sqrt()[:, None]


@torch.no_grad()
@pytest.mark.parametrize("members", [3, 4, 5, 7])
@pytest.mark.parametrize("bridges", [1, 2])
def test_with_exact_bridges_the_prediction_is_the_mean_of_the_groups_means(
    members: int, bridges: int
) -> None:
    ensemble, groups = _tiny.ensemble(members), member_groups(members, bridges)
    scores = [Exact(Ensemble([ensemble.members[index] for index in group])) for group in groups]
    fast = FastEnsemble(ensemble.source, [Bridge(score) for score in scores], _tiny.FEATURE).eval()
    found = fast(_tiny.images()).softmax(-1)
    probs = ensemble.member_logits(_tiny.images()).softmax(-1)
    means = torch.stack([probs[list(group)].mean(0) for group in groups])
    torch.testing.assert_close(found, means.mean(0), rtol=1e-4, atol=1e-5)
    shares = torch.tensor(
        [sum((index in group) / len(group) for group in groups) / bridges for index in range(members)]
    )
    assert shares.sum().item() == pytest.approx(1)
    torch.testing.assert_close(found, (shares[:, None, None] * probs).sum(0), rtol=1e-4, atol=1e-5)
    if (members, bridges) == (5, 2):  # as the documentation says
        assert shares.tolist() == pytest.approx([1 / 3] + 4 * [1 / 6])
        assert not found.allclose(probs.mean(0), atol=1e-4)


@torch.no_grad()
def test_the_source_is_part_of_the_mean_only_when_asked_for(ensemble: Ensemble) -> None:
    bridges = [_tiny.bridge_to(ensemble, seed).bridge for seed in range(2)]
    without, within = (
        FastEnsemble(ensemble.source, bridges, _tiny.FEATURE, average_source=flag).eval()(_tiny.images())
        for flag in (False, True)
    )
    source = ensemble.source(_tiny.images()).softmax(-1)
    expected = (2 * without.softmax(-1) + source) / 3
    torch.testing.assert_close(within.softmax(-1), expected, rtol=1e-5, atol=1e-6)


def test_bridges_of_two_kinds_sources_or_features_are_refused(ensemble: Ensemble) -> None:
    source, centre, other = ensemble.members
    light = _tiny.bridge_network(source, [centre])
    for wrong in (
        _tiny.bridge_to(ensemble),  # another kind
        _tiny.bridge_network(other, [centre]),  # another source
        BridgeNetwork(source, [centre], _tiny.pooled(), "stem"),  # another feature
    ):
        with pytest.raises(ValueError, match="do not share their kind, source and feature"):
            FastEnsemble.of(light, wrong)


def test_bridge_networks_stand_for_the_source_and_each_centre(ensemble: Ensemble) -> None:
    source, *centres = ensemble.members
    both = [_tiny.bridge_network(source, [centre], seed) for seed, centre in enumerate(centres)]
    assert FastEnsemble.of(both[0]).members == 2
    assert FastEnsemble.of(*both).members == 3
    assert FastEnsemble.of(_tiny.bridge_network(source, centres)).members == 3
    assert FastEnsemble.of(both[0], _tiny.bridge_network(source, centres[:1], 9)).members == 2


def test_a_bad_fast_ensemble_is_refused(ensemble: Ensemble) -> None:
    here, there = _tiny.bridge_to(ensemble), _tiny.bridge_to(_tiny.ensemble(3, seed=7))
    with pytest.raises(ValueError, match="do not share their kind, source"):
        FastEnsemble.of(here, there)
    elsewhere = DiffusionBridge(ensemble, _tiny.score(), "stem")
    with pytest.raises(ValueError, match="and feature"):
        FastEnsemble.of(here, elsewhere)
    with pytest.raises(ValueError, match="0 bridges"):
        FastEnsemble.of()
    with pytest.raises(ValueError, match="feature ''"):
        FastEnsemble(ensemble.source, [here.bridge])
    with pytest.raises(ValueError, match="'layer9'"):
        FastEnsemble(ensemble.source, [here.bridge], "layer9")
    for temperature in (0.0, -1.0, math.nan, math.inf, 1e-320, 1e300):
        with pytest.raises(
            ValueError, match=re.escape(f"temperature is {temperature}; it must be from 0.001")
        ):
            FastEnsemble(ensemble.source, [here.bridge], _tiny.FEATURE, temperature=temperature)
    for share in (math.nan, math.inf, -1e7):
        with pytest.raises(ValueError, match=f"source_logit_weight is {share}"):
            FastEnsemble(ensemble.source, [here.bridge], _tiny.FEATURE, source_logit_weight=share)
