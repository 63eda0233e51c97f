"""What `compress` is called with and under: it works or says why, and leaves all else as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import _tiny
import ensbridge as eb
from ensbridge.methods import DeepEnsemble
from ensbridge.training import FitConfig, fit
from ensbridge.utils.devices import brought_to, find_device

QUICK: dict[str, Any] = {"feature": "1", "budget": 20, "epochs": 1, "quiet": True}
IMAGES = _tiny.images(32)[:, :1, :4, :4]
LABELS = torch.arange(32) % 3


def member(seed: int) -> nn.Sequential:
    with _tiny.seeded(seed):
        layers = [nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)]
        return nn.Sequential(*layers).eval()


def members() -> list[nn.Sequential]:
    return [member(seed) for seed in range(3)]


def modes(nets: list[nn.Sequential]) -> list[bool]:
    return [module.training for net in nets for module in net.modules()]


def test_a_run_of_impossible_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"fit": {"epochs": 1' + "0" * 400 + "}}")
    with pytest.raises(ValueError, match=r"config\.json is not of a run of compress"):
        eb.compress(members(), IMAGES, feature="1", budget=20, max_minutes=0.1, run_dir=tmp_path, quiet=True)


# ------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("under", [torch.no_grad, torch.inference_mode])
def test_it_trains_where_gradients_are_off(under: Callable[[], Any]) -> None:
    expected = eb.compress(members(), IMAGES, (IMAGES, LABELS), **QUICK)
    with under():
        made = members()  # as all tensors here, of the kind that is made there
        found = eb.compress(made, IMAGES.clone(), (IMAGES.clone(), LABELS.clone()), **QUICK)
        assert not torch.is_grad_enabled()
    assert _tiny.same(found.state_dict(), expected.state_dict())
    assert (found.temperature, found.source_logit_weight) == (
        expected.temperature,
        expected.source_logit_weight,
    )
    assert all(weight.requires_grad for weight in found.bridges.parameters())


def test_training_works_where_gradients_are_off() -> None:
    net = member(0)
    before = _tiny.state(net)
    with torch.no_grad():
        fit(DeepEnsemble([net]), (IMAGES, LABELS), FitConfig(epochs=1, batch_size=16, lr=0.1))
    assert not _tiny.same(before, net.state_dict())


# ------------------------------------------------------------------------------ data


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16])
def test_labels_of_any_integers(dtype: torch.dtype) -> None:
    labelled = IMAGES, LABELS.to(dtype)
    expected, found = (eb.compress(members(), IMAGES, val, **QUICK) for val in ((IMAGES, LABELS), labelled))
    assert _tiny.same(found.state_dict(), expected.state_dict())
    assert found.temperature == expected.temperature
    batches = [(IMAGES[:16], labelled[1][:16]), (IMAGES[16:], labelled[1][16:])]
    assert eb.compress(members(), batches, batches, **QUICK).temperature == expected.temperature
    assert found.fidelity(labelled, members=members()) == found.fidelity((IMAGES, LABELS), members=members())
    rows = [
        eb.evaluate({"DE": eb.Ensemble(members())}, (IMAGES, given)).rows for given in (LABELS, labelled[1])
    ]
    assert rows[0] == rows[1]
    net = member(0)
    fit(DeepEnsemble([net]), labelled, FitConfig(epochs=1, batch_size=16, lr=0.1))


@pytest.mark.parametrize(
    ("images", "named"),
    [
        (IMAGES.to_sparse(), "torch.sparse_coo"),
        (IMAGES.to("meta"), "meta"),
        (torch.nested.nested_tensor(list(IMAGES), layout=torch.jagged), "nested"),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_images_without_values_to_look_up_are_refused(images: Tensor, named: str) -> None:
    nets = members()
    with pytest.raises(ValueError, match=named):
        eb.compress(nets, images, **QUICK)
    with pytest.raises(ValueError, match=named):
        eb.compress(nets, IMAGES, images, **QUICK)


# ------------------------------------------------------------------------------ devices


@pytest.mark.parametrize("name", ["meta", "mps", "xpu", "hpu", "xla", "vulkan", "cuda", "cuda:99", "gpu", ""])
def test_a_device_that_is_not_there_is_refused_before_anything_is_touched(name: str) -> None:
    kind = name.split(":")[0]
    if kind in ("mps", "xpu", "cuda") and getattr(torch, kind).is_available() and name != "cuda:99":
        pytest.skip("there is one here")
    nets = members()
    before = [_tiny.state(net) for net in nets]
    for call in (lambda: find_device(name), lambda: eb.compress(nets, IMAGES, device=name, **QUICK)):
        with pytest.raises(ValueError, match=repr(name)):
            call()
    assert all(_tiny.same(state, net.state_dict()) for state, net in zip(before, nets, strict=True))


def test_members_without_weights_are_refused() -> None:
    nets = members()
    with pytest.raises(ValueError, match=r"member 2 .*'meta'"):
        eb.compress([nets[0], nets[1].to("meta")], IMAGES, **QUICK)


class Moves(nn.Linear):
    """A layer that writes down where it is brought."""

    def __init__(self) -> None:
        super().__init__(16, 3)
        self.moves: list[object] = []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Moves:
        self.moves.append(fn)
        return super()._apply(fn, recurse)


def test_networks_are_brought_back_also_from_halfway() -> None:
    first, second, third = Moves(), Moves(), nn.Linear(2, 2)
    third.to = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), brought_to(torch.device("cpu"), [first, second, third]):
        pytest.fail("it was interrupted before this")
    with brought_to(torch.device("cpu"), [first.eval()]):
        assert len(first.train().moves) == 3
    assert not first.training
    assert [len(each.moves) for each in (first, second)] == [4, 2]


# ------------------------------------------------------------------------------ all else


def broken(error: type[BaseException], calls: int) -> Callable[[Tensor], Tensor]:
    """Preprocessing that fails at a call in the midst of training."""
    left = iter(range(calls))

    def preprocess(images: Tensor) -> Tensor:
        if next(left, None) is None:
            raise error("broken on purpose")
        return images

    return preprocess


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_an_error_leaves_networks_in_their_modes(error: type[BaseException], calls: int) -> None:
    nets = members()
    nets[0].train()
    nets[0][2].eval()
    nets[1].train()
    before, states = modes(nets), [_tiny.state(net) for net in nets]
    with pytest.raises((error, ValueError)):
        eb.compress(nets, IMAGES, preprocess=[None, broken(error, calls), None], **QUICK)
    assert modes(nets) == before
    assert all(_tiny.same(state, net.state_dict()) for state, net in zip(states, nets, strict=True))
    assert not any(_tiny.hooks_of(net) for net in nets)


def test_members_keep_their_modes_and_the_model_is_in_evaluation_mode() -> None:
    nets = members()
    for net in nets[:2]:
        net.train()
    prepare = nn.Dropout(0.0).train()
    before = modes(nets)
    fast = eb.compress(nets, IMAGES, preprocess=[None, prepare, None], **QUICK)
    assert modes(nets) == before
    assert prepare.training
    assert not any(module.training for module in fast.modules())
    assert fast.source is not nets[0]
    assert _tiny.same(fast.source.state_dict(), nets[0].state_dict())


def random_states() -> tuple[bytes, bytes, object]:
    arrays = np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr]  # noqa: NPY002
    return torch.random.get_rng_state().numpy().tobytes(), arrays, random.getstate()


class Draws(torch.utils.data.Dataset[Tensor]):
    """Images that are augmented from every global random state there is."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return IMAGES[index] * (torch.rand(()) + np.random.rand() + random.random()) / 3  # noqa: NPY002


@pytest.mark.parametrize("options", [{}, {"feature": None}, {"epochs": None, "max_minutes": 0.01}])
def test_the_global_random_state_is_left_as_it_was(options: dict[str, Any]) -> None:
    nets, data = members(), DataLoader(TensorDataset(IMAGES, LABELS), 8, shuffle=True)
    before = random_states()
    eb.compress(nets, DataLoader(Draws(), 8), data, **QUICK | options)
    assert random_states() == before
    with pytest.raises(ValueError, match="budget"):
        eb.compress(nets, Draws(), **QUICK | {"budget": 1.0001})
    assert random_states() == before
