"""Limits of what a recipe may ask for, so that a stranger's run folder cannot take all memory or time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ensbridge
from ensbridge.bridge.schedule import MOST_STEPS, BridgeSchedule
from ensbridge.experiments import Plan, check_runs, train_recipe
from ensbridge.methods import BridgeConfig
from ensbridge.training import FitConfig


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("bridge.num_steps=300000000", r"num_steps is 300000000\b.*1,000"),
        ("member_fit.batch_size=65537", r"batch_size is 65537\b.*65,536"),
        ("member_fit.warmup_steps=1" + "0" * 300, "warmup_steps is 1"),
        ("member_fit.checkpoint_every=1" + "0" * 300, "checkpoint_every is 1"),
        ("member_fit.log_every=2000000000", r"log_every is 2000000000\b.*1,000,000,000"),
        ("member_fit.augment.crop=9", r"member_fit\.augment\.crop is 9\b.*8×8"),
        ("figure_members=101", r"figure_members is 101\b.*100"),
        ("feature=" + "x" * 2000, r"2,008 characters.*1,000"),
    ],
    ids=lambda text: text[:40],
)
def test_what_no_machine_could_do_is_refused_before_anything_is_made(
    assignment: str, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        train_recipe(Plan("digits", changes=(assignment,)), tmp_path / "run", 0, ["members"])
    assert not (tmp_path / "run" / "config.json").exists()


def test_the_limits_themselves_are_allowed() -> None:
    assert len(BridgeSchedule(num_steps=MOST_STEPS).times()) == MOST_STEPS + 1
    assert BridgeConfig(num_steps=MOST_STEPS).num_steps == MOST_STEPS
    assert FitConfig(epochs=1e6, batch_size=65_536, lr=0.1, warmup_steps=10**9).batch_size == 65_536
    for make in (BridgeSchedule, BridgeConfig):
        with pytest.raises(ValueError, match=r"num_steps is 1001\b.*1,000"):
            make(num_steps=MOST_STEPS + 1)


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay", "warmup_lr", "epochs"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_rates_are_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value};"):
        FitConfig(**{"epochs": 1, "batch_size": 2, "lr": 0.1, name: value})


EVALUATING = """
import resource, sys
from ensbridge.experiments import evaluate_run, check_runs
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
(check_runs if sys.argv[1] == "check" else lambda folders: evaluate_run(folders[0]))([sys.argv[2]])
"""


@pytest.mark.parametrize("how", ["check", "evaluate"])
def test_a_strangers_run_cannot_ask_for_all_memory(how: str, tmp_path: Path) -> None:
    for change in ("bridge.num_steps=300000000", "bridge.num_steps=" + "9" * 300):
        plan = Plan("digits", changes=(change,)).to_json()
        (tmp_path / "config.json").write_text(json.dumps({"plan": plan, "seed": 0}))
        done = subprocess.run(
            [sys.executable, "-c", EVALUATING, how, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(Path(ensbridge.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.stderr.splitlines()[-1].startswith("ValueError: num_steps is ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 10**30}, "seed is 1000"),
        ({"seed": -(2**63)}, "seed is -9223372036854775808"),
        ({"plan": Plan("digits", changes=("members=2",) * 1001).to_json()}, "1,001 changes"),
    ],
    ids=["seed", "negative seed", "changes"],
)
def test_a_strangers_run_cannot_ask_for_too_much(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = {"plan": Plan("digits").to_json(), "seed": 0} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as refused:
        check_runs([tmp_path])
    assert words in str(refused.value)
