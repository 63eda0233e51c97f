"""The diffusion bridge network: from the source's logits to the ensemble's (ICLR 2024).

Shapes: B images, K classes, M members. Z_1 is the source's tempered logit, Z_0 the target ensemble's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from ensbridge.ensemble import Ensemble, ensemble_logit, weights_digest
from ensbridge.fast_ensemble import AbstractBridge, FastEnsemble
from ensbridge.methods.method import AbstractMethod, Batch, EmaRule, Teacher, TeacherOutputs
from ensbridge.nets.features import find_module
from ensbridge.nets.score import ScoreNet, ZInput
from ensbridge.sampler import estimate_z0, walk
from ensbridge.schedule import BridgeSchedule, PosteriorVariance, TemperatureLaw

Preset = Literal["default", "paper", "released"]


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
        _ = self.schedule, EmaRule(self.ema)
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
    """The part that is kept: a score network and the walk that it steers.

    `times` is the grid that it walks, the schedule's own unless given; `(0, 1)` is one step.

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
            raise ValueError(f"times are {self.times}; a bridge walks from 1 to 0, give such as (0.0, 1.0)")
        self.steps = len(self.times) - 1

    def one_step(self) -> Bridge:
        """A copy with the same weights that walks in one step."""
        return self.on_times((0.0, 1.0))

    def on_times(self, times: Sequence[float]) -> Bridge:
        """A copy with the same weights on another time grid."""
        return Bridge(copy.deepcopy(self.score), self.config, times)

    def residual(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        """√beta·ε, which is (Z_t - Z_0) / √t: the network's own output.

        With beta = 1e-4 the raw target is a hundred times Z_1 - Z_0; in this unit Adam sees targets of
        unit scale, and the squared error is the paper's loss times beta at every t.
        """
        return self.score(h, z_t, t).to(z_t.dtype)

    def epsilon(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
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
        self, h: Tensor, source_logits: Tensor, generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """Every stop of the walk [Z_1, …, Z_0].

        Without a generator the walk repeats itself: steps take their posterior's mean, and where the
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
        return walk(self.epsilon, self.schedule, z1, h, self.times, generator, noise=noisy)

    def forward(self, h: Tensor, source_logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Z_0, the logits (B, K) that stand in for the ensemble's."""
        return self.path(h, source_logits, generator)[-1]


class DiffusionBridge(AbstractMethod):
    """Training of a bridge from an ensemble's first member to the ensemble of the members in `target`.

    `loss="bridge"` is the paper's regression on the score; `loss="kl"` trains one step straight with
    KL(ensemble ‖ bridge). `target` names members by index, all of them unless given; `target=(0,)` is the
    control that has the source alone as its target. Labels are never used.

    >>> from ensbridge.nets import ResNet
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
        config: BridgeConfig | None = None,
    ) -> None:
        if loss not in ("bridge", "kl"):
            raise ValueError(f"loss is {loss!r}; it must be 'bridge' or 'kl'")
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
        self.objective = loss
        self.bridge = self.student = Bridge(score, config, (0.0, 1.0) if loss == "kl" else None)
        self.ema = EmaRule(config.ema, config.ema_warmup, config.ema_swapped)

    def loss(self, batch: Batch) -> Tensor:
        """The bridge's loss or the KL divergence, mean over the batch."""
        z0, z1, outputs = self.ends(batch)
        if self.objective == "kl":
            now = z1.new_ones(len(z1))
            log_q = estimate_z0(
                self.bridge.epsilon, self.bridge.schedule, z1, outputs.feature, now
            ).log_softmax(-1)
            log_p = z0.log_softmax(-1)
            return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
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
        z0 = ensemble_logit(outputs.logits if 0 in self.target else outputs.logits[1:])
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

    def model(self) -> FastEnsemble:
        """The source with the bridge."""
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
            "teachers": weights_digest(self.ensemble),
            "config": asdict(self.bridge.config),
            "score": str(self.bridge.score),
        }
