"""How good a prediction is: accuracy, NLL, Brier score, ECE, calibrated NLL, DEE and the gap closed.

And what its uncertainty is worth: AUROC and FPR95 of detecting other images, AURC and AUGRC of abstaining,
the mutual information of an ensemble, and conformal prediction sets.

Every metric of a prediction is a ratio of sums over images. `MetricStream` keeps those sums, so that a set
measured in one pass or in batches gives the same number; the one-shot functions are a stream
that is updated once. All sums are float64 on the CPU, whatever the precision of the prediction.

Shapes: B images, K classes, M members of the largest deep ensemble. `log_probs` are log-probabilities (B, K)
of any float dtype, in which -inf is a probability of zero; `labels` are integers (B,) in 0..K-1.
"""

from ensbridge.metrics.conformal import conformal_sets, conformal_threshold, coverage
from ensbridge.metrics.dee import deep_ensemble_equivalent, format_dee, gap_closed
from ensbridge.metrics.detection import auroc, auroc_difference, delong, fpr95, rank_correlation
from ensbridge.metrics.information import (
    EntropyParts,
    decompose_entropy,
    entropy,
    msp_uncertainty,
    total_variation,
)
from ensbridge.metrics.predictions import (
    accuracy,
    bootstrap_error,
    brier,
    calibrated_nll,
    ece,
    kl_per_image,
    nll,
    nll_per_image,
    standard_error,
)
from ensbridge.metrics.selective import augrc, aurc
from ensbridge.metrics.stream import MetricStream
from ensbridge.metrics.temperature import fit_source_logit_weight, fit_temperature

__all__ = [
    "EntropyParts",
    "MetricStream",
    "accuracy",
    "augrc",
    "aurc",
    "auroc",
    "auroc_difference",
    "bootstrap_error",
    "brier",
    "calibrated_nll",
    "conformal_sets",
    "conformal_threshold",
    "coverage",
    "decompose_entropy",
    "deep_ensemble_equivalent",
    "delong",
    "ece",
    "entropy",
    "fit_source_logit_weight",
    "fit_temperature",
    "format_dee",
    "fpr95",
    "gap_closed",
    "kl_per_image",
    "msp_uncertainty",
    "nll",
    "nll_per_image",
    "rank_correlation",
    "standard_error",
    "total_variation",
]
