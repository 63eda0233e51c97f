"""The paper's experiments: exact sizes and costs, its schedules, and rows for every line of its tables."""

from __future__ import annotations

import pytest
import torch

from ensbridge.cost import count_params
from ensbridge.recipes import Plan, outline
from ensbridge.recipes.plan import RECIPES
from ensbridge.recipes.recipe import Recipe, build, rival_sizes
from ensbridge.report.paper import paper_rows

PAPER = [name for name in RECIPES if name != "digits"]
# Parameters of a member and of a score network, training images, steps of a member and of a bridge.
EXACT = {
    "cifar10": (1_860_986, 395_543, 40_960, 32_000, 256_000),
    "cifar100": (7_433_044, 1_547_617, 40_960, 64_000, 256_000),
    "tiny-imagenet": (21_396_616, 3_186_117, 90_000, 140_625, 175_781),
    "imagenet64": (21_798_504, 8_278_222, 1_231_167, 480_925, 1_202_312),
}


def recipe(name: str, preset: str = "default") -> Recipe:
    return Plan(name, preset).recipe()  # type: ignore[arg-type]


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
    assert (own.members, own.target, own.most_members, rival_sizes(own)) == (5, 3, 9, (3, 5))


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
        rivals = {fit.epochs for fit in (own.ed_fit, own.end2_fit, own.bn_fit, own.kl_fit)}
        assert rivals == {epochs}
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
    assert [each.kl_heat for each in every] == [2, 1.5, 1, 1]
    assert recipe("cifar10", "paper").kl_heat == recipe("cifar10", "released").kl_heat == 1


def test_what_would_be_trained_is_said_without_the_data() -> None:
    lines = outline(recipe("cifar10"), ["members", "distill", "rivals", "capacity"])
    assert lines[0].split()[:4] == ["members", "5", "×", "member"]
    text = "\n".join(lines)
    assert "rivals    2 × ED " in text
    assert "distill   4 × bridge (KL, T = 4) " in text
    assert "rivals    6 × bridge network, small and medium" in text  # four small and two medium
    assert "capacity  4 × member " in text  # up to nine
    assert "800 epochs of 40,960 images, batches of 128: 256,000 steps" in text


def test_every_row_of_the_papers_cifar_10_table_has_a_name_here() -> None:
    own = recipe("cifar10")
    target, sizes = own.target, rival_sizes(own)
    made = {f"DE-{k}" for k in range(1, own.members + 1)}
    made |= {"+1 DBN", f"+{(own.members - 1) // (target - 1)} DBN (DE-{own.members})", "ED", "EnD²"}
    made |= {f"{rival} (DE-{size})" for rival in ("ED", "EnD²") for size in sizes[1:]}
    made |= {f"+{size - 1} BN small" for size in sizes} | {f"+{target - 1} BN medium"}
    assert {row.model for row in paper_rows("cifar10")} <= made
