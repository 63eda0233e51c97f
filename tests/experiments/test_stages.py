"""Stages of a recipe, alone and together; what can be changed of a recipe, and what cannot."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import _runs
from _recipe import RecordedProgress, results, tiny
from ensbridge.bridge.bridge import Preset
from ensbridge.data import Augment
from ensbridge.evaluation.scores import read_scores
from ensbridge.experiments import Plan, Recipe, digits, dry_run, evaluate_run, run_recipe, train_recipe
from ensbridge.experiments.jobs import Experiment, Job
from ensbridge.experiments.parts import trained_ensemble
from ensbridge.experiments.recipe import change
from ensbridge.experiments.runner import Run
from ensbridge.experiments.table import experiment_of
from ensbridge.models import ResNet
from ensbridge.models.ensemble import Ensemble
from ensbridge.training.checkpoint import load_checkpoint
from ensbridge.utils.files import locked

# ------------------------------------------------------------------------------ stages


def test_a_stage_trains_what_it_builds_on_and_evaluation_says_what_is_missing(tmp_path: Path) -> None:
    train_recipe(tiny(), tmp_path, 3, ["bridge"])
    scores, missing = evaluate_run(tmp_path, tiny())
    assert [each.split()[0] for each in missing] == [
        "distill",
        "headline",
        "baselines",
        "tradeoff",
        "capacity",
    ]
    assert missing[0] == "distill (distilled/5-to-1 is not finished)"
    bridges = ["+1 DBN (5 steps)", "+1 DBN (KL)", "+2 DBN (KL)", "control (KL)", "+2 control (KL)"]
    assert [row.model for row in scores.rows] == ["DE-1", "DE-2", "DE-3", *bridges]
    assert scores == read_scores(tmp_path)


def test_the_bridge_that_learns_with_kl_has_a_temperature_of_its_own(tmp_path: Path) -> None:
    heated = replace(tiny(), kl_temperature=3.0)
    train_recipe(heated, tmp_path, 3, ["bridge"])

    def temperatures(part: str) -> set[float]:
        methods = json.loads((tmp_path / part / "config.json").read_text())["method"]["methods"]
        return {each["config"]["temperature"]["base"] for each in methods.values()}

    base = heated.bridge.temperature.base
    assert temperatures("bridges-kl") == {3.0} != {base}
    assert temperatures("bridges") == {base}


def test_members_side_by_side_are_those_trained_alone(tmp_path: Path) -> None:
    alone = tiny(members=3, figure_members=5)
    assert alone.member_fit.augment == Augment()  # whose draws would be the whole batch's
    together, recorded = replace(alone, members_together=2), RecordedProgress()
    train_recipe(alone, tmp_path / "alone", 3, ["members"])
    train_recipe(together, tmp_path / "together", 3, ["members"], recorded)
    folders = sorted(path.name for path in (tmp_path / "together").glob("member*"))
    assert folders == ["member-3", "members-1-to-2"]
    total, done = recorded.stages["members"]
    assert total == sum(done) == 2 * 4  # of two jobs
    one, other = (
        evaluate_run(tmp_path / name, recipe)[0]
        for name, recipe in (("alone", alone), ("together", together))
    )
    assert [row.model for row in one.rows] == ["DE-1", "DE-2", "DE-3"]
    assert one.rows == other.rows
    assert one.curves == other.curves
    # More members, for the figures, leave those that are there.
    before = _runs.contents(tmp_path / "together" / "members-1-to-2")
    data = together.load()

    def five_members(recipe: Recipe, folder: Path) -> Ensemble:
        experiment = experiment_of(recipe, 3)
        run = Run(experiment, folder, 3, data, RecordedProgress())
        run.train([job for job in experiment.jobs if job.group == "members"])
        return trained_ensemble(run, recipe, 5)

    more = five_members(together, tmp_path / "together")
    assert {path.name for path in (tmp_path / "together").glob("members*")} == {
        "members-1-to-2",
        "members-4-to-5",
    }
    assert _runs.contents(tmp_path / "together" / "members-1-to-2") == before
    five = five_members(alone, tmp_path / "alone")
    images = data.test.images
    assert more(images).equal(five(images))


def test_as_many_members_side_by_side_as_there_are(tmp_path: Path) -> None:
    recipe = replace(tiny(), members_together=100)
    # Rounded as for one member: 0.3 epochs of 40 images in batches of 5 are 2 steps, three times as many 7.
    recipe = replace(recipe, member_fit=replace(recipe.member_fit, epochs=0.3))
    recorded = RecordedProgress()
    train_recipe(recipe, tmp_path, 3, ["members"], recorded)
    assert [path.name for path in tmp_path.glob("member*")] == ["members-1-to-3"]
    total, done = recorded.stages["members"]
    assert total == sum(done) == 2
    assert dry_run(recipe, ["members"])[0].startswith("members   3 × member, 3 at a time ")


def test_bridges_towards_fewer_members_than_are_trained_side_by_side(tmp_path: Path) -> None:
    together, alone = (replace(tiny(), members_together=count) for count in (100, 1))
    assert together.target < together.members
    rows = []
    for recipe, name in ((together, "together"), (alone, "alone")):
        train_recipe(recipe, tmp_path / name, 3, ["bridge"])
        rows.append(evaluate_run(tmp_path / name, recipe)[0].rows)
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("folders", "needs", "named"), [(["a", "a"], (), "'a'"), (["a", "b"], ("c",), "c"), (["a"], ("a",), "a")]
)
def test_jobs_that_cannot_be_trained_in_order_are_refused(
    folders: list[str], needs: tuple[str, ...], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Experiment(tuple(Job(folder, "group", {}, needs) for folder in folders), (), {})
    with pytest.raises(ValueError, match="nope"):
        Experiment((Job("a", "group", {}),), (), {}).job("nope")


def test_words_that_give_the_same_recipe_take_the_place_of_the_old(tmp_path: Path) -> None:
    old = Plan("digits", changes=("member_fit.epochs=0.1", "kl_temperature=2"))
    train_recipe(old, tmp_path, 0, ["members"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["plan"]["changes"] = ["member_fit.epochs=0.1", "kl_temperature=3"]  # as if the recipe had changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"kl_temperature.*2\.0.*3\.0"):
        evaluate_run(tmp_path)
    train_recipe(old, tmp_path, 0, ["members"])
    assert [row.model for row in evaluate_run(tmp_path)[0].rows][:2] == ["DE-1", "DE-2"]
    # A recipe without words of its own leaves those that are there.
    train_recipe(old.recipe(), tmp_path, 0, ["members"])
    assert json.loads((tmp_path / "config.json").read_text())["plan"] == old.to_json()


def test_members_side_by_side_go_on_where_they_were_stopped(tmp_path: Path) -> None:
    noisy = replace(tiny().member_fit, augment=Augment(noise=0.1))
    recipe = replace(tiny(), members_together=3, member_fit=noisy)
    train_recipe(recipe, tmp_path / "whole", 3, ["members"])
    with pytest.raises(ConnectionError):
        train_recipe(recipe, tmp_path / "stopped", 3, ["members"], RecordedProgress(("members", 3)))
    train_recipe(recipe, tmp_path / "stopped", 3, ["members"])
    last = "members-1-to-3/checkpoint-000000004.safetensors"
    whole, stopped = (load_checkpoint(tmp_path / name / last) for name in ("whole", "stopped"))
    assert _runs.same(whole[0], stopped[0])
    with pytest.raises(ValueError, match=r"members_together is 3"):
        train_recipe(replace(recipe, members_together=1), tmp_path / "stopped", 3, ["members"])


def test_stages_one_by_one_give_the_same_bytes_as_the_whole(tmp_path: Path) -> None:
    run_recipe(tiny(), tmp_path / "whole", 3)
    for stage in ("baselines", "members", "headline", "distill"):  # in any order
        train_recipe(tiny(), tmp_path / "parts", 3, [stage])
    missing = evaluate_run(tmp_path / "parts", tiny())[1]
    assert [each.split()[0] for each in missing] == ["tradeoff", "capacity"]
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


def test_baselines_without_mixup_are_trained_on_batches_of_their_own(tmp_path: Path) -> None:
    recipe = tiny()
    plain = replace(recipe.ed_fit, augment=replace(recipe.ed_fit.augment, mixup=0.0))
    recipe = replace(recipe, ed_fit=plain)
    train_recipe(recipe, tmp_path, 0, ["baselines"])
    folders = sorted(path.name for path in tmp_path.glob("baselines*"))
    assert folders == ["baselines", "baselines-bn", "baselines-end2"]
    scores, _ = evaluate_run(tmp_path, recipe)
    assert {"ED", "EnD²", "BN small", "BN medium"} <= {curve.name for curve in scores.curves}


def test_progressive_distillation_goes_through_its_stages(tmp_path: Path) -> None:
    recipe = tiny(bridge=replace(tiny().bridge, distillation="progressive"))
    reporter = RecordedProgress()
    train_recipe(recipe, tmp_path, 0, ["distill"], reporter)
    assert sorted(path.name for path in (tmp_path / "distilled").iterdir()) == ["2-to-1", "3-to-2", "5-to-3"]
    total, steps = reporter.stages["bridges"]
    assert steps == [1] * total


def test_bad_runs_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'nope'.*members, bridge"):
        train_recipe(tiny(), tmp_path / "new", 0, ["nope"])
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        evaluate_run(tmp_path)
    train_recipe(tiny(), tmp_path / "run", 0, ["members"])
    with pytest.raises(ValueError, match="member-1"):
        evaluate_run(tmp_path / "run" / "member-1")
    for checkpoint in (tmp_path / "run" / "member-2").glob("checkpoint-*"):
        checkpoint.unlink()
    with pytest.raises(ValueError, match=r"member-2.*ensbridge train"):
        evaluate_run(tmp_path / "run", tiny())


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("bridge_fit", "write field=value"),
        ("nope=1", r"nope .*feature"),
        ("bridge_fit=1", r"bridge_fit .*bridge_fit\.epochs"),
        ("bridge_fit.epochs.x=1", "epochs has no fields"),
        ("members=2.5", r"members is '2\.5'.*whole number"),
        ("bridge.beta=nan", r"bridge\.beta is 'nan'"),
        ("bridge.centre=1", r"bridge\.centre is '1'"),
        ("seed=1", "seed is not a field"),
    ],
)
def test_changes_that_cannot_be_made_are_explained(assignment: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        change(digits(), assignment)


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


@pytest.mark.parametrize("preset", ["default", "paper", "released"])
@pytest.mark.parametrize(
    "changes", [(), ("bridge_fit.epochs=32",), ("bridge.num_steps=3", "distill_fit.epochs=2")]
)
def test_every_baseline_sees_as_many_images_as_the_bridge(preset: Preset, changes: tuple[str, ...]) -> None:
    recipe = Plan("digits", preset, changes).recipe()
    jobs = experiment_of(recipe, 0).of_stages(["distill"])
    stages = sum(job.folder.startswith("distilled/") for job in jobs)
    assert stages == (1 if preset != "paper" else 2 if "bridge.num_steps=3" in changes else 3)
    passes = recipe.bridge_fit.epochs + stages * recipe.distill_fit.epochs
    assert {getattr(recipe, f"{name}_fit").epochs for name in ("kl", "ed", "end2", "bn")} == {passes}


def test_the_digits_bridge_networks_read_the_block_at_four_fifths() -> None:
    member = digits().member()
    assert isinstance(member, ResNet)
    assert digits().tail_feature == member.block_at(0.8)


def test_every_field_that_an_error_names_can_be_set() -> None:
    for name in ("bridge_fit", "ed_fit.augment", "bridge", "bridge.temperature"):
        with pytest.raises(ValueError) as refused:
            change(digits(), f"{name}=1")
        for field in str(refused.value).partition("them: ")[2].split(", "):
            with suppress(ValueError):  # a nested one, or one of another type
                change(digits(), f"{field}=1")
            with pytest.raises(ValueError, match=r"it must be|fields of its own|must lie|is 'x'"):
                change(digits(), f"{field}=x")
    assert change(digits(), "ed_fit.augment.mixup=0").ed_fit.augment.mixup == 0


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("end2_predict=mean", "end2_predict is 'mean'.*'dirichlet', 'softmax'"),
        ("end2_divisor=q", "end2_divisor is 'q'.*'beta0', 's'"),
        ("members_together=0", "members_together is 0;"),
        ("kl_temperature=0", r"kl_temperature is 0\.0;"),
        ("ed_tau=-1", r"ed_tau is -1\.0;"),
        ("feature=nonsense", "feature 'nonsense'"),
        ("feature=head", "feature is 'head'"),
        ("feature=stages.1.0", r"feature is 'stages\.1\.0'"),
        ("tail_feature=stages.2.0", "block before the last"),
        ("members=101", "members 101"),
        ("bridge_fit.epochs=1e300", r"epochs is 1e\+300;.*1,000,000"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    assignment: str, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        train_recipe(Plan("digits", changes=(assignment,)), tmp_path / "run", 0, ["members"])
    assert not (tmp_path / "run" / "config.json").exists()


def test_the_same_recipe_in_other_words_goes_on(tmp_path: Path) -> None:
    few = ("members=2", "target=2", "member_fit.epochs=0.2")
    train_recipe(Plan("digits", changes=(*few, "member_fit.checkpoint_every=1")), tmp_path, 0, ["members"])
    train_recipe(Plan("digits", changes=("target=2", "members=2", "member_fit.epochs=0.20")), tmp_path, 0, [])


@pytest.mark.parametrize(
    "config",
    [
        "[]",
        "3",
        '{"plan": {}, "seed": 0}',
        '{"plan": 3, "seed": 0}',
        '{"plan": {"name": "digits", "preset": "default", "changes": [5]}, "seed": 0}',
        '{"plan": {"name": "digits", "preset": "default", "changes": null}, "seed": 0}',
        '{"plan": {"name": [], "preset": "default", "changes": []}, "seed": 0}',
        '{"plan": {"name": "digits", "preset": "default", "changes": []}, "seed": "x"}',
        "[" * 100_000,
    ],
)
def test_a_foreign_configuration_is_refused(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"config\.json|foreign"):
        evaluate_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_evaluation_never_trains_and_leaves_a_damaged_part_out(tmp_path: Path) -> None:
    train_recipe(tiny(), tmp_path, 0, ["baselines"])
    (newest,) = (tmp_path / "curve-1-2").glob("checkpoint-*4.safetensors")
    newest.write_bytes(b"junk")
    with pytest.warns(UserWarning, match="damaged"):
        scores, missing = evaluate_run(tmp_path, tiny())
    assert newest.read_bytes() == b"junk"
    assert [row.model for row in scores.rows] == ["DE-1", "DE-2", "DE-3", "ED", "EnD²"]
    assert any(each.startswith("baselines (") and "is at step 2 of 4" in each for each in missing)


def test_a_damaged_log_costs_a_curve_and_nothing_else(tmp_path: Path) -> None:
    train_recipe(tiny(), tmp_path, 0, ["members"])
    (tmp_path / "member-1" / "log.jsonl").unlink()
    scores, _ = evaluate_run(tmp_path, tiny())
    assert scores.curves == ()


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 4, "images": 20, "loss": NaN}',
        '{"step": 4, "images": 20, "loss": 1e300}',
        '{"step": 4, "images": 20, "loss": "x"}',
        '{"step": 4, "images": 1e999, "loss": 1.0}',
        '{"step": 4, "images": 20, "losses": [1]}',
        "[" * 100_000,
        "7",
    ],
    ids=lambda line: line[:40],
)
def test_a_log_that_holds_no_numbers_costs_a_curve_and_nothing_else(line: str, tmp_path: Path) -> None:
    train_recipe(tiny(), tmp_path, 0, ["members"])
    scores, _ = evaluate_run(tmp_path, tiny())
    assert [curve.name for curve in scores.curves] == ["DE-1"]
    log = tmp_path / "member-1" / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:-1], line]) + "\n")
    before = log.read_bytes()
    scores, _ = evaluate_run(tmp_path, tiny())
    assert scores.curves == ()
    assert log.read_bytes() == before
    assert read_scores(tmp_path) == scores


def test_a_folder_serves_one_process_at_a_time(tmp_path: Path) -> None:
    train_recipe(tiny(), tmp_path, 0, ["members"])
    with locked(tmp_path), pytest.raises(ValueError, match="in use"):
        train_recipe(tiny(), tmp_path, 0, ["members"])
    train_recipe(tiny(), tmp_path, 0, ["members"])
