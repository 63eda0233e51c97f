"""Bridges: what runs beside the source, and every switch of the diffusion bridge.

Shapes: B images, K classes. Z_1 is the source's tempered logit, Z_0 the target ensemble's.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from ensbridge.bridge.sampler import Features, sample
from ensbridge.bridge.schedule import BridgeSchedule, PosteriorVariance, TemperatureLaw

ZInput = Literal["paper", "dead", "none", "informative"]
Preset = Literal["default", "paper", "released"]


class AbstractBridge(nn.Module, ABC):
    """What runs beside the source: its feature and logits in, logits that stand for other members out."""

    steps: int  # how often its network runs for one prediction

    @abstractmethod
    def forward(self, h: Features, source_logits: Tensor) -> Tensor:
        """Logits (B, K) from the feature h and the source's logits (B, K), at least float32."""


@dataclass(frozen=True)
class BridgeConfig:
    """Every switch of the bridge; the defaults are the mathematically right ones.

    `train_times`: "grid" draws n uniformly from {1..N}, the times that the sampler visits; "uniform" draws
    t from (0, 1]; "released" leaves out n = N, so that the first sampling step is extrapolation.
    `temperature_draw`: a temperature for each "image" or one for the "batch"; `test_temperature`: the law's
    "mean", or "drawn". `centre` takes the mean over classes from Z_1, as Z_0 has none. `z_input` is what the
    score network sees of Z_t. `variance` is the sampling steps' noise. `ema` is the weights' average.
    `distillation` is how steps are distilled by default.

    >>> BridgeConfig.preset("released").train_times
    'released'
    """

    beta: float = 1e-4
    num_steps: int = 5
    train_times: Literal["grid", "uniform", "released"] = "grid"
    temperature: TemperatureLaw = field(default_factory=TemperatureLaw)
    temperature_draw: Literal["image", "batch"] = "image"
    test_temperature: Literal["mean", "drawn"] = "mean"
    centre: bool = True
    z_input: ZInput = "none"
    variance: PosteriorVariance = "exact"
    ema: float = 0.99995
    ema_warmup: bool = True
    ema_swapped: bool = False
    distillation: Literal["direct", "progressive"] = "direct"

    def __post_init__(self) -> None:
        _ = self.schedule  # which checks its own
        if not 0 <= self.ema < 1:
            raise ValueError(f"the EMA decay is {self.ema}; it must lie in [0, 1), such as 0.99995")
        for name, hint in get_type_hints(BridgeConfig).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                choices = ", ".join(map(repr, get_args(hint)))
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {choices}")
        if self.train_times == "released" and self.num_steps < 2:
            raise ValueError("train_times 'released' draws n from {1..N-1}; num_steps is 1, give at least 2")

    @property
    def schedule(self) -> BridgeSchedule:
        """The bridge's schedule."""
        return BridgeSchedule(self.beta, self.num_steps, self.variance)

    @classmethod
    def preset(cls, name: Preset) -> BridgeConfig:
        """The default, the `paper` as it is worded, or the code that was `released` with it."""
        presets: dict[str, BridgeConfig] = {
            "default": cls(),
            "paper": cls(
                train_times="uniform",
                test_temperature="drawn",
                centre=False,
                ema_warmup=False,
                z_input="paper",
                distillation="progressive",
            ),
            "released": cls(
                train_times="released",
                temperature_draw="batch",
                centre=False,
                z_input="dead",
                variance="released",
                ema_swapped=True,
            ),
        }
        if name not in presets:
            raise ValueError(f"preset is {name!r}; it must be one of {', '.join(presets)}")
        return presets[name]


class Bridge(AbstractBridge):
    """The part that is kept: a score network and the sampling that it steers.

    `times` is the time grid of sampling, the schedule's own unless given; `(0, 1)` is one step.

    >>> from ensbridge.models import ScoreNet
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> bridge = Bridge(score).eval()
    >>> bridge(torch.rand(2, 8, 4, 4), torch.randn(2, 3)).shape, bridge.one_step().steps
    (torch.Size([2, 3]), 1)
    """

    def __init__(
        self, score: nn.Module, config: BridgeConfig | None = None, times: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.score = score
        self.config = config or BridgeConfig()
        self.schedule = self.config.schedule
        self.times = tuple(self.schedule.times().tolist() if times is None else times)
        if len(self.times) < 2 or self.times[0] != 0 or self.times[-1] != 1:
            raise ValueError(f"times are {self.times}; they must rise from 0 to 1, such as (0.0, 1.0)")
        self.steps = len(self.times) - 1

    def one_step(self) -> Bridge:
        """A copy with the same weights that is sampled in one step."""
        return self.on_times((0.0, 1.0))

    def on_times(self, times: Sequence[float]) -> Bridge:
        """A copy with the same weights on another time grid."""
        return Bridge(copy.deepcopy(self.score), self.config, times)

    def residual(self, h: Features, z_t: Tensor, t: Tensor) -> Tensor:
        """√beta·ε, which is (Z_t - Z_0) / √t: the network's own output.

        With beta = 1e-4 the raw target is a hundred times Z_1 - Z_0; in this unit Adam sees targets of
        unit scale, and the squared error is the paper's loss times beta at every t.
        """
        return self.score(h, z_t, t).to(z_t.dtype)

    def epsilon(self, h: Features, z_t: Tensor, t: Tensor) -> Tensor:
        """The score ε(h, Z_t, t) that the sampler asks for."""
        return self.residual(h, z_t, t) / math.sqrt(self.config.beta)

    def draw_temperature(self, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        """Temperatures for training, (B, 1) or (1, 1)."""
        rows = count if self.config.temperature_draw == "image" else 1
        return self.config.temperature.sample((rows, 1), generator=generator, device=device)

    def start(self, source_logits: Tensor, temperature: Tensor | float) -> Tensor:
        """Z_1 from the source's logits (B, K): tempered and, by default, centred over classes."""
        z1 = source_logits / temperature
        return z1 - z1.mean(-1, keepdim=True) if self.config.centre else z1

    def path(
        self, h: Features, source_logits: Tensor, generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """Every state of a sample [Z_1, …, Z_0].

        Without a generator sampling is deterministic: steps take their posterior's mean, and where the
        configuration insists on draws (a drawn temperature, the released code's noise in every step)
        they come anew from the same seed at each call.
        """
        noisy = generator is not None or self.schedule.variance == "released"
        drawn = self.config.test_temperature == "drawn"
        if generator is None and (noisy or drawn):  # a compiler could not make one
            generator = torch.Generator(source_logits.device).manual_seed(0)
        temperature: Tensor | float = self.config.temperature.mean
        if drawn:
            rows = (len(source_logits), 1)
            temperature = self.config.temperature.sample(rows, generator, source_logits.device)
        z1 = self.start(source_logits, temperature)
        return sample(self.epsilon, self.schedule, z1, h, self.times, generator, noise=noisy)

    def forward(self, h: Features, source_logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Z_0, the logits (B, K) that stand in for the ensemble's."""
        return self.path(h, source_logits, generator)[-1]

    def draw(self, h: Features, source_logits: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Samples of Z_0, shape (S, B, K)."""
        return torch.stack([self(h, source_logits, generator) for _ in range(samples)])


class FeatureBridge(AbstractBridge):
    """The part that is kept: a network from the source's feature to logits."""

    steps = 1

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, h: Features, source_logits: Tensor) -> Tensor:
        """Logits (B, K) from the feature; the source's logits are not read."""
        return self.net(h).to(source_logits.dtype)
