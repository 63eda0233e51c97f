"""A method of its own: a network distilled from an ensemble and its bridges, trained at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ensbridge as eb
from ensbridge.methods import AbstractMethod, Batch, Bridge, EmaRule

EMA = 0.9995


class ResNetWithFeature(nn.Module):
    """A ResNet that also returns its first block's output, written out so that it compiles as one graph."""

    def __init__(self, net: eb.models.ResNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and the feature."""
        net = self.net
        images = images.contiguous(memory_format=torch.channels_last)
        x = net.stem((images - net.mean) / net.std)
        feature = None
        for block in net.blocks().values():
            x = block(x)
            feature = x if feature is None else feature
        assert feature is not None
        return net.head(x.mean((2, 3))), feature


class PlainScore(nn.Module):
    """Three residual blocks of the source's own kind on its feature; no time and no Z_t go in."""

    def __init__(self, classes: int = 10, channels: int = 32, widths: Sequence[int] = (64, 112, 112)) -> None:
        super().__init__()
        strides, inputs = (2, 2, 1), (channels, *widths)
        parts = zip(inputs, widths, strides, strict=False)
        self.blocks = nn.Sequential(*(eb.models.BasicBlock(*part, bias=True) for part in parts))
        self.head = nn.Linear(widths[-1], classes)
        self.apply(eb.models.initialise)
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        """What a score network gives, from the feature alone."""
        return self.head(self.blocks(h).mean((2, 3)))


class DistilledSource(AbstractMethod):
    """A network distilled from an ensemble and bridges from its logits, all towards the ensemble at once.

    Unless `joint`, the source learns from its own loss alone, as if there were no bridges. The source has one
    optimiser, the bridges another.
    """

    parts = ("source", "bridges")

    def __init__(
        self, ensemble: eb.Ensemble, net: eb.models.ResNet, bridges: Mapping[str, Bridge], joint: bool
    ) -> None:
        self.ensemble, self.net, self.bridges, self.joint = ensemble.eval(), net, dict(bridges), joint
        self.student = nn.ModuleDict({"source": net, "bridges": nn.ModuleDict(self.bridges)})
        self.with_feature = ResNetWithFeature(net)
        self.ema = EmaRule(EMA)

    def loss(self, batch: Batch) -> Tensor:
        """KL(ensemble ‖ source), and KL(ensemble ‖ bridge) for each bridge."""
        target = eb.ensemble_logit(batch.member_logits(self.ensemble)).log_softmax(-1)
        logits, feature = self.with_feature(batch.images)
        logits = eb.models.at_least_float32(logits)
        losses = [kl(target, logits)]
        if not self.joint:
            logits, feature = logits.detach(), feature.detach()
        for bridge in self.bridges.values():
            temperature = bridge.draw_temperature(len(logits), logits.device, batch.generator)
            z1 = bridge.start(logits, temperature)
            now = z1.new_ones(len(z1))
            losses.append(
                kl(target, eb.bridge.estimate_z0(bridge.epsilon, bridge.schedule, z1, feature, now))
            )
        return torch.stack(losses).sum()

    def model(self) -> nn.Module:
        """The source by itself."""
        return self.net

    def with_bridges(self, names: Sequence[str], feature: str, average_source: bool) -> eb.FastEnsemble:
        """The source with these bridges, and with its own prediction averaged in where asked."""
        bridges = [self.bridges[name] for name in names]
        return eb.FastEnsemble(self.net, bridges, feature, average_source=average_source)

    def networks(self) -> Sequence[nn.Module]:
        """The source and the score networks."""
        return [self.with_feature, *(bridge.score for bridge in self.bridges.values())]

    def teachers(self) -> Sequence[tuple[eb.Ensemble, None]]:
        """The ensemble."""
        return [(self.ensemble, None)]

    def describe(self) -> dict[str, Any]:
        """The teachers and the score networks."""
        return {
            "method": "distilled_source",
            "joint": self.joint,
            "teachers": eb.models.weights_digest(self.ensemble),
            "bridges": {name: str(bridge.score) for name, bridge in self.bridges.items()},
        }


def kl(log_p: Tensor, logits: Tensor) -> Tensor:
    """KL(p ‖ softmax(logits)), mean over the batch."""
    return (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1).mean()
