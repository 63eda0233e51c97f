"""Two processes train and measure as one would."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import _recipe
import _runs
import _world
from ensbridge.experiments import evaluate_run, train_recipe
from ensbridge.training import distributed as engine_module
from ensbridge.training import fit
from ensbridge.training.checkpoint import load_checkpoint
from ensbridge.training.compiled import step_kinds
from ensbridge.training.distributed import Engine, World, find_world, join, rank_zero_only

several = pytest.mark.skipif(
    _world.FABRIC is None,
    reason="several processes need Lightning Fabric: pip install 'ensbridge[distributed]'",
)


@pytest.fixture(scope="module")
def both() -> Iterator[_world.Both]:
    """Runs work in two processes."""
    running = _world.Both()
    yield running
    running.close()


@pytest.fixture(scope="module")
def trained(both: _world.Both, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What two processes trained that nothing interrupted, and where."""
    folder = tmp_path_factory.mktemp("trained")
    return both(_world.train_every_kind, folder), folder


@pytest.fixture(scope="module")
def plainly(both: _world.Both) -> list[Any]:
    """What two processes trained without batch norm."""
    return both(_world.train_plain)


# ------------------------------------------------------------------------------ training


@several
def test_without_batch_norm_two_processes_train_what_one_does(plainly: list[Any]) -> None:
    one, (first, second) = _world.train_plain(None), plainly
    assert set(one) == set(_world.PLAIN)
    for kind, (weights, loss) in one.items():
        start = _runs.state(_world.plain(kind).student)
        assert not _runs.same(weights, start), kind
        assert _runs.same(first[kind][0], second[kind][0]), kind
        assert first[kind][1] == second[kind][1]
        assert first[kind][1] == pytest.approx(loss, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(
                first[kind][0][name], weight, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}"
            )


@several
def test_both_processes_have_the_same_weights_and_running_statistics(trained: tuple[list[Any], Path]) -> None:
    (first, second), folder = trained
    for kind in _runs.KINDS:
        start = _runs.state(_runs.method(kind).student)
        assert any("running_var" in name for name in start)
        assert not any(torch.equal(start[name], each) for name, each in first[kind].items())
        assert _runs.same(first[kind], second[kind])
        # One process goes on where two ended: all is there, and nothing else.
        assert _runs.same(_world.train_kind(None, kind, folder / kind)[0], first[kind])
        steps = [json.loads(line)["step"] for line in (folder / kind / "log.jsonl").read_text().splitlines()]
        assert steps == [3, 6, 9, 12]


@several
def test_compiled_steps_of_two_processes_learn_what_eager_ones_learn(
    both: _world.Both, plainly: list[Any]
) -> None:
    kinds = "members", "bridge", "progressive"
    (first, graphs), (second, _) = both(_world.train_compiled, kinds)
    assert graphs >= 2  # both bridges have one
    for kind in kinds:
        weights, loss = plainly[0][kind]
        assert _runs.same(first[kind][0], second[kind][0]), kind
        assert first[kind][1] == second[kind][1] == pytest.approx(loss, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(
                first[kind][0][name], weight, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}"
            )


@several
def test_compiled_steps_average_running_statistics_and_resume(
    both: _world.Both, trained: tuple[list[Any], Path], tmp_path: Path
) -> None:
    first, second = both(_world.train_every_kind, tmp_path, "compiled")
    for kind in _runs.KINDS:
        assert _runs.same(first[kind], second[kind])
        for name, tensor in first[kind].items():
            torch.testing.assert_close(tensor, trained[0][0][kind][name], rtol=1e-5, atol=1e-6)
        lines, eager = ((folder / kind / "log.jsonl").read_text() for folder in (tmp_path, trained[1]))
        for line, other in zip(lines.splitlines(), eager.splitlines(), strict=True):
            assert json.loads(line)["loss"] == pytest.approx(json.loads(other)["loss"], rel=1e-5)
    folder = tmp_path / "killed"
    assert both(_world.train_kind, "bridge", folder, 6, "compiled") == ["killed", "killed"]
    again, other = both(_world.train_kind, "bridge", folder, 0, "compiled")
    assert again[1] == other[1] == 4
    assert _runs.same(again[0], other[0])
    assert _runs.same(again[0], first["bridge"])


@several
@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_cannot_compile_all_take_eager_steps(both: _world.Both, rank: int) -> None:
    (first, expected, said), (second, _, silent) = both(_world.fail_to_compile, rank)
    assert _runs.same(first, expected)
    assert _runs.same(second, expected)
    assert said == ["compiled steps do not work here (no compiler was found); falling back to eager ones"]
    assert silent == []


@several
def test_killed_both_go_on_from_one_checkpoint(
    both: _world.Both, trained: tuple[list[Any], Path], tmp_path: Path
) -> None:
    assert both(_world.train_kind, "bridge", tmp_path, 7) == ["killed", "killed"]
    first, second = both(_world.train_kind, "bridge", tmp_path)
    assert first[1] == second[1] == 4
    assert _runs.same(first[0], second[0])
    assert _runs.same(first[0], trained[0][0]["bridge"])
    assert _runs.contents(tmp_path).keys() == _runs.contents(trained[1] / "bridge").keys()


@several
def test_time_is_up_for_all_where_it_is_up_for_one(both: _world.Both, tmp_path: Path) -> None:
    first, second = both(_world.run_late, 1, tmp_path / "run")
    assert first == second
    assert re.search(r"step 1 of 12.*'checkpoint-000000001\.safetensors'", first)


# ------------------------------------------------------------------------------ measuring


@several
def test_two_processes_measure_1001_images_as_one_does(both: _world.Both) -> None:
    one = _world.measure(None)
    assert both(_world.measure) == [one, one]


@several
def test_each_process_hears_of_all_images(both: _world.Both) -> None:
    assert _world.recorded_progress(None) == (1001, 16)
    assert both(_world.recorded_progress) == [(1001, 9), (1001, 9)]  # eight batches each, and the other's


@several
def test_members_that_are_trained_together_stay_in_one_process(both: _world.Both, tmp_path: Path) -> None:
    (first, scores), (second, other) = both(_world.recipe, tmp_path / "two", 2)
    alone = [{each for each in told if each.endswith(" alone")} for told in (first, second)]
    assert alone == [{"members-1-to-2 alone"}, {"member-3 alone"}]
    assert scores == other


@several
def test_a_recipe_spreads_members_and_shares_the_rest(both: _world.Both, tmp_path: Path) -> None:
    (first, scores), (second, other) = both(_world.recipe, tmp_path / "two")
    shared = {"bridges together", "bridges-kl together", "5-to-1 together"}
    assert set(first) == {"member-1 alone", "member-3 alone", *shared}
    assert set(second) == {"member-2 alone", *shared}
    # Members are to the bit those of one process, which measures the same.
    train_recipe(_recipe.tiny(), tmp_path / "one", 0, ("members",))
    for name in ("member-1", "member-2", "member-3"):
        paths = _runs.checkpoints(tmp_path / "one" / name)
        assert len(paths) == 2
        for path in paths:
            here, there = load_checkpoint(path), load_checkpoint(tmp_path / "two" / name / path.name)
            assert _runs.same(here[0], there[0])
            assert here[1] == there[1]
    written = (tmp_path / "two" / "scores.json").read_bytes()
    assert scores == other == json.dumps(json.loads(written), sort_keys=True)
    evaluate_run(tmp_path / "two", _recipe.tiny())
    assert (tmp_path / "two" / "scores.json").read_bytes() == written


# ------------------------------------------------------------------------------ errors


@several
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_ends_both(both: _world.Both, rank: int) -> None:
    answers = both(_world.go_wrong, rank, "error")
    assert answers[rank] == f"ValueError: {_world.GONE}"
    # The store ends with the first process, so that the other may only know that it did.
    unknown = "|another process" if rank == 0 else ""
    assert re.match(f"StoppedElsewhere: (process {rank} of 2.*{_world.GONE}{unknown})", answers[1 - rank])


@several
def test_a_loss_that_is_not_finite_in_one_is_refused_by_both_in_the_same_words(both: _world.Both) -> None:
    first, second = both(_world.go_wrong, 1, "nan")
    assert first == second
    assert re.match("FloatingPointError: .*nan at step 3", first)


@several
@pytest.mark.parametrize("how", ["nan", "inf"])  # infinite is the loss alone
def test_a_span_that_is_not_finite_in_one_is_refused_by_both(both: _world.Both, how: str) -> None:
    first, second = both(_world.go_wrong, 1, how, "compiled")
    assert first == second
    assert re.match("FloatingPointError: .*not finite at steps 1 to 3", first)


@several
def test_an_error_in_work_of_its_own_ends_the_other_too(both: _world.Both) -> None:
    first, second = both(_world.fail_apart)
    assert second == f"ValueError: {_world.GONE}"
    assert re.match(f"StoppedElsewhere: process 1 of 2.*{_world.GONE}", first)


@several
def test_who_is_out_of_time_waits_until_the_others_have_saved(both: _world.Both) -> None:
    assert both(_world.late_apart) == ["late, 1 saved", "late, 0 saved"]


@several
def test_processes_with_other_data_are_refused(both: _world.Both) -> None:
    for answer in both(_world.other_data):
        assert answer.startswith("ValueError: processes were given other data")


def test_captured_steps_of_several_processes_are_refused() -> None:
    engine = object.__new__(Engine)
    with pytest.raises(ValueError, match=r"'captured'.*'compiled' or 'eager'"):
        fit(_runs.method("members"), _runs.data(), _runs.config("members"), step="captured", engine=engine)
    assert step_kinds(None, torch.device("cuda"), engine) == ("compiled", "eager")
    assert step_kinds(None, torch.device("cpu"), engine) == ("eager",)


# ------------------------------------------------------------------------------ the world


def test_a_process_alone_has_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join() is None
    with rank_zero_only() as speaks:
        assert speaks
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join() is None


def test_the_world_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert find_world() == World(5, 8, 1, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="3 of 8 processes"):
        find_world()
    monkeypatch.setenv("RANK", "five")
    with pytest.raises(ValueError, match="RANK and WORLD_SIZE"):
        find_world()


@pytest.mark.parametrize(("count", "size"), [(5, 2), (7, 3), (1001, 8), (8, 8)])
def test_slices_hold_every_image_once_and_differ_by_one(count: int, size: int) -> None:
    slices = []
    for rank in range(size):
        engine = object.__new__(Engine)
        engine.rank, engine.size = rank, size
        slices.append(list(range(count))[engine.rows(count)])
    assert sum(slices, []) == list(range(count))  # noqa: RUF017
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(engine_module, "import_module", missing)
    with pytest.raises(ValueError, match=r"'ensbridge\[distributed\]'"):
        engine_module._find_fabric()


def test_a_run_of_one_process_loads_no_fabric() -> None:
    fit(_runs.method("bridge"), _runs.data(), _runs.config("bridge"))
    _world.measure(None)
    assert [name for name in sys.modules if name.startswith("lightning")] == []
