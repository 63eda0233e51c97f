"""FastEnsemble: the source and its bridges as one network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ensbridge.ensemble import at_least_float32, ensemble_logit
from ensbridge.methods.diffusion_bridge import Bridge, DiffusionBridge
from ensbridge.nets.tap import find_module, run_tapped


class FastEnsemble(nn.Module):
    """One network in place of an ensemble: the source runs once, each bridge reads its feature and logits.

    Called on images it returns logits (B, K), whose softmax is the mean of the bridges' predictions, divided
    by `temperature`, 1 unless it was calibrated. With several bridges the source, part of each bridge's
    target, weighs more than another member: 1/3 against 1/6 each for five members and two bridges.

    >>> from ensbridge.nets import ResNet, ScoreNet
    >>> source = ResNet((1,), (8,), 3, stem=8)
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> fast = FastEnsemble(source, [Bridge(score).one_step()], feature="stages.0.0").eval()
    >>> fast(torch.rand(2, 3, 8, 8)).shape, fast.source is source, fast.temperature
    (torch.Size([2, 3]), True, 1.0)
    """

    def __init__(
        self,
        source: nn.Module,
        bridges: Sequence[Bridge],
        feature: str,
        *,
        temperature: float = 1.0,
        members: int | None = None,
    ) -> None:
        super().__init__()
        if len(bridges) == 0:
            raise ValueError("a FastEnsemble was given 0 bridges; it needs at least 1")
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it must be above 0")
        find_module(source, feature)
        self.source = source
        self.bridges = nn.ModuleList(bridges)
        self.feature = feature
        self.temperature = float(temperature)
        # How many members the bridges stand for, the source included: at least one other for each bridge.
        self.members = 1 + len(bridges) if members is None else members

    @classmethod
    def of(cls, *methods: DiffusionBridge) -> FastEnsemble:
        """The network that trained bridges make with the source they share."""
        if not methods:
            raise ValueError("a FastEnsemble was given 0 bridges; it needs at least 1")
        first = methods[0]
        if any(m.ensemble.source is not first.ensemble.source or m.feature != first.feature for m in methods):
            raise ValueError("these bridges do not share one source and one feature; train them on the same")
        members = len({index for method in methods for index in method.target})
        return cls(
            first.ensemble.source, [method.bridge for method in methods], first.feature, members=members
        )

    def each_bridge(self) -> list[Bridge]:
        """The bridges, with their type."""
        return [bridge for bridge in self.bridges if isinstance(bridge, Bridge)]

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K)."""
        logits, feature = run_tapped(self.source, self.feature, images)
        logits = at_least_float32(logits)
        ends = torch.stack([bridge(feature, logits) for bridge in self.bridges])
        return ensemble_logit(ends) / self.temperature
