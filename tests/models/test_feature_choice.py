"""Where bridges read sources of other people's making, and what reads them there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import _tiny
import ensbridge as eb
from ensbridge.models.feature_choice import choose_feature, list_features
from ensbridge.models.features import FeatureExtractor, find_module, forward_with_features, uncompiled
from ensbridge.models.preprocessed import Preprocessed
from ensbridge.models.score_net import TokenScore
from ensbridge.models.sizing import MapScore, fitting_score, has_channels_last

IMAGE = _tiny.images(1)


class Residual(nn.Module):
    """A block of two convolutions with an activation in place behind."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.conv2(F.relu_(self.conv1(x))) + x)


class Common(nn.Module):
    """A residual network as most are written: a large stem, one `relu` for all, a head of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 16, 7, padding=3), nn.BatchNorm2d(16), nn.ReLU(True)
        self.layer1 = nn.Sequential(Residual(16), Residual(16))
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.layer2 = nn.Sequential(Residual(32), Residual(32))
        self.weight = nn.Parameter(0.1 * torch.randn(3, 32))

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer1(self.relu(self.bn1(self.conv1(images))))
        x = self.layer2(self.relu(self.down(x)))
        return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), self.weight)


class Grid(nn.Module):
    """A transformer whose maps lie as (B, H, W, C): layers mix channels, and positions by a mean."""

    def __init__(self, channels: int = 24, blocks: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, channels, 2, 2)
        layers = [
            nn.Sequential(nn.Linear(channels, 48), nn.GELU(), nn.Linear(48, channels)) for _ in range(blocks)
        ]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(channels, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).movedim(1, -1)
        for block in self.blocks:
            x = x + block(x + x.mean((1, 2), keepdim=True))
        return self.head(x.mean((1, 2)))


def made(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with _tiny.seeded(seed):
        return kind()


def quick(members: list[nn.Module], **options: object) -> eb.FastEnsemble:
    chosen = {"budget": 3.0, "epochs": 1.0, "quiet": True, **options}
    return eb.compress(members, _tiny.images(16), **chosen)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ the choice


def test_the_work_of_recurrent_layers_is_part_of_the_share() -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.head = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, sequences: Tensor) -> Tensor:
            return self.head(self.steps(sequences)[0][:, -1])

    steps, head = 6 * 4 * 8 * (5 + 8), 8 * 3
    shares = {feature.name: feature.share for feature in list_features(Sequences(), torch.rand(1, 6, 5))}
    assert shares == {"steps": pytest.approx(steps / (steps + head)), "head": 1.0}


def test_a_block_comes_before_a_stem_whatever_that_costs() -> None:
    net = made(Common)
    shares = {each.name: each.share for each in list_features(net, IMAGE)}
    assert shares["conv1"] > 0.05  # early enough in the pass, were it a block
    assert choose_feature(net, IMAGE, None, budget=3.0).feature == "layer1.0"


def test_a_layer_is_taken_where_no_block_fits() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(192, 64), nn.Linear(64, 1024)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    large = [nn.Linear(1024, 1024), nn.Linear(1024, 3)]
    net = nn.Sequential(nn.Flatten(), Wide(), nn.Linear(1024, 64), nn.Linear(64, 1024), *large)
    shares = {each.name: each.share for each in list_features(net, IMAGE)}
    assert 0.05 < shares["1"] < shares["2"] < 0.8
    assert choose_feature(net, IMAGE, None, budget=1.2).feature == "1"
    assert choose_feature(net, IMAGE, None, budget=1.02).feature == "2"  # the block is the wider of the two


def test_a_container_with_a_way_of_its_own_is_one_block() -> None:
    class Dense(nn.ModuleDict):
        """Each layer sees all before it; what one alone returns is little."""

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.values():
                x = torch.cat([x, layer(x)], 1)
            return x

    layers = {str(number): nn.Conv2d(8 + 4 * number, 4, 3, padding=1) for number in range(3)}
    net = nn.Sequential(nn.Conv2d(3, 8, 1), Dense(layers), Residual(20), nn.Flatten(), nn.Linear(1280, 3))
    assert choose_feature(net, IMAGE, None, budget=20.0).feature == "1"


def test_what_runs_twice_or_is_of_no_image_is_not_chosen() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where = nn.Embedding(16, 8)  # its output is the same for any number of images
            self.patch, self.again = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 8)
            self.turned = nn.Identity()
            self.head = nn.Linear(8, 3)

        def forward(self, images: Tensor) -> Tensor:
            x = self.patch(images).flatten(2).transpose(1, 2) + self.where(torch.arange(16))[None]
            x = self.again(self.again(x))
            return self.head(self.turned(x.transpose(0, 1)).mean(0))

    net = made(Net)
    assert [each.name for each in list_features(net, IMAGE)] == ["patch", "head"]
    for name, named in (
        ("again", "'again' ran 2 times"),
        ("turned", r"'turned'.*\(16, 2, 8\)"),
        ("where", r"'where'.*\(16, 8\)"),
    ):
        with pytest.raises(ValueError, match=named):
            choose_feature(net, IMAGE, name, budget=9.0)


def test_a_feature_of_whole_numbers_is_refused() -> None:
    class Codes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x > 0).long()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.head = Codes(), nn.Linear(192, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.codes(images.flatten(1)).float())

    with pytest.raises(ValueError, match=r"'codes'.*int64"):
        choose_feature(Net(), IMAGE, "codes", budget=9.0)


@pytest.mark.parametrize("feature", [None, "layer1.0"])
def test_looking_changes_nothing_in_the_source(feature: str | None) -> None:
    net = made(Common)
    net.train()
    net.layer1.eval()  # type: ignore[union-attr]
    before, modes = _tiny.state(net), [module.training for module in net.modules()]
    choose_feature(net, torch.rand(1, 3, 8, 8), feature, budget=3.0)
    assert _tiny.same(before, net.state_dict())  # batch norm has counted nothing
    assert modes == [module.training for module in net.modules()]
    assert not any(module._forward_hooks for module in net.modules())


# ------------------------------------------------------------------------------ maps with channels last


@pytest.mark.parametrize(
    ("shape", "image", "last"),
    [
        ((24, 8, 8), (32, 32), False),
        ((8, 8, 24), (32, 32), True),
        ((8, 8, 8), (32, 32), False),  # either way
        ((4, 6, 32), (32, 48), True),
        ((32, 4, 6), (32, 48), False),
        ((4, 4, 6), (32, 48), False),
        ((7, 7, 64), (225, 223), True),
        ((64, 1, 1), (32, 32), False),
        ((1, 1, 64), (32, 32), True),
        ((5, 9, 7), (32, 32), False),  # neither way
        ((16, 24), (32, 32), False),
    ],
)
def test_proportions_tell_where_the_channels_are(
    shape: tuple[int, ...], image: tuple[int, ...], last: bool
) -> None:
    assert has_channels_last(torch.zeros(1, *shape), torch.zeros(1, 3, *image)) == last


@pytest.mark.parametrize("deep", [False, True])
def test_a_map_with_channels_last_is_read_as_the_same_map(deep: bool) -> None:
    with _tiny.seeded(0):
        first, last = (MapScore(3, 12, 8, 4, deep, way).eval() for way in (False, True))
    last.load_state_dict(first.state_dict())
    h, now = torch.rand(5, 12, 4, 4), torch.full((5,), 0.5)
    assert last(h.movedim(1, -1), torch.zeros(5, 3), now).equal(first(h, torch.zeros(5, 3), now))
    with pytest.raises(ValueError, match=r"\(B, H, W, 12\)"):
        last(h, torch.zeros(5, 3), now)
    assert MapScore(**last.arguments).channels_last


def test_a_source_with_channels_last_is_compressed_saved_and_loaded(tmp_path: Path) -> None:
    members = [made(Grid, 0), made(Grid, 1)]
    site = choose_feature(members[0], IMAGE, "blocks.0", budget=9.0)
    assert "4×4×24, channels last" in site.summary
    fast = quick(members, feature="blocks.0", budget=9.0)
    score = fast.each_bridge()[0].score
    assert isinstance(score, MapScore)
    assert (score.channels, score.channels_last) == (24, True)
    fast.save(tmp_path)
    again = eb.load(tmp_path, source=made(Grid, 2))
    assert again(_tiny.images(4)).equal(fast(_tiny.images(4)))


# ------------------------------------------------------------------------------ feature_names


def test_a_shared_module_is_known_by_each_of_its_names() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 8))
            self.encoder = self.body[1]  # a second name, run once all the same
            self.head = nn.Linear(8, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.body(images))

    net = made(Net)
    first, second = (forward_with_features(net, IMAGE, name)[1] for name in ("body.1", "encoder"))
    assert first.equal(second)
    assert [each.name for each in list_features(net, IMAGE)] == ["body.0", "body.1", "body", "head"]


def test_a_head_of_functions_is_no_obstacle() -> None:
    members = [made(Common, seed).eval() for seed in range(3)]
    before = [_tiny.state(member) for member in members]
    fast = quick(members)
    assert fast.feature == "layer1.0"
    logits, h = forward_with_features(members[0], IMAGE, "layer1.0")
    inner = members[0].relu(members[0].bn1(members[0].conv1(IMAGE)))  # type: ignore[operator]
    assert h.equal(members[0].layer1[0](inner))  # type: ignore[index]
    assert logits.equal(members[0](IMAGE))
    assert all(_tiny.same(state, member.state_dict()) for state, member in zip(before, members, strict=True))


def test_a_compiled_source_is_read_by_its_own_names() -> None:
    torch.compiler.reset()
    net = made(Common).eval()
    compiled = torch.compile(net, backend="eager")
    assert uncompiled(compiled) is net
    assert uncompiled(net) is net
    site, own = (choose_feature(each, IMAGE, None, budget=3.0) for each in (compiled, net))
    assert site.summary == own.summary
    expected = forward_with_features(net, IMAGE, "layer1.0")
    assert find_module(compiled, "_orig_mod.layer1.0") is find_module(compiled, "layer1.0") is net.layer1[0]  # type: ignore[index]
    for name in ("layer1.0", "_orig_mod.layer1.0"):
        assert choose_feature(compiled, IMAGE, name, budget=3.0).feature == "layer1.0"
        tap = FeatureExtractor(compiled, name)
        for found in (forward_with_features(compiled, IMAGE, name), tap(IMAGE)):
            assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match=r"conv1, bn1, relu, layer1, down, layer2$"):
        find_module(compiled, "layer9")
    behind = Preprocessed(compiled, lambda images: images * 2)
    assert forward_with_features(behind, IMAGE / 2, "net.layer1.0")[1].equal(expected[1])
    assert not any(module._forward_hooks for module in net.modules())
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace", "ignore:Using `torch.compile")
def test_only_a_part_of_the_source_may_be_compiled() -> None:
    torch.compiler.reset()
    net = made(Common).eval()
    expected = forward_with_features(net, IMAGE, "layer1.0")
    net.layer1 = torch.compile(net.layer1, backend="eager")  # type: ignore[assignment]
    assert choose_feature(net, IMAGE, None, budget=3.0).feature == "layer1.0"
    for _ in range(2):
        found = forward_with_features(net, IMAGE, "layer1.0")
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    torch.compiler.reset()


# ------------------------------------------------------------------------------ types


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_score_network_reads_features_of_any_type(dtype: torch.dtype) -> None:
    now = torch.ones(2)
    for score, shape in ((TokenScore(3, 8, 8), (2, 5, 8)), (MapScore(3, 8, 8, 4), (2, 8, 4, 4))):
        h = torch.rand(shape).to(dtype)
        found = score.eval()(h, torch.zeros(2, 3), now)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, score(h.float(), torch.zeros(2, 3), now), rtol=1e-6, atol=1e-6)
        assert fitting_score(h[:1], 3, 1e9) is not None


def test_a_source_in_double_precision_is_compressed() -> None:
    members = [made(Common, seed).double() for seed in range(2)]
    fast = eb.compress(
        members, _tiny.images(16).double(), feature="layer1.0", budget=3.0, epochs=1, quiet=True
    )
    assert fast(_tiny.images(2).double()).dtype == torch.float64


@pytest.mark.parametrize("width", [4, 7, 11, 16])
def test_the_budget_that_is_advised_is_enough(width: int) -> None:
    net = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(width, 3))
    image = torch.rand(1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"×[\d.]+;") as caught:
        choose_feature(net, image, "1", budget=1.001)
    advised = float(str(caught.value).split("×")[-1].split(";")[0])
    assert choose_feature(net, image, "1", budget=advised).macs_ratio <= advised
