"""The model that a report is about: a source distilled from the ensemble, with a bridge beside it.

It is what `compress` makes of the members where validation prefers it; on digits cross-validation did
(studies/choose_headline.py).
"""

from __future__ import annotations

import copy
from dataclasses import replace

from torch import nn

from ensbridge.bridge.bridge import Bridge, BridgeConfig
from ensbridge.evaluation.scores import ModelInfo
from ensbridge.experiments.jobs import Job, MethodSpec, TableModel
from ensbridge.experiments.parts import checked, member_folders, one_step, trained_ensemble
from ensbridge.experiments.recipe import Recipe
from ensbridge.experiments.runner import Run, seeded
from ensbridge.methods.base import EmaRule
from ensbridge.methods.joint_distillation import JointDistillation
from ensbridge.training.config import FitConfig

FOLDER = "headline"
DISTILLED, CONTROL, BRIDGE = "distilled", "control", "bridge"


def headline(recipe: Recipe, seed: int) -> tuple[list[Job], list[TableModel]]:
    """The job and the models of a recipe that has a headline: the pair, its control, and its source alone.

    The control is the same with the first member alone as the teacher.
    """
    if recipe.headline_fit is None:
        return [], []
    specs = {
        DISTILLED: _spec(recipe, recipe.headline_fit, seed, recipe.target),
        CONTROL: _spec(recipe, recipe.headline_fit, seed, 1),
    }
    job = Job(FOLDER, FOLDER, specs, member_folders(recipe, recipe.target))
    base = recipe.headline_temperature
    pair = replace(one_step(recipe, "kl"), source="distilled", source_temperature=base)
    models = [
        TableModel(
            ModelInfo("ED", recipe.target, tau=1.0), (FOLDER,), lambda run: _method(run, DISTILLED).source
        ),
        TableModel(pair, (FOLDER,), lambda run: _method(run, DISTILLED).model(), headline=True),
        TableModel(pair.as_control(), (FOLDER,), lambda run: _method(run, CONTROL).model()),
    ]
    return [job], models


def _method(run: Run, name: str) -> JointDistillation:
    return checked(run.methods(FOLDER)[name], JointDistillation)


def _spec(recipe: Recipe, sgd: FitConfig, seed: int, teachers: int) -> MethodSpec:
    """A copy of the first member that is distilled, by SGD, and a bridge beside it, as with KL."""
    source_fit = seeded(sgd, seed, "bridge")
    bridge_fit = replace(seeded(recipe.kl_fit, seed, "bridge"), epochs=sgd.epochs, augment=sgd.augment)
    law = replace(recipe.bridge.temperature, base=recipe.headline_temperature)
    config = BridgeConfig(beta=recipe.bridge.beta, temperature=law, ema=recipe.bridge.ema)

    def make(run: Run) -> JointDistillation:
        ensemble = trained_ensemble(run, recipe, teachers)
        source: nn.Module = copy.deepcopy(ensemble.source).requires_grad_()
        score = run.build(lambda: recipe.score(config.z_input), "score")
        bridges = {BRIDGE: Bridge(score, config, (0.0, 1.0))}
        return JointDistillation(ensemble, source, bridges, recipe.feature, ema=EmaRule(config.ema))

    label = f"distilled source and bridge (T = {recipe.headline_temperature:g})"
    return MethodSpec(label, make, bridge_fit, {"source": source_fit, "bridges": bridge_fit})
