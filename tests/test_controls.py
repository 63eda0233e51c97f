"""The parts of the controls' study that are its own: mixed labels as a teacher, and a member's entropy."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ensbridge as eb
from ensbridge.methods import Batch, EnsembleDistillation


@pytest.fixture(autouse=True)
def studies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "studies"))


@pytest.fixture
def controls() -> ModuleType:
    return importlib.import_module("controls")


def on_labels(net: nn.Module, mixup: float) -> eb.methods.AbstractMethod:
    build = lambda labels: EnsembleDistillation(labels, net, tau=1.0)  # noqa: E731
    return importlib.import_module("mixed_labels").MixedLabels(build, mixup)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 10))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_mixed_labels_are_those_of_the_images_that_were_mixed() -> None:
    net = network()
    images, classes = torch.rand(8, 1, 4, 4), torch.arange(8)
    one_hot = F.one_hot(classes, 10).float()[:, :, None, None].expand(-1, -1, 4, 4)
    mixed = eb.data.Augment(mixup=0.4)(torch.cat([images, one_hot], 1), generator())
    target = mixed[:, 1:, 0, 0]
    loss = on_labels(net, 0.4).loss(Batch(images, classes, generator()))
    assert not target.equal(one_hot[:, :, 0, 0])  # something was mixed
    assert target.sum(1).allclose(torch.ones(8))
    assert loss.isclose(F.cross_entropy(net(mixed[:, :1]), target), atol=1e-5)


def test_without_mixing_it_is_the_cross_entropy_of_the_labels() -> None:
    net = network()
    images, classes = torch.rand(8, 1, 4, 4), torch.arange(8)
    loss = on_labels(net, 0.0).loss(Batch(images, classes, generator()))
    assert loss.isclose(F.cross_entropy(net(images), classes), atol=1e-5)


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
