"""The ensemble is the mean softmax of its members."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor, nn

import _tiny
from ensbridge.models.ensemble import Ensemble, ensemble_logit, member_groups

# The ensemble's logit


def test_its_softmax_is_the_members_mean_softmax() -> None:
    logits = _tiny.logits(50, members=4)
    expected = scipy.special.softmax(logits.numpy(), axis=-1).mean(0)
    np.testing.assert_allclose(ensemble_logit(logits).softmax(-1).numpy(), expected, rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_stay_finite_and_right(dtype: torch.dtype) -> None:
    signs = torch.randn(3, 40, 5, generator=_tiny.generator()).sign()
    logits = (1e4 * signs + torch.randn(3, 40, 5, generator=_tiny.generator(1))).to(dtype)
    result = ensemble_logit(logits)
    assert result.dtype == dtype
    assert result.isfinite().all()
    # log p̄ in double, where p̄ itself would underflow
    log_p = scipy.special.log_softmax(logits.double().numpy(), axis=-1)
    log_mean = scipy.special.logsumexp(log_p, axis=0) - np.log(3)
    expected = log_mean - log_mean.mean(-1, keepdims=True)
    # Numbers of 1e4 have their last place there, whichever way they are computed.
    last_place = 2e4 * torch.finfo(dtype).eps
    np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=4 * last_place)
    np.testing.assert_allclose(result.softmax(-1).numpy(), np.exp(log_mean), rtol=0, atol=4 * last_place)


def test_it_is_centred_over_classes() -> None:
    for scale in (1.0, 1e4):
        sums = ensemble_logit(_tiny.logits(50, members=4, scale=scale)).sum(-1)
        assert sums.abs().max() < 1e-13 * scale * 10


def test_one_member_is_its_own_ensemble_but_for_the_centre() -> None:
    logits = _tiny.logits(members=1)
    expected = logits[0] - logits[0].mean(-1, keepdim=True)
    torch.testing.assert_close(ensemble_logit(logits), expected, rtol=1e-13, atol=1e-13)


def test_neither_the_members_order_nor_their_offsets_matter() -> None:
    logits = _tiny.logits(members=4)
    offsets = 10 * torch.randn(4, 6, 1, generator=_tiny.generator(), dtype=torch.float64)
    torch.testing.assert_close(ensemble_logit(logits.flip(0) + offsets), ensemble_logit(logits))


@pytest.mark.parametrize("shape", [(2, 3), (0, 2, 3), (1, 2, 3, 4)])
def test_logits_that_are_not_of_members_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        ensemble_logit(torch.zeros(shape))


# Many members, one call


def mixed_members() -> list[nn.Module]:
    """Three kinds of classifiers of the same classes."""
    with _tiny.seeded(2):
        linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, _tiny.CLASSES))
    return [_tiny.member(0), _tiny.batch_norm_member(1), linear]


@torch.no_grad()
def test_members_of_any_kind_are_averaged() -> None:
    members, images = mixed_members(), _tiny.images()
    ensemble = Ensemble(members).double()
    images = images.double()
    each = torch.stack([member(images) for member in members])
    assert ensemble.member_logits(images).equal(each)
    torch.testing.assert_close(ensemble(images).softmax(-1), each.softmax(-1).mean(0), rtol=1e-13, atol=0)
    assert len(ensemble) == 3
    assert ensemble.source is members[0]


@torch.no_grad()
def test_the_first_members_are_the_smaller_ensemble_and_share_weights() -> None:
    members, images = mixed_members(), _tiny.images()
    first = Ensemble(members).first(2)
    assert list(first.members) == members[:2]
    mean = torch.stack([member(images).softmax(-1) for member in members[:2]]).mean(0)
    torch.testing.assert_close(first(images).softmax(-1), mean)
    assert len(Ensemble(members).first(3)) == 3


@pytest.mark.parametrize("count", [0, -1, 4])
def test_more_members_than_there_are_cannot_be_asked_for(count: int) -> None:
    with pytest.raises(ValueError, match=rf"{count} members.*\b3"):
        _tiny.ensemble(3).first(count)


def test_half_precision_members_are_averaged_in_float32() -> None:
    members = [nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).bfloat16() for _ in range(2)]
    images = _tiny.images().bfloat16()
    assert Ensemble(members)(images).dtype == torch.float32
    assert Ensemble(members).member_logits(images).dtype == torch.float32


def test_an_ensemble_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="0 members"):
        Ensemble([])


def test_members_of_different_classes_are_refused_with_their_shapes() -> None:
    ensemble = Ensemble([_tiny.member(0), _tiny.member(1, classes=4)])
    for call in (ensemble, ensemble.member_logits, partial(_tiny.teacher_outputs, ensemble, _tiny.FEATURE)):
        with pytest.raises(ValueError, match=r"1: \(6, 3\).*2: \(6, 4\)"):
            call(_tiny.images())


def test_outputs_that_are_not_logits_are_refused_with_their_shape() -> None:
    with pytest.raises(ValueError, match=r"\(6, 8, 6, 6\)"):
        Ensemble([nn.Conv2d(3, 8, 3)])(_tiny.images())


# Members partitioned over bridges


@pytest.mark.parametrize("members", range(2, 11))
def test_members_are_partitioned_in_order_evenly_and_once(members: int) -> None:
    for bridges in range(1, members):
        groups = member_groups(members, bridges)
        assert len(groups) == bridges
        assert all(group[0] == 0 and 0 not in group[1:] for group in groups)
        others = [index for group in groups for index in group[1:]]
        assert others == list(range(1, members))  # in order, all of them, none twice
        sizes = [len(group) for group in groups]
        assert min(sizes) >= 2
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


def test_five_members_and_two_bridges_are_the_specified_groups() -> None:
    assert member_groups(5, 2) == [(0, 1, 2), (0, 3, 4)]
    assert member_groups(3, 1) == [(0, 1, 2)]
    assert member_groups(4, 3) == [(0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize(
    ("members", "bridges", "named"),
    [
        (1, 1, "1 members"),
        (0, 1, "0 members"),
        (5, 5, "5 bridges.*5 members.*1 to 4"),
        (5, 0, "0 bridges.*5 members"),
        (3, -1, "-1 bridges.*3 members.*1 to 2"),
    ],
)
def test_an_impossible_partition_is_refused(members: int, bridges: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        member_groups(members, bridges)


# What teachers say of a batch


def test_their_outputs_are_every_members_logits_and_the_sources_own_feature() -> None:
    members, images = mixed_members(), _tiny.images()
    ensemble = Ensemble(members)
    seen = _tiny.teacher_outputs(ensemble)
    source = members[0]
    expected = source.stages[0][0](source.stem((images - source.mean) / source.std))
    torch.testing.assert_close(seen.feature, expected, rtol=0, atol=0)
    torch.testing.assert_close(seen.logits, ensemble.member_logits(images), rtol=0, atol=0)
    assert not seen.feature.requires_grad
    assert not seen.logits.requires_grad
    assert _tiny.hooks_of(ensemble) == 0


@pytest.mark.parametrize("wrap", [lambda x: {"logits": x}, lambda x: SimpleNamespace(logits=x)])
def test_members_may_return_objects_with_logits(wrap: Callable[[Tensor], object]) -> None:
    class Wrapped(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: Tensor) -> object:
            return wrap(self.net(images))

    plain, images = _tiny.ensemble(2), _tiny.images()
    wrapped = Ensemble([Wrapped(member) for member in plain.members])
    assert wrapped(images).equal(plain(images))
    assert _tiny.teacher_outputs(wrapped, "net.stem").feature.equal(
        _tiny.teacher_outputs(plain, "stem").feature
    )


def test_other_outputs_are_refused() -> None:
    class Pair(nn.Module):
        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            return images, images

    with pytest.raises(ValueError, match="tuple"):
        Ensemble([Pair()])(_tiny.images())
