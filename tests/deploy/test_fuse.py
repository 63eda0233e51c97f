"""A model that is prepared for inference gives the same logits from fewer operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import _tiny
from ensbridge.bridge.bridge import FeatureBridge, ZInput
from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.deploy.fuse import FoldedScore, OneStep, fold_batch_norm, prepare_for_inference
from ensbridge.deploy.tracing import difference
from ensbridge.methods import Bridge, BridgeConfig
from ensbridge.metrics.cost import count_macs
from ensbridge.models import MapScore, ResNet, ScoreNet, TokenScore
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.features import forward_with_features
from ensbridge.models.score_net import InvertedResidual

ONE = (0.0, 1.0)
DEPTHWISE_FIRST, EXPANDED_FIRST = [(1, 8, 2, 1), (2, 8, 2, 2)], [(3, 8, 2, 2), (2, 16, 1, 1)]
RESIDUAL_FIRST = [(1, 9, 2, 1), (2, 8, 1, 1)], [(2, 9, 2, 1), (2, 9, 1, 1)]  # 9: the feature's and Z_t's


def trained(net: nn.Module, seed: int = 0) -> nn.Module:
    """The network with weights, and statistics of its normalisation, that are nowhere 0 or 1."""
    generator = _tiny.generator(seed)
    for parameter in net.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.copy_(torch.randn(module.num_features, generator=generator))
            module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
    return net


def score(stages: Sequence[tuple[int, int, int, int]], z_input: ZInput = "none") -> nn.Module:
    with _tiny.seeded(3):
        return trained(ScoreNet(3, 8, stages, last=16, z_input=z_input))


def model(
    *bridges: nn.Module, temperature: float = 1.7, share: float = 0.0, average_source: bool = False
) -> FastEnsemble:
    fast = FastEnsemble(
        _tiny.member(),
        bridges,  # type: ignore[arg-type]
        _tiny.FEATURE,
        temperature=temperature,
        source_logit_weight=share,
        average_source=average_source,
    )
    return fast.eval()


def gap(fast: FastEnsemble, images: Tensor) -> float:
    """How far the prepared model is from the model, which must not notice."""
    before = _tiny.state(fast)
    prepared = prepare_for_inference(fast)
    with torch.no_grad():
        expected, found = fast(images), prepared(images)
    assert _tiny.same(before, _tiny.state(fast))
    assert not prepared.training
    assert found.dtype == expected.dtype
    return difference(expected, found)


@pytest.mark.parametrize("stages", [DEPTHWISE_FIRST, EXPANDED_FIRST, *RESIDUAL_FIRST])
@pytest.mark.parametrize("centre", [True, False])
def test_a_bridge_of_one_step_becomes_plain_convolutions(
    stages: list[tuple[int, int, int, int]], centre: bool
) -> None:
    config = BridgeConfig(centre=centre, temperature=TemperatureLaw(1.5))
    fast = model(Bridge(score(stages), config, ONE))
    (bridge,) = prepare_for_inference(fast).bridges
    assert isinstance(bridge, OneStep)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in bridge.modules())
    assert gap(fast, _tiny.images(5)) < 1e-5
    assert gap(fast.double(), _tiny.images(5).double()) < 1e-12  # exact, not merely near


def test_maps_of_other_sizes_than_the_trained_are_right_up_to_their_border() -> None:
    fast = model(Bridge(score(DEPTHWISE_FIRST), times=ONE)).double()
    for height, width in ((8, 8), (5, 12), (2, 2)):
        assert gap(fast, torch.rand(2, 3, height, width, dtype=torch.float64)) < 1e-12


def test_the_depthwise_convolution_has_whole_blocks_of_channels() -> None:
    for stages in (DEPTHWISE_FIRST, EXPANDED_FIRST):
        (bridge,) = prepare_for_inference(model(Bridge(score(stages), times=ONE))).bridges
        convs = [module for module in bridge.modules() if isinstance(module, nn.Conv2d)]
        first = next(conv for conv in convs if conv.groups > 1)
        assert first.groups == first.in_channels == first.out_channels
        assert first.out_channels % 16 == 0


@pytest.mark.parametrize("z_input", ["paper", "dead", "none", "informative"])
@pytest.mark.parametrize("times", [ONE, (0.0, 0.4, 1.0)])
def test_every_bridge_keeps_its_logits(z_input: ZInput, times: tuple[float, ...]) -> None:
    bridge = Bridge(score(DEPTHWISE_FIRST, z_input), BridgeConfig(z_input=z_input), times)
    fast = model(bridge).double()
    assert gap(fast, _tiny.images().double()) < 1e-12
    (prepared,) = prepare_for_inference(fast).bridges
    assert isinstance(prepared, OneStep) == (z_input == "none" and times == ONE)


def test_the_released_codes_dead_input_is_a_constant() -> None:
    net = ScoreNet(3, 8, DEPTHWISE_FIRST, last=16, z_input="dead")
    last = net.z_embedding.mlp[-1]  # type: ignore[index]
    last.bias.data.fill_(0.7)  # the one number of it that training moves
    fast = model(Bridge(net, BridgeConfig(z_input="dead"), ONE)).double()
    assert isinstance(prepare_for_inference(fast).bridges[0], OneStep)
    assert gap(fast, _tiny.images().double()) < 1e-12
    last.weight.data[0, 0] = 1e-3
    assert not isinstance(prepare_for_inference(fast).bridges[0], OneStep)


@pytest.mark.parametrize("preset", ["paper", "released"])
def test_bridges_that_draw_stay_as_they_are(preset: str) -> None:
    config = BridgeConfig.preset(preset)  # type: ignore[arg-type]
    fast = model(Bridge(score(DEPTHWISE_FIRST, config.z_input), config, ONE)).double()
    assert isinstance(prepare_for_inference(fast).bridges[0], Bridge)
    assert gap(fast, _tiny.images().double()) < 1e-12


def test_several_bridges_of_several_kinds_and_the_source_among_them() -> None:
    tail = FeatureBridge(_tiny.tail(_tiny.member()))
    entered = trained(MapScore(3, 8, 16, size=8, deep=False))
    straight = trained(MapScore(3, 8, 8, size=8))
    tokens = TokenScore(3, 8, 8)
    bridges = [Bridge(net, times=ONE) for net in (entered, straight, score(EXPANDED_FIRST))]
    for share in (0.0, -0.4):
        assert gap(model(*bridges, share=share).double(), _tiny.images().double()) < 1e-12
        assert gap(model(bridges[0], share=share).double(), _tiny.images().double()) < 1e-12
    assert gap(model(tail, average_source=True).double(), _tiny.images().double()) < 1e-12
    vectors = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    assert gap(FastEnsemble(vectors, [Bridge(tokens, times=ONE)], "1").eval(), _tiny.images()) < 1e-6


def test_where_nothing_is_folded_the_logits_are_the_models_to_the_bit() -> None:
    vectors = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with _tiny.seeded(4):
        tokens = [Bridge(trained(TokenScore(3, 8, 8), seed)) for seed in range(2)]
    several = FastEnsemble(vectors, tokens, "1", temperature=1.7, source_logit_weight=0.2).eval()
    networks = model(*(FeatureBridge(_tiny.pooled(seed)) for seed in range(2)), average_source=True)
    with torch.no_grad():
        for fast in (several, networks):
            found = prepare_for_inference(fast).with_source(_tiny.images())
            assert all(
                mine.equal(own) for mine, own in zip(found, fast.with_source(_tiny.images()), strict=True)
            )
        one = FastEnsemble(vectors, tokens[:1], "1").eval()
        logits, h = forward_with_features(vectors, _tiny.images(), "1")
        end = tokens[0](h, logits)
        assert prepare_for_inference(one)(_tiny.images()).equal(end - end.mean(-1, keepdim=True))


class ChannelsLast(nn.Module):
    """A source whose maps are (B, H, W, C), as Swin's."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.block, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.block(self.patch(images).movedim(1, -1)).mean((1, 2)))


@pytest.mark.parametrize("width", [8, 16])  # without and with an entry
@pytest.mark.parametrize("shape", [(8, 8), (6, 4)])  # H = C, where a mistake would be silent, and other
def test_maps_with_channels_last_are_read_that_way(width: int, shape: tuple[int, int]) -> None:
    with _tiny.seeded(5):
        net = trained(MapScore(3, 8, width, size=8, deep=False, channels_last=True))
        fast = FastEnsemble(ChannelsLast(), [Bridge(net, times=ONE)], "block").eval().double()
    assert isinstance(prepare_for_inference(fast).bridges[0], OneStep)
    assert gap(fast, torch.rand(5, 3, *shape, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 16])
def test_a_source_of_another_type_than_its_bridges_keeps_its_logits(width: int, dtype: torch.dtype) -> None:
    with _tiny.seeded(6):
        net = trained(MapScore(3, 8, width, size=8, deep=False))
    fast = FastEnsemble(_tiny.batch_norm_member().to(dtype), [Bridge(net, times=ONE)], "1").eval()
    assert gap(fast, _tiny.images(5).to(dtype)) < 1e-5
    weights = prepare_for_inference(fast).bridges.parameters()
    assert {parameter.dtype for parameter in weights} == {torch.float32}


def test_half_precision_is_kept() -> None:
    fast = model(Bridge(score(DEPTHWISE_FIRST), times=ONE)).bfloat16()
    assert gap(fast, _tiny.images().bfloat16()) < 0.1
    assert {parameter.dtype for parameter in prepare_for_inference(fast).parameters()} == {torch.bfloat16}


def test_batch_norm_without_a_convolution_before_it_stays() -> None:
    net = nn.Sequential(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)), nn.BatchNorm2d(3)).eval()
    images = _tiny.images()
    expected = trained(net)(images)
    fold_batch_norm(net)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in net.modules()) == 2
    assert torch.equal(net(images), expected)


class Operations(TorchDispatchMode):
    """Counts what torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_papers_bridge_leaves_convolutions_with_their_activations_and_ten_small_operations() -> None:
    net = ScoreNet.cifar10(z_input="none").eval()
    bridge = Bridge(net, times=ONE)
    fast = FastEnsemble(ResNet((1,), (32,), 10, stem=16), [bridge], _tiny.FEATURE).eval()
    prepared = prepare_for_inference(fast).bridges[0]
    assert isinstance(prepared, OneStep)
    assert isinstance(prepared.score, FoldedScore)
    h, logits = torch.rand(1, 32, 32, 32), torch.zeros(1, 10)
    before, after = Operations(), Operations()
    with torch.no_grad():
        with before:
            bridge(h, logits)
        with after:
            prepared(h, logits)
    convs = [sum("conv" in name for name in each.names) for each in (before, after)]
    assert convs[1] == convs[0] + 1  # in place of the concatenation and the first shift
    activations = sum("hardtanh" in name for name in after.names)
    residuals = sum(isinstance(each, InvertedResidual) and each.residual for each in prepared.modules())
    assert len(after.names) - convs[1] - activations - residuals <= 10
    assert len(before.names) - convs[0] - activations - residuals > 80
    assert count_macs(prepared.score, h) < 1.11 * count_macs(net, h, logits, torch.ones(1))
