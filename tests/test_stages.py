"""Stages of a recipe, alone and together; what can be changed of a recipe, and what cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from _recipe import Heard, results, tiny
from ensbridge.recipes import Plan, digits, evaluate_run, run_recipe, train_recipe
from ensbridge.recipes.recipe import change
from ensbridge.scores import read_scores

# ------------------------------------------------------------------------------ stages


def test_a_stage_trains_what_it_builds_on_and_evaluation_says_what_is_missing(tmp_path: Path) -> None:
    train_recipe(tiny(), tmp_path, 3, ["bridge"])
    scores, missing = evaluate_run(tmp_path, tiny())
    assert missing == ["distill", "rivals", "tradeoff", "capacity"]
    names = ["DE-1", "DE-2", "DE-3", "+1 DBN (5 steps)", "+1 DBN (KL)", "control (KL)"]
    assert [row.model for row in scores.rows] == names
    assert scores == read_scores(tmp_path)


def test_stages_one_by_one_give_the_same_bytes_as_the_whole(tmp_path: Path) -> None:
    run_recipe(tiny(), tmp_path / "whole", 3)
    for stage in ("rivals", "members", "distill"):  # in any order
        train_recipe(tiny(), tmp_path / "parts", 3, [stage])
    assert evaluate_run(tmp_path / "parts", tiny())[1] == ["tradeoff", "capacity"]
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the stages behind the figures."""
    folder = tmp_path_factory.mktemp("figures") / "run"
    train_recipe(tiny(members=4, target=3), folder, 3, ["tradeoff", "capacity"])
    evaluate_run(folder, tiny(members=4, target=3))
    return folder


def test_the_tradeoff_has_as_many_bridges_as_members_need(figures: Path) -> None:
    rows = read_scores(figures).tradeoff
    assert [(row.model, row.method, row.members, row.bridges) for row in rows] == [
        ("+1 DBN (DE-2)", "DBN", 2, 1),
        ("+1 DBN (DE-3)", "DBN", 3, 1),
        ("+2 DBN (DE-4)", "DBN", 4, 2),
        ("+1 BN (DE-2)", "BN", 2, 1),
        ("+2 BN (DE-3)", "BN", 3, 2),
        ("+3 BN (DE-4)", "BN", 4, 3),
    ]
    assert len({row.nll for row in rows}) == len(rows)


def test_the_capacity_is_of_one_network_for_each_number_of_teachers(figures: Path) -> None:
    rows = read_scores(figures).capacity
    assert [(row.method, row.members) for row in rows] == [
        (method, teachers) for teachers in (2, 3, 4) for method in ("DBN", "BN", "ED", "EnD2")
    ]
    for method, bridges in (("DBN", 1), ("BN", 1), ("ED", 0), ("EnD2", 0)):
        of_method = [row for row in rows if row.method == method]
        assert {row.bridges for row in of_method} == {bridges}
        assert len({row.macs for row in of_method}) == 1
        assert len({row.nll for row in of_method}) == 3


def test_rivals_without_mixup_are_trained_on_batches_of_their_own(tmp_path: Path) -> None:
    recipe = tiny()
    plain = replace(recipe.ed_fit, augment=replace(recipe.ed_fit.augment, mixup=0.0))
    recipe = replace(recipe, ed_fit=plain, end2_fit=replace(plain, lr=0.05))
    train_recipe(recipe, tmp_path, 0, ["rivals"])
    folders = sorted(path.name for path in tmp_path.glob("rivals*"))
    assert folders == ["rivals", "rivals-bn-small-1"]
    scores, _ = evaluate_run(tmp_path, recipe)
    assert {"ED", "EnD²", "BN small", "BN medium"} <= {curve.name for curve in scores.curves}


def test_progressive_distillation_goes_through_its_stages(tmp_path: Path) -> None:
    recipe = tiny(bridge=replace(tiny().bridge, distillation="progressive"))
    reporter = Heard()
    train_recipe(recipe, tmp_path, 0, ["distill"], reporter)
    assert sorted(path.name for path in (tmp_path / "distilled").iterdir()) == ["2-to-1", "3-to-2", "5-to-3"]
    total, steps = reporter.stages["bridges"]
    assert steps == [1] * total


def test_bad_runs_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'nope' is not a stage; there are: members, bridge"):
        train_recipe(tiny(), tmp_path / "new", 0, ["nope"])
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        evaluate_run(tmp_path)
    train_recipe(tiny(), tmp_path / "run", 0, ["members"])
    with pytest.raises(ValueError, match=r"member-1 is a part of a run, or foreign"):
        evaluate_run(tmp_path / "run" / "member-1")
    for checkpoint in (tmp_path / "run" / "member-2").glob("checkpoint-*"):
        checkpoint.unlink()
    with pytest.raises(
        ValueError, match=r"has no trained members \(member-2 is not finished\); ensbridge train"
    ):
        evaluate_run(tmp_path / "run", tiny())


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("bridge_fit", "write field=value"),
        ("nope=1", "nope is not a field of the recipe; at 'nope' there are: feature"),
        ("bridge_fit=1", "bridge_fit has fields of its own; set one of them: bridge_fit.epochs"),
        ("bridge_fit.epochs.x=1", "epochs has no fields of its own"),
        ("members=2.5", "members is '2.5'; it must be a whole number"),
        ("bridge.beta=nan", "bridge.beta is 'nan'; it must be a finite number"),
        ("bridge.centre=1", "bridge.centre is '1'; it must be true or false"),
        ("seed=1", "seed is not a field of the recipe"),
    ],
)
def test_changes_that_cannot_be_made_are_explained(assignment: str, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        change(digits(), assignment)
    assert words in str(refused.value)


def test_changes_are_checked_when_all_are_made() -> None:
    assert Plan("digits", changes=("members=2", "target=2")).recipe().target == 2
    with pytest.raises(ValueError, match="target is 9 and members 5"):
        Plan("digits", changes=("target=9",)).recipe()


def test_changes_keep_their_types() -> None:
    recipe = change(change(change(digits(), "bridge_fit.epochs=0.5"), "members=4"), "bridge.centre=false")
    assert (recipe.bridge_fit.epochs, recipe.members, recipe.bridge.centre) == (0.5, 4, False)


def test_presets_differ_where_the_paper_and_its_code_do() -> None:
    default, paper, released = digits(), digits("paper"), digits("released")
    assert [each.end2_predict for each in (default, paper, released)] == ["dirichlet", "dirichlet", "softmax"]
    assert [each.ed_fit.augment.mixup for each in (default, paper, released)] == [0.4, 0, 0]
    assert [each.bn_fit.augment.mixup for each in (default, paper, released)] == [0.4] * 3
    assert [each.bridge.train_times for each in (default, paper, released)] == ["grid", "uniform", "released"]


def test_every_rival_sees_as_many_images_as_the_bridge() -> None:
    recipe = digits()
    passes = recipe.bridge_fit.epochs + recipe.distill_fit.epochs
    assert {getattr(recipe, f"{name}_fit").epochs for name in ("kl", "ed", "end2", "bn")} == {passes}
