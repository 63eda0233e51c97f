"""A whole recipe, scaled down to seconds: the same seed gives the same bytes, however often it is stopped."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import _runs
import _tiny
from _recipe import RecordedProgress, member, results, tiny
from ensbridge.evaluation.scores import name_rows, read_scores
from ensbridge.experiments import Recipe, cifar10, evaluate_run, run_recipe, train_recipe
from ensbridge.experiments.jobs import outline
from ensbridge.experiments.parts import groups_for
from ensbridge.experiments.recipe import build, describe
from ensbridge.experiments.runner import Run, side_by_side
from ensbridge.experiments.table import experiment_of
from ensbridge.methods.diffusion_bridge import DiffusionBridge
from ensbridge.methods.joint_distillation import JointDistillation
from ensbridge.models import PyramidScore, ResNet

STAGES = ["members", "bridges", "headline", "curves", "baselines"]
BASELINES = ["ED", "EnD²", "+1 BN small", "+1 BN medium"]
BRIDGES = ["+1 DBN (5 steps)", "+1 DBN", "+1 DBN (KL)", "+2 DBN (DE-3)", "+2 DBN (KL)"]
CONTROLS = ["control", "control (KL)", "+2 control", "+2 control (KL)"]
HEADLINE = ["ED (τ = 1)", "+1 DBN (distilled source)", "control (distilled source)"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("recipe") / "run"
    run_recipe(tiny(), folder, seed=3)
    return folder


# ------------------------------------------------------------------------------ the whole chain


def test_rows_come_in_their_order(whole: Path) -> None:
    scores = read_scores(whole)
    names = ["DE-1", "DE-2", "DE-3", *BASELINES, *BRIDGES, *CONTROLS, *HEADLINE]
    assert [row.model for row in scores.rows] == names
    methods = ["ED", "EnD2", "BN", "BN", *["DBN"] * 5, *["control"] * 4, "ED", "DBN", "control"]
    assert [row.kind for row in scores.rows[3:]] == methods
    assert [row.members for row in scores.rows] == [1, 2, 3, *[2] * 4, 2, 2, 2, 3, 2, *[1] * 4, 2, 2, 1]
    assert [row.bridges for row in scores.rows] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 1, 1, 2, 2, 0, 1, 1]
    assert [row.steps for row in scores.rows] == [0, 0, 0, 0, 0, 1, 1, 5, *[1] * 8, 0, 1, 1]
    assert [row.model for row in scores.rows if row.headline] == [HEADLINE[1]]
    assert [row.dee for row in scores.rows[:3]] == [1.0, 2.0, 3.0]
    one, target = scores.rows[0].nll, scores.rows[1].nll
    gaps = [(one - row.nll) / (one - target) for row in scores.rows[3:]]
    assert [row.gap for row in scores.rows[3:]] == pytest.approx(gaps, rel=1e-4)
    assert all(row.cnll is not None and row.reliability is not None for row in scores.rows)
    assert (scores.dataset, scores.seed, scores.class_names) == ("digits", 3, ("a", "b", "c"))
    assert len({row.nll for row in scores.rows}) == len(scores.rows)  # each row is a network of its own


def test_every_bridge_of_one_step_is_measured_beside_its_control(whole: Path) -> None:
    rows = {row.model: row for row in read_scores(whole).rows}
    for name, control in zip([*BRIDGES[1:], HEADLINE[1]], [*CONTROLS, HEADLINE[2]], strict=True):
        assert rows[name].nll_gain_over_control == pytest.approx(rows[control].nll - rows[name].nll, abs=1e-5)
        assert rows[name].bridges == rows[control].bridges
        assert rows[name].macs == rows[control].macs


@pytest.mark.parametrize(("members", "target"), [(2, 2), (3, 2), (3, 3), (4, 3), (5, 3), (5, 4)])
def test_what_bridges_learn_from_and_start_from(
    members: int, target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(members=members, target=target)
    experiment = experiment_of(recipe, seed=3)
    run = Run(experiment, tmp_path, 3, recipe.load(), RecordedProgress())
    monkeypatch.setattr("ensbridge.experiments.runner.load_trained", lambda *_: None)  # as they start
    monkeypatch.setattr(Run, "is_finished", lambda *_: True)
    monkeypatch.setattr("ensbridge.experiments.parts.FastEnsemble.of", staticmethod(lambda *methods: methods))
    models = [
        model
        for model in experiment.models
        if (model.table, model.info.method, model.info.source) == ("rows", "DBN", "member")
    ]
    names = name_rows([model.info for model in models], target)
    made: dict[str, tuple[DiffusionBridge, ...]] = {
        name: model.build(run)  # type: ignore[misc]
        for name, model in zip(names, models, strict=True)
    }

    own, places = tuple(range(target)), groups_for(recipe, members)
    wanted = {key: [own] for key in ("+1 DBN (5 steps)", "+1 DBN", "+1 DBN (KL)")}
    wanted |= {key: [(0,)] for key in ("control", "control (KL)")}
    if (count := len(places)) > 1:
        wanted |= {f"+{count} DBN (DE-{members})": places, f"+{count} DBN (KL)": [own] * count}
        wanted |= dict.fromkeys((f"+{count} control", f"+{count} control (KL)"), [(0,)] * count)
    assert {name: [each.target for each in bridges] for name, bridges in made.items()} == wanted
    for name, bridges in made.items():
        assert {each.objective for each in bridges} == {"kl" if "(KL)" in name else "bridge"}
        assert len(set(map(id, bridges))) == len(bridges)

    def starts(name: str) -> list[bytes]:
        return [next(each.student.parameters()).detach().numpy().tobytes() for each in made[name]]

    # A bridge and its control start alike, those that are averaged do not.
    assert starts("+1 DBN") == starts("+1 DBN (KL)") == starts("control") == starts("control (KL)")
    if count > 1:
        several = starts(f"+{count} DBN (DE-{members})")
        assert several[:1] == starts("+1 DBN")
        assert len(set(several)) == count
        assert all(
            starts(f"+{count} {other}") == several for other in ("DBN (KL)", "control", "control (KL)")
        )

    lines = outline(experiment.of_stages(["distill"]), 40)
    folders = ("bridges", "bridges-kl", "distilled/5-to-1")
    trained = [len(experiment.job(folder).methods) for folder in folders]
    assert [line.split()[1] for line in lines if line.startswith("bridges")] == list(map(str, trained))


def test_the_scores_hold_what_the_figures_show(whole: Path) -> None:
    scores = read_scores(whole)
    names = [
        "DE-1",
        BRIDGES[0],
        "control",
        "+1 DBN (KL)",
        "Bezier curve",
        "ED",
        "EnD²",
        "BN small",
        "BN medium",
    ]
    assert sorted(curve.name for curve in scores.curves) == sorted(names)
    for curve in scores.curves:
        assert curve.images == (5, 10, 15, 20)  # four steps of five images, each logged
        assert all(loss > -10 for loss in curve.loss)
    for each in scores.transitions:
        assert each.times == pytest.approx((1, 0.8, 0.6, 0.4, 0.2, 0))
        assert max(each.source) != max(each.ensemble)
        assert each.source.index(max(each.source)) != each.ensemble.index(max(each.ensemble))
        assert [sum(stop) for stop in each.path] == pytest.approx([1] * 6, abs=1e-5)
    assert (scores.tradeoff, scores.capacity) == ((), ())


def test_the_same_seed_gives_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)  # whatever the global randomness
    returned = run_recipe(tiny(), tmp_path, seed=3)
    assert results(tmp_path) == results(whole)
    assert returned == read_scores(tmp_path)


def test_another_seed_gives_other_scores(whole: Path, tmp_path: Path) -> None:
    run_recipe(tiny(), tmp_path, seed=4)
    here, there = read_scores(tmp_path), read_scores(whole)
    assert all(a.nll != b.nll for a, b in zip(here.rows, there.rows, strict=True))


@pytest.mark.parametrize(
    ("stage", "step"), [("members", 1), ("members", 7), ("bridges", 10), ("curves", 2), ("baselines", 3)]
)
def test_stopped_midway_and_run_again_it_gives_the_same_bytes(
    stage: str, step: int, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConnectionError, match="stopped by the test"):
        run_recipe(tiny(), tmp_path, 3, RecordedProgress((stage, step)))
    assert not (tmp_path / "scores.json").exists()
    run_recipe(tiny(), tmp_path, 3)
    assert results(tmp_path) == results(whole)


def test_stopped_again_and_again(whole: Path, tmp_path: Path) -> None:
    # At the first step that is recorded: a later one may never come, as another thread may be far ahead.
    for stage in ("members", "members", "bridges", "bridges", "baselines"):
        with pytest.raises(ConnectionError):
            run_recipe(tiny(), tmp_path, 3, RecordedProgress((stage, 1)))
    run_recipe(tiny(), tmp_path, 3)
    assert results(tmp_path) == results(whole)


def test_a_complete_run_is_read_and_nothing_is_trained_or_measured(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, reporter = _runs.contents(whole), RecordedProgress()
    monkeypatch.setattr("ensbridge.experiments.run.evaluate_run", None)
    scores = run_recipe(tiny(), whole, 3, reporter)
    assert scores == read_scores(whole)
    assert all(sum(steps) == total for total, steps in reporter.stages.values())  # told as done
    assert _runs.contents(whole) == before


def test_a_look_at_an_unfinished_run_does_not_end_it(whole: Path, tmp_path: Path) -> None:
    train_recipe(tiny(), tmp_path, 3, ["members"])
    evaluate_run(tmp_path, tiny())  # writes the scores of what there is
    run_recipe(tiny(), tmp_path, 3)
    assert results(tmp_path) == results(whole)


def test_training_more_takes_old_scores_away_and_training_nothing_leaves_them(tmp_path: Path) -> None:
    train_recipe(tiny(), tmp_path, 3, ["members"])
    evaluate_run(tmp_path, tiny())
    train_recipe(tiny(), tmp_path, 3, ["members"])
    assert (tmp_path / "scores.json").exists()
    train_recipe(tiny(), tmp_path, 3, ["bridge"])
    assert not (tmp_path / "scores.json").exists()


def test_the_reporter_hears_every_step(tmp_path: Path) -> None:
    reporter = RecordedProgress()
    run_recipe(tiny(), tmp_path, 0, reporter)
    # Three members; two fits and a distillation; one curve; two jobs of baselines.
    images = len(tiny().load().test) + len(tiny().load().val)
    networks = 3 + len(BASELINES + BRIDGES + CONTROLS + HEADLINE)
    totals = dict(zip([*STAGES, "evaluate"], (12, 12, 4, 4, 8, networks * images), strict=True))
    assert {name: total for name, (total, _) in reporter.stages.items()} == totals
    assert sum(reporter.stages.pop("evaluate")[1]) == networks * images
    for total, steps in reporter.stages.values():
        assert steps == [1] * total


def test_the_callers_threads_and_randomness_return(tmp_path: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        run_recipe(tiny(), tmp_path, 3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)


def test_members_differ_in_start_and_order(whole: Path) -> None:
    logs = [(whole / f"member-{index}" / "log.jsonl").read_text() for index in (1, 2, 3)]
    assert len(set(logs)) == 3
    configs = [json.loads((whole / f"member-{index}" / "config.json").read_text()) for index in (1, 2, 3)]
    assert len({config["fit"]["seed"] for config in configs}) == 3


def test_a_build_is_a_function_of_its_seed() -> None:
    one, same, other = (build(member, seed).state_dict() for seed in (1, 1, 2))
    assert _runs.same(one, same)
    assert not _runs.same(one, other)


# ------------------------------------------------------------------------------ another recipe's folder


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    others = {
        "adam": "sgd",
        "sgd": "muon",
        "muon": "adam",
        "grid": "uniform",
        "image": "batch",
        "mean": "drawn",
    }
    others |= {"none": "dead", "exact": "released", "direct": "progressive"}
    others |= {"default": "paper", "dirichlet": "softmax", "beta0": "s", "auto": "float32"}
    if value is None:
        return 7
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, "x")
    if isinstance(value, str):
        return others.get(value, value + "x")
    return value / 2 if isinstance(value, float) and value else value + 1


UNCHANGED = ("checkpoint_every", "log_every", "tail_feature", "headline_score")


def variations(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Every copy of a dataclass in which one field, however deep, differs; functions are left as they are."""
    found: list[tuple[str, Any]] = []
    for each in fields(value):
        inner, label = getattr(value, each.name), f"{name}{each.name}"
        if is_dataclass(inner):
            found += [
                (place, replace(value, **{each.name: other}))
                for place, other in variations(inner, f"{label}.")
            ]
        # A recipe with a tail behind no block, or without a function, cannot be described at all.
        elif not callable(inner) and each.name not in UNCHANGED:
            found.append((label, replace(value, **{each.name: changed(inner)})))
    return found


def test_there_are_many_ways_to_change_a_recipe() -> None:
    places = [place for place, _ in variations(tiny())]
    assert {"feature", "target", "member_fit.lr", "bridge_fit.augment.mixup", "bridge.temperature.base"} <= {
        *places
    }


@pytest.mark.parametrize(("place", "other"), [pytest.param(*each, id=each[0]) for each in variations(tiny())])
def test_whatever_decides_the_numbers_is_described(place: str, other: Recipe) -> None:
    assert describe(other) != describe(tiny())


def test_another_recipe_or_seed_is_refused_and_nothing_changes(whole: Path) -> None:
    before, reporter = _runs.contents(whole), RecordedProgress()
    recipe = tiny()
    faster = replace(recipe.bridge_fit, lr=0.5)
    mixed = replace(recipe.bridge_fit, augment=replace(recipe.bridge_fit.augment, mixup=0.7))
    others = [
        (recipe, 4, r"seed is 3 .*4"),
        (replace(recipe, target=3), 3, r"recipe\.target is 2 .*3"),
        (replace(recipe, bridge_fit=faster), 3, r"bridge_fit\.lr is .*0\.5"),
        (replace(recipe, bridge_fit=mixed), 3, r"bridge_fit\.augment\.mixup is .*0\.7"),
    ]
    for other, seed, words in others:
        with pytest.raises(ValueError, match=words):
            run_recipe(other, whole, seed, reporter)
    assert reporter.stages == {}
    assert _runs.contents(whole) == before


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ValueError, match="taken is a file"):
        run_recipe(tiny(), tmp_path / "taken")
    assert _runs.contents(tmp_path) == {"taken": b"mine"}


# ------------------------------------------------------------------------------ threads


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_thread_stops_the_others_and_surfaces(failing: int) -> None:
    # Also where the job that fails was given after the one that goes on.
    begun, finished = threading.Event(), []

    def long(progress: Callable[[int, int, float], None]) -> None:
        begun.set()
        for step in range(1, 2000):
            progress(step, 2000, 0.0)
            threading.Event().wait(0.001)
        finished.append("long")

    def broken(progress: Callable[[int, int, float], None]) -> None:
        begun.wait()
        raise FloatingPointError("the loss is nan")

    jobs = [broken, long, long] if failing == 0 else [long, broken, long]
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        side_by_side(jobs, lambda steps: None)
    assert finished == []


def test_jobs_all_run_and_their_steps_are_counted_once() -> None:
    counted: list[int] = []

    def job(progress: Callable[[int, int, float], None]) -> None:
        for step in (3, 4, 5):  # goes on from step 2
            progress(step, 5, 0.0)
        for step in (1, 2):  # a second stage
            progress(step, 2, 0.0)

    side_by_side([job] * 5, counted.append)
    assert sum(counted) == 5 * 7


def test_an_error_in_a_member_surfaces_from_the_recipe(tmp_path: Path) -> None:
    class Broken(ResNet):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) * float("nan")

    def broken() -> nn.Module:
        return Broken((1, 1), (8, 8), 3, stem=8, mean=(0.5,), std=(0.3,))

    with pytest.raises(FloatingPointError, match=r"member.*nan at step 1"):
        run_recipe(tiny(member=broken), tmp_path)
    assert not (tmp_path / "scores.json").exists()


def test_the_headline_is_a_distilled_source_that_starts_as_the_first_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(members=3, target=2)
    run = Run(experiment_of(recipe, seed=3), tmp_path, 3, recipe.load(), RecordedProgress())
    monkeypatch.setattr("ensbridge.experiments.runner.load_trained", lambda *_: None)  # as they start
    monkeypatch.setattr(Run, "is_finished", lambda *_: True)
    pair, control = (run.methods("headline")[name] for name in ("distilled", "control"))
    assert isinstance(pair, JointDistillation)
    assert isinstance(control, JointDistillation)
    member = pair.ensemble.source
    assert (len(pair.ensemble), len(control.ensemble)) == (2, 1)
    assert control.ensemble.source is member
    for method in (pair, control):
        assert method.source is not member  # whose weights stay
        assert _tiny.same(_tiny.state(method.source), _tiny.state(member))
    assert _tiny.same(_tiny.state(pair.bridges["bridge"]), _tiny.state(control.bridges["bridge"]))


def test_a_headline_may_have_new_weights_and_a_bridge_that_reads_several_features(tmp_path: Path) -> None:
    recipe = tiny(target=2)
    assert recipe.headline_fit is not None
    recipe = replace(
        recipe,
        headline_new=True,
        headline_teachers=3,
        headline_features=("stages.0.0", "stages.1.0"),
        headline_score=lambda: PyramidScore(3, [8, 8], [(1, 8, 1, 2)], joins=[0], stem=8, last=8),
        headline_bridge_fit=replace(recipe.headline_fit, lr=0.01),
    ).check()
    recipe.try_networks(recipe.load())
    run_recipe(recipe, tmp_path, seed=3)
    run = Run(experiment_of(recipe, 3), tmp_path, 3, recipe.load(), RecordedProgress())
    pair, control = (run.methods("headline")[name] for name in ("distilled", "control"))
    assert isinstance(pair, JointDistillation)
    assert (len(pair.ensemble), pair.features) == (3, recipe.headline_features)
    assert isinstance(control, JointDistillation)
    assert len(control.ensemble) == 1
    assert not _tiny.same(_tiny.state(pair.source), _tiny.state(pair.ensemble.source))
    rows = {row.model: row for row in read_scores(tmp_path).rows}
    (headline,) = [row for row in rows.values() if row.headline]
    assert (headline.members, headline.source, headline.model) == (
        3,
        "distilled",
        "+1 DBN (distilled source, DE-3)",
    )


def test_a_recipe_without_later_fields_is_described_as_before() -> None:
    described = describe(tiny())
    assert {"headline_fit", "headline_temperature"} <= described.keys()
    assert not {"headline_new", "headline_teachers", "headline_features", "headline_score"} & described.keys()
    assert {"headline_new", "headline_features", "headline_score"} <= describe(cifar10()).keys()
    assert not any(name.startswith("headline") for name in describe(cifar10("paper", "paper")))
