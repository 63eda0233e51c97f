"""Files that version 0.1 wrote are read, resumed and loaded; `tests/files_v0_1` was made by it."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ensbridge as eb
from _recipe import tiny
from ensbridge.evaluation.scores import read_scores
from ensbridge.experiments import run_recipe, train_recipe
from ensbridge.experiments.run import _check_schedule

OLD = Path(__file__).parent / "files_v0_1"


def test_old_scores_have_the_fields_of_today() -> None:
    document, scores = json.loads((OLD / "scores.json").read_text()), read_scores(OLD)
    for old, row in zip(document["rows"], scores.rows, strict=True):
        assert (old["model"], old["nll"], old["dee"], old["owed"]) == (
            row.model,
            row.nll,
            row.dee,
            row.nll_gain_over_control,
        )
        assert (old["method"] == "control") == row.control
        assert row.seed == 3
    bridges = [row for row in scores.rows if row.method == "DBN"]
    assert [row.loss for row in bridges] == ["kl" if "KL" in row.model else "bridge" for row in bridges]
    assert [row.width for row in scores.rows if row.method == "BN"] == ["small", "medium"]


def test_a_run_that_was_killed_resumes_to_the_same_scores(tmp_path: Path) -> None:
    with tarfile.open(OLD / "run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    before = {path: path.read_bytes() for path in tmp_path.glob("member-*/checkpoint-*")}
    scores, old = run_recipe(tiny(), tmp_path, seed=3), read_scores(OLD)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("member-*/checkpoint-*")}
    rows = [row for row in scores.rows if row.source == "member" and row.tau is None]  # which are new
    assert len(scores.rows) == len(rows) + 3
    assert [row.model for row in rows] == [row.model for row in old.rows]
    for row, expected in zip(rows, old.rows, strict=True):
        assert row.nll == pytest.approx(expected.nll, rel=1e-4), row.model
        assert row.macs == expected.macs


@pytest.mark.parametrize("name", ["dbn", "dbn-steps", "bn"])
def test_a_saved_model_has_the_same_logits(name: str) -> None:
    tensors = load_file(OLD / "models" / f"{name}.safetensors")
    with torch.no_grad():
        logits = eb.load(OLD / "models" / name)(tensors["images"])
    torch.testing.assert_close(logits, tensors["logits"], rtol=1e-5, atol=1e-5)


def test_modules_are_importable_under_their_other_names() -> None:
    code = "import ensbridge.nets, ensbridge.models, ensbridge.cost; from ensbridge.nets import ResNet; "
    code += "assert ensbridge.nets is ensbridge.models and ensbridge.models.ResNet is ResNet; "
    code += "assert ensbridge.cost.__name__ == 'ensbridge.metrics.cost'"
    code += "; assert ensbridge.models.__spec__.name == 'ensbridge.models'"
    subprocess.run([sys.executable, "-c", code], check=True)


def config(changes: list[str]) -> dict[str, object]:
    """What version 0.1 wrote of a run of CIFAR-10."""
    plan = {"name": "cifar10", "preset": "default", "changes": changes}
    return {"plan": plan, "recipe": {"kl_heat": 1.5, "bridge": {"temperature": {"base": 4.0}}}, "seed": 0}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([], []),
        (["kl_heat=1.5"], ["kl_temperature=6.0"]),
        ([" kl_heat = 1.5", "members=4"], ["members=4", "kl_temperature=6.0"]),
        (["bridge.temperature.base=4"], ["bridge.temperature.base=4", "kl_temperature=6.0"]),
    ],
)
def test_changes_of_an_old_run_are_those_of_today(old: list[str], new: list[str], tmp_path: Path) -> None:
    plan, _ = eb.experiments.Plan.from_config(config(old), tmp_path)
    assert (plan.changes, plan.schedule) == (tuple(new), "paper")


def test_an_old_run_is_resumed_by_the_schedule_that_it_had(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config([])))
    with pytest.raises(ValueError, match="--schedule paper"):
        _check_schedule(tmp_path, eb.experiments.Plan("cifar10"))
    _check_schedule(tmp_path, eb.experiments.Plan("cifar10", schedule="paper"))


def test_a_run_without_a_headline_takes_other_settings_of_it(tmp_path: Path) -> None:
    recipe = tiny()
    assert recipe.headline_fit is not None
    before = replace(recipe, headline_fit=replace(recipe.headline_fit, lr=0.3))
    train_recipe(before, tmp_path, 3, ["members"])
    for _ in range(2):  # and resumes with them
        train_recipe(recipe, tmp_path, 3, ["headline"])
    with pytest.raises(ValueError, match=r"headline_fit\.lr is 0\.05 there and 0\.3 here"):
        train_recipe(before, tmp_path, 3, ["headline"])
