"""The verdict follows from the numbers, and the numbers from the predictions."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.evaluation.fidelity import measure_fidelity
from ensbridge.evaluation.scores.columns import dee_text
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


class Recalls(nn.Module):
    """A bridge that looks up a network's logits for `IMAGES`, at no cost."""

    steps = 1

    def __init__(self, net: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.logits = net(IMAGES).detach() * scale

    def forward(self, images: Tensor) -> Tensor:
        return self.logits[(images[:, :1, 0, 0] == IMAGES[None, :, 0, 0, 0]).int().argmax(1)]


class Source(nn.Module):
    """A member that passes its images through a module first, so that a tap sees them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.images, self.net = nn.Identity(), net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(self.images(images))


def compressed(
    net: nn.Module,
    scale: float = 1.0,
    bridge: type[Plays | Recalls] = Plays,
    temperature: float = 1.0,
    share: float = 0.0,
) -> tuple[eb.FastEnsemble, list[nn.Module]]:
    """A network that predicts exactly as `net` before calibration, and the members that it stands for."""
    source = Source(MEMBERS[0])
    bridges = [FeatureBridge(bridge(net, scale))]
    fast = eb.FastEnsemble(
        source, bridges, "images", temperature=temperature, source_logit_weight=share
    ).eval()
    return fast, [source, *MEMBERS[1:]]


def labels(net: nn.Module, temperature: float = 1.0) -> Tensor:
    """Labels drawn from a network's own prediction, under which it is the best there is."""
    probabilities = (net(IMAGES) / temperature).softmax(-1)
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


@pytest.mark.parametrize("labelled", [True, False])
def test_the_whole_set_passes_every_network_once(labelled: bool) -> None:
    fast, members = compressed(MEMBERS[1])
    test = (IMAGES, labels(MEMBERS[1])) if labelled else IMAGES
    seen = dict.fromkeys(range(3), 0)
    hooks = [
        member.register_forward_hook(
            lambda _, inputs, __, number=number: seen.update(
                {number: seen[number] + len(inputs[0]) * (len(inputs[0]) == len(IMAGES))}
            )
        )
        for number, member in enumerate(members)
    ]
    fast.fidelity(test, members=members)
    for hook in hooks:
        hook.remove()
    # The source is member 1, and the bridge here runs member 2 itself.
    assert seen == {0: len(IMAGES), 1: 2 * len(IMAGES), 2: len(IMAGES)}


def test_the_ensemble_itself_is_at_no_distance_and_worth_it() -> None:
    fast, members = compressed(eb.Ensemble(MEMBERS), bridge=Recalls)
    found = fast.fidelity(IMAGES, members=members)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.agreement == 1
    assert found.worth_it
    assert found.verdict.startswith("worth it as far as images without labels tell: 100%")


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
    assert re.search(r"×4\.00 .*first 2 members, ×2\.00 ", found.verdict)
    unlabelled = fast.fidelity(IMAGES, members=members)
    assert not unlabelled.worth_it
    assert re.search(r"ensemble costs ×3\.00 .*×4\.00", unlabelled.verdict)


def test_the_bar_is_the_cost_of_the_members_not_their_number() -> None:
    with _tiny.seeded(3):
        wide = Source(eb.nets.ResNet((1, 1), (32, 64), 3, stem=32).eval())
    members = [wide, *MEMBERS[1:]]
    ensemble = eb.Ensemble(members)
    drawn = labels(ensemble, temperature=0.2)
    costs = [eb.cost.count_macs(net, IMAGES[:1]) for net in members]
    for bridge, worth_it in ((Plays, False), (Recalls, True)):
        bridges = [FeatureBridge(bridge(ensemble))]
        fast = eb.FastEnsemble(wide, bridges, "images", temperature=0.2).eval()
        found = fast.fidelity((IMAGES, drawn), members=members)
        assert ("but the first 3 members, ×1.13" in found.verdict) is not worth_it
        assert found.ensemble_macs_ratio == pytest.approx(sum(costs) / costs[0])
        assert found.ensemble_macs_ratio < 1.2
        assert found.worth_it == worth_it, found.verdict
        assert fast.fidelity(IMAGES, members=members).worth_it == worth_it


def test_it_prints_as_text_that_ends_with_the_verdict() -> None:
    fast, members = compressed(MEMBERS[1])
    found = fast.fidelity((IMAGES, labels(MEMBERS[1])), members=members)
    text = str(found)
    assert text.endswith(found.verdict)
    for word in ("KL to the ensemble", "agrees with", "the source's MACs", "NLL", "Brier", "ECE", "DEE"):
        assert word in text


def test_a_dee_below_one_is_no_number() -> None:
    fast, members = compressed(MEMBERS[1])
    found = fast.fidelity((IMAGES, labels(MEMBERS[1])), members=members)
    assert found.row is not None
    text = str(replace(found, row=replace(found.row, dee=-6.4)))
    assert "-6.4" not in text
    assert "worse than one member" in text


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
    with pytest.raises(ValueError, match="1 members"):
        fast.fidelity(IMAGES, members=members[:1])


def test_a_temperature_alone_is_no_merit() -> None:
    fast, members = compressed(MEMBERS[0], scale=0.2)  # the source itself, less sure
    drawn = torch.multinomial((0.2 * MEMBERS[0](IMAGES)).softmax(-1), 1, generator=_tiny.generator(1))[:, 0]
    found = measure_fidelity(fast, (IMAGES, drawn), members)
    assert found.row is not None
    assert found.source_row is not None
    assert found.row.nll < found.source_row.nll  # better, but so is the source with a temperature
    assert not found.worth_it
    assert "the source with a temperature" in found.verdict


def test_an_ensemble_that_is_no_better_than_its_source_is_said_to_be_the_reason() -> None:
    everyone = eb.Ensemble(MEMBERS)
    as_good, members = compressed(everyone, bridge=Recalls)
    of_source, of_ensemble = labels(MEMBERS[0], temperature=0.2), labels(everyone, temperature=0.2)
    found = as_good.fidelity((IMAGES, of_source), members=members)
    assert found.verdict.startswith("not worth it: ")
    assert found.verdict.endswith("give better members")
    poor, _ = compressed(MEMBERS[0], bridge=Recalls)
    found = measure_fidelity(poor, (IMAGES, of_ensemble), members)
    assert found.verdict.endswith("raise budget")


def test_members_are_the_models_own_and_come_as_compress_takes_them() -> None:
    fast, members = compressed(MEMBERS[1])
    plain = measure_fidelity(fast, IMAGES, members)
    assert measure_fidelity(fast, IMAGES, eb.Ensemble(members)) == plain
    with pytest.raises(ValueError, match="first of members"):
        measure_fidelity(fast, IMAGES, members[1:])
    with pytest.raises(ValueError, match="first of members"):
        measure_fidelity(fast, IMAGES, members, preprocess=[lambda images: 2 * images, None, None])


@pytest.mark.parametrize("share", [0.0, 0.5, -0.2])
def test_calibration_changes_neither_nearness_nor_dee(share: float) -> None:
    everyone = eb.Ensemble(MEMBERS)
    drawn = labels(everyone)
    raw, members = compressed(everyone, bridge=Recalls)
    calibrated, _ = compressed(everyone, bridge=Recalls, temperature=0.3, share=share)
    for test in (IMAGES, (IMAGES, drawn)):
        before = raw.fidelity(test, members=members)
        after = measure_fidelity(calibrated, test, [calibrated.source, *members[1:]])
        assert after.kl == pytest.approx(before.kl, abs=1e-6)
        assert "± 0.0000 before calibration" in str(after)
        assert "before calibration" not in str(before)
    assert before.row is not None
    assert after.row is not None
    assert float(str(after.row.dee).lstrip(">")) == pytest.approx(3, abs=1e-3)
    assert after.row.gap == pytest.approx(before.row.gap, abs=1e-3)
    assert after.row.nll == pytest.approx(
        nn.functional.cross_entropy((everyone(IMAGES) + share * MEMBERS[0](IMAGES)) / 0.3, drawn).item(),
        rel=1e-4,
    )
    assert after.row.nll != pytest.approx(before.row.nll, rel=1e-2)


def test_a_calibrated_model_stays_worth_it() -> None:
    everyone = eb.Ensemble(MEMBERS)
    drawn = labels(everyone, temperature=0.2)  # the members are far less sure than they could be
    fast, members = compressed(everyone, bridge=Recalls, temperature=0.2)
    for test in (IMAGES, (IMAGES, drawn)):
        found = fast.fidelity(test, members=members)
        assert found.worth_it, found.verdict
        assert found.kl < found.source_kl


def test_what_is_further_from_the_ensemble_than_the_source_is_called_so() -> None:
    fast, members = compressed(MEMBERS[0], scale=20, bridge=Recalls)
    verdict = fast.fidelity(IMAGES, members=members).verdict
    assert re.match("not worth it: it is further from the ensemble .*KL ", verdict)
    assert "%" not in verdict


def test_members_may_be_any_iterable_and_keep_their_modes() -> None:
    fast, members = compressed(MEMBERS[1])
    plain = measure_fidelity(fast, IMAGES, members)
    for each in (fast, *members):
        each.train()
    members[1].eval()
    before = [module.training for each in (fast, *members) for module in each.modules()]
    assert measure_fidelity(fast, IMAGES, (each for each in members)) == plain
    assert [module.training for each in (fast, *members) for module in each.modules()] == before


@pytest.mark.parametrize(
    ("members", "named"),
    [
        (None, "members.*NoneType"),
        (MEMBERS[0], "members.*ResNet.*at least 2"),
        (["a.pt", "b.pt"], "member 1 .*str"),
        ([MEMBERS[0], MEMBERS[0]], "same network.*twice"),
    ],
)
def test_what_is_no_list_of_networks_is_named(members: Any, named: str) -> None:
    fast, _ = compressed(MEMBERS[1])
    with pytest.raises(ValueError, match=named):
        fast.fidelity(IMAGES, members=members)


def test_images_that_a_network_cannot_take_are_named() -> None:
    fast, members = compressed(MEMBERS[1])
    with pytest.raises(ValueError, match=r"this model.*\(1, 8, 8\)"):
        fast.fidelity(IMAGES[:, :1], members=members)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(27, 3))
    with pytest.raises(ValueError, match=r"member 2.*\(3, 8, 8\).*preprocess="):
        fast.fidelity(IMAGES, members=[members[0], flat])


def test_a_model_or_a_member_without_values_is_named() -> None:
    fast, members = compressed(MEMBERS[1])
    with pytest.raises(ValueError, match=r"member 2 .*'meta'"):
        fast.fidelity(IMAGES, members=[members[0], copy.deepcopy(members[1]).to("meta")])
    with pytest.raises(ValueError, match=r"this model .*'meta'"):
        copy.deepcopy(fast).to("meta").fidelity(IMAGES, members=members)


def test_labels_of_other_classes_are_refused_before_all_images_are_run() -> None:
    fast, members = compressed(MEMBERS[1])
    seen: list[int] = []
    for each in members:
        each.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    wrong = torch.full((len(IMAGES),), 3)
    with pytest.raises(ValueError, match=r"labels contain 3.*0\.\.2"):
        fast.fidelity((IMAGES, wrong), members=members)
    assert max(seen) < len(IMAGES)


def nlls(log_probs: Tensor, targets: Tensor) -> np.ndarray:
    return -log_probs.detach().double()[torch.arange(len(targets)), targets].numpy()


def at_best_temperature(log_probs: Tensor, targets: Tensor) -> np.ndarray:
    """The NLL of each image at the best of many temperatures."""
    each = [
        nlls((log_probs / temperature).log_softmax(-1), targets)
        for temperature in np.geomspace(0.02, 50, 2000)
    ]
    return min(each, key=np.mean)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 6.0])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_what_is_worth_it_is_so_by_every_figure(scale: float, temperature: float) -> None:
    everyone = eb.Ensemble(MEMBERS)
    fast, members = compressed(everyone, scale, bridge=Recalls, temperature=scale * temperature)
    targets = labels(everyone, temperature)
    found = fast.fidelity((IMAGES, targets), members=members)
    assert found.row is not None
    assert found.source_row is not None
    assert found.row.dee is not None
    own = nlls(fast(IMAGES).log_softmax(-1), targets)
    gain = at_best_temperature(members[0](IMAGES).log_softmax(-1), targets) - own
    error = gain.std(ddof=1) / len(gain) ** 0.5
    # Whether each figure is as it must be, and what names it. It costs no more than one member, so that no
    # members are as good for its cost where the first is not.
    figures = {
        f"{gain.mean():.4f} ± {error:.4f}": gain.mean() > 2 * error,
        f"KL {found.kl:.4f}, source {found.source_kl:.4f}": found.kl < found.source_kl,
        f"DEE {dee_text(found.row.dee)}": dee_text(found.row.dee) != "<1",
    }
    assert found.worth_it == all(figures.values())
    if found.worth_it:
        assert found.row.nll < found.source_row.nll
    else:
        assert any(name in found.verdict for name, is_good in figures.items() if not is_good)
    assert found.verdict.startswith("worth it" if found.worth_it else "not worth it")
