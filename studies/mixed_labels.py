"""Labels in place of teachers: a distillation that learns the labels of the images that mixup has mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ensbridge as eb
from ensbridge.methods import AbstractMethod, Batch


class MixedLabels(AbstractMethod):
    """A distillation whose teacher is the labels: a mixed image has those of its two images, by their shares.

    It mixes each batch itself, so the batches must come unmixed. `build` makes the distillation of an
    ensemble; the one it is given only stands for the labels.
    """

    def __init__(
        self, build: Callable[[eb.Ensemble], AbstractMethod], mixup: float, classes: int = 10
    ) -> None:
        self.teacher: nn.Module = nn.Identity()
        self.inner, self.mix = build(eb.Ensemble([self.teacher])), eb.data.Augment(mixup=mixup)
        self.classes = classes
        self.student, self.parts, self.ema = self.inner.student, self.inner.parts, self.inner.ema

    def loss(self, batch: Batch) -> Tensor:
        """The inner method's loss, with the mixed labels as the prediction of its only teacher."""
        assert isinstance(batch.images, Tensor)
        assert batch.labels is not None
        ids = torch.arange(self.classes, device=batch.labels.device)
        one_hot = (batch.labels[:, None] == ids).to(batch.images)
        height, width = batch.images.shape[2:]
        planes = one_hot[:, :, None, None].expand(-1, -1, height, width)  # mixed as the image's channels are
        mixed = self.mix(torch.cat([batch.images, planes], 1), batch.generator)
        images, target = mixed[:, : -self.classes], mixed[:, -self.classes :, 0, 0]
        logits = target.clamp(min=1e-12).log()
        return self.inner.loss(
            Batch(images, None, batch.generator, runners={self.teacher: lambda _: (logits,)})
        )

    def model(self) -> nn.Module:
        """The inner method's."""
        return self.inner.model()

    def networks(self) -> Sequence[nn.Module]:
        """The inner method's."""
        return self.inner.networks()

    def teachers(self) -> Sequence[tuple[eb.Ensemble, str | None]]:
        """None: the labels teach."""
        return []

    def describe(self) -> dict[str, Any]:
        """The inner method, on mixed labels."""
        return {"method": "mixed labels", "mixup": self.mix.mixup, "inner": self.inner.describe()}
