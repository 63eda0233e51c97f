"""DE-k: independently trained members whose softmaxes are averaged (Lakshminarayanan et al., 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ensbridge.methods.base import AbstractMethod, Batch, Teacher, check_labels
from ensbridge.models.ensemble import Ensemble
from ensbridge.utils.inputs import map_inputs


class DeepEnsemble(AbstractMethod):
    """Members trained by plain cross-entropy on labels, each for itself, and averaged in use.

    Trained one at a time (`DeepEnsemble([net])`) each member has its own order of images; trained together
    they share the order and differ by their starts only, unless each is a method that learns from its own
    `part` of every batch, such as (0, 3) for the first of three.

    >>> import torch
    >>> method = DeepEnsemble([nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)])
    >>> len(method.model()), method.model()(torch.rand(5, 1, 2, 2)).shape
    (2, torch.Size([5, 3]))
    """

    def __init__(self, members: Sequence[nn.Module], part: tuple[int, int] | None = None) -> None:
        if part is not None and not 0 <= part[0] < part[1]:
            raise ValueError(f"part is {part}; it must be a number from 0 and how many there are, as (0, 3)")
        self.ensemble, self.part = Ensemble(members), part
        self.student = self.ensemble

    def loss(self, batch: Batch) -> Tensor:
        """The sum over members of the mean cross-entropy with the labels; those of mixed images are mixed."""
        if batch.labels is None:
            raise ValueError("members learn from labels and the data has none; give (images, labels)")
        images, labels = map_inputs(self._own, batch.images), self._own(batch.labels)
        logits = self.ensemble.member_logits(images)
        check_labels(labels, logits.shape[-1])
        if batch.mixed is None:
            every = labels.expand(len(logits), -1).flatten()
        else:
            every = self._own(batch.label_probs(logits.shape[-1])).repeat(len(logits), 1)
        return F.cross_entropy(logits.flatten(0, 1), every) * len(logits)

    def _own(self, rows: Tensor) -> Tensor:
        """The rows of its part."""
        if self.part is None:
            return rows
        number, parts = self.part
        if len(rows) % parts:
            raise ValueError(f"a batch of {len(rows)} images has no {parts} equal parts; change its size")
        return rows.chunk(parts)[number]

    def model(self) -> Ensemble:
        """The members, averaged."""
        return self.ensemble

    def networks(self) -> Sequence[nn.Module]:
        """The members."""
        return list(self.ensemble.members)

    def teachers(self) -> Sequence[Teacher]:
        """None: the labels teach."""
        return []

    def describe(self) -> dict[str, Any]:
        """The members' architectures, as they print, and their part of a batch, if any."""
        members = [str(member) for member in self.ensemble.members]
        part = {} if self.part is None else {"part": list(self.part)}
        return {"method": "deep_ensemble", "members": members, **part}
