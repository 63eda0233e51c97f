"""The deep ensemble: its members' losses and their mean softmax."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

import _tiny
from ensbridge.methods import (
    Batch,
    DeepEnsemble,
)


def test_the_members_loss_is_the_sum_of_their_cross_entropies() -> None:
    members, data = [_tiny.member(0), _tiny.batch_norm_member(1), _tiny.member(2)], _tiny.data(6)
    found = DeepEnsemble(members).loss(Batch(data.images, data.labels))
    expected = 0.0
    for member in members:
        log_p = scipy.special.log_softmax(member(data.images).detach().double().numpy(), axis=-1)
        expected -= log_p[np.arange(6), data.labels.numpy()].mean()
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_members_trained_together_get_the_gradients_they_would_get_alone() -> None:
    members, data = [_tiny.member(0), _tiny.member(1)], _tiny.data(6)
    alone = copy.deepcopy(members[1])
    DeepEnsemble(members).loss(Batch(data.images, data.labels)).backward()
    DeepEnsemble([alone]).loss(Batch(data.images, data.labels)).backward()
    for one, other in zip(members[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_a_member_of_several_learns_from_its_part_of_a_batch() -> None:
    member, data = _tiny.member(0), _tiny.data(6)
    whole = Batch(data.images, data.labels)
    for number in range(3):
        rows = slice(2 * number, 2 * number + 2)
        own = DeepEnsemble([member], part=(number, 3))
        assert own.loss(whole).equal(DeepEnsemble([member]).loss(Batch(data.images[rows], data.labels[rows])))
        assert own.describe()["part"] == [number, 3]
    assert "part" not in DeepEnsemble([member]).describe()  # as runs made before parts were
    with pytest.raises(ValueError, match=r"\b6 images.*\b4\b"):
        DeepEnsemble([member], part=(0, 4)).loss(whole)
    with pytest.raises(ValueError, match=r"part.*\(3, 3\)"):
        DeepEnsemble([member], part=(3, 3))


@torch.no_grad()
def test_the_deep_ensembles_prediction_is_the_mean_softmax() -> None:
    members = [_tiny.member(0), _tiny.batch_norm_member(1)]
    mean = torch.stack([member(_tiny.images()).softmax(-1) for member in members]).mean(0)
    torch.testing.assert_close(_tiny.predict(DeepEnsemble(members), _tiny.images()).exp(), mean)


def test_members_cannot_learn_without_labels() -> None:
    with pytest.raises(ValueError, match="labels"):
        DeepEnsemble([_tiny.member()]).loss(_tiny.batch())


def test_labels_outside_the_members_classes_are_named() -> None:
    method = DeepEnsemble([_tiny.ensemble().source])
    with pytest.raises(ValueError, match=r"0 to 7.*0 to 2"):
        method.loss(Batch(_tiny.data().images[:2], torch.tensor([0, 7])))
