"""Measuring models: predictions, scores, fidelity.

Names load on first use, so that reports, which read scores alone, need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensbridge.evaluation.choices import Choice as Choice
    from ensbridge.evaluation.predict import predict_each as predict_each
    from ensbridge.evaluation.scores import ModelInfo as ModelInfo
    from ensbridge.evaluation.scores import Row as Row
    from ensbridge.evaluation.scores import Scores as Scores
    from ensbridge.evaluation.scores import Summary as Summary
    from ensbridge.evaluation.scores import name_rows as name_rows
    from ensbridge.evaluation.scores import read_scores as read_scores
    from ensbridge.evaluation.scores import summarise as summarise
    from ensbridge.evaluation.uncertainty import measure_uncertainty as measure_uncertainty
    from ensbridge.evaluation.uncertainty import score_images as score_images

_SCORES = ("ModelInfo", "Row", "Scores", "Summary", "name_rows", "read_scores", "summarise")
_HOMES = {
    "Choice": "choices",
    "predict_each": "predict",
    "measure_uncertainty": "uncertainty",
    "score_images": "uncertainty",
    **dict.fromkeys(_SCORES, "scores"),
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(import_module(f"ensbridge.evaluation.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ensbridge.evaluation' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
