"""Saving and loading by several at once: one model or the other, never parts of both."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import _tiny
import ensbridge as eb
from _limits import pipe
from _saving import FILES, assert_same, bridge, contents, foreign, model
from ensbridge.bridge.bridge import FeatureBridge
from ensbridge.deploy.saving import folder as folder_module
from ensbridge.deploy.saving.folder import CARD, CONFIG, PENDING
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.files import locked


def interrupted(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    act: Callable[[], None],
    when: Callable[..., bool],
) -> None:
    """Let `act` run once, when a function of a module was called with certain arguments."""
    real, done = getattr(module, name), []

    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        if not done and when(*arguments):
            done.append(1)
            act()
        return result

    monkeypatch.setattr(module, name, wrapped)


# ------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("moment", [PENDING, CARD, CONFIG])
def test_a_second_save_at_the_same_time_is_refused(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = model(bridge(1)), model(bridge(2), bridge(3))

    def save_too() -> None:
        with pytest.raises(ValueError, match=f"{tmp_path} is in use"):
            second.save(tmp_path)

    at = (folder_module, "write_atomically", save_too, lambda path, _: path.name == moment)
    interrupted(monkeypatch, *at)
    first.save(tmp_path)
    assert_same(eb.load(tmp_path), first)
    assert sorted(contents(tmp_path)) == FILES
    second.save(tmp_path)
    assert_same(eb.load(tmp_path), second)


def test_a_folder_that_many_save_into_is_one_of_their_models(tmp_path: Path) -> None:
    models = [model(bridge(seed)) for seed in range(4)]
    images, refusals, saved = _tiny.images(), [], []
    start = threading.Barrier(4)

    def save(fast: FastEnsemble) -> None:
        for _ in range(5):
            start.wait(timeout=60)
            try:
                fast.save(tmp_path)
                saved.append(1)
            except Exception as error:  # one that ended its thread would leave the others waiting
                refusals.append(str(error))

    threads = [threading.Thread(target=save, args=(fast,)) for fast in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(saved) + len(refusals) == 20
    assert len(saved) >= 1
    assert all("is in use" in each for each in refusals)
    with torch.no_grad():
        found = eb.load(tmp_path)(images)
        assert any(found.equal(fast(images)) for fast in models)


def test_a_folder_that_is_not_ours_gets_no_lock_either(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Mine")
    with pytest.raises(ValueError, match="not the card"):
        model().save(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["README.md"]


def test_a_pipe_in_place_of_the_card_is_not_waited_for(tmp_path: Path) -> None:
    with pipe(tmp_path / "README.md"), pytest.raises(ValueError, match=r"README\.md is not a regular"):
        model().save(tmp_path)


def test_a_model_can_be_loaded_while_its_folder_is_kept(tmp_path: Path) -> None:
    fast = model()
    fast.save(tmp_path)
    with locked(tmp_path):
        assert_same(eb.load(tmp_path), fast)


# ------------------------------------------------------------------------------ loading


@pytest.mark.parametrize("moment", ["read_description", "_weights_of", "layout_of_file"])
@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_a_model_that_is_replaced_while_it_is_loaded_is_the_new_one(
    kind: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = {"ours": lambda seed: model(bridge(seed), temperature=1.0 + seed), "foreign": foreign}[kind]
    old, new = make(0), make(1)
    old.save(tmp_path)
    interrupted(monkeypatch, folder_module, moment, lambda: new.save(tmp_path), lambda *_: True)
    loaded = eb.load(tmp_path, source=None if kind == "ours" else _tiny.batch_norm_member(9))
    assert loaded.temperature == new.temperature
    assert_same(loaded, new)


def test_a_model_that_is_replaced_again_and_again_is_refused_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = model()
    fast.save(tmp_path)
    real = folder_module.layout_of_file

    def replacing(*arguments: Any) -> Any:
        fast.save(tmp_path)
        return real(*arguments)

    monkeypatch.setattr(folder_module, "layout_of_file", replacing)
    with pytest.raises(ValueError, match="is being written"):
        eb.load(tmp_path)


# ------------------------------------------------------------------------------ randomness

SEEDING = """
import torch
from torch import nn
import _tiny

class Seeded(nn.Sequential):
    def __init__(self):
        torch.manual_seed(3)
        super().__init__(*_tiny.batch_norm_member())
        self.register_buffer("directions", torch.randn(3), persistent=False)

    def forward(self, images):
        for module in self.children():
            images = module(images)
        return images * self.directions
"""


@pytest.fixture
def seeding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FastEnsemble, dict[str, Any]]:
    """A source that seeds the global generator and draws a buffer that is not saved, and how it is built."""
    name = f"seeding_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SEEDING)
    monkeypatch.syspath_prepend(tmp_path)
    source = importlib.import_module(name).Seeded()
    return FastEnsemble(source, [bridge()], "0").eval(), {"build": f"{name}:Seeded"}


def load_in_threads(place: Path, allow: str, count: int = 8) -> list[FastEnsemble]:
    """The models that as many threads load at once."""
    start, loaded = threading.Barrier(count), []

    def load() -> None:
        start.wait(timeout=60)
        loaded.append(eb.load(place, allow=[allow]))

    threads = [threading.Thread(target=load) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == count
    return loaded


def test_networks_of_ours_are_loaded_without_a_draw_from_the_global_generator(tmp_path: Path) -> None:
    fast = model(FeatureBridge(_tiny.tail(_tiny.member())), bridge())
    fast.save(tmp_path)
    torch.manual_seed(5)
    expected = [torch.rand(1).item() for _ in range(20_000)]
    torch.manual_seed(5)
    loaded: list[FastEnsemble] = []
    threads = [threading.Thread(target=lambda: loaded.append(eb.load(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    drawn = [torch.rand(1).item() for _ in range(10_000)]  # while they load
    for thread in threads:
        thread.join()
    drawn += [torch.rand(1).item() for _ in range(10_000)]
    assert drawn == expected
    assert len(loaded) == 8
    for each in loaded:
        assert_same(each, fast)


def test_threads_that_load_at_once_leave_the_random_state_as_it_was(
    seeding: tuple[FastEnsemble, dict[str, Any]], tmp_path: Path
) -> None:
    fast, recipe = seeding
    fast.save(tmp_path / "model", **recipe)
    before = torch.get_rng_state()
    loaded = load_in_threads(tmp_path / "model", recipe["build"])
    assert torch.equal(torch.get_rng_state(), before)
    for each in loaded:
        assert_same(each, fast)  # the buffer that was drawn, too


def test_a_source_that_seeds_leaves_the_random_state_alone(
    seeding: tuple[FastEnsemble, dict[str, Any]], tmp_path: Path
) -> None:
    fast, recipe = seeding
    before = torch.get_rng_state()
    fast.save(tmp_path / "model", **recipe)
    assert torch.equal(torch.get_rng_state(), before)
    eb.load(tmp_path / "model", allow=[recipe["build"]])
    assert torch.equal(torch.get_rng_state(), before)
