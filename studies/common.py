"""What studies on CIFAR share: their command line, the data, the members, and a bridge as a method to train.

DATA is an npz or a folder of the set, or its name where `ensbridge data get` has put it. Members' weights are
member-k.safetensors in --weights.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import load_file

import ensbridge as eb
from ensbridge.experiments import MethodSpec, Recipe, Run
from provenance import RESULTS as RESULTS
from provenance import plain_parser

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EMA = 0.9995
CROP = eb.data.Augment(crop=4, flip=True)
Group = tuple[int, ...]  # members by index


class Given(NamedTuple):
    """What every study begins with."""

    options: argparse.Namespace
    recipe: Recipe
    data: eb.data.Splits
    members: eb.Ensemble


def parser(doc: str | None, *, epochs: float) -> argparse.ArgumentParser:
    """What every training study asks for; `epochs` is its length unless another is given."""
    asked = plain_parser(doc)
    asked.add_argument("data", help="an npz, a folder, or cifar10")
    asked.add_argument("out", type=Path, help="the study's folder, in which a killed one resumes")
    asked.add_argument("--recipe", choices=["cifar10", "cifar100"], default="cifar10")
    asked.add_argument("--weights", type=Path, help="folder of the members; results/RECIPE unless given")
    asked.add_argument("--epochs", type=float, default=epochs)
    asked.add_argument("--batch", type=int, default=512)
    asked.add_argument("--lr", type=float, default=2e-3)
    asked.add_argument("--mixup", type=float, default=0.4)
    asked.add_argument("--cutmix", type=float, default=0.0)
    asked.add_argument("--checkpoint-every", type=int, default=800)
    asked.add_argument("--limit", type=int, help="only so many images of each part, to rehearse")
    asked.add_argument("--final", action="store_true", help="use the test images, once all is chosen")
    return asked


def begin(parser: argparse.ArgumentParser) -> Given:
    """The options, the recipe, the data and the members."""
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    recipe = eb.experiments.RECIPES[options.recipe]("default", "published")
    data = eb.experiments.limit_images(eb.data.open_splits(options.data), options.limit)
    return Given(options, recipe, data, members_of(options.weights, recipe))


def members_of(weights: Path | None, recipe: Recipe) -> eb.Ensemble:
    """The members in a folder, or those that lie in results/."""
    return eb.experiments.load_members(weights or RESULTS / recipe.name, recipe).to(DEVICE)


def frozen_with(*bridges: str) -> eb.FastEnsemble:
    """CIFAR-10's first member with bridges towards the first three (KL, T = 4): "1", "2" or "control"."""
    recipe, loaded = eb.experiments.cifar10(), []
    for name in bridges:
        score = recipe.score("none")
        loaded.append(eb.methods.Bridge(score, at_temperature(4.0), (0.0, 1.0)))
        loaded[-1].load_state_dict(load_file(RESULTS / "cifar10" / f"bridge-kl-{name}.safetensors"))
    source = members_of(None, recipe).source
    members = 1 if bridges == ("control",) else 3
    return eb.FastEnsemble(source, loaded, recipe.feature, members=members).eval().to(DEVICE)


def fit_config(options: argparse.Namespace, seed: int = 0) -> eb.FitConfig:
    """How bridges are trained, as the command line says."""
    return eb.FitConfig(
        options.epochs,
        options.batch,
        options.lr,
        augment=replace(CROP, mixup=options.mixup, cutmix=options.cutmix),
        log_every=800,
        checkpoint_every=options.checkpoint_every,
        seed=seed,
    )


def bridge_spec(
    recipe: Recipe,
    config: eb.methods.BridgeConfig,
    fit: eb.FitConfig,
    *,
    loss: Literal["bridge", "kl"] = "kl",
    target: Group = (0, 1, 2),
    start: tuple[str | int, ...] = (0, "score"),
) -> MethodSpec:
    """A bridge from the first of the given members towards `target`; `start` decides its first weights."""

    def make(run: Run) -> eb.methods.DiffusionBridge:
        assert run.members is not None
        seed = eb.experiments.derive_seed(int(start[0]), *start[1:])
        score = eb.experiments.build(lambda: recipe.score(config.z_input), seed).to(run.device)
        return eb.methods.DiffusionBridge(
            run.members, score, recipe.feature, loss=loss, target=target, config=config
        )

    return MethodSpec("bridge", make, fit)


def at_temperature(base: float, ema: float = EMA) -> eb.methods.BridgeConfig:
    """A bridge's switches at a temperature."""
    return eb.methods.BridgeConfig(temperature=eb.TemperatureLaw(base=base), ema=ema)


def by_sgd(fit: eb.FitConfig) -> eb.FitConfig:
    """How networks are distilled on the bridges' batches."""
    return replace(fit, optimizer="sgd", lr=0.2, weight_decay=5e-4, warmup_steps=200)


def fresh_network(run: Run, recipe: Recipe) -> torch.nn.Module:
    """An untrained network of the members' architecture, the same for all methods of a run."""
    return run.build(recipe.member, "student")
