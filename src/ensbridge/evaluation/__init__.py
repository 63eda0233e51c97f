"""Measuring models: predictions, scores, fidelity.

Names load on first use, so that reports, which read scores alone, need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensbridge.utils.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "choices": "Choice",
        "predict": "predict_each",
        "scores": "ModelInfo Row Scores Summary name_rows read_scores summarise",
        "uncertainty": "measure_uncertainty score_images",
    },
)
