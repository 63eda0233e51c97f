"""Bridge networks: the light tail's exact costs, the KL to the curve's centre, and the prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.methods import BridgeNetwork, FeatureBridge
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models import ResNet, forward_with_features, resnet32x2, resnet34
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.resnet import BasicBlock
from ensbridge.models.tail import Tail


@pytest.fixture
def ensemble() -> Ensemble:
    return _tiny.ensemble(3)


# The tail


@pytest.mark.parametrize(
    ("width", "macs", "params"), [(1.0, 1.418, 1.956), (0.5, 1.126, 1.289)], ids=["medium", "small"]
)
def test_two_bridge_networks_cost_what_they_should(width: float, macs: float, params: float) -> None:
    with torch.device("meta"):
        source, image = resnet32x2(10), torch.empty(1, 3, 32, 32)
        feature = source.block_at(0.8)
        bridges = [FeatureBridge(Tail(source, feature, width)) for _ in range(2)]
        fast = FastEnsemble(source, bridges, feature, average_source=True)
        ratio = count_macs(fast, image, convs_only=True) / count_macs(source, image, convs_only=True)
        whole = count_macs(fast, image) / count_macs(source, image)
    assert round(ratio, 3) == macs
    assert round(whole, 3) == macs
    assert round(count_params(fast) / count_params(source), 3) == params


@pytest.mark.parametrize(
    ("build", "size", "number", "of", "left"),
    [(lambda: resnet32x2(10), 32, 12, 15, 3), (lambda: resnet34(200), 64, 13, 16, 3)],
    ids=["resnet32x2", "resnet34"],
)
def test_the_feature_is_the_output_of_block_12_of_15_or_13_of_16(
    build: Any, size: int, number: int, of: int, left: int
) -> None:
    with torch.device("meta"):
        net = build()
    ran: list[str] = []
    blocks = {name: module for name, module in net.named_modules() if isinstance(module, BasicBlock)}
    for name, block in blocks.items():
        block.register_forward_hook(lambda *_, name=name: ran.append(name))
    with torch.device("meta"):
        logits, feature = forward_with_features(net, torch.empty(2, 3, size, size), net.block_at())
        assert ran == list(net.blocks())  # named in the order in which they run
        assert (len(ran), ran.index(net.block_at()) + 1) == (of, number)
        medium, small = (Tail(net, net.block_at(), width) for width in (1.0, 0.5))
        assert [len(tail.blocks) for tail in (medium, small)] == [left, left]
        assert medium(feature).shape == small(feature).shape == logits.shape


@pytest.mark.parametrize(
    ("blocks", "share", "expected"), [(2, 0.8, 1), (5, 0.8, 4), (10, 0.8, 8), (4, 0.1, 1)]
)
def test_on_other_depths_the_feature_is_at_its_share(blocks: int, share: float, expected: int) -> None:
    net = ResNet((blocks,), (8,), 3, stem=8)
    assert net.block_at(share) == f"stages.0.{expected - 1}"


@torch.no_grad()
def test_with_the_sources_weights_the_tail_ends_where_the_source_ends() -> None:
    net = ResNet((2, 2), (8, 16), 3, stem=8)
    for feature in ("stages.0.0", "stages.0.1", "stages.1.0"):
        logits, inner = forward_with_features(net, _tiny.images(), feature)
        tail = Tail(net, feature)
        assert not tail(inner).allclose(logits, atol=1e-3)  # its weights are new
        after = list(net.blocks().values())[list(net.blocks()).index(feature) + 1 :]
        for own, block in zip(tail.blocks, after, strict=True):
            own.load_state_dict(block.state_dict())
        tail.head.load_state_dict(net.head.state_dict())
        torch.testing.assert_close(tail(inner), logits)


def test_a_small_tail_has_half_the_channels_and_reads_all_of_the_feature() -> None:
    net = ResNet((1, 2), (8, 16), 3, stem=8, bias=False)
    tail = Tail(net, "stages.0.0", width=0.5)
    convs = [(block.conv1.in_channels, block.conv1.out_channels) for block in tail.blocks]
    assert convs == [(8, 8), (8, 8)]
    assert [block.stride for block in tail.blocks] == [2, 1]
    assert tail.head.in_features == 8
    assert all(conv.bias is None for conv in tail.modules() if isinstance(conv, nn.Conv2d))


@pytest.mark.parametrize(
    ("feature", "width", "named"),
    [
        ("stem", 1.0, r"'stem'.*stages\.0\.0, stages\.1\.0"),
        ("stages.1.0", 1.0, r"0 blocks.*1\.0"),
        ("stages.0.0", 0.0, r"1 blocks.*0\.0"),
        ("stages.0.0", -0.5, r"-0\.5"),
    ],
)
def test_a_tail_that_cannot_be_built_is_refused(feature: str, width: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Tail(_tiny.member(), feature, width)


@pytest.mark.parametrize(("blocks", "share"), [(1, 0.8), (3, 0.0), (3, 1.0)])
def test_a_share_without_a_block_is_refused(blocks: int, share: float) -> None:
    with pytest.raises(ValueError, match=rf"\b{share} of {blocks}\b"):
        ResNet((blocks,), (8,), 3, stem=8).block_at(share)


# The loss


@pytest.mark.parametrize("centres", [1, 2])
def test_the_loss_is_the_relative_entropy_from_the_centres_mean(ensemble: Ensemble, centres: int) -> None:
    source, *others = ensemble.members
    method = _tiny.bridge_network(source, others[:centres], 5)
    with torch.no_grad():
        _, feature = forward_with_features(source, _tiny.images(), _tiny.FEATURE)
        q = scipy.special.softmax(method.bridge.net(feature).double().numpy(), axis=-1)
        each = [scipy.special.softmax(net(_tiny.images()).double().numpy(), axis=-1) for net in others]
    p = np.mean(each[:centres], axis=0)
    expected = scipy.special.rel_entr(p, q).sum(-1).mean()
    assert scipy.stats.entropy(p, q, axis=-1).mean() == pytest.approx(expected, rel=1e-9)
    assert expected > 1e-3
    assert method.loss(_tiny.batch()).item() == pytest.approx(expected, rel=1e-4)


def test_a_bridge_that_is_the_centre_has_no_loss(ensemble: Ensemble) -> None:
    """The centre's own blocks behind the centre's own feature: here centre and source share their start."""
    source, centre = _tiny.member(0), _tiny.member(0)
    nn.init.ones_(centre.head.bias[:1])
    method = _tiny.bridge_network(source, [centre])
    tail = method.bridge.net
    tail.blocks[0].load_state_dict(centre.stages[1][0].state_dict())
    tail.head.load_state_dict(centre.head.state_dict())
    assert method.loss(_tiny.batch()).item() == pytest.approx(0, abs=1e-6)
    expected = (source(_tiny.images()).softmax(-1) + centre(_tiny.images()).softmax(-1)) / 2
    torch.testing.assert_close(_tiny.predict(method, _tiny.images()).exp(), expected.detach())


def test_a_bridge_learns_its_centre_from_the_sources_feature(ensemble: Ensemble) -> None:
    source, centre, _ = ensemble.members
    method = _tiny.bridge_network(source, [centre], 5)
    before = method.loss(_tiny.batch()).item()
    config = eb.FitConfig(epochs=20, batch_size=6, lr=0.05, optimizer="sgd")
    eb.fit(method, _tiny.images(), config)
    assert method.loss(_tiny.batch()).item() < 0.1 * before


# The prediction


@torch.no_grad()
def test_the_prediction_is_the_mean_of_source_and_bridge(ensemble: Ensemble) -> None:
    source, centre, _ = ensemble.members
    method = _tiny.bridge_network(source, [centre], 5)
    logits, feature = forward_with_features(source, _tiny.images(), _tiny.FEATURE)
    expected = (logits.softmax(-1) + method.bridge.net(feature).softmax(-1)) / 2
    torch.testing.assert_close(_tiny.predict(method, _tiny.images()).exp(), expected)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_bridges_and_the_source_have_equal_shares_and_the_source_runs_once(count: int) -> None:
    members = _tiny.ensemble(count + 1)
    source, *centres = members.members
    methods = [_tiny.bridge_network(source, [centre], seed) for seed, centre in enumerate(centres)]
    logits, feature = forward_with_features(source, _tiny.images(), _tiny.FEATURE)
    ends = [logits, *(method.bridge.net(feature) for method in methods)]
    expected = torch.stack([end.softmax(-1) for end in ends]).mean(0)
    fast, calls = FastEnsemble.of(*methods).eval(), _tiny.count_runs(members)
    blocks = _tiny.count_runs([method.bridge.net for method in methods])
    torch.testing.assert_close(fast(_tiny.images()).softmax(-1), expected)
    assert calls == {0: 1}
    assert blocks == dict.fromkeys(range(count), 1)
    assert (fast.members, fast.average_source) == (count + 1, True)
    assert fast.source is source
    assert [bridge.steps for bridge in fast.each_bridge()] == [1] * count


def test_a_feature_that_is_not_there_is_refused(ensemble: Ensemble) -> None:
    with pytest.raises(ValueError, match="'layer9'"):
        BridgeNetwork(ensemble.source, [ensemble.members[1]], _tiny.tail(ensemble.source), "layer9")


def test_a_bridge_gives_logits_of_the_sources_precision() -> None:
    class Half(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h.flatten(1)[:, :3].bfloat16()

    bridge = FeatureBridge(Half())
    assert bridge(torch.rand(2, 8, 4, 4), torch.rand(2, 3)).dtype == torch.float32
