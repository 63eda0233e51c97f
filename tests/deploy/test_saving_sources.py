"""Saved models whose source is not of ensbridge: given again, or built by a recipe that is allowed."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as unpack
from safetensors.torch import save as pack
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from _saving import assert_same, bridge, change, foreign, model, put
from ensbridge.bridge.bridge import FeatureBridge
from ensbridge.deploy.saving.weights import digest
from ensbridge.methods import Bridge
from ensbridge.models import Preprocessed
from ensbridge.models.fast_ensemble import FastEnsemble

# ------------------------------------------------------------------------------ sources that are not ours


class Tied(nn.Module):
    """A classifier that uses one weight twice, keeps a view of it, and a buffer outside its state."""

    scale: Tensor
    part: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("part", self.first.weight.detach()[:2])
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.map = nn.Conv2d(3, _tiny.CHANNELS, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.scale * self.first(self.map(images)[:, :3].mean((2, 3)))
        return self.second(x) + self.part.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_weights_views_and_other_buffers_of_a_users_network(dtype: torch.dtype, tmp_path: Path) -> None:
    fast = FastEnsemble(Tied(), [bridge()], "map").eval().to(dtype)
    fast.save(tmp_path)
    net = Tied()
    weight = net.first.weight
    loaded = eb.load(tmp_path, source=net)
    assert loaded.source is net
    assert net.first.weight is net.second.weight is weight  # an optimiser that holds it has the new values
    assert_same(loaded, fast)


class Masked(nn.Sequential):
    """A classifier with a mask that holds -inf, as those of attention do."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(*_tiny.batch_norm_member())
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))

    def forward(self, images: Tensor) -> Tensor:
        for module in self.children():
            images = module(images)
        return images + self.mask.softmax(-1).sum()


def test_masks_may_hold_infinity_and_nothing_may_hold_nan(tmp_path: Path) -> None:
    fast = FastEnsemble(Masked(), [bridge()], "0").eval()
    fast.save(tmp_path / "model")
    assert_same(eb.load(tmp_path / "model", source=Masked()), fast)
    for name, value in (("mask", torch.nan), ("5.weight", torch.nan), ("5.weight", torch.inf)):
        broken = FastEnsemble(Masked(), [bridge()], "0")
        broken.source.state_dict()[name][0, 0] = value
        with pytest.raises(ValueError, match=f'"source.{name}" holds {value}'):
            broken.save(tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_a_source_is_left_as_it_was_where_the_weights_are_no_numbers(tmp_path: Path) -> None:
    foreign().save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = unpack(path.read_bytes())
    tensors["source.5.weight"][0, 0] = torch.nan
    path.write_bytes(pack(tensors))
    change(tmp_path, put("sha256", digest(path)))
    net = _tiny.batch_norm_member(9)
    before = _tiny.state(net)
    with pytest.raises(ValueError, match=r'"source.5.weight" holds nan'):
        eb.load(tmp_path, source=net)
    assert _tiny.same(before, net.state_dict())


def test_a_network_that_ties_what_was_not_tied_is_refused(tmp_path: Path) -> None:
    apart = Tied()
    apart.second.weight = nn.Parameter(torch.zeros(3, 3))
    FastEnsemble(apart, [bridge()], "map").save(tmp_path)
    with pytest.raises(ValueError, match=r'"source\.\S+" did not keep'):
        eb.load(tmp_path, source=Tied())


def test_a_source_of_another_class_is_asked_for_and_filled(tmp_path: Path) -> None:
    fast = foreign()
    fast.save(tmp_path)
    with pytest.raises(ValueError, match=r"container\.Sequential.*source=net"):
        eb.load(tmp_path)
    net = _tiny.batch_norm_member(seed=9).train()
    loaded = eb.load(tmp_path, net)
    assert loaded.source is net
    assert_same(loaded, fast)
    assert _tiny.same(net.state_dict(), fast.source.state_dict())


def test_a_source_that_does_not_fit_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    foreign().save(tmp_path)
    plain = _tiny.batch_norm_member(9)
    more, fewer = copy.deepcopy(plain), copy.deepcopy(plain)
    more.extra = nn.Linear(2, 2)
    fewer[1] = nn.Identity()
    wide = _tiny.batch_norm_member(9, classes=4)
    counted = copy.deepcopy(plain)
    counted[1].num_batches_tracked = torch.zeros((), dtype=torch.int32)
    nowhere = copy.deepcopy(plain).to("meta")
    for net, named in (
        (more, r'no "source.extra.weight"'),
        (fewer, r'"source.1.\w+".* has not'),
        (wide, r'"source.5.weight".*\(3, 8\).*\(4, 8\)'),
        (counted, r'"source.1.num_batches_tracked".*int64.*int32'),
        (nowhere, "meta"),
        ("net", "source.*str"),
    ):
        before = _tiny.state(net) if isinstance(net, nn.Module) and net is not nowhere else {}
        with pytest.raises(ValueError, match=named):
            eb.load(tmp_path, source=net)  # type: ignore[arg-type]
        assert not before or _tiny.same(before, net.state_dict())  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"config\.json: feature '0'"):
        eb.load(tmp_path, source=nn.Sequential(nn.Sequential()).append(nn.Linear(1, 1))[1:1])


def test_a_source_behind_preprocessing_is_asked_for_with_it(tmp_path: Path) -> None:
    def double(images: Tensor) -> Tensor:
        return 2 * images

    fast = FastEnsemble(Preprocessed(_tiny.batch_norm_member(), double), [bridge()], "net.0")
    fast.eval().save(tmp_path)
    with pytest.raises(ValueError, match=r"Sequential.*preprocess"):
        eb.load(tmp_path, source=_tiny.batch_norm_member(9))
    assert_same(eb.load(tmp_path, source=Preprocessed(_tiny.batch_norm_member(9), double)), fast)


def test_a_source_of_another_name_is_pointed_out(tmp_path: Path) -> None:
    class Other(nn.Sequential):
        pass

    foreign().save(tmp_path)
    with pytest.warns(UserWarning, match=r"Sequential.*Other"):
        eb.load(tmp_path, source=Other(*_tiny.batch_norm_member()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eb.load(tmp_path, source=_tiny.batch_norm_member())


def test_a_network_of_ours_that_was_changed_is_no_longer_described(tmp_path: Path) -> None:
    fast = model()
    fast.source.stem[2] = nn.ReLU()  # type: ignore[index]
    fast.save(tmp_path)
    with pytest.raises(ValueError, match=r"models\.resnet\.ResNet"):
        eb.load(tmp_path)
    net = _tiny.member(3)
    net.stem[2] = nn.ReLU()
    assert_same(eb.load(tmp_path, net), fast)
    score = _tiny.score()
    score.head = nn.Sequential(score.head)  # type: ignore[assignment]
    for changed in (Bridge(score), FeatureBridge(_tiny.pooled())):
        with pytest.raises(ValueError, match=r"bridge 2.*class"):
            model(bridge(), changed).save(tmp_path / "other")
    assert not (tmp_path / "other").exists()
