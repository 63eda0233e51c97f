"""The paper's experiments: exact sizes and costs, its schedules, and rows for every line of its tables."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ensbridge.bridge.bridge import Preset
from ensbridge.experiments import Plan, dry_run
from ensbridge.experiments.plan import RECIPES
from ensbridge.experiments.recipe import Recipe, baseline_sizes, build
from ensbridge.metrics.cost import count_params
from ensbridge.report.tables import paper_rows

PAPER = [name for name in RECIPES if name != "digits"]
# Parameters of a member and of a score network, training images, steps of a member and of a bridge.
EXACT = {
    "cifar10": (1_860_986, 395_543, 40_960, 32_000, 256_000),
    "cifar100": (7_433_044, 1_547_617, 40_960, 64_000, 256_000),
    "tiny-imagenet": (21_396_616, 3_186_117, 90_000, 140_625, 175_781),
    "imagenet64": (21_798_504, 8_278_222, 1_231_167, 480_925, 1_202_312),
}


def recipe(name: str, preset: str = "default", schedule: str = "paper") -> Recipe:
    return Plan(name, preset, schedule=schedule).recipe()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PAPER)
def test_networks_and_lengths_are_the_papers(name: str) -> None:
    own = recipe(name)
    params, score, images, member_steps, bridge_steps = EXACT[name]
    with torch.device("meta"):
        assert count_params(own.member()) == params
        assert count_params(own.score("dead")) == score  # with its dead Z channel, as the paper's counts have
    assert own.train_images == images
    assert own.member_fit.total_steps(images) == member_steps
    assert own.bridge_fit.total_steps(images) == bridge_steps
    assert (own.members, own.target, own.most_members, baseline_sizes(own)) == (5, 3, 9, (3, 5))


@pytest.mark.parametrize("name", PAPER)
def test_networks_fit_each_other(name: str) -> None:
    own, size = recipe(name), 32 if name.startswith("cifar") else 64
    from ensbridge.data import ImageSet, Splits

    images = ImageSet(torch.zeros(1, 3, size, size, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    own.try_networks(Splits(images, images, images))
    net = build(own.member, 0)
    assert list(dict(net.named_modules())).count(own.feature) == 1
    blocks = list(net.blocks())  # type: ignore[operator]
    place = {15: 12, 16: 13}[len(blocks)]
    assert blocks.index(own.tail_feature) == place - 1


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("preset", ["default", "paper", "released"])
def test_presets_decide_who_gets_mixup_and_how_many_passes(name: str, preset: str) -> None:
    own = recipe(name, preset)
    mixup = 0.0 if name == "imagenet64" else 0.4
    assert own.bridge_fit.augment.mixup == mixup
    assert own.ed_fit.augment.mixup == own.end2_fit.augment.mixup == (mixup if preset == "default" else 0)
    epochs = own.bridge_fit.epochs + 50 * (3 if preset == "paper" else 1)
    if preset == "default":
        baselines = {fit.epochs for fit in (own.ed_fit, own.end2_fit, own.bn_fit, own.kl_fit)}
        assert baselines == {epochs}
    else:
        assert (own.end2_fit.epochs, own.bn_fit.epochs) == (250, 200)
        assert own.ed_fit.epochs == own.member_fit.epochs
    assert own.end2_predict == ("softmax" if preset == "released" else "dirichlet")


def test_settings_of_the_paper_by_data_set() -> None:
    every = [recipe(name) for name in PAPER]
    assert [each.bridge.beta for each in every] == [1e-4, 1e-4, 1e-3, 5e-3]
    assert [each.bridge_fit.lr for each in every] == [2.5e-4, 2.5e-4, 5e-4, 5e-4]
    assert [each.member_fit.weight_decay for each in every] == [1e-3, 5e-4, 5e-4, 1e-4]
    assert [each.member_fit.warmup_steps for each in every] == [0, 5, 5, 5]
    assert recipe("imagenet64", "paper").member_fit.epochs == 250
    assert every[0].bn_fit.warmup_steps == 5 * 40_960 // 128
    assert every[0].distill_fit.lr == pytest.approx(2.5e-5)
    assert [each.kl_temperature for each in every] == [4, 3, 2, 2]
    assert {recipe("cifar10", preset).kl_temperature for preset in ("paper", "released")} == {2}


@pytest.mark.parametrize(("name", "epochs"), [("cifar10", 320), ("cifar100", 158)])
def test_the_published_schedule_is_that_of_the_results(name: str, epochs: int) -> None:
    own = recipe(name, schedule="published")
    fits = [own.bridge_fit, own.kl_fit, own.ed_fit, own.end2_fit, own.bn_fit]
    assert {(fit.epochs, fit.batch_size, fit.augment.mixup) for fit in fits} == {(epochs, 512, 0.4)}
    assert [fit.lr for fit in fits] == [2e-3, 2e-3, 0.1, 0.05, 0.1]
    assert (own.distill_fit.epochs, own.distill_fit.lr, own.bridge.ema) == (10, 2e-4, 0.9995)
    assert own.member_fit == recipe(name).member_fit
    assert own.bn_fit.warmup_steps == 400


def test_baselines_follow_a_changed_length_in_the_published_schedule_too() -> None:
    own = Plan("cifar10", changes=("bridge_fit.epochs=640", "ed_fit.epochs=5")).recipe()
    assert {fit.epochs for fit in (own.bridge_fit, own.kl_fit, own.end2_fit, own.bn_fit)} == {640}
    assert own.ed_fit.epochs == 5


@pytest.mark.parametrize("name", ["tiny-imagenet", "imagenet64"])
def test_what_was_not_run_has_the_papers_schedule(name: str) -> None:
    published, paper = (recipe(name, schedule=schedule) for schedule in ("published", "paper"))
    assert published.bridge_fit == paper.bridge_fit


def test_what_would_be_trained_is_said_without_the_data() -> None:
    plan = Plan("cifar10", schedule="paper")
    lines = dry_run(plan, ["members", "distill", "baselines", "capacity"])
    assert lines[0].split()[:4] == ["members", "9", "×", "member"]  # the capacity's too
    text = "\n".join(lines)
    assert "baselines 2 × ED " in text
    assert "bridges   4 × bridge (KL, T = 4) " in text
    assert "baselines 4 × bridge network, small " in text
    assert "baselines 2 × bridge network, medium " in text
    assert "800 epochs of 40,960 images, batches of 128: 256,000 steps" in text
    assert dry_run(plan, ["members"])[0].split()[1] == "5"


@pytest.mark.parametrize(("preset", "stages"), [("default", "5 → 1"), ("paper", "5 → 3, 3 → 2, 2 → 1")])
def test_a_dry_run_says_how_steps_are_distilled(preset: Preset, stages: str) -> None:
    lines = [line for line in dry_run(Plan("digits", preset), ["distill"]) if "distilled" in line]
    assert [re.findall(r"distilled (\d → \d) steps", line)[0] for line in lines] == stages.split(", ")


def test_every_row_of_the_papers_cifar_10_table_has_a_name_here() -> None:
    own = recipe("cifar10")
    target, sizes = own.target, baseline_sizes(own)
    made = {f"DE-{k}" for k in range(1, own.members + 1)}
    made |= {"+1 DBN", f"+{(own.members - 1) // (target - 1)} DBN (DE-{own.members})", "ED", "EnD²"}
    made |= {f"{student} (DE-{size})" for student in ("ED", "EnD²") for size in sizes[1:]}
    made |= {f"+{size - 1} BN small" for size in sizes} | {f"+{target - 1} BN medium"}
    assert {row.model for row in paper_rows("cifar10")} <= made


@pytest.mark.parametrize(
    ("options", "named"), [({"minutes": 0.0}, "0 minutes"), ({"device": "abacus"}, "abacus")]
)
def test_a_dry_run_refuses_what_the_run_would(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dry_run(Plan("digits"), **options)
