"""The score network: the paper's exact sizes, how it is put together, and what it sees of Z_t."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import _tiny
from ensbridge.bridge.bridge import ZInput
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models import ScoreNet, forward_with_features, resnet32x2, resnet32x4, resnet34
from ensbridge.models.score_net import InvertedResidual, Pointwise, conv_bn, in_eights, time_embedding

F64 = torch.float64
Z_INPUTS: list[ZInput] = ["paper", "dead", "none", "informative"]


@pytest.mark.parametrize(
    ("build", "size", "params", "macs"),
    [
        (ScoreNet.cifar10, 32, 395_543, 42_686_464),
        (ScoreNet.cifar100, 32, 1_547_617, 167_021_568),
        (ScoreNet.tiny_imagenet, 64, 3_186_117, 862_965_760),
        (ScoreNet.imagenet64, 64, 8_278_222, 1_077_807_104),
    ],
    ids=["cifar10", "cifar100", "tiny_imagenet", "imagenet64"],
)
def test_score_networks_have_the_exact_size_and_cost(
    build: Callable[[], ScoreNet], size: int, params: int, macs: int
) -> None:
    with torch.device("meta"):
        net = build()
        inputs = torch.empty(1, net.channels, size, size), torch.empty(1, net.classes), torch.empty(1)
    assert count_params(net) == params
    assert count_macs(net, *inputs, convs_only=True) == macs


def test_each_score_network_fits_its_member() -> None:
    with torch.device("meta"):
        pairs = [
            (resnet32x2(10), ScoreNet.cifar10(), 32),
            (resnet32x4(100), ScoreNet.cifar100(), 32),
            (resnet34(200), ScoreNet.tiny_imagenet(), 64),
            (resnet34(1000, bias=False), ScoreNet.imagenet64(), 64),
        ]
        for member, score, size in pairs:
            logits, h = forward_with_features(member, torch.empty(2, 3, size, size), _tiny.FEATURE)
            assert h.shape[2:] == (size, size)
            assert score(h, logits, torch.empty(2)).shape == logits.shape


@pytest.mark.parametrize("size", [2, 8, 16])
def test_the_time_embedding_is_its_formula(size: int) -> None:
    t = np.array([0.0, 0.2, 0.55, 1.0])
    half = size // 2
    angles = t[:, None] * np.exp(-np.log(1e4) * np.arange(half) / half)
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    found = time_embedding(torch.from_numpy(t), size).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def score_inputs(seed: int = 0, count: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """A random feature, state and time for `_tiny.score`."""
    draws = _tiny.generator(seed)
    h = torch.randn(count, _tiny.CHANNELS, 8, 8, generator=draws)
    return h, 3 * torch.randn(count, 3, generator=draws), 0.1 + 0.9 * torch.rand(count, generator=draws)


@pytest.mark.parametrize("z_input", Z_INPUTS)
def test_the_score_is_put_together_as_it_should_be(z_input: ZInput) -> None:
    """ReLU6-BN-conv of h beside tiled channels of Z_t/3, a time shift before each stage, pooled, linear."""
    net, (h, z_t, t) = _tiny.score(z_input), score_inputs()
    entered: list[Tensor] = []
    for stage in net.stages:
        stage.register_forward_hook(lambda _m, inputs, _o: entered.append(inputs[0]))
    result = net(h, z_t, t)
    saw = tuple(entered)
    stem = F.batch_norm(
        F.conv2d(h, net.stem[0].weight, padding=1), net.stem[1].running_mean, net.stem[1].running_var
    )
    z_channels = net.z_embedding(z_t / 3)
    assert z_channels.shape[1] == (3 if z_input == "informative" else 1)
    x = torch.cat([stem.clamp(0, 6), z_channels[:, :, None, None].expand(-1, -1, 8, 8)], 1)
    angles = time_embedding(t, _tiny.CHANNELS // 4)
    time = F.silu(F.linear(angles, net.time[0].weight, net.time[0].bias))
    for stage, shift, found in zip(net.stages, net.time_shifts, saw, strict=True):
        x = x + F.linear(time, shift.weight, shift.bias)[:, :, None, None]
        torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-5)
        x = stage(x)
    pooled = F.relu6(net.tail[1](net.tail[0](x))).mean((2, 3))
    torch.testing.assert_close(result, F.linear(pooled, net.head.weight, net.head.bias))
    assert net.tail[0].kernel_size == (1, 1)
    assert net.tail[0].bias is None


def test_what_the_dead_input_would_see_is_mean_share_and_population_deviation() -> None:
    net = _tiny.score("dead")
    seen: list[Tensor] = []
    net.z_embedding.mlp.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    h, z_t, t = score_inputs()
    net(h, z_t, t)
    z = z_t.double().numpy() / 3
    expected = np.stack([z.mean(1), np.full(4, 1 / 3), z.std(1)], axis=1)
    np.testing.assert_allclose(seen[0].numpy(), expected, rtol=1e-5)


def trained(net: ScoreNet, optimizer: type[torch.optim.Optimizer]) -> ScoreNet:
    """The network after a few steps on random targets."""
    stepper = optimizer(net.parameters(), lr=0.05, weight_decay=1e-3)
    net.train()
    for seed in range(5):
        h, z_t, t = score_inputs(seed, 8)
        loss = (net(h, z_t, t) - z_t).square().mean()
        stepper.zero_grad()
        loss.backward()
        stepper.step()
    return net.eval()


def moves_with_z(net: ScoreNet) -> bool:
    """Whether the output depends on Z_t."""
    h, z_t, t = score_inputs(9)
    others = [10 * z_t, -z_t, z_t.flip(1), z_t + 5, torch.zeros_like(z_t)]
    with torch.no_grad():
        return any(not net(h, other, t).equal(net(h, z_t, t)) for other in others)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_the_dead_input_never_sees_z(optimizer: type[torch.optim.Optimizer]) -> None:
    net = _tiny.score("dead")
    assert not moves_with_z(net)
    trained(net, optimizer)
    assert not moves_with_z(net)
    *inner, last_bias = net.z_embedding.mlp.parameters()
    assert sum(p.numel() for p in inner) == 16
    assert all(p.eq(0).all() for p in inner)
    assert last_bias.item() != 0


def test_an_absent_input_never_sees_z_and_living_ones_do() -> None:
    for z_input in Z_INPUTS:
        net = _tiny.score(z_input)
        alive = z_input in ("paper", "informative")
        assert moves_with_z(net) == alive
        assert moves_with_z(trained(net, torch.optim.Adam)) == alive


def test_the_papers_input_is_normalised_pooled_and_small() -> None:
    net = _tiny.score("paper", classes=4)
    norm, pool, first, _, last = net.z_embedding.mlp
    z = _tiny.logits(5, scale=2.0)[:, [0, 1, 2, 0]].float() + torch.arange(4)
    expected = (z - z.mean(1, keepdim=True)) / (z.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(pool(norm(z)), expected.view(5, 2, 2).mean(2), rtol=1e-4, atol=1e-5)
    assert (first.in_features, first.out_features, last.out_features) == (2, 2, 1)


def test_the_informative_input_sees_each_class() -> None:
    net = _tiny.score("informative")
    h, z_t, t = score_inputs()
    for k in range(3):
        other = z_t.clone()
        other[:, k] += 1
        assert (net(h, other, t) - net(h, z_t, t)).abs().min() > 0
    widths = [net.z_embedding.mlp[1].out_features, net.z_embedding.mlp[3].out_features]
    assert widths == [6, 3]


@pytest.mark.parametrize("z_input", Z_INPUTS)
def test_the_score_depends_on_time_and_on_the_feature(z_input: ZInput) -> None:
    net, (h, z_t, t) = _tiny.score(z_input), score_inputs()
    assert (net(h, z_t, t) - net(h, z_t, t / 2)).abs().max() > 1e-5
    assert (net(h, z_t, t) - net(h.flip(0), z_t, t)).abs().max() > 1e-4


# Inverted residuals


@pytest.mark.parametrize("expansion", [1, 3])
@pytest.mark.parametrize(("outputs", "stride"), [(8, 1), (8, 2), (12, 1), (12, 2)])
def test_a_residual_is_added_only_where_the_shape_stays(outputs: int, stride: int, expansion: int) -> None:
    block = InvertedResidual(8, outputs, expansion, stride).eval()
    convs = [module for module in block.modules() if isinstance(module, nn.Conv2d)]
    assert all(conv.bias is None for conv in convs)
    assert [conv.kernel_size[0] for conv in convs] == ([1, 3, 1] if expansion != 1 else [3, 1])
    depthwise = convs[-2]
    assert depthwise.groups == depthwise.in_channels == 8 * expansion
    x = torch.randn(2, 8, 6, 6, generator=_tiny.generator())
    assert block(x).shape == (2, outputs, 6 // stride, 6 // stride)
    nn.init.zeros_(convs[-1].weight)  # the body now gives zeros: what is left is the residual
    expected = x if (outputs, stride) == (8, 1) else torch.zeros(2, outputs, 6 // stride, 6 // stride)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=0)


def test_an_inverted_residual_is_clipped_at_six_but_linear_at_its_end() -> None:
    block = InvertedResidual(4, 4, 2, 1).eval()
    x = 100 * torch.randn(2, 4, 5, 5, generator=_tiny.generator())
    expand, depthwise, project = block.body
    y = expand[1](expand[0](x)).clamp(0, 6)
    y = depthwise[1](depthwise[0](y)).clamp(0, 6)
    torch.testing.assert_close(block(x), x + project[1](project[0](y)))
    assert len(project) == 2


# What is refused


def test_a_score_network_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'zed'.*paper, dead, none, informative"):
        _tiny.score("zed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="12 channels"):
        ScoreNet(3, 12, [(1, 8, 1, 1)], 8)


@pytest.mark.parametrize("shape", [(2, 16, 8, 8), (2, 8)])
def test_a_feature_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(str(shape))}.*\(B, 8, H, W\)"):
        _tiny.score()(torch.zeros(shape), torch.zeros(2, 3), torch.ones(2))


def test_channels_in_eights_change_no_result_and_no_gradient() -> None:
    x, weight = torch.randn(2, 33, 4, 4, requires_grad=True), torch.randn(5, 33, 1, 1, requires_grad=True)
    plain, padded = F.conv2d(x, weight), F.conv2d(*in_eights(x, weight))
    torch.testing.assert_close(padded, plain)
    upstream = torch.randn_like(plain)
    for one, other in zip(
        torch.autograd.grad(padded, (x, weight), upstream),
        torch.autograd.grad(plain, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_convolution_of_the_score_network_is_described_as_any_other() -> None:
    assert repr(conv_bn(33, 32, 1)[0]) == repr(nn.Conv2d(33, 32, 1, bias=False))


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True


@pytest.mark.parametrize("bias", [False, True])
def test_a_1x1_convolution_on_a_gpu_gives_what_any_other_gives(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []

    def counted(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        padded = in_eights(x, weight)
        widths.append(padded[0].shape[1])
        return padded

    monkeypatch.setattr("ensbridge.models.score_net.in_eights", counted)
    conv, x = Pointwise(33, 6, stride=2), torch.randn(2, 33, 5, 5)
    conv.bias = nn.Parameter(torch.randn(6)) if bias else None  # as batch norm leaves it that is folded in
    plain = nn.Conv2d(33, 6, 1, stride=2, bias=bias)
    plain.load_state_dict(conv.state_dict())
    torch.testing.assert_close(conv(x.as_subclass(OnGpu)).as_subclass(Tensor), plain(x))
    assert widths == [40]
    with torch.no_grad():
        assert conv(x.as_subclass(OnGpu)).as_subclass(Tensor).equal(plain(x))
    assert widths == [40]
