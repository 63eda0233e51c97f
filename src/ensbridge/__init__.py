"""ensbridge: one network and a small bridge in place of a deep ensemble.

Public names load on first use, so that what needs no torch, such as reports, starts without it.
"""

from __future__ import annotations

import random
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensbridge import cost as cost
    from ensbridge import data as data
    from ensbridge import methods as methods
    from ensbridge import metrics as metrics
    from ensbridge import nets as nets
    from ensbridge import recipes as recipes
    from ensbridge.capturing import capture as capture
    from ensbridge.compression import compress as compress
    from ensbridge.ensemble import Ensemble as Ensemble
    from ensbridge.ensemble import ensemble_logit as ensemble_logit
    from ensbridge.ensemble import member_groups as member_groups
    from ensbridge.evaluation import evaluate as evaluate
    from ensbridge.exporting import export as export
    from ensbridge.fast_ensemble import FastEnsemble as FastEnsemble
    from ensbridge.saving import load as load
    from ensbridge.saving import push as push
    from ensbridge.schedule import BridgeSample as BridgeSample
    from ensbridge.schedule import BridgeSchedule as BridgeSchedule
    from ensbridge.schedule import TemperatureLaw as TemperatureLaw
    from ensbridge.scores import Scores as Scores
    from ensbridge.train.config import FitConfig as FitConfig
    from ensbridge.train.distill import distill_steps as distill_steps
    from ensbridge.train.fit import fit as fit

__version__ = "0.1.0"

_ROOMS = ("cost", "data", "methods", "metrics", "nets", "recipes")
_HOMES = {
    "capture": "capturing",
    "compress": "compression",
    "Ensemble": "ensemble",
    "ensemble_logit": "ensemble",
    "member_groups": "ensemble",
    "evaluate": "evaluation",
    "export": "exporting",
    "FastEnsemble": "fast_ensemble",
    "load": "saving",
    "push": "saving",
    "BridgeSample": "schedule",
    "BridgeSchedule": "schedule",
    "TemperatureLaw": "schedule",
    "Scores": "scores",
    "distill_steps": "train.distill",
    "FitConfig": "train.config",
    "fit": "train.fit",
}


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return _load(name)
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
    return sorted([*_ROOMS, *_HOMES, "__version__"])
