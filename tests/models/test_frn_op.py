"""The fused normalisation: its values, its gradients, and when it is left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import _tiny
from ensbridge.models import ResNet, forward_with_features, frn
from ensbridge.models.frn import frn as fused

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels need a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def by_hand(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    tau: Tensor,
    swish: bool,
) -> Tensor:
    """The definition, for autograd to differentiate."""
    x = x if bias is None else x + bias[:, None, None]
    x = x / (x.square().mean((2, 3), keepdim=True) + 1e-6).sqrt()
    u = torch.maximum(gamma[:, None, None] * x + beta[:, None, None], tau[:, None, None])
    u = u if residual is None else u + residual
    return u * u.sigmoid() if swish else u


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 5, 4, 7), (2, 16, 1, 1), (2, 20, 40, 40)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("swish", [False, True])
def test_values_and_gradients_are_those_of_the_definition(
    shape: tuple[int, ...], biased: bool, added: bool, swish: bool, device: str
) -> None:
    draws = _tiny.generator(3)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=draws).to(device).requires_grad_()

    x, gamma, beta, tau = random(*shape), random(shape[1]), random(shape[1]), random(shape[1])
    bias, residual = random(shape[1]) if biased else None, random(*shape) if added else None
    leaves = [leaf for leaf in (x, bias, residual, gamma, beta, tau) if leaf is not None]
    upstream = torch.randn(shape, generator=draws).to(device)
    expected = by_hand(x, bias, residual, gamma, beta, tau, swish)
    got = fused(x, bias, residual, gamma, beta, tau, 1e-6, swish)[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    slopes = torch.autograd.grad((expected * upstream).sum(), leaves)
    for one, other in zip(torch.autograd.grad((got * upstream).sum(), leaves), slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_nan_is_not_hidden_by_the_threshold() -> None:
    ones = torch.ones(2)
    assert (
        fused(torch.full((1, 2, 2, 2), torch.nan), None, None, ones, ones, ones, 1e-6, True)[0].isnan().all()
    )


def grown(seed: int = 0) -> ResNet:
    """A tiny network whose biases and normalisations all do something."""
    net = _tiny.member(seed)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn(weight.shape, generator=_tiny.generator(len(name)))
    return net


def test_a_network_is_the_same_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other, images = grown(), copy.deepcopy(grown()), _tiny.images()
    plain(images).square().sum().backward()
    monkeypatch.setattr(frn, "_is_fused", lambda x: True)
    torch.testing.assert_close(other(images), plain(images))
    other(images).square().sum().backward()
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert one.grad is not None, name
        assert two.grad is not None, name
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("feature", ["stages.0.0.norm1", "stages.0.0.conv2"])
def test_a_tapped_layer_still_gives_its_own_output(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = grown(), _tiny.images()
    expected = forward_with_features(net, images, feature)
    monkeypatch.setattr(frn, "_is_fused", lambda x: True)
    for one, other in zip(forward_with_features(net, images, feature), expected, strict=True):
        torch.testing.assert_close(one, other)
