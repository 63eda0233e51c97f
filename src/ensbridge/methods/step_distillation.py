"""Step distillation: a bridge of fewer steps that lands where the teacher's many steps land."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ensbridge.bridge.sampler import sample
from ensbridge.methods.base import AbstractMethod, Batch, Teacher
from ensbridge.methods.diffusion_bridge import DiffusionBridge
from ensbridge.models.ensemble import weights_digest
from ensbridge.models.fast_ensemble import FastEnsemble


def halved(times: Sequence[float]) -> tuple[float, ...]:
    """Every other time of a grid, counted from its end, with its 0.

    >>> halved((0, 0.2, 0.4, 0.6, 0.8, 1)), halved((0, 0.2, 0.6, 1)), halved((0, 0.2, 1))
    ((0, 0.2, 0.6, 1), (0, 0.2, 1), (0, 1))
    """
    return (times[0], *reversed(times[:0:-2]))


class StepDistillation(AbstractMethod):
    """A student on the grid `times` that learns each of its steps from the teacher's several.

    mode="direct": one step from t = 1; the loss mixes, with `weight` on the first, the teacher's sample and
    the true ensemble logit. mode="progressive": Z_t is drawn on the bridge at a time of the student's grid
    (the batch shares it), the teacher is sampled to the grid's next time, and the student's target is the
    score that gets there in one step; `weight` is not used.

    >>> from ensbridge.models.ensemble import Ensemble
    >>> from ensbridge.models import ResNet, ScoreNet
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> teacher = DiffusionBridge(Ensemble([ResNet((1,), (8,), 3, stem=8) for _ in range(2)]), score)
    >>> StepDistillation(teacher).distilled.bridge.steps
    1
    """

    def __init__(
        self,
        teacher: DiffusionBridge,
        times: Sequence[float] = (0.0, 1.0),
        *,
        mode: Literal["direct", "progressive"] = "direct",
        weight: float = 0.5,
    ) -> None:
        if mode not in ("direct", "progressive"):
            raise ValueError(f"mode is {mode!r}; it must be 'direct' or 'progressive'")
        if teacher.draw != "mean":
            raise ValueError(
                f"the bridge's draw is {teacher.draw!r}, whose samples need all their steps; give one with "
                "draw='mean'"
            )
        if not 0 <= weight <= 1:
            raise ValueError(f"weight is {weight}; it must lie in [0, 1], such as 0.5")
        if not set(times) <= set(teacher.bridge.times):
            raise ValueError(
                f"times are {tuple(times)}; each must be one of the teacher's {teacher.bridge.times}"
            )
        if mode == "direct" and tuple(times) != (0.0, 1.0):
            raise ValueError(f"times are {tuple(times)}; direct distillation makes one step, (0.0, 1.0)")
        teacher.bridge.eval()
        self.teacher = teacher
        self.mode, self.weight = mode, weight
        self.distilled = teacher.with_bridge(teacher.bridge.on_times(times))
        self.student = self.bridge = self.distilled.bridge
        self.ema = teacher.ema

    def loss(self, batch: Batch) -> Tensor:
        """Squared error of the student's scores, in units of √beta, mean over the batch."""
        z0, z1, outputs = self.teacher.ends(batch)
        if self.mode == "progressive":
            return self._progressive(z0, z1, outputs.feature, batch.generator)
        now, end = z1.new_ones(len(z1)), z1.new_zeros(len(z1))
        sampled = self._teacher_sample(z1, outputs.feature, self.teacher.bridge.times, batch.generator)
        residual = self.bridge.residual(outputs.feature, z1, now)
        errors = [self._error(residual, z1, goal, now, end) for goal in (sampled, z0)]
        return self.weight * errors[0] + (1 - self.weight) * errors[1]

    def _progressive(self, z0: Tensor, z1: Tensor, h: Tensor, generator: torch.Generator | None) -> Tensor:
        grid = self.bridge.times
        index = int(torch.randint(1, len(grid), (), generator=generator, device=z1.device))
        t_prev, t = list(pairwise(grid))[index - 1]
        now, before = z1.new_full(z1.shape[:1], t), z1.new_full(z1.shape[:1], t_prev)
        z_t = self.bridge.schedule.sample(z0, z1, now, generator).z_t
        between = [time for time in self.teacher.bridge.times if t_prev <= time <= t]
        z_prev = self._teacher_sample(z_t, h, between, generator)
        return self._error(self.bridge.residual(h, z_t, now), z_t, z_prev, now, before)

    @torch.no_grad()
    def _teacher_sample(
        self, z: Tensor, h: Tensor, times: Sequence[float], generator: torch.Generator | None
    ) -> Tensor:
        teacher = self.teacher.bridge
        return sample(teacher.epsilon, teacher.schedule, z, h, times, generator, noise=generator is not None)[
            -1
        ]

    def _error(self, residual: Tensor, z_t: Tensor, z_prev: Tensor, t: Tensor, t_prev: Tensor) -> Tensor:
        # Eq. 9 with the target of one step that lands on z_prev.
        schedule = self.bridge.schedule
        target = math.sqrt(schedule.beta) * schedule.step_target(z_t, z_prev, t, t_prev)
        return (residual - target).square().sum(-1).mean()

    def model(self) -> FastEnsemble:
        """The source with the student."""
        return FastEnsemble.of(self.distilled)

    def networks(self) -> Sequence[nn.Module]:
        """The student's score network."""
        return [self.bridge.score]

    def teachers(self) -> Sequence[Teacher]:
        """Those of the bridge that is distilled."""
        return self.teacher.teachers()

    def describe(self) -> dict[str, Any]:
        """The student's grid and mode, and its teacher."""
        return {
            "method": "step_distillation",
            "mode": self.mode,
            "weight": self.weight,
            "times": list(self.bridge.times),
            "teacher": {
                **self.teacher.describe(),
                "times": list(self.teacher.bridge.times),
                "weights": weights_digest(self.teacher.bridge),
            },
        }
