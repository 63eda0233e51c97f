"""What a recipe is: everything that decides a run, in one frozen value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ensbridge.data.digits import Splits
from ensbridge.methods.diffusion_bridge import BridgeConfig
from ensbridge.nets.score import ScoreNet, ZInput
from ensbridge.train.config import FitConfig


@dataclass(frozen=True)
class Recipe:
    """Data, networks and training of one experiment; seeds are set by the run."""

    name: str
    load: Callable[[], Splits]
    member: Callable[[], nn.Module]
    score: Callable[[ZInput], ScoreNet]
    feature: str
    members: int  # how many are trained
    target: int  # how many of them the bridge stands for
    member_fit: FitConfig
    bridge_fit: FitConfig
    distill_fit: FitConfig
    bridge: BridgeConfig
    kl_bridge: BridgeConfig  # of the row that is trained straight with KL
