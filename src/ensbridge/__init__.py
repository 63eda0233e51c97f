"""ensbridge: one network and a small bridge in place of a deep ensemble.

Public names load on first use, so that what needs no torch, such as reports, starts without it.
"""

from __future__ import annotations

import random
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from ensbridge import _aliases

if TYPE_CHECKING:
    from ensbridge import bridge as bridge
    from ensbridge import data as data
    from ensbridge import evaluation as evaluation
    from ensbridge import experiments as experiments
    from ensbridge import methods as methods
    from ensbridge import metrics as metrics
    from ensbridge import models as models
    from ensbridge import report as report
    from ensbridge._compress import compress as compress
    from ensbridge.bridge.schedule import BridgeSample as BridgeSample
    from ensbridge.bridge.schedule import BridgeSchedule as BridgeSchedule
    from ensbridge.bridge.schedule import TemperatureLaw as TemperatureLaw
    from ensbridge.deploy.cuda_graph import capture as capture
    from ensbridge.deploy.export import export as export
    from ensbridge.deploy.predictor import BatchPredictor as BatchPredictor
    from ensbridge.deploy.saving import load as load
    from ensbridge.deploy.saving import push as push
    from ensbridge.evaluation.evaluate import evaluate as evaluate
    from ensbridge.evaluation.scores import Scores as Scores
    from ensbridge.metrics import cost as cost
    from ensbridge.models.ensemble import Ensemble as Ensemble
    from ensbridge.models.ensemble import ensemble_logit as ensemble_logit
    from ensbridge.models.ensemble import member_groups as member_groups
    from ensbridge.models.fast_ensemble import FastEnsemble as FastEnsemble
    from ensbridge.training.config import FitConfig as FitConfig
    from ensbridge.training.distill import distill_steps as distill_steps
    from ensbridge.training.fit import fit as fit

    nets = models

__version__ = "0.1.0"
_aliases.install()

_MODULES = {
    "bridge": "bridge",
    "cost": "metrics.cost",
    "data": "data",
    "evaluation": "evaluation",
    "experiments": "experiments",
    "methods": "methods",
    "metrics": "metrics",
    "models": "models",
    "nets": "models",
    "report": "report",
}
_HOMES = {
    "BatchPredictor": "deploy.predictor",
    "capture": "deploy.cuda_graph",
    "compress": "_compress",
    "Ensemble": "models.ensemble",
    "ensemble_logit": "models.ensemble",
    "member_groups": "models.ensemble",
    "evaluate": "evaluation.evaluate",
    "export": "deploy.export",
    "FastEnsemble": "models.fast_ensemble",
    "load": "deploy.saving",
    "push": "deploy.saving",
    "BridgeSample": "bridge.schedule",
    "BridgeSchedule": "bridge.schedule",
    "TemperatureLaw": "bridge.schedule",
    "Scores": "evaluation.scores",
    "FitConfig": "training.config",
    "distill_steps": "training.distill",
    "fit": "training.fit",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return _load(_MODULES[name])
    if name in _HOMES:
        value = getattr(_load(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ensbridge' has no attribute {name!r}")


def _load(module: str) -> ModuleType:
    state = random.getstate()  # rich draws from it when it is imported
    try:
        return import_module(f"ensbridge.{module}")
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_HOMES, "__version__"])
