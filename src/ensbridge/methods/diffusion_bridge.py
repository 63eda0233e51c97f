"""The diffusion bridge network: from the source's logits to the ensemble's (ICLR 2024).

Shapes: B images, K classes, M members. Z_1 is the source's tempered logit, Z_0 the target ensemble's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ensbridge.bridge.bridge import Bridge, BridgeConfig
from ensbridge.bridge.sampler import estimate_z0
from ensbridge.methods.base import (
    AbstractMethod,
    Batch,
    EmaRule,
    Teacher,
    TeacherOutputs,
    check_label_weight,
    kl_loss,
    with_labels,
)
from ensbridge.models.ensemble import Ensemble, SampledEnsemble, ensemble_logit, random_member, weights_digest
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.features import find_module
from ensbridge.models.score_net import ScoreNet

Draw = Literal["mean", "member"]


class DiffusionBridge(AbstractMethod):
    """Training of a bridge from an ensemble's first member to the ensemble of the members in `target`.

    `loss="bridge"` is the paper's regression on the score; `loss="kl"` trains one step directly with
    KL(ensemble ‖ bridge). `target` names members by index, all of them unless given; `target=(0,)` is the
    control that has the source alone as its target. With `draw="member"` Z_0 is the logit of one member,
    drawn anew for each image and step, so that samples of the bridge stand for members; with "mean" it is
    that of their mean prediction. With `loss="kl"` and a `label_weight` w the loss is (1 - w) times the KL
    plus w times the cross-entropy with the labels; otherwise labels are not used.

    >>> from ensbridge.models import ResNet
    >>> members = [ResNet((1,), (8,), 3, stem=8) for _ in range(3)]
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> method = DiffusionBridge(Ensemble(members), score, feature="stages.0.0", loss="bridge")
    >>> batch = Batch(torch.rand(4, 3, 8, 8), None, torch.Generator().manual_seed(0))
    >>> method.loss(batch).ndim, method.model()(batch.images).shape
    (0, torch.Size([4, 3]))
    """

    average_source = False

    def __init__(
        self,
        ensemble: Ensemble,
        score: nn.Module,
        feature: str = "stages.0.0",
        *,
        loss: Literal["bridge", "kl"] = "bridge",
        target: Sequence[int] | None = None,
        draw: Draw = "mean",
        label_weight: float = 0.0,
        config: BridgeConfig | None = None,
    ) -> None:
        if loss not in ("bridge", "kl"):
            raise ValueError(f"loss is {loss!r}; it must be 'bridge' or 'kl'")
        if draw not in get_args(Draw) or (draw == "member" and loss == "kl"):
            raise ValueError(
                f"draw is {draw!r} with loss={loss!r}; it must be 'mean', or 'member' with "
                "loss='bridge', as KL trains a single deterministic step"
            )
        if check_label_weight(label_weight) and loss != "kl":
            raise ValueError(
                f"label_weight is {label_weight} with loss={loss!r}, which has no predictions to compare "
                "with labels; give loss='kl', or leave it out"
            )
        if config is None:
            config = BridgeConfig(z_input=score.z_input) if isinstance(score, ScoreNet) else BridgeConfig()
        if isinstance(score, ScoreNet) and score.z_input != config.z_input:
            raise ValueError(
                f"the score network reads Z_t as {score.z_input!r}, the configuration says "
                f"{config.z_input!r}; build the network with z_input=config.z_input"
            )
        self.target = tuple(range(len(ensemble)) if target is None else target)
        if not self.target or not all(0 <= index < len(ensemble) for index in self.target):
            raise ValueError(f"target is {self.target}; it must name members 0 to {len(ensemble) - 1}")
        find_module(ensemble.source, feature)
        self.ensemble, self.source = ensemble.eval(), ensemble.source
        # The source and those that are learnt from: no other need run.
        others = [ensemble.members[index] for index in self.target if index]
        self._teachers = Ensemble([ensemble.source, *others])
        self.feature = feature
        self.objective, self.draw, self.label_weight = loss, draw, float(label_weight)
        self.bridge = self.student = Bridge(score, config, (0.0, 1.0) if loss == "kl" else None)
        self.ema = EmaRule(config.ema, config.ema_warmup, config.ema_swapped)

    def loss(self, batch: Batch) -> Tensor:
        """The bridge's loss or the KL divergence, mean over the batch."""
        z0, z1, outputs = self.ends(batch)
        if self.objective == "kl":
            now = z1.new_ones(len(z1))
            end = estimate_z0(self.bridge.epsilon, self.bridge.schedule, z1, outputs.feature, now)
            return with_labels(lambda: kl_loss(z0.log_softmax(-1), end), end, batch, self.label_weight)
        t = self.draw_times(len(z1), z1.device, batch.generator)
        sample = self.bridge.schedule.sample(z0, z1, t, batch.generator)
        # Eq. 8 in units of √beta: squared error summed over classes, mean over the batch.
        residual = self.bridge.residual(outputs.feature, sample.z_t, t)
        return (residual - math.sqrt(self.bridge.config.beta) * sample.target).square().sum(-1).mean()

    def ends(self, batch: Batch) -> tuple[Tensor, Tensor, TeacherOutputs]:
        """Both ends Z_0 and Z_1 of each image's bridge, and the teachers' outputs."""
        outputs = batch.teacher_outputs(self._teachers, self.feature)
        score = self.bridge.score
        if isinstance(score, ScoreNet) and score.classes != outputs.logits.shape[-1]:
            raise ValueError(
                f"the score network has {score.classes} classes and the members {outputs.logits.shape[-1]}; "
                "build it with the members' number"
            )
        targets = outputs.logits if 0 in self.target else outputs.logits[1:]
        z0 = ensemble_logit(targets) if self.draw == "mean" else random_member(targets, batch.generator)
        temperature = self.bridge.draw_temperature(len(z0), z0.device, batch.generator)
        return z0, self.bridge.start(outputs.logits[0], temperature), outputs

    def draw_times(self, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        """Training times (B,) by the rule of `train_times`."""
        config = self.bridge.config
        if config.train_times == "uniform":
            return 1 - torch.rand(count, generator=generator, device=device)
        last = config.num_steps - (config.train_times == "released")
        n = torch.randint(1, last + 1, (count,), generator=generator, device=device)
        return n / config.num_steps

    def with_bridge(self, bridge: Bridge) -> DiffusionBridge:
        """The same ensemble, feature and target around another bridge."""
        other = copy.copy(self)
        other.bridge = other.student = bridge
        return other

    def model(self) -> FastEnsemble | SampledEnsemble:
        """The source with the bridge, sampled several times where it carries the members' distribution."""
        if self.draw == "member":
            return SampledEnsemble(self.source, self.bridge, self.feature)
        return FastEnsemble.of(self)

    def stands_for(self) -> Sequence[nn.Module]:
        """The members of the target."""
        return [self.ensemble.members[index] for index in self.target]

    def networks(self) -> Sequence[nn.Module]:
        """The score network."""
        return [self.bridge.score]

    def teachers(self) -> Sequence[Teacher]:
        """The source at the feature, and the other members of the target."""
        return [(self._teachers, self.feature)]

    def describe(self) -> dict[str, Any]:
        """The bridge's switches, target and score network."""
        return {
            "method": "diffusion_bridge",
            "loss": self.objective,
            "feature": self.feature,
            "target": list(self.target),
            **({"draw": self.draw} if self.draw != "mean" else {}),
            **({"label_weight": self.label_weight} if self.label_weight else {}),
            "teachers": weights_digest(self.ensemble),
            "config": asdict(self.bridge.config),
            "score": str(self.bridge.score),
        }
