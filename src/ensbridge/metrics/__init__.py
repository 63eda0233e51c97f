"""How good a prediction is: accuracy, NLL, Brier score, ECE, calibrated NLL, DEE and the gap closed.

Every metric of a prediction is a ratio of sums over images. `MetricStream` keeps those sums, so that a set
measured in one pass or in batches gives the same number; the one-shot functions are a stream
that is updated once. All sums are float64 on the CPU, whatever the precision of the prediction.

Shapes: B images, K classes, M members of the largest deep ensemble. `log_probs` are log-probabilities (B, K)
of any float dtype, in which -inf is a probability of zero; `labels` are integers (B,) in 0..K-1.
"""

from ensbridge.metrics.dee import deep_ensemble_equivalent, format_dee, gap_closed
from ensbridge.metrics.predictions import (
    accuracy,
    brier,
    calibrated_nll,
    ece,
    kl_per_image,
    nll,
    nll_per_image,
    standard_error,
)
from ensbridge.metrics.stream import MetricStream
from ensbridge.metrics.temperature import fit_source_logit_weight, fit_temperature

__all__ = [
    "MetricStream",
    "accuracy",
    "brier",
    "calibrated_nll",
    "deep_ensemble_equivalent",
    "ece",
    "fit_source_logit_weight",
    "fit_temperature",
    "format_dee",
    "gap_closed",
    "kl_per_image",
    "nll",
    "nll_per_image",
    "standard_error",
]
