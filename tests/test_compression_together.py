"""Two processes compress as one: the same model in both, one voice, from memory and from streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch

import _runs
import _world
import _world_compress

pytestmark = pytest.mark.skipif(
    _world.FABRIC is None,
    reason="several processes need Lightning Fabric: pip install 'ensbridge[distributed]'",
)
KINDS = ("memory", "items", "loader", "entries", "sharded")


@pytest.fixture(scope="module")
def both() -> Iterator[_world.Both]:
    """Runs work in two processes."""
    running = _world.Both()
    yield running
    running.close()


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The NLL of one process, with several seeds."""
    return [_world_compress.compress(None, "memory", seed, quiet=True).nll for seed in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_one_model_as_good_as_that_of_one(
    both: _world.Both, kind: str, alone: list[float]
) -> None:
    first, second = both(_world_compress.compress, kind)
    assert _runs.same(first.weights, second.weights)
    assert (first.nll, first.temperature) == (second.nll, second.temperature)
    assert abs(first.nll - mean(alone)) < 4 * stdev(alone)
    assert "calibrated by" in first.said
    assert second.said == ""
    assert first.mode == second.mode


def test_processes_agree_on_the_length_the_choice_and_the_folder(both: _world.Both, tmp_path: Path) -> None:
    first, second = both(_world_compress.compress_auto, "entries", tmp_path)
    for one, other in zip(first, second, strict=True):
        assert _runs.same(one.weights, other.weights)
        assert other.said == ""
    assert "training for" in first[0].said
    assert "resuming a training of" in first[1].said
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize("kind", ["items", "loader"])
def test_each_process_reads_a_half_of_the_images(both: _world.Both, kind: str) -> None:
    first, second = both(_world_compress.read_part, kind)
    count = _world_compress.COUNT
    # The trial of a run reads the first batch, which is kept; of a loader, whole batches of 8.
    assert sorted({*first, *second}) == list(range(count))
    assert not {*first} & {*second}
    assert len(first) == len(second) == count // 2


@pytest.mark.parametrize("kind", ["loader", "entries"])
def test_killed_both_resume_where_they_were_in_the_stream(
    both: _world.Both, kind: str, tmp_path: Path
) -> None:
    whole, _ = both(_world_compress.train, kind, tmp_path / "whole")
    assert both(_world_compress.train, kind, tmp_path / "run", 7) == ["killed", "killed"]
    first, second = both(_world_compress.train, kind, tmp_path / "run")
    assert first[1] == second[1] == 4
    assert _runs.same(first[0], second[0])
    assert _runs.same(first[0], whole[0])


def test_compiled_steps_on_a_stream_learn_what_eager_ones_learn(both: _world.Both, tmp_path: Path) -> None:
    (eager, _), _ = both(_world_compress.train, "loader", tmp_path / "eager")
    first, second = both(_world_compress.train, "loader", tmp_path / "compiled", 0, "compiled")
    assert _runs.same(first[0], second[0])
    for name, tensor in first[0].items():
        torch.testing.assert_close(tensor, eager[name], rtol=1e-5, atol=1e-6)


def test_a_cache_is_for_one_process(both: _world.Both, tmp_path: Path) -> None:
    for answer in both(_world_compress.refuse_cache, tmp_path):
        assert answer.startswith("ValueError: cache= was given to several processes")
