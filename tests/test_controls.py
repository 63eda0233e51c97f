"""The parts of the controls' study that are its own, as a member with the ensemble's entropy."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import ensbridge as eb


@pytest.fixture(autouse=True)
def studies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "studies"))


@pytest.fixture
def controls() -> ModuleType:
    return importlib.import_module("controls")


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 10))


def test_the_tempered_member_has_the_ensembles_entropy(controls: ModuleType) -> None:
    members = eb.Ensemble([network() for _ in range(3)])
    for weights in members.parameters():
        weights.data.mul_(20)
    images = torch.rand(50, 1, 4, 4)
    tempered = controls.entropy_matched(images, members)
    entropies = [eb.metrics.entropy(net(images).log_softmax(-1)).mean() for net in (tempered, members)]
    assert entropies[0].isclose(entropies[1], atol=1e-3)
    assert tempered(images).argmax(1).equal(members.source(images).argmax(1))


def test_the_wider_network_has_the_pairs_cost(controls: ModuleType) -> None:
    recipe = eb.experiments.digits()
    bridge = eb.methods.Bridge(recipe.score("none"), recipe.bridge, (0.0, 1.0))
    pair = eb.FastEnsemble(recipe.member(), [bridge], recipe.feature)
    images = torch.rand(1, 1, 8, 8)
    wider, cost = (eb.cost.count_macs(model, images) for model in (controls.wider_network(), pair))
    assert 0.999 < wider / cost <= 1


def test_a_difference_has_an_error_over_sets_and_one_over_images(controls: ModuleType) -> None:
    of_sets = [{"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([0.0, 0.0])}]
    of_sets += [{"a": torch.tensor([2.0, 6.0]), "b": torch.tensor([0.0, 0.0])}]
    difference = controls.differences(of_sets, "a", "b")
    assert (difference["nll"], difference["sets"]) == (3.0, [2.0, 4.0])
    assert difference["se_sets"] == pytest.approx(1.0)  # 2 and 4: a deviation of √2, over √2
    assert difference["se_images"] == pytest.approx(1.5)  # 1.5 and 4.5: a deviation of 1.5·√2, over √2
