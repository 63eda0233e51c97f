"""The members: the paper's exact sizes, and each layer against its formula."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import _tiny
from ensbridge.bridge.bridge import ZInput
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models import FRN, ResNet, forward_with_features, resnet32x2, resnet32x4, resnet34

F64 = torch.float64
Z_INPUTS: list[ZInput] = ["paper", "dead", "none", "informative"]

F64 = torch.float64


# Sizes and costs, on the meta device: nothing is computed


@pytest.mark.parametrize(
    ("build", "size", "params", "macs"),
    [
        (lambda: resnet32x2(10), 32, 1_860_986, 270_974_976),
        (lambda: resnet32x4(100), 32, 7_433_044, 1_072_087_040),
        (lambda: resnet34(200), 64, 21_396_616, 4_637_589_504),
        (lambda: resnet34(1000, bias=False), 64, 21_798_504, 4_637_589_504),
    ],
    ids=["cifar10", "cifar100", "tiny_imagenet", "imagenet64"],
)
def test_members_have_the_exact_size_and_cost(
    build: Callable[[], ResNet], size: int, params: int, macs: int
) -> None:
    with torch.device("meta"):
        net, image = build(), torch.empty(1, 3, size, size)
    assert count_params(net) == params
    assert count_macs(net, image, convs_only=True) == macs


# Filter response normalisation


def frn_reference(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """y = max(γ·x / √(mean x² + 1e-6) + β, τ), one channel of one image at a time."""
    y = np.empty_like(x)
    for image in range(x.shape[0]):
        for c in range(x.shape[1]):
            nu2 = (x[image, c] ** 2).mean()
            y[image, c] = np.maximum(gamma[c] * x[image, c] / np.sqrt(nu2 + 1e-6) + beta[c], tau[c])
    return y


def random_frn(channels: int) -> FRN:
    """An FRN whose γ, β and τ all do something."""
    frn, generator = FRN(channels), _tiny.generator(5)
    with torch.no_grad():
        for parameter in frn.parameters():
            parameter.copy_(torch.randn(channels, generator=generator))
    return frn


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_frn_is_its_formula(scale: float) -> None:
    frn = random_frn(4).double()
    x = scale * torch.randn(3, 4, 5, 6, generator=_tiny.generator(), dtype=F64)
    expected = frn_reference(x.numpy(), *(p.detach().numpy() for p in (frn.gamma, frn.beta, frn.tau)))
    y = frn(x).detach().numpy()
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    at_threshold = np.isclose(y, frn.tau.detach().numpy()[:, None, None])
    assert 0.1 < at_threshold.mean() < 0.9  # τ is at work, and not everywhere


def test_frns_gradients_are_those_of_the_maximum() -> None:
    frn = random_frn(3).double()
    x = torch.randn(2, 3, 4, 4, generator=_tiny.generator(), dtype=F64, requires_grad=True)
    weight = torch.randn(2, 3, 4, 4, generator=_tiny.generator(1), dtype=F64)
    gamma, beta, tau = (p.view(1, -1, 1, 1) for p in (frn.gamma, frn.beta, frn.tau))
    reference = torch.maximum(gamma * x / (x.square().mean((2, 3), keepdim=True) + 1e-6).sqrt() + beta, tau)
    inputs = [x, *frn.parameters()]
    expected = torch.autograd.grad((reference * weight).sum(), inputs)
    found = torch.autograd.grad((frn(x) * weight).sum(), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert torch.autograd.gradcheck(frn, (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 200.0])
def test_frn_of_half_precision_is_right_to_its_last_bit(dtype: torch.dtype, scale: float) -> None:
    """Squares vanish or overflow in float16, and bfloat16 cannot sum a thousand of them."""
    x = (scale * torch.randn(2, 3, 32, 32, generator=_tiny.generator())).to(dtype)
    frn = FRN(3)
    y = frn(x)
    assert y.dtype == dtype
    expected = frn_reference(x.double().numpy(), np.ones(3), np.zeros(3), np.zeros(3))
    np.testing.assert_allclose(
        y.detach().double().numpy(), expected, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=1e-6
    )


def test_what_frn_does_to_an_image_does_not_depend_on_its_neighbours() -> None:
    frn, x = random_frn(3).train(), torch.randn(4, 3, 5, 5, generator=_tiny.generator())
    torch.testing.assert_close(frn(x)[1:2], frn(x[1:2]), rtol=0, atol=0)


def test_frn_starts_as_the_identity_behind_a_relu() -> None:
    frn = FRN(2)
    assert frn.gamma.eq(1).all()
    assert frn.beta.eq(0).all()
    assert frn.tau.eq(0).all()


# Members


def test_normalisation_belongs_to_the_network() -> None:
    net, images = _tiny.member(), _tiny.images()
    seen: list[Tensor] = []
    net.stem.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    net(images)
    expected = (images.double() - torch.tensor([0.49, 0.48, 0.44], dtype=F64).view(3, 1, 1)) / 0.2
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-5, atol=1e-6)
    assert not {"mean", "std"} & set(net.state_dict())


def test_a_member_of_another_kind_of_image_has_its_own_normalisation() -> None:
    net = ResNet((1,), (8,), 2, stem=8, mean=(0.5,), std=(0.25,))
    seen: list[Tensor] = []
    net.stem.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    assert net(torch.full((1, 1, 4, 4), 0.75)).shape == (1, 2)
    assert seen[0].eq(1).all()


def block_reference(block: Any, x: Tensor, stride: int) -> Tensor:
    """conv3×3(s) – FRN – Swish – conv3×3 – FRN, plus shortcut, Swish; from weights alone."""

    def frn(module: FRN, maps: Tensor) -> Tensor:
        numbers = (p.detach().numpy() for p in (module.gamma, module.beta, module.tau))
        return torch.from_numpy(frn_reference(maps.detach().numpy(), *numbers))

    def swish(maps: Tensor) -> Tensor:
        return maps / (1 + torch.exp(-maps))

    y = swish(frn(block.norm1, F.conv2d(x, block.conv1.weight, block.conv1.bias, stride, 1)))
    y = frn(block.norm2, F.conv2d(y, block.conv2.weight, block.conv2.bias, 1, 1))
    if not isinstance(block.shortcut, nn.Identity):
        conv, norm = block.shortcut
        x = frn(norm, F.conv2d(x, conv.weight, conv.bias, stride))
    return swish(y + x)


@pytest.mark.parametrize(("width", "stride"), [(8, 1), (16, 1), (8, 2), (16, 2)])
def test_the_first_feature_is_taken_after_the_blocks_last_swish(width: int, stride: int) -> None:
    net = ResNet((1,), (width,), 3, stem=8, strides=(stride,)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=_tiny.generator(), dtype=F64))
    images = _tiny.images(2).double()
    h = forward_with_features(net, images, _tiny.FEATURE)[1]
    x = net.stem((images - net.mean) / net.std)
    torch.testing.assert_close(h, block_reference(net.stages[0][0], x, stride), rtol=1e-10, atol=1e-10)
    assert h.min() > -0.2785  # Swish's minimum
    shapes_change = width != 8 or stride != 1
    assert isinstance(net.stages[0][0].shortcut, nn.Identity) != shapes_change


def test_the_head_reads_the_mean_over_the_map() -> None:
    net, images = _tiny.member(), _tiny.images()
    logits, maps = forward_with_features(net, images, "stages")
    torch.testing.assert_close(logits, maps.mean((2, 3)) @ net.head.weight.T + net.head.bias)
    assert maps.shape == (6, 16, 4, 4)  # the second stage halves the map


def test_only_the_widened_member_projects_in_its_first_block() -> None:
    with torch.device("meta"):
        assert not isinstance(resnet32x2(10).stages[0][0].shortcut, nn.Identity)
        assert isinstance(resnet34(200).stages[0][0].shortcut, nn.Identity)
        biases = [
            module.bias for module in resnet34(9, bias=False).modules() if isinstance(module, nn.Conv2d)
        ]
    assert set(biases) == {None}


def test_weights_start_he_normal_and_biases_at_zero() -> None:
    with _tiny.seeded(0):
        net = ResNet((2, 1), (32, 64), 10, stem=16)
    layers = [module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    units = []
    for layer in layers:
        assert layer.bias is not None
        assert layer.bias.eq(0).all()
        unit = layer.weight.detach().double() / math.sqrt(2 / layer.weight[0].numel())
        assert abs(unit.std().item() - 1) < 4.5 / math.sqrt(2 * unit.numel())
        units.append(unit.flatten())
    assert scipy.stats.kstest(torch.cat(units)[::5].numpy(), "norm").pvalue > 0.01


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"blocks": (1, 1), "widths": (8,)}, "2, 1 and 2"),
        ({"blocks": (), "widths": ()}, "0, 0"),
        ({"blocks": (1,), "widths": (8,), "strides": (1, 2)}, "1, 1 and 2"),
        ({"blocks": (1,), "widths": (8,), "mean": (0.5,)}, "mean.*1.*std.*3"),
        ({"blocks": (1,), "widths": (8,), "classes": 1}, "classes is 1"),
    ],
)
def test_a_member_that_cannot_be_built_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ResNet(**{"classes": 3, **arguments})


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (3, 8, 8)])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(str(shape))}.*\(B, 3, H, W\)"):
        _tiny.member()(torch.zeros(shape))
