"""ensbridge: one network and a small bridge in place of a deep ensemble.

Public names load on first use, so that what needs no torch, such as reports, starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensbridge import _aliases
from ensbridge.utils.lazy import lazy_names

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

__getattr__, _names = lazy_names(
    __name__,
    {
        "_compress": "compress",
        "bridge.schedule": "BridgeSample BridgeSchedule TemperatureLaw",
        "deploy.cuda_graph": "capture",
        "deploy.export": "export",
        "deploy.predictor": "BatchPredictor",
        "deploy.saving": "load push",
        "evaluation.evaluate": "evaluate",
        "evaluation.scores": "Scores",
        "models.ensemble": "Ensemble ensemble_logit member_groups",
        "models.fast_ensemble": "FastEnsemble",
        "training.config": "FitConfig",
        "training.distill": "distill_steps",
        "training.fit": "fit",
    },
    {
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
    },
)


def __dir__() -> list[str]:
    return sorted([*_names(), "__version__"])
