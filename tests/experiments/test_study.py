"""Studies: experiments on members that are given, resumed, measured on validation unless they are final."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import _recipe
import ensbridge as eb
from ensbridge.evaluation.scores import read_scores

INFO = eb.evaluation.ModelInfo("DBN", 2, 1, 1, "kl", 2.0)


def members(count: int = 2) -> eb.Ensemble:
    return eb.Ensemble([eb.experiments.build(_recipe.member, seed) for seed in range(count)]).eval()


def experiment(recipe: eb.experiments.Recipe) -> eb.experiments.Experiment:
    """A bridge with KL and its control, on members that no job of it trains."""
    specs = eb.experiments.bridge_specs(recipe, 0, [(0, 1)], 2, None, "kl")
    specs |= eb.experiments.bridge_specs(recipe, 0, [(0, 1)], 2, (0,), "kl")
    job = eb.experiments.Job("bridges", "bridges", specs)
    models = (
        eb.experiments.bridge_model(INFO, "bridges", ["members-1-2"]),
        replace(
            eb.experiments.bridge_model(INFO.as_control(), "bridges", ["control"]), name="its own control"
        ),
    )
    return eb.experiments.Experiment((job,), models, {})


def study(out: Path, final: bool = False) -> eb.experiments.StudyResult:
    recipe = _recipe.tiny()
    return eb.experiments.run_study(
        experiment(recipe), recipe, _recipe.load(), out, members(), quiet=True, final=final
    )


def test_given_members_are_the_reference_and_the_test_images_are_left_alone(tmp_path: Path) -> None:
    result = study(tmp_path)
    assert [*result.scores] == ["validation"]
    rows = {row.model: row for row in result.scores["validation"].rows}
    assert [*rows] == ["DE-1", "DE-2", "+1 DBN (KL)", "its own control"]
    labels = _recipe.load().val.labels
    assert labels is not None
    for name, row in rows.items():
        assert row.nll == pytest.approx(eb.metrics.nll(result.log_probs["validation"][name], labels))
    gain = rows["its own control"].nll - rows["+1 DBN (KL)"].nll
    assert rows["+1 DBN (KL)"].nll_gain_over_control == pytest.approx(gain)
    assert read_scores(tmp_path / "validation.json") == result.scores["validation"]
    with np.load(tmp_path / "validation.npz") as arrays:
        assert [*arrays] == [*rows]
        assert arrays["DE-2"].dtype == np.float16
    assert not (tmp_path / "test.json").exists()


def test_a_finished_study_is_loaded_and_final_adds_the_test_images(tmp_path: Path) -> None:
    first = study(tmp_path)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint-*")}
    again = study(tmp_path, final=True)
    assert written
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert again.scores["validation"] == first.scores["validation"]
    assert [*again.scores] == ["validation", "test"]
    assert len(again.log_probs["test"]["DE-1"]) == len(_recipe.load().test)


def test_a_study_may_train_its_members(tmp_path: Path) -> None:
    recipe = _recipe.tiny()
    whole = eb.experiments.experiment_of(recipe, 0).only(["members"])
    assert [job.folder for job in whole.jobs] == ["member-1", "member-2", "member-3"]
    assert (whole.models, [*whole.stages]) == ((), ["members"])
    result = eb.experiments.run_study(whole, recipe, _recipe.load(), tmp_path, quiet=True)
    assert [row.model for row in result.scores["validation"].rows] == ["DE-1", "DE-2", "DE-3"]


def test_members_are_loaded_from_half_precision_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    nets = [eb.experiments.build(_recipe.member, number) for number in range(11)]
    eb.experiments.save_members(tmp_path, eb.Ensemble(nets))
    found = eb.experiments.load_members(tmp_path, _recipe.tiny())
    assert len(found) == len(nets)
    for own, net in zip(found.members, nets, strict=True):
        for name, tensor in own.state_dict().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, net.state_dict()[name].half().float())


def test_a_folder_without_the_first_member_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"member-1\.safetensors"):
        eb.experiments.load_members(tmp_path, _recipe.tiny())


def test_a_method_in_parts_has_a_configuration_for_each() -> None:
    slow, fast = (eb.FitConfig(epochs=1, batch_size=2, lr=rate) for rate in (0.1, 0.2))

    def never(run: object) -> eb.methods.AbstractMethod:
        raise AssertionError

    whole = eb.experiments.MethodSpec("one", never, slow)
    parted = eb.experiments.MethodSpec("other", never, slow, {"net": slow, "bridges": fast})
    job = eb.experiments.Job("folder", "group", {"a": whole, "b": parted})
    assert job.config() == {"a": slow, "b.net": slow, "b.bridges": fast}
    assert eb.experiments.Job("folder", "group", {"a": whole}).config() == slow


def test_the_members_of_a_run_are_those_that_were_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensbridge.experiments import plan

    monkeypatch.setitem(plan.RECIPES, "digits", lambda preset, schedule: _recipe.tiny())
    eb.experiments.train_recipe(eb.experiments.Plan("digits"), tmp_path, 1, ["members"])
    run, recipe = eb.experiments.open_run(tmp_path)
    found = eb.experiments.trained_ensemble(run, recipe, 3)
    scores, _ = eb.experiments.evaluate_run(tmp_path)
    labels = run.data.test.labels
    assert labels is not None
    nll = eb.metrics.nll(eb.evaluation.predict_each({"DE-3": found}, run.data.test)["DE-3"], labels)
    assert (run.seed, scores.rows[2].nll) == (1, pytest.approx(nll))
