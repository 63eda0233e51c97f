"""Members that stay on disk give what they would in memory, and bad files are refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import _tiny
import ensbridge as eb
from ensbridge.ensemble import weights_digest


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
    seen, real = stored.observe(images, _tiny.FEATURE), _tiny.ensemble(3).observe(images, _tiny.FEATURE)
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
    for bad, words in (
        (tmp_path / "none.pt", "does not exist"),
        (tmp_path / "short.safetensors", "does not hold the weights of a ResNet"),
        (other, "does not hold the weights of a ResNet"),
        (hostile, r"hostile\.pt does not hold"),
        (tmp_path / "empty.pt", r"empty\.pt does not hold"),
    ):
        with pytest.raises(ValueError, match=words):
            eb.Ensemble.from_files([paths[0], bad], _tiny.member)


def test_the_number_of_functions_must_fit(paths: list[Path]) -> None:
    with pytest.raises(ValueError, match="2 functions for 3 files"):
        eb.Ensemble.from_files(paths, [_tiny.member, _tiny.member])
    with pytest.raises(ValueError, match="0 files"):
        eb.Ensemble.from_files([], _tiny.member)
