"""How good a prediction is: accuracy, NLL, Brier score, ECE, calibrated NLL, DEE and the gap closed.

And what its uncertainty is worth: AUROC and FPR95 of detecting other images, AURC and AUGRC of abstaining,
the mutual information of an ensemble, and conformal prediction sets.

Every metric of a prediction is a ratio of sums over images. `MetricStream` keeps those sums, so that a set
measured in one pass or in batches gives the same number; the one-shot functions are a stream
that is updated once. All sums are float64 on the CPU, whatever the precision of the prediction.

Shapes: B images, K classes, M members of the largest deep ensemble. `log_probs` are log-probabilities (B, K)
of any float dtype, in which -inf is a probability of zero; `labels` are integers (B,) in 0..K-1.
"""

from ensbridge.metrics.conformal import conformal_sets as conformal_sets
from ensbridge.metrics.conformal import conformal_threshold as conformal_threshold
from ensbridge.metrics.conformal import coverage as coverage
from ensbridge.metrics.dee import deep_ensemble_equivalent as deep_ensemble_equivalent
from ensbridge.metrics.dee import format_dee as format_dee
from ensbridge.metrics.dee import gap_closed as gap_closed
from ensbridge.metrics.detection import augrc as augrc
from ensbridge.metrics.detection import aurc as aurc
from ensbridge.metrics.detection import auroc as auroc
from ensbridge.metrics.detection import auroc_difference as auroc_difference
from ensbridge.metrics.detection import delong as delong
from ensbridge.metrics.detection import fpr95 as fpr95
from ensbridge.metrics.detection import rank_correlation as rank_correlation
from ensbridge.metrics.information import EntropyParts as EntropyParts
from ensbridge.metrics.information import decompose_entropy as decompose_entropy
from ensbridge.metrics.information import entropy as entropy
from ensbridge.metrics.information import msp_uncertainty as msp_uncertainty
from ensbridge.metrics.information import total_variation as total_variation
from ensbridge.metrics.predictions import MetricStream as MetricStream
from ensbridge.metrics.predictions import accuracy as accuracy
from ensbridge.metrics.predictions import bootstrap_error as bootstrap_error
from ensbridge.metrics.predictions import brier as brier
from ensbridge.metrics.predictions import calibrated_nll as calibrated_nll
from ensbridge.metrics.predictions import ece as ece
from ensbridge.metrics.predictions import kl_per_image as kl_per_image
from ensbridge.metrics.predictions import nll as nll
from ensbridge.metrics.predictions import nll_per_image as nll_per_image
from ensbridge.metrics.predictions import standard_error as standard_error
from ensbridge.metrics.temperature import fit_source_logit_weight as fit_source_logit_weight
from ensbridge.metrics.temperature import fit_temperature as fit_temperature
