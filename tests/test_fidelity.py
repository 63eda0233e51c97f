"""The verdict follows from the numbers, and the numbers from the predictions."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.fidelity import measure_fidelity
from ensbridge.methods import FeatureBridge

IMAGES = _tiny.images(200)
MEMBERS = [_tiny.member(seed) for seed in range(3)]


class Plays(nn.Module):
    """A bridge that returns a network's own logits for the images that the source has just seen."""

    steps = 1

    def __init__(self, net: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.net, self.scale = net, scale

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images) * self.scale


class Source(nn.Module):
    """A member that passes its images through a module first, so that a tap sees them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.images, self.net = nn.Identity(), net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(self.images(images))


def compressed(net: nn.Module, scale: float = 1.0) -> tuple[eb.FastEnsemble, list[nn.Module]]:
    """A network that predicts exactly as `net`, and the members that it stands for."""
    source = Source(MEMBERS[0])
    fast = eb.FastEnsemble(source, [FeatureBridge(Plays(net, scale))], "images").eval()
    return fast, [source, *MEMBERS[1:]]


def labels(net: nn.Module) -> Tensor:
    """Labels drawn from a network's own prediction, under which it is the best there is."""
    probabilities = net(IMAGES).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=_tiny.generator(5))[:, 0]


def test_the_numbers_are_those_of_the_predictions() -> None:
    fast, members = compressed(MEMBERS[1])
    found = measure_fidelity(fast, IMAGES, members)
    real = np.mean([member(IMAGES).softmax(-1).detach().double().numpy() for member in members], axis=0)
    for value, net in ((found.kl, MEMBERS[1]), (found.source_kl, MEMBERS[0])):
        own = net(IMAGES).softmax(-1).detach().double().numpy()
        assert value == pytest.approx(scipy.stats.entropy(real, own, axis=1).mean(), rel=1e-4)
    ours = MEMBERS[1](IMAGES).argmax(-1).numpy()
    assert found.agreement == pytest.approx((ours == real.argmax(-1)).mean())
    assert (found.images, found.ensemble_macs_ratio) == (200, 3.0)
    assert found.row is None


def test_the_ensemble_itself_is_at_no_distance_and_worth_it() -> None:
    fast, members = compressed(eb.Ensemble(MEMBERS))
    found = fast.fidelity(IMAGES, members=members)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.agreement == 1
    assert found.worth_it
    assert found.verdict.startswith("worth it as far as images without labels tell: 100% of")


def test_the_source_itself_is_not_worth_it() -> None:
    fast, members = compressed(MEMBERS[0])
    for test in (IMAGES, (IMAGES, labels(eb.Ensemble(MEMBERS)))):
        found = fast.fidelity(test, members=members)
        assert not found.worth_it
        assert found.verdict.startswith("not worth it: ")
        assert found.source_kl == pytest.approx(found.kl)


def test_real_members_of_the_same_cost_are_the_bar() -> None:
    everyone = eb.Ensemble(MEMBERS)
    fast, members = compressed(everyone)  # costs four networks
    found = fast.fidelity((IMAGES, labels(everyone)), members=members)
    assert found.row is not None
    assert found.macs_ratio == found.row.macs_ratio == 4
    assert not found.worth_it
    assert "real members at the cost of 4.00; run that many members" in found.verdict


def test_it_prints_as_text_that_ends_with_the_verdict() -> None:
    fast, members = compressed(MEMBERS[1])
    found = fast.fidelity((IMAGES, labels(MEMBERS[1])), members=members)
    text = str(found)
    assert text.endswith(found.verdict)
    for word in ("KL to the ensemble", "agrees with", "the source's MACs", "NLL", "Brier", "ECE", "DEE"):
        assert word in text


def test_a_clear_gain_at_a_small_cost_is_worth_it() -> None:
    members = [_tiny.member(seed) for seed in range(2)]
    fast = eb.compress(members, IMAGES, feature="stages.0.0", budget=30, epochs=30, quiet=True)
    better = eb.Ensemble(members)
    found = fast.fidelity((IMAGES, labels(better)), members=members)
    assert found.row is not None
    assert found.source_row is not None
    assert found.worth_it == found.verdict.startswith("worth it")
    assert found.kl < found.source_kl


def test_a_single_member_is_nothing_to_compare_with() -> None:
    fast, members = compressed(MEMBERS[1])
    with pytest.raises(ValueError, match="1 members were given to compare with"):
        fast.fidelity(IMAGES, members=members[:1])


def test_a_temperature_alone_is_no_merit() -> None:
    fast, members = compressed(MEMBERS[0], scale=0.2)  # the source itself, less sure
    drawn = torch.multinomial((0.2 * MEMBERS[0](IMAGES)).softmax(-1), 1, generator=_tiny.generator(1))[:, 0]
    found = measure_fidelity(fast, (IMAGES, drawn), members)
    assert found.row is not None
    assert found.source_row is not None
    assert found.row.nll < found.source_row.nll  # better, but so is the source with a temperature
    assert not found.worth_it
    assert "not clearly better than the source with a temperature" in found.verdict


def test_members_are_the_models_own_and_come_as_compress_takes_them() -> None:
    fast, members = compressed(MEMBERS[1])
    plain = measure_fidelity(fast, IMAGES, members)
    assert measure_fidelity(fast, IMAGES, eb.Ensemble(members)) == plain
    with pytest.raises(ValueError, match="the first of members does not predict as this model's source"):
        measure_fidelity(fast, IMAGES, members[1:])
    with pytest.raises(ValueError, match="the first of members does not predict"):
        measure_fidelity(fast, IMAGES, members, preprocess=[lambda images: 2 * images, None, None])
