"""Times are taken in turn, ratios are of one round, and none is claimed that the noise could have made."""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import _tiny
import ensbridge.cli.bench  # noqa: F401
from _named import run
from ensbridge.deploy.benchmark import Benchmark, bench, runtimes
from ensbridge.deploy.benchmark.bench import Row, Table
from ensbridge.deploy.benchmark.memory import RESOLUTION, cores, peak_memory, pinned
from ensbridge.deploy.benchmark.runtimes import CannotRun, Runner, ready
from ensbridge.deploy.benchmark.text import cells, headline, memory, rich_costs, rich_table
from ensbridge.deploy.benchmark.timing import median_interval, ratio_of, time_rounds
from ensbridge.deploy.fuse import InferenceModel
from ensbridge.methods import Bridge
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models import MapScore
from ensbridge.models.fast_ensemble import FastEnsemble

IMAGE = _tiny.images(1)


def model(members: int = 3, bridges: int = 1) -> FastEnsemble:
    own = [Bridge(_tiny.score(seed=seed), times=(0.0, 1.0)) for seed in range(bridges)]
    return FastEnsemble(_tiny.member(), own, _tiny.FEATURE, members=members).eval()


class Machine:
    """A clock that only models move, by seconds of their own and a machine's slowness."""

    def __init__(
        self, seconds: dict[str, float], slowness: Callable[[int], float] = lambda call: 1.0
    ) -> None:
        self.now, self.order, self.seconds, self.slowness = 0.0, [], seconds, slowness

    def __call__(self) -> float:
        return self.now

    def models(self) -> dict[str, Callable[[], None]]:
        return {name: lambda name=name: self.run(name) for name in self.seconds}

    def run(self, name: str) -> None:
        self.now += self.seconds[name] * self.slowness(len(self.order))
        self.order.append(name)


# ------------------------------------------------------------------------------ rounds


def test_every_round_times_every_model_in_an_order_of_its_own() -> None:
    machine = Machine({"a": 0.2, "b": 0.3, "c": 0.4})
    found = time_rounds(machine.models(), 12, clock=machine)
    assert found.calls == 3
    assert {name: len(times) for name, times in found.times.items()} == {"a": 12, "b": 12, "c": 12}
    for name, seconds in machine.seconds.items():
        assert found.times[name] == pytest.approx([seconds] * 12)
    pairs = machine.order[9:]  # after three calls of each; an untimed call before each timed one
    assert pairs[::2] == pairs[1::2]
    rounds = [tuple(pairs[::2][3 * each :][:3]) for each in range(36)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 2
    again = Machine({"a": 0.2, "b": 0.3, "c": 0.4})
    time_rounds(again.models(), 12, clock=again)
    assert again.order == machine.order


def test_short_models_are_called_often_and_equally_and_an_interruption_does_not_count() -> None:
    machine = Machine({"a": 0.004, "b": 0.02}, lambda call: 50.0 if call % 7 == 6 else 1.0)
    done: list[int] = []
    found = time_rounds(machine.models(), 8, clock=machine, advance=done.append)
    assert found.calls == math.ceil(0.5 / 0.004)
    assert machine.order.count("a") == machine.order.count("b") == 3 + 8 * 2 * found.calls
    pairs = machine.order[6:]  # an untimed call of each before its timed one
    assert pairs[::2] == pairs[1::2]
    turns = pairs[::2]
    assert all({one, two} == {"a", "b"} for one, two in zip(turns[::2], turns[1::2], strict=True))
    assert found.times["a"] == pytest.approx([0.004] * 8)
    assert found.times["b"] == pytest.approx([0.02] * 8)
    assert done == [1] * 8


def test_a_drifting_machine_leaves_the_ratio() -> None:
    machine = Machine({"one": 1.0, "two": 2.0}, lambda call: 1.002**call)
    times = time_rounds(machine.models(), 60, clock=machine).times
    assert max(times["one"]) > 1.2 * min(times["one"])
    ratio = ratio_of(times["two"], times["one"])
    assert ratio.median == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(("seconds", "expected"), [(math.inf, 40), (40.0, 9), (1.0, 6)])
def test_seconds_end_the_rounds_but_not_before_there_can_be_ratios(seconds: float, expected: int) -> None:
    machine = Machine({"a": 0.3, "b": 0.5})
    assert len(time_rounds(machine.models(), 40, seconds, clock=machine).times["a"]) == expected


# ------------------------------------------------------------------------------ ratios


def noisy(centre: float, spread: float, count: int = 40, seed: int = 0) -> list[float]:
    draws = random.Random(seed)
    return [centre * (1 + spread * (2 * draws.random() - 1)) for _ in range(count)]


def test_a_clear_ratio_is_claimed_with_its_spread() -> None:
    ratio = ratio_of(noisy(1.2, 0.03), noisy(1.0, 0.03, seed=1))
    assert ratio.reason is None
    assert ratio.median is not None
    assert ratio.interval is not None
    assert ratio.median == pytest.approx(1.2, abs=0.02)
    assert 1 < ratio.low < ratio.median < ratio.high
    assert ratio.interval[0] < ratio.median < ratio.interval[1]
    assert str(ratio) == f"×{ratio.median:.2f} ({ratio.interval[0]:.2f} … {ratio.interval[1]:.2f})"


def test_equal_times_have_no_ratio() -> None:
    for seed in range(20):
        ratio = ratio_of(noisy(1.0, 0.1, seed=seed), noisy(1.0, 0.1, seed=seed + 100))
        assert ratio.median is None  # whatever the seed
        assert str(ratio) == "—"


def test_a_difference_behind_wide_noise_is_not_claimed_however_many_the_rounds() -> None:
    few, many = (ratio_of(noisy(1.2, 0.5, count), [1.0] * count) for count in (30, 3000))
    assert few.median is many.median is None
    assert many.interval is not None
    assert many.interval[1] - many.interval[0] < 0.1 < 0.5 < many.high - many.low  # as wide as they are
    assert many.reason is not None
    assert "between ×0." in many.reason
    quieter = ratio_of(noisy(1.2, 0.1, 200), [1.0] * 200)
    assert quieter.median == pytest.approx(1.2, abs=0.03)
    wide = ratio_of([1.02, 1.05, 1.1, 1.2, 1.3, 1.35], [1.0] * 6)  # slower for certain, but by how much?
    assert wide.median is None
    assert wide.interval == (1.02, 1.35)
    assert wide.reason is not None
    assert "0.15 from ×1" in wide.reason


def test_a_faster_model_is_claimed_alike() -> None:
    assert ratio_of(noisy(0.5, 0.05), [1.0] * 40).median == pytest.approx(0.5, abs=0.02)
    assert ratio_of(noisy(0.97, 0.3), [1.0] * 40).median is None


def test_few_rounds_have_no_ratio() -> None:
    few = ratio_of([2.0] * 5, [1.0] * 5)
    assert few.median is None
    assert re.match(r"5 rounds.* 6$", few.reason or "")
    assert ratio_of([2.0] * 6, [1.0] * 6).median == 2.0


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draws = random.Random(0)
    for count in (6, 9, 20, 55):
        held = 0
        for _ in range(2000):
            interval = median_interval([draws.expovariate(1.0) for _ in range(count)])
            assert interval is not None
            held += interval[0] <= math.log(2) <= interval[1]
        assert held >= 0.94 * 2000
    assert median_interval(range(20)) == (5, 14)  # as tables of the sign test have it


# ------------------------------------------------------------------------------ the machine


def test_threads_and_cores_are_pinned_and_restore() -> None:
    before = torch.get_num_threads(), cores()
    with pinned(1):
        assert torch.get_num_threads() == 1
        assert len(cores()) == 1 or not hasattr(os, "sched_setaffinity")
    assert (torch.get_num_threads(), cores()) == before
    with pytest.raises(ValueError, match=r"threads is 0.*1 to \d+"), pinned(0):
        pass


def test_memory_is_what_a_call_needs_at_its_peak() -> None:
    held = torch.ones(4_000_000)  # not of the call
    need = peak_memory(lambda: (torch.ones(8_000_000) + 1).sum())
    assert held.sum() > 0
    if need is not None:
        assert 60e6 < need < 90e6


def test_memory_that_a_process_cannot_show_is_a_bound_and_no_number() -> None:
    (table,) = bench(model(2), IMAGE, threads=1, rounds=1, batches=[1], runtimes=["eager"]).tables
    for row in table.rows:  # of networks of a few kB
        assert row.memory is None
        assert row.memory_below in (RESOLUTION, None)  # nothing is known but on Linux
    words = {(5_000_000, None): "5 MB", (None, 2_000_000): "< 2 MB", (None, None): "—"}
    for (own, below), expected in words.items():
        assert memory(Row("", 0, 0, own, below, 0.0, 0.0, 0.0, None)) == expected


def test_each_runtime_gives_the_models_logits() -> None:
    net, images = _tiny.batch_norm_member(), _tiny.images(4)
    for runtime in ("eager", "onnxruntime"):
        found = ready(runtime, net, images, 1, net)
        with torch.no_grad():
            torch.testing.assert_close(found.call(), net(images), rtol=1e-4, atol=1e-4)


def test_a_runtime_that_fails_or_gives_other_logits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Runner:
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setitem(runtimes._BUILD, "compiled", failing)
    with pytest.raises(CannotRun, match=r"^compiled .*: no compiler and much more$"):
        ready("compiled", _tiny.member(), IMAGE, 1, _tiny.member())
    monkeypatch.setitem(runtimes._BUILD, "compiled", lambda *_: Runner(lambda: torch.ones(1, 3), None))
    with pytest.raises(CannotRun, match=r"^compiled .*other logits.* by \d"):
        ready("compiled", _tiny.member(), IMAGE, 1, _tiny.member())
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(CannotRun, match=r"^onnxruntime .*'ensbridge\[export\]'"):
        ready("onnxruntime", _tiny.member(), IMAGE, 1, _tiny.member())


# ------------------------------------------------------------------------------ the whole


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Runtimes that take the time they are told; compiled is not there."""
    seconds = {"one member": 1.0, "source + bridge": 1.2, "DE-2": 2.0, "DE-3": 3.0}
    machine = Machine(seconds)

    def fake(runtime: str, net: object, images: torch.Tensor, threads: int, truth: object) -> Runner:
        if runtime == "compiled":
            raise CannotRun("there is no compiler")
        name = names.setdefault(net, list(seconds)[len(names) % len(seconds)])
        return Runner(lambda: machine.run(name) or images, 3_000_000)

    names: dict[object, str] = {}  # of each network, in the order in which they are first seen
    monkeypatch.setattr(sys.modules["ensbridge.deploy.benchmark.bench"], "ready", fake)
    return machine


def test_all_is_measured_in_every_runtime_and_batch(machine: Machine) -> None:
    fast = model()
    stages: list[tuple[str, int]] = []

    def begin(name: str, total: int, unit: str = "steps") -> Callable[[int], None]:
        stages.append((name, total))
        return lambda steps: None

    told: list[Table] = []
    found = bench(fast, IMAGE, threads=1, rounds=7, clock=machine, begin=begin, tell=told.append)
    assert tuple(told) == found.tables
    assert [(table.runtime, table.batch) for table in found.tables] == [
        ("eager", 1),
        ("eager", 128),
        ("compiled", 1),
        ("compiled", 128),
        ("onnxruntime", 1),
        ("onnxruntime", 128),
    ]
    eager, compiled = found.tables[0], found.tables[2]
    assert (compiled.rows, compiled.problem) == ((), "there is no compiler")
    assert (eager.rounds, eager.calls, eager.problem) == (7, 3, None)
    assert [row.model for row in eager.rows] == ["one member", "source + bridge", "DE-2", "DE-3"]
    assert [round(row.median, 6) for row in eager.rows] == [1.0, 1.2, 2.0, 3.0]
    assert [str(row.ratio) for row in eager.rows[1:]] == [
        "×1.20 (1.20 … 1.20)",
        "×2.00 (2.00 … 2.00)",
        "×3.00 (3.00 … 3.00)",
    ]
    one, bridged, two, _ = eager.rows
    assert (one.macs, one.params) == (count_macs(fast.source, IMAGE), count_params(fast.source))
    assert (bridged.macs, bridged.params) == (count_macs(fast, IMAGE), count_params(fast))
    assert (two.macs, two.params) == (2 * one.macs, 2 * one.params)
    assert stages[:2] == [("eager 1: build", 4), ("eager 1: time", 7)]
    assert (found.members, found.bridges, found.image_shape, found.threads) == (3, 1, (3, 8, 8), 1)


def test_words_and_json_claim_what_is_claimed_and_no_more(machine: Machine) -> None:
    draws = random.Random(3)
    clear = bench(model(), IMAGE, threads=1, rounds=7, batches=[4], clock=machine)
    machine.slowness = lambda call: 1 + 3 * draws.random()
    vague = bench(model(), IMAGE, threads=1, rounds=9, batches=[4], runtimes=["onnxruntime"], clock=machine)
    eager_line, compiled_line, onnx_line = headline(clear).splitlines()
    assert eager_line == (
        "Source + bridge takes ×1.20 (1.20 … 1.20) the time of one member with eager at batch 4; half "
        "of the rounds gave 1.20 … 1.20."
    )
    assert onnx_line == eager_line.replace("eager", "onnxruntime")
    assert re.search("compiled at batch 4: there is no compiler", compiled_line)
    assert re.search("no ratio with onnxruntime at batch 4", headline(vague))
    eager, compiled, _ = clear.tables
    expected = ("source + bridge", "1200.00", "1200.00 … 1200.00", "×1.20 (1.20 … 1.20)", "3 MB")
    assert cells(eager.rows[1]) == expected
    assert rich_table(compiled) == "compiled, batch 4: there is no compiler."
    assert rich_costs(clear) is not None
    assert rich_costs(replace(clear, tables=(compiled,))) is None
    for found in (clear, vague):
        again = json.loads(json.dumps(found.to_json(), allow_nan=False))
        assert "DE-k" in again["stand_ins"]
        assert again["memory_means"]
        first, second = again["tables"][0]["rows"][:2]
        assert first["ratio"] is None
        assert (second["ratio"]["median"] is None) == (found is vague)
        assert (second["ratio"]["reason"] is None) == (found is clear)
        assert second["ratio"]["low"] <= second["ratio"]["high"]


def test_a_file_that_claims_a_thousand_members_has_ten_timed(machine: Machine) -> None:
    found = bench(model(members=1000), IMAGE, runtimes=["eager"], batches=[1], threads=1, rounds=1)
    names = [row.model for row in found.tables[0].rows]
    assert names == ["one member", "source + bridge", *(f"DE-{count}" for count in range(2, 11))]
    assert found.members == 1000


def test_it_runs_for_real_and_leaves_the_model_as_it_was() -> None:
    fast = model(2, bridges=2).train()
    before, draws = _tiny.state(fast), torch.get_rng_state()
    found = bench(fast, IMAGE, threads=1, rounds=1, batches=[2], runtimes=["eager"])
    (table,) = found.tables
    assert table.problem is None
    assert [row.model for row in table.rows] == ["one member", "source + 2 bridges", "DE-2"]
    assert all(row.median > 0 for row in table.rows)
    assert fast.training
    assert _tiny.same(before, _tiny.state(fast))
    assert torch.equal(draws, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_source_of_another_type_than_its_bridges_is_timed(dtype: torch.dtype) -> None:
    score = MapScore(3, _tiny.CHANNELS, 8, size=8, deep=False)
    bridges = [Bridge(score, times=(0.0, 1.0))]
    fast = FastEnsemble(_tiny.batch_norm_member().to(dtype), bridges, "1", members=2).eval()
    (table,) = bench(fast, IMAGE.to(dtype), threads=1, rounds=1, batches=[2], runtimes=["eager"]).tables
    assert table.problem is None


def test_a_wrong_preparation_is_noticed_and_a_failing_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = InferenceModel.forward

    def problem() -> str | None:
        return bench(model(2), IMAGE, threads=1, rounds=1, batches=[2], runtimes=["eager"]).tables[0].problem

    monkeypatch.setattr(InferenceModel, "forward", lambda self, images: forward(self, images).flip(-1))
    wrong = problem()
    assert wrong is not None
    assert re.match(r"eager .*other logits.* by \d", wrong)
    monkeypatch.setattr(InferenceModel, "forward", lambda self, images: forward(self, images[:, 0]))
    failing = problem()
    assert failing is not None
    assert failing.startswith("eager cannot run")


def test_a_model_that_fails_at_its_first_call_says_so() -> None:
    with pytest.raises(CannotRun, match=r"^eager cannot run"):
        ready("eager", _tiny.member(), IMAGE[:, :1], 1, _tiny.member())


def test_a_plain_network_is_refused() -> None:
    with pytest.raises(ValueError, match="FastEnsemble"):
        bench(_tiny.member(), IMAGE)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model that says what images it takes."""
    folder = tmp_path_factory.mktemp("bench") / "model"
    model().save(folder, image_shape=(3, 8, 8))
    return folder


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_tables_or_json(
    as_json: bool, saved: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ["--rounds", "6", "--batch", "4", "--batch", "2", "--threads", "1", "--quiet"]
    assert run(monkeypatch, "bench", saved, *words, *(["--json"] if as_json else [])) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    if as_json:
        found = json.loads(captured.out)
        assert [table["batch"] for table in found["tables"]] == [4, 2] * 3
        assert found["model"] == str(saved)
    else:
        assert "copies of its source" in captured.out
        assert captured.out.index("eager, batch 4 (6") < captured.out.index("onnxruntime, batch 2 (6")
        assert captured.out.index("onnxruntime, batch 2 (6") < captured.out.index("one image")
        assert "DE-3" in captured.out
        assert captured.out.index("one image") < captured.out.index("compiled at batch 4: ")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_table_is_printed_once_it_is_measured_and_json_at_the_end(
    as_json: bool, saved: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    module = sys.modules["ensbridge.deploy.benchmark.bench"]
    build = module.ready

    def interrupted(runtime: str, *others: Any) -> Runner:
        if runtime == "onnxruntime":
            raise KeyboardInterrupt
        return build(runtime, *others)

    monkeypatch.setattr(module, "ready", interrupted)
    words = ["--rounds", "6", "--batch", "2", "--threads", "1", *(["--json"] if as_json else [])]
    assert run(monkeypatch, "bench", saved, *words) == 130
    captured = capsys.readouterr()
    if as_json:
        assert captured.out == ""
    else:
        assert captured.out.startswith("eager, batch 2 (6 rounds of ")
        assert captured.out.splitlines()[-1] == "compiled, batch 2: there is no compiler."
    begun = ["eager 2: build, 4 models", "eager 2: time, 6 rounds", "compiled 2: build, 4 models"]
    begun += ["onnxruntime 2: build, 4 models"]
    assert captured.err.splitlines()[:-1] == [f"ensbridge: {line}" for line in begun]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nothing"], "nothing.*not exist"),
        (["plain"], "plain.*--image-shape"),
        (["plain", "--image-shape", "3x8"], "'3x8'"),
        (["plain", "--image-shape", "3,8,8", "--batch", "0"], "batch is 0; give 1 to 65536 images"),
        (["plain", "--image-shape", "3,2048,2048"], "batch.* 128 .*12,582,912"),
        (["plain", "--image-shape", "3,8,8", "--runtime", "tpu"], "runtime.*'tpu'.*eager"),
        (["plain", "--image-shape", "3,8,8", "--rounds", "0"], "rounds.* 0;"),
        (["plain", "--image-shape", "3,8,8", "--seconds", "nan"], "seconds.* nan;"),
        (["plain", "--image-shape", "3,8,8", "--threads", "9999"], "threads.* 9999;"),
        (["plain", "--image-shape", "3,8,8", "--device", "tpu"], "device.*'tpu'"),
        (["plain", "--image-shape", "1,8,8"], r"\(1, 8, 8\)"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model().save(tmp_path / "plain")
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "bench", *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("ensbridge: ")
    assert re.search(named, line)


def test_a_benchmark_knows_its_names() -> None:
    found = Benchmark("", 2, 5, (3, 8, 8), "cpu", 1, {}, ())
    assert found.fast == "source + 2 bridges"
    assert headline(found) == ""
