"""A fast ensemble's calibration: a temperature, and a share of the source's own logits where that gains."""

from __future__ import annotations

import torch
from torch import Tensor

from ensbridge.metrics import fit_source_logit_weight, fit_temperature, nll_per_image, standard_error

MIN_IMAGES = 100  # images


def calibrated(logits: Tensor, source: Tensor, temperature: float, source_logit_weight: float) -> Tensor:
    """Logits (B, K) with a share of the source's own, which are centred as they are, over the temperature.

    >>> calibrated(torch.tensor([[2.0, -2.0]]), torch.tensor([[3.0, 1.0]]), 2.0, 0.5)
    tensor([[ 1.2500, -1.2500]])
    """
    if source_logit_weight:
        logits = logits + source_logit_weight * (source - source.mean(-1, keepdim=True))
    return logits / temperature


def fit_calibration(log_probs: Tensor, source: Tensor, labels: Tensor) -> tuple[float, float]:
    """Temperature and share of the source for predictions (B, K) of validation images.

    The share is 0 with fewer than a hundred images, or unless it gains more than a standard error of NLL on
    images that it was not fitted on: it is fitted on every other one and tried on the rest, both ways round.

    >>> draws = torch.Generator().manual_seed(0)
    >>> truth, source = torch.randn(2, 2000, 3, generator=draws)
    >>> labels = torch.multinomial(truth.softmax(1), 1, generator=draws)[:, 0]
    >>> [fit_calibration(logits, source, labels)[1] != 0 for logits in (truth, truth + source)]
    [False, True]
    """
    alone = fit_temperature(log_probs, labels), 0.0
    if len(labels) < MIN_IMAGES:
        return alone
    halves = slice(0, None, 2), slice(1, None, 2)
    gains = []
    for here, there in (halves, halves[::-1]):
        fits = (
            (fit_temperature(log_probs[here], labels[here]), 0.0),
            fit_source_logit_weight(log_probs[here], source[here], labels[here]),
        )
        without, with_share = (
            nll_per_image(calibrated(log_probs[there], source[there], *fit).log_softmax(-1), labels[there])
            for fit in fits
        )
        gains.append(without - with_share)
    gain = torch.cat(gains)
    if gain.mean().item() > standard_error(gain):
        return fit_source_logit_weight(log_probs, source, labels)
    return alone
