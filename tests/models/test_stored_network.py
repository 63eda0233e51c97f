"""Members that stay on disk give what they would in memory, and bad files are refused."""

from __future__ import annotations

import argparse
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import _tiny
import ensbridge as eb
from _limits import outcome, pipe
from ensbridge.models import stored_network
from ensbridge.models.ensemble import weights_digest


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Three members' weights, in both formats."""
    found = [tmp_path / "a.safetensors", tmp_path / "b.pt", tmp_path / "c.safetensors"]
    for seed, path in enumerate(found):
        state = {name: each.contiguous() for name, each in _tiny.member(seed).state_dict().items()}
        save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return found


def test_they_are_the_ensemble_to_the_bit_and_only_the_source_is_in_memory(paths: list[Path]) -> None:
    stored, images = eb.Ensemble.from_files(paths, _tiny.member), _tiny.images()
    assert stored(images).equal(_tiny.ensemble(3)(images))
    seen, real = _tiny.teacher_outputs(stored), _tiny.teacher_outputs(_tiny.ensemble(3))
    assert seen.feature.equal(real.feature)
    assert seen.logits.equal(real.logits)
    assert sum(each.numel() for each in stored.parameters()) == eb.cost.count_params(_tiny.member())


def test_bridges_trained_on_them_are_the_same(paths: list[Path]) -> None:
    images = _tiny.images(24)
    options = {"feature": _tiny.FEATURE, "budget": 30.0, "epochs": 1.0, "quiet": True}
    fast = eb.compress(eb.Ensemble.from_files(paths, _tiny.member), images, **options)
    plain = eb.compress([_tiny.member(seed) for seed in range(3)], images, **options)
    assert fast(images).equal(plain(images))


def test_a_run_knows_them_by_their_content(paths: list[Path]) -> None:
    before = weights_digest(eb.Ensemble.from_files(paths, _tiny.member))
    assert before == weights_digest(eb.Ensemble.from_files(paths, _tiny.member))
    save_file({k: v.contiguous() for k, v in _tiny.member(9).state_dict().items()}, paths[2])
    assert weights_digest(eb.Ensemble.from_files(paths, _tiny.member)) != before


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('executed')",))


def test_bad_files_are_refused_and_nothing_is_executed(paths: list[Path], tmp_path: Path) -> None:
    whole = paths[2].read_bytes()
    hostile = tmp_path / "hostile.pt"
    hostile.write_bytes(pickle.dumps(Hostile(), protocol=2))
    (tmp_path / "short.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    other = tmp_path / "other.safetensors"
    save_file(nn.Linear(2, 3).state_dict(), other)
    for bad, named in (
        (tmp_path / "none.pt", r"none\.pt does not exist"),
        (tmp_path / "short.safetensors", r"short\.safetensors.*weights"),
        (other, r"other\.safetensors.*ResNet"),
        (hostile, r"hostile\.pt.*exec"),
        (tmp_path / "empty.pt", r"empty\.pt.*EOFError"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(ValueError, match=named):
            eb.Ensemble.from_files([paths[0], bad], _tiny.member)


def test_the_number_of_functions_must_fit(paths: list[Path]) -> None:
    with pytest.raises(ValueError, match="2 functions for 3 files"):
        eb.Ensemble.from_files(paths, [_tiny.member, _tiny.member])
    with pytest.raises(ValueError, match="0 files"):
        eb.Ensemble.from_files([], _tiny.member)
    for one in (str(paths[0]), paths[0]):
        with pytest.raises(ValueError, match=r"paths is '"):
            eb.Ensemble.from_files(one, _tiny.member)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"paths.*ResNet"):
        eb.Ensemble.from_files([_tiny.member()], _tiny.member)  # type: ignore[list-item]
    assert len(eb.Ensemble.from_files(iter(paths), _tiny.member)) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (_tiny.member(), r"build.*ResNet.*lambda"),
        ([_tiny.member, _tiny.member, _tiny.member()], r"build.*ResNet"),
        ("resnet18", r"build.*str"),
        (None, r"build.*NoneType"),
        (lambda: _tiny.member, r"a\.safetensors.*a function"),
    ],
)
def test_what_builds_no_network_is_named(build: Any, named: str, paths: list[Path]) -> None:
    with pytest.raises(ValueError, match=named):
        eb.Ensemble.from_files(paths, build)


# ------------------------------------------------------------------------------ as others save them


def prefixed(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {prefix + name: each for name, each in state.items()}


WAYS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Lightning": lambda state: {"epoch": 3, "state_dict": prefixed("model.")(state), "callbacks": {}},
    "timm": lambda state: {"arch": "resnet", "state_dict": state, "optimizer": {"state": {}}},
    "torchvision": lambda state: {"model": state, "args": {"lr": 0.1}},
    "a script": lambda state: {"model_state_dict": state, "loss": torch.tensor(0.5)},
    "twice": lambda state: {"model": {"state_dict": state}},
    "parallel": prefixed("module."),
    "compiled": prefixed("_orig_mod."),
    "compiled and parallel": prefixed("module._orig_mod."),
    "parallel in a module": prefixed("model.module."),
    "a compiled part": lambda state: {
        name.replace("stages.0.", "stages.0._orig_mod."): each for name, each in state.items()
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [_tiny.member, lambda: nn.DataParallel(_tiny.member())])
def test_weights_are_found_as_others_save_them(
    way: str, build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    paths = [tmp_path / f"{seed}.pt" for seed in range(2)]
    for seed, path in enumerate(paths):
        torch.save(WAYS[way](_tiny.member(seed).state_dict()), path)
    images = _tiny.images()
    assert eb.Ensemble.from_files(paths, build)(images).equal(_tiny.ensemble(2)(images))


def test_a_network_with_such_a_name_of_its_own_keeps_it(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"model": nn.Linear(2, 3)})

    net, path = build(), tmp_path / "net.pt"
    torch.save(net.state_dict(), path)
    assert eb.Ensemble.from_files([path], build).source["model"].weight.equal(net["model"].weight)
    torch.save({"model.bias": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"ModuleDict.*lacks model\.weight\)"):
        eb.Ensemble.from_files([path], build)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    state = _tiny.member().state_dict()
    names = list(state)
    wider = _tiny.member(classes=5).state_dict()
    rest = {f"extra.{index}": torch.zeros(1) for index in range(5)}
    for held, named in (
        ({name: state[name] for name in names[4:]}, rf"lacks {', '.join(names[:3])} and 1 more\)"),
        (state | rest, r"extra\.0, extra\.1, extra\.2 and 2 more\)"),
        (wider, r"head\.weight.*\(5, 16\).*\(3, 16\).*head\.bias.*\(5,\).*\(3,\)"),
        ({"epoch": 3, "weights": 4}, rf"and {len(names) - 3} more.*epoch, weights\)"),
    ):
        torch.save(held, path)
        with pytest.raises(ValueError, match=rf"net\.pt .*ResNet.*{named}"):
            eb.Ensemble.from_files([path], _tiny.member)


def test_what_is_more_than_tensors_is_named_without_advice_to_execute_it(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    state = {"state_dict": _tiny.member().state_dict(), "hyper_parameters": argparse.Namespace(lr=0.1)}
    for held, named in (
        (_tiny.member(), r"models\.resnet\.ResNet.*safetensors"),
        (state, r"argparse\.Namespace.*safetensors"),
        (torch.zeros(3), r"net\.pt.*Tensor.*state_dict"),
        ([1, 2], r"net\.pt.*list.*state_dict"),
    ):
        torch.save(held, path)
        with pytest.raises(ValueError, match=named) as refused:
            eb.Ensemble.from_files([path], _tiny.member)
        assert "weights_only" not in str(refused.value)


# ------------------------------------------------------------------------------ hostile files


def test_dictionaries_that_hold_themselves_are_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.zeros(1)}
    state["model"] = state
    torch.save(state, tmp_path / "net.pt")
    place = str(tmp_path / "net.pt")
    found = outcome(f"ensbridge.models.stored_network.load_weights(torch.nn.Linear(1, 1), Path({place!r}))")
    assert found.startswith(f"ValueError: {place} holds dictionaries within dictionaries")


@pytest.mark.parametrize("name", ["net.pt", "net.safetensors"])
def test_no_pipe_is_read_for_weights(name: str, tmp_path: Path) -> None:
    with pipe(tmp_path / name), pytest.raises(ValueError, match="not a regular file"):
        eb.Ensemble.from_files([tmp_path / name], _tiny.member)


def test_a_compressed_archive_does_not_fill_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, bomb = tmp_path / "net.pt", tmp_path / "bomb.pt"
    torch.save({"weight": torch.zeros(100, 100), "bias": torch.zeros(100)}, place)
    with zipfile.ZipFile(place) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    for path in (place, bomb):  # a little more is no harm
        eb.Ensemble.from_files([path], lambda: nn.Linear(100, 100))
    monkeypatch.setattr(stored_network, "COMPRESSED", 10_000)
    eb.Ensemble.from_files([place], lambda: nn.Linear(100, 100))
    with pytest.raises(ValueError, match=r"[\d,]+ bytes of memory.*[\d,]+\)"):
        eb.Ensemble.from_files([bomb], lambda: nn.Linear(100, 100))


def test_names_in_a_file_are_shown_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    torch.save({"\x1b[2Jgone" + "x" * 10_000: torch.zeros(1)}, tmp_path / "net.pt")
    with pytest.raises(ValueError) as refused:
        eb.Ensemble.from_files([tmp_path / "net.pt"], lambda: nn.Linear(1, 1))
    assert r"holds \x1b[2Jgone" in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 600
