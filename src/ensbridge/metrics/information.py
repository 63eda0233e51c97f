"""The entropy of a prediction, what of it members disagree about, and how far two predictions are apart.

A prediction is log-probabilities (B, K), that of M members (M, B, K); results are (B,), float64 on the CPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ensbridge.metrics.predictions import kl_per_image


class EntropyParts(NamedTuple):
    """The entropy of an ensemble's prediction in its two parts, each (B,) in nats.

    >>> parts = EntropyParts(torch.ones(1), torch.ones(1), torch.zeros(1))
    >>> bool(parts.total == parts.expected + parts.mutual_information)
    True
    """

    total: Tensor  # of the members' mean prediction
    expected: Tensor  # the mean of the members' entropies: what each member is unsure of by itself
    mutual_information: Tensor  # the rest: what the members disagree about


def entropy(log_probs: Tensor) -> Tensor:
    """The entropy of each prediction, in nats; a class of probability zero adds nothing.

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log()).exp()
    tensor([2., 1.], dtype=torch.float64)
    """
    return torch.special.entr(_normalised(log_probs).exp()).sum(-1)


def decompose_entropy(member_log_probs: Tensor) -> EntropyParts:
    """The entropy of members' mean prediction as expected entropy + mutual information.

    Mutual information is the mean KL divergence from a member to the mean: 0 where all agree, at most log M.

    >>> sure, even = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]).log(), torch.full((2, 1, 2), 0.5).log()
    >>> [round(part.exp().item(), 6) for part in decompose_entropy(sure)]  # each sure of another class
    [2.0, 1.0, 2.0]
    >>> [round(part.exp().item(), 6) for part in decompose_entropy(even)]  # none knows
    [2.0, 2.0, 1.0]
    """
    if member_log_probs.ndim != 3 or len(member_log_probs) == 0:
        shape = tuple(member_log_probs.shape)
        raise ValueError(f"member_log_probs have shape {shape}; they must be (members, images, classes)")
    members_MBK = _normalised(member_log_probs)
    mean_BK = members_MBK.logsumexp(0) - math.log(len(members_MBK))
    apart_MB = torch.stack([kl_per_image(member_BK, mean_BK) for member_BK in members_MBK])
    information_B = apart_MB.mean(0).clamp(min=0)
    return EntropyParts(entropy(mean_BK), entropy(members_MBK).mean(0), information_B)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Half the sum of absolute differences of two predictions' probabilities: 0 where equal, at most 1.

    >>> total_variation(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log())
    tensor([0.5000], dtype=torch.float64)
    """
    return (_normalised(log_p).exp() - _normalised(log_q).exp()).abs().sum(-1) / 2


def msp_uncertainty(log_probs: Tensor) -> Tensor:
    """One minus the largest probability of each prediction (MSP as a score of uncertainty).

    Taken from the other classes, it stays apart from 0 where float32 has rounded the largest to 1.

    >>> msp_uncertainty(torch.tensor([[20.0, 0.0]]).log_softmax(-1)).item() > 0
    True
    """
    return -torch.expm1(_normalised(log_probs).amax(-1))


def _normalised(log_probs: Tensor) -> Tensor:
    """Log-probabilities in float64, normalised anew: what rounding took from the largest, the rest tell."""
    return log_probs.detach().cpu().double().log_softmax(-1)
