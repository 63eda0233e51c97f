"""DE-k: independently trained members whose softmaxes are averaged (Lakshminarayanan et al., 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ensbridge.ensemble import Ensemble
from ensbridge.methods.method import AbstractMethod, Batch


class DeepEnsemble(AbstractMethod):
    """Members trained by plain cross-entropy on labels, each for itself, and averaged in use.

    Trained one at a time (`DeepEnsemble([net])`) each member has its own order of images; trained together
    they share the order and differ by their starts only, unless each is an `OwnPart`.

    >>> import torch
    >>> method = DeepEnsemble([nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)])
    >>> method.log_probs(torch.rand(5, 1, 2, 2)).exp().sum(1).allclose(torch.ones(5))
    True
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        self.ensemble = Ensemble(members)
        self.student = self.ensemble

    def loss(self, batch: Batch) -> Tensor:
        """The sum over members of the mean cross-entropy with the labels."""
        if batch.labels is None:
            raise ValueError("members learn from labels and the data has none; give (images, labels)")
        logits = self.ensemble.member_logits(batch.images)
        if batch.labels.device.type == "cpu":  # looking at an accelerator's would stall it
            low, high = int(batch.labels.min()), int(batch.labels.max())
            if low < 0 or high >= logits.shape[-1]:
                raise ValueError(
                    f"labels span {low} to {high}; members of {logits.shape[-1]} classes need 0 to "
                    f"{logits.shape[-1] - 1}"
                )
        labels = batch.labels.expand(len(logits), -1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * len(logits)

    def log_probs(self, images: Tensor) -> Tensor:
        """Log of the members' mean softmax."""
        return self.ensemble(images).log_softmax(-1)

    def networks(self) -> Sequence[nn.Module]:
        """The members."""
        return list(self.ensemble.members)

    def describe(self) -> dict[str, Any]:
        """The members' architectures, as they print."""
        return {"method": "deep_ensemble", "members": [str(member) for member in self.ensemble.members]}


class OwnPart(DeepEnsemble):
    """One member of several that are trained side by side, which learns from its part of each batch alone.

    >>> import torch
    >>> net, images, labels = nn.Flatten(), torch.rand(6, 1, 1, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> second = OwnPart(net, part=1, parts=3)
    >>> second.loss(Batch(images, labels)).equal(DeepEnsemble([net]).loss(Batch(images[2:4], labels[2:4])))
    True
    """

    def __init__(self, member: nn.Module, part: int, parts: int) -> None:
        super().__init__([member])
        self.part, self.parts = part, parts

    def loss(self, batch: Batch) -> Tensor:
        """The mean cross-entropy on the part."""
        labels = None if batch.labels is None else batch.labels.chunk(self.parts)[self.part]
        return super().loss(Batch(batch.images.chunk(self.parts)[self.part], labels))

    def describe(self) -> dict[str, Any]:
        """The member's architecture, and which part is its own."""
        return super().describe() | {"part": [self.part, self.parts]}
