"""Labels beside the teachers: the loss against scikit-learn and a naive mixture, and what is learnt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import log_loss
from torch import nn
from torch.utils.data import DataLoader

import _runs
import ensbridge as eb
from ensbridge.data.augment import Augment
from ensbridge.methods import (
    AbstractMethod,
    Batch,
    DiffusionBridge,
    EnsembleDistillation,
    JointDistillation,
    base,
)
from ensbridge.training.batches import Inputs
from ensbridge.training.step import augmented


def distillation(label_weight: float) -> EnsembleDistillation:
    teachers = eb.Ensemble([_runs.member(0), _runs.member(1)]).eval()
    return EnsembleDistillation(teachers, _runs.member(2).eval(), tau=1.0, label_weight=label_weight)


def joint(label_weight: float) -> JointDistillation:
    teachers = eb.Ensemble([_runs.member(0), _runs.member(1)]).eval()
    bridges = {"one": eb.methods.Bridge(_runs.score().eval(), eb.methods.BridgeConfig(), (0.0, 1.0))}
    return JointDistillation(
        teachers, _runs.member(2).eval(), bridges, _runs.FEATURE, label_weight=label_weight
    )


def bridge(label_weight: float) -> DiffusionBridge:
    ensemble = eb.Ensemble([_runs.member(0), _runs.member(1)]).eval()
    return DiffusionBridge(
        ensemble, _runs.score().eval(), _runs.FEATURE, loss="kl", label_weight=label_weight
    )


@pytest.mark.parametrize("make", [distillation, joint, bridge])
def test_the_loss_is_the_weighted_mean_of_the_teachers_and_the_labels(make: object) -> None:
    images, labels = _runs.data().images, _runs.data().labels
    batch = lambda: Batch(images, labels, torch.Generator().manual_seed(0))  # noqa: E731
    alone, only, half = (make(weight).loss(batch()).item() for weight in (0.0, 1.0, 0.3))  # type: ignore[operator]
    assert half == pytest.approx(0.7 * alone + 0.3 * only, rel=1e-6)
    assert only != pytest.approx(alone, rel=1e-3)


def test_with_all_the_weight_it_is_the_cross_entropy_of_the_labels() -> None:
    data, method = _runs.data(), distillation(1.0)
    assert isinstance(data.images, torch.Tensor)
    probs = method.student(data.images).double().softmax(-1).detach().numpy()
    assert method.loss(Batch(data.images, data.labels)).item() == pytest.approx(
        log_loss(data.labels, probs, labels=[0, 1, 2]), rel=1e-6
    )


@pytest.mark.parametrize("augment", [Augment(mixup=0.7), Augment(cutmix=0.7), Augment(mixup=0.7, cutmix=0.7)])
def test_a_mixed_image_has_the_labels_of_what_it_shows(augment: Augment) -> None:
    # Image i is i everywhere, so that the mean of a mixed one tells its share.
    count = 12
    images = torch.arange(count, dtype=torch.float64)[:, None, None, None].expand(count, 1, 40, 40)
    labels = torch.arange(count) % 5
    config = eb.FitConfig(epochs=1, batch_size=count, lr=0.1, augment=augment)
    batch = augmented(Inputs(images, labels), config, torch.Generator().manual_seed(0), {})
    assert isinstance(batch.images, torch.Tensor)
    probs = batch.label_probs(5)
    for index, image in enumerate(batch.images):
        other = (index - 1) % count
        share = (image.mean().item() - other) / (index - other)
        expected = torch.zeros(5)
        expected[labels[index]] += share
        expected[labels[other]] += 1 - share
        torch.testing.assert_close(probs[index].float(), expected, rtol=1e-4, atol=1e-4)


def test_without_mixing_a_label_is_all_of_it_and_without_labels_there_is_no_loss() -> None:
    data = _runs.data()
    assert Batch(data.images, data.labels).label_probs(3).equal(torch.eye(3)[data.labels])
    with pytest.raises(ValueError, match=r"the data has none; give \(images, labels\)"):
        distillation(0.5).loss(Batch(data.images, None))
    with pytest.raises(ValueError, match="labels span 0 to 2; networks of 2 classes need 0 to 1"):
        Batch(data.images, data.labels).label_probs(2)


@pytest.mark.parametrize("weight", [-0.1, 1.5, float("nan"), True, "half"])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    for make in (distillation, joint, bridge):
        with pytest.raises(ValueError, match=r"it must lie in \[0, 1\]"):
            make(weight)
    images = torch.rand(8, 1, 4, 4)
    with pytest.raises(ValueError, match=r"label_weight is .*; it must lie in \[0, 1\]"):
        eb.compress(list(distillation(0).ensemble.members), images, epochs=1, label_weight=weight, quiet=True)


def test_the_bridge_loss_takes_no_labels() -> None:
    method: AbstractMethod = bridge(0.5)
    assert "label_weight" in method.describe()
    with pytest.raises(ValueError, match="give loss='kl'"):
        DiffusionBridge(
            eb.Ensemble([_runs.member(0)]), _runs.score(), _runs.FEATURE, loss="bridge", label_weight=0.5
        )


def wrong_members() -> list[nn.Module]:
    """Networks that always predict class 0, with features that tell the classes apart."""
    nets = []
    for seed in range(2):
        net = _runs.built(
            seed, lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
        )
        with torch.no_grad():
            net[-1].weight.zero_()
            net[-1].bias.copy_(torch.tensor([3.0, 0.0, 0.0]))
        nets.append(net)
    return nets


@pytest.mark.parametrize(
    ("source", "budget", "streamed"),
    [("frozen", 30.0, False), ("distilled", 1.0, False), ("distilled", 1.0, True)],
)
def test_compress_learns_from_labels_what_members_do_not_know(
    source: str, budget: float, streamed: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 3
    images = torch.rand(120, 1, 4, 4, generator=generator) + 2 * torch.eye(4)[labels][:, None, None, :]
    options: dict[str, Any] = {"epochs": 12, "batch_size": 30, "lr": 0.05, "distil_lr": 0.1, "quiet": True}
    train: Any = images[:90], labels[:90]
    if streamed:
        train = DataLoader([*zip(*train, strict=True)], 30, shuffle=True)  # type: ignore[arg-type]
        options["memory"] = 0
    accuracies = []
    for weight in (0.0, 0.9):
        fast = eb.compress(
            wrong_members(),
            train,
            feature="1" if budget > 1 else None,
            budget=budget,
            source=source,  # type: ignore[arg-type]
            label_weight=weight,
            **options,
        )
        accuracies.append(eb.metrics.accuracy(fast(images[90:]).log_softmax(-1), labels[90:]))
    assert accuracies[0] < 0.5
    assert accuracies[1] > 0.9


def test_compress_names_labels_that_are_missing_or_no_class() -> None:
    members, images = wrong_members(), torch.rand(12, 1, 4, 4)
    common = {"feature": "1", "budget": 30.0, "epochs": 1, "label_weight": 0.5, "quiet": True}
    with pytest.raises(ValueError, match=r"train has no labels; give \(images, labels\), or leave it out"):
        eb.compress(members, images, **common)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="train has labels from 3 to 3; the members' are 0 to 2"):
        eb.compress(members, (images, torch.full((12,), 3)), **common)  # type: ignore[arg-type]


def test_a_label_that_was_not_looked_at_makes_the_loss_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    # On an accelerator labels are not looked at; the step is refused instead.
    monkeypatch.setattr(base, "check_labels", lambda labels, classes: None)
    images = torch.rand(3, 1, 4, 4)
    for wrong in (3, -1):
        probs = Batch(images, torch.tensor([0, wrong, 2])).label_probs(3)
        assert probs.isnan().any(1).tolist() == [False, True, False]


def test_a_run_that_had_no_labels_is_another_than_one_with_them() -> None:
    assert distillation(0.5).describe() != distillation(0.0).describe()
    assert "label_weight" not in distillation(0.0).describe()
