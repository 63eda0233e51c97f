"""What `compress` trains: bridges beside the first member, a distilled source with bridges, or both at once.

Everything is trained side by side on the same batches, so that each candidate has as many passes as it would
have alone and the members run once for all of them.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ensbridge.bridge.bridge import Bridge, BridgeConfig
from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.data.examples import ExampleSet
from ensbridge.data.stream import Stream
from ensbridge.methods.base import AbstractMethod, EmaRule, JointTraining
from ensbridge.methods.diffusion_bridge import DiffusionBridge
from ensbridge.methods.ensemble_distillation import EnsembleDistillation
from ensbridge.methods.joint_distillation import JointDistillation
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.feature_choice import FeatureChoice
from ensbridge.training.batches import TrainData, total_steps
from ensbridge.training.compress_inputs import CannotDistil
from ensbridge.training.config import FitConfig, derive_seed
from ensbridge.training.distributed import Engine
from ensbridge.training.fit import TimeBudgetExceeded, fit
from ensbridge.training.forecast import epochs_within, steps_within, with_length
from ensbridge.training.optimizers import Configs, shared_config
from ensbridge.training.output_cache import cache_outputs, length_of
from ensbridge.training.step import TimeSplit
from ensbridge.utils.devices import device_of
from ensbridge.utils.files import read_json
from ensbridge.utils.progress import count_steps, progress_bars

Say = Callable[[str], None]
Source = Literal["frozen", "distilled", "auto"]

MIN_STEPS = 200  # with fewer a bridge has hardly left its random start
SLACK = 1.1  # by how much training may take longer than its minutes
EMA = EmaRule(0.995)
# By what the source's logits are divided, beside a member and beside a distilled source; where validation
# images have no labels to choose by, the first.
TEMPERATURES, DISTILLED_TEMPERATURES = (2.0, 4.0), (2.0, 1.5, 3.0)
# The distillation's rate, of Muon, from the source's weights and from new ones, and its weight decay.
DISTIL_LR, FRESH_LR, DISTIL_WEIGHT_DECAY = 0.05, 0.1, 0.01
# A copy that has fewer steps than these is distilled at a rate that is lower in proportion: trained weights
# are lost at a high rate before a short training can make up for it (studies/short_distillation.py).
FULL_RATE_STEPS = 600
DISTILLED = "distilled"  # the name of that method
_NETWORKS = ((DISTILLED, ""), (DISTILLED, "source"))  # methods and their parts that are networks, not bridges


def distil_config(config: FitConfig, lr: float = DISTIL_LR) -> FitConfig:
    """The configuration of a distillation on the same batches.

    >>> distil_config(FitConfig(epochs=1, batch_size=2, lr=2e-3)).optimizer
    'muon'
    """
    return replace(config, optimizer="muon", lr=lr, weight_decay=DISTIL_WEIGHT_DECAY)


def lower_rates(configs: Mapping[str, FitConfig], steps: int) -> dict[str, FitConfig]:
    """Configurations in which the rate of a distillation of few steps is lower in proportion.

    >>> config = FitConfig(epochs=1, batch_size=2, lr=2e-3)
    >>> lower_rates({"bridge": config, "distilled": distil_config(config)}, 300)["distilled"].lr
    0.025
    """
    share = min(1.0, steps / FULL_RATE_STEPS)
    return {
        name: replace(config, lr=share * config.lr) if config.optimizer == "muon" else config
        for name, config in configs.items()
    }


@dataclass(frozen=True)
class Candidate:
    """A kind of model, with one for each temperature of the source among which validation chooses."""

    name: str
    models: Sequence[FastEnsemble]


@dataclass(frozen=True)
class CandidateTraining:
    """The training of `compress`: on which images, towards which members, and for how long."""

    ensemble: Ensemble
    data: ExampleSet | Stream
    plan: FeatureChoice | None  # what bridges read; None where the budget leaves no room for them
    bridges: int  # how many, each with all members as its target
    config: FitConfig  # of the bridges
    distil: FitConfig  # of the distillation
    lower_rate: bool  # whether that has a lower rate where there are few steps
    minutes: float | None  # None where the configurations' epochs count
    run_dir: Path | None
    seed: int
    labelled: bool  # whether validation can choose among temperatures
    label_weight: float  # of the training labels in every loss
    quiet: bool
    say: Say
    cache: Path | None = None  # where the members' outputs are kept
    engine: Engine | None = None  # of several processes

    def run(self, source: Source, student: Callable[[], nn.Module]) -> list[Candidate]:
        """Train what `source` asks for; `student` makes the network that is distilled."""
        try:
            methods = self.methods(source, student)
            if methods:
                self._fit(methods)
            return self.candidates(source, methods)
        except CannotDistil as error:
            if source != "auto":
                raise
            instead = "bridges are trained without it" if self.plan else "the source stays as it is"
            self.say(f"{error.reason}, so {instead}; to distil it, {error.remedy}")
        without = replace(self, run_dir=self.run_dir and self.run_dir / "without-distillation")
        return [self._source(), *(without.run("frozen", student) if self.plan else [])]

    def methods(self, source: Source, student: Callable[[], nn.Module]) -> dict[str, AbstractMethod]:
        """What is trained side by side, by name: bridges beside the first member, and the distillation."""
        methods: dict[str, AbstractMethod] = {}
        if source != "distilled":
            methods |= self._frozen_bridges()
        if source != "frozen":
            methods[DISTILLED] = self._distillation(student())
        return methods

    def configs(self, methods: Mapping[str, AbstractMethod]) -> dict[str, FitConfig]:
        """The configuration of each method, or of each of its parts."""
        return {
            f"{name}.{part}".rstrip("."): self.distil if (name, part) in _NETWORKS else self.config
            for name, method in methods.items()
            for part in method.parts
        }

    def candidates(self, source: Source, methods: Mapping[str, AbstractMethod]) -> list[Candidate]:
        """The models that trained methods make, the source alone among them where it is a choice."""
        candidates = [self._source()] if source == "auto" or not methods else []
        bridges = {name: method for name, method in methods.items() if isinstance(method, DiffusionBridge)}
        if bridges:
            groups = _by_temperature({name: method.bridge for name, method in bridges.items()})
            models = [FastEnsemble.of(*(bridges[name] for name in names)) for names in groups]
            candidates.append(Candidate("source + bridges", models))
        distilled = methods.get(DISTILLED)
        if isinstance(distilled, EnsembleDistillation):
            candidates.append(Candidate("distilled", [self._alone(distilled.student)]))
        elif isinstance(distilled, JointDistillation):
            bridged = [distilled.with_bridges(*names) for names in _by_temperature(distilled.bridges)]
            candidates.append(Candidate("distilled", [self._alone(distilled.source)]))
            candidates.append(Candidate("distilled + bridges", bridged))
        return candidates

    def _source(self) -> Candidate:
        return Candidate("source", [FastEnsemble(self.ensemble.source)])

    def _alone(self, student: nn.Module) -> FastEnsemble:
        return FastEnsemble(student, members=len(self.ensemble), source_distilled=True)

    def _frozen_bridges(self) -> dict[str, DiffusionBridge]:
        """Untrained bridges beside the first member, by temperature and number."""
        if self.plan is None:
            return {}
        feature, weight = self.plan.feature, self.label_weight
        return {
            name: DiffusionBridge(
                self.ensemble, bridge.score, feature, loss="kl", label_weight=weight, config=bridge.config
            )
            for name, bridge in self._bridges(TEMPERATURES, self.plan.score).items()
        }

    def _distillation(self, student: nn.Module) -> JointDistillation | EnsembleDistillation:
        weight = self.label_weight
        if self.plan is None:
            return EnsembleDistillation(self.ensemble, student, tau=1.0, label_weight=weight, ema=EMA)
        bridges = self._bridges(DISTILLED_TEMPERATURES, self.plan.score)
        return JointDistillation(
            self.ensemble, student, bridges, self.plan.feature, label_weight=weight, ema=EMA
        )

    def _bridges(self, temperatures: Sequence[float], score: nn.Module) -> dict[str, Bridge]:
        """Untrained bridges whose weights depend on the seed and their number alone."""
        bridges: dict[str, Bridge] = {}
        for base in temperatures if self.labelled else temperatures[:1]:
            config = BridgeConfig(temperature=TemperatureLaw(base=base), ema=EMA.decay)
            for number in range(self.bridges):
                fresh = _reset(score, derive_seed(self.seed, "score", number))
                name = f"T{base:g}-{number}".replace(".", "_")  # a name holds no dot
                bridges[name] = Bridge(fresh.to(device_of(self.ensemble.source)), config, (0.0, 1.0))
        return bridges

    def _fit(self, methods: Mapping[str, AbstractMethod]) -> None:
        """Train; where there are minutes, these decide the length and how long it may take at most."""
        folder, joint, timing = self.run_dir, JointTraining(methods), TimeSplit()
        configs = self.configs(methods)
        config: Configs = self.config if set(configs.values()) == {self.config} else configs
        data, deadline = self._prepared(joint), None
        if self.minutes is not None:
            config = self._sized(methods, data, config, self.minutes)
            deadline = time.monotonic() + 60 * SLACK * self.minutes
        shared = shared_config(joint, config)
        total = total_steps(shared, data)
        if self.lower_rate and not isinstance(config, FitConfig):
            config = lower_rates(config, total)
        warning = few_steps(total, self.minutes, shared.epochs)
        if warning and _length_begun(folder) is None:  # a resumed run keeps the length of its first call
            self.say(warning)
        with progress_bars(self.quiet) as bars:
            progress = count_steps(bars.stage("training", total))
            try:
                fit(
                    joint,
                    data,
                    config,
                    folder,
                    progress,
                    deadline=deadline,
                    engine=self.engine,
                    timing=timing,
                )
            except TimeBudgetExceeded as late:
                remedy = "give more max_minutes" if folder is None else "repeat the call to resume"
                self.say(f"time is up and {late}, so that the model is as trained so far; {remedy}")
            except FloatingPointError as error:
                if DISTILLED not in methods:
                    raise
                rates = config.values() if not isinstance(config, FitConfig) else [config]
                rate = next(one.lr for one in rates if one.optimizer == self.distil.optimizer)
                raise CannotDistil(
                    "the distillation failed, as its loss or a gradient was not finite",
                    f"give a distil_lr below {rate:g}",
                ) from error
        if timing.seconds["total"]:
            self.say(f"of the training's time: {timing}")

    def _prepared(self, joint: JointTraining) -> TrainData:
        """The data, counted where epochs are asked of a stream, or with the members' outputs beside it."""
        data = self.data
        if isinstance(data, Stream) and data.length is None and self.minutes is None:
            self.say(
                f"{data.name} does not say how many examples it has, so they are counted in one pass before "
                "training; max_minutes in place of epochs needs none"
            )
            with progress_bars(self.quiet) as bars:
                data = data.counted(bars.stage("counting", 0, "images"))
            data = self.engine.with_length(data) if self.engine else data
        if self.cache is None:
            return data
        with progress_bars(self.quiet) as bars:
            advance = bars.stage("teachers", length_of(data) * len(self.ensemble), "images")
            return cache_outputs(data, list(joint.teachers()), self.cache, advance)

    def _sized(
        self, methods: Mapping[str, AbstractMethod], data: TrainData, config: Configs, minutes: float
    ) -> Configs:
        """The configuration of a length that fits into the minutes, or that a run was begun with."""
        begun = partial(_length_begun, self.run_dir)
        length = self.engine.broadcast(begun) if self.engine else begun()
        resumed = length is not None
        if length is None and isinstance(data, Stream) and data.length is None:
            length = {"steps": round(steps_within(minutes, methods, data, config, self.engine))}
        elif length is None:
            length = {"epochs": epochs_within(minutes, methods, data, config, self.engine)}
        ((unit, count),) = length.items()
        amount = f"{count:g} epochs" if unit == "epochs" else f"{count:,} steps"
        allowed = f"{minutes:g} minute{'' if minutes == 1 else 's'}"
        if resumed:
            self.say(f"resuming a training of {amount} on the {data.device}, for {allowed} at most")
        else:
            self.say(f"training for {amount} on the {data.device}, about {allowed}")
        return with_length(config, **length)


def few_steps(steps: int, minutes: float | None, epochs: float) -> str | None:
    """A sentence that asks for more time where so many steps teach little; None where they are enough.

    >>> few_steps(22, 1.5, 0.5)
    'only 22 steps fit into that time, and with fewer than 200 little is learnt; give max_minutes=14 or more'
    >>> few_steps(200, 1.5, 0.5)
    """
    if steps >= MIN_STEPS:
        return None
    share = MIN_STEPS / steps
    if minutes is None:
        there, remedy = f"these are only {steps} steps", f"epochs={epochs * share:.3g}"
    else:
        there = f"only {steps} steps fit into that time"
        remedy = f"max_minutes={math.ceil(minutes * share)}"
    return f"{there}, and with fewer than {MIN_STEPS} little is learnt; give {remedy} or more"


def _by_temperature(bridges: Mapping[str, Bridge]) -> list[list[str]]:
    """The names of bridges, those of one temperature of the source together."""
    groups: dict[float, list[str]] = {}
    for name, bridge in bridges.items():
        groups.setdefault(bridge.config.temperature.base, []).append(name)
    return list(groups.values())


def _reset(score: nn.Module, seed: int) -> nn.Module:
    """A copy of a score network with new weights."""
    score = copy.deepcopy(score)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in score.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
    return score


def _length_begun(folder: Path | None) -> dict[str, Any] | None:
    """The epochs, or the steps, of a run that was begun in a folder; None where there is none."""
    config = None if folder is None else folder / "config.json"
    if config is None or not config.exists():
        return None
    try:
        settings = read_json(config)["fit"]
        if "epochs" not in settings:  # a configuration for each method, all of the same length
            settings = next(iter(settings.values()))
        if settings.get("steps") is not None:
            return {"steps": settings["steps"]}
        return {"epochs": float(settings["epochs"])}
    except (KeyError, TypeError, AttributeError, StopIteration, OverflowError) as error:
        raise ValueError(f"{config} is not of a run of compress; choose another folder") from error
