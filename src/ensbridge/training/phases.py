"""The phases of `compress`: bridges, a distillation of the source, or both, within epochs or minutes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ensbridge.bridge.bridge import BridgeConfig
from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.data.loader import ImageSet
from ensbridge.methods.base import AbstractMethod, EmaRule, JointTraining
from ensbridge.methods.diffusion_bridge import DiffusionBridge
from ensbridge.methods.ensemble_distillation import EnsembleDistillation
from ensbridge.models.ensemble import Ensemble, weights_digest
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.feature_choice import FeatureChoice
from ensbridge.training.config import FitConfig, derive_seed
from ensbridge.training.fit import TimeBudgetExceeded, fit
from ensbridge.training.forecast import epochs_within, with_epochs
from ensbridge.training.optimizers import Configs
from ensbridge.utils.devices import device_of
from ensbridge.utils.files import read_json
from ensbridge.utils.progress import count_steps, progress_bars
from ensbridge.utils.text import one_line

Say = Callable[[str], None]

SLACK = 1.1  # by how much training may take longer than its minutes
EMA = 0.995
DISTIL_SHARE = 0.5  # of the passes, where bridges follow
DISTILLED = "distilled"  # the name of that method beside bridges


@dataclass(frozen=True)
class BridgePlan:
    """Where bridges read the source, and the members that each learns from."""

    site: FeatureChoice
    groups: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Phases:
    """What all phases have in common; each trains on the same images towards the same members."""

    ensemble: Ensemble
    data: ImageSet
    config: FitConfig  # of the bridges
    distil: FitConfig  # of the distillation, which has an optimiser of its own
    minutes: float | None  # for all phases together; None where the configurations' epochs count
    run_dir: Path | None
    seed: int
    quiet: bool
    say: Say

    def split(self, share: float) -> tuple[Phases, Phases]:
        """Two phases, of which the first has this share of the minutes or steps; together they have all."""
        if self.minutes is not None:
            return self.within(share), self.within(1 - share)
        steps = self.config.total_steps(len(self.data))
        first = min(max(1, round(share * steps)), max(1, steps - 1))
        return self._of_steps(first), self._of_steps(max(1, steps - first))

    def within(self, share: float) -> Phases:
        """With a share of the minutes, where they count."""
        return self if self.minutes is None else replace(self, minutes=share * self.minutes)

    def _of_steps(self, steps: int) -> Phases:
        epochs = steps * self.config.batch_size / len(self.data)
        config, distil = (replace(config, epochs=epochs) for config in (self.config, self.distil))
        return replace(self, config=config, distil=distil)

    def bridges(self, plan: BridgePlan, temperatures: Sequence[float]) -> list[FastEnsemble]:
        """Train bridges beside the first member: a model for each temperature of it."""
        methods = self._bridges(self.ensemble, plan, temperatures)
        self._train("bridges", methods, self.config, self.run_dir)
        return _models(methods)

    def distilled(self, student: nn.Module) -> FastEnsemble:
        """Train a network towards the members' mean prediction."""
        methods = {DISTILLED: self._distillation(student)}
        self._train("distillation", methods, self.distil, self._folder(DISTILLED))
        return self._alone(student)

    def bridges_and_distilled(
        self, plan: BridgePlan, temperatures: Sequence[float], student: nn.Module
    ) -> tuple[list[FastEnsemble], FastEnsemble]:
        """`bridges` and `distilled` side by side, the members' passes shared; each as it would be alone."""
        bridges = self._bridges(self.ensemble, plan, temperatures)
        methods = {**bridges, DISTILLED: self._distillation(student)}
        configs = {name: self.distil if name == DISTILLED else self.config for name in methods}
        self._train("bridges and distillation", methods, configs, self._folder("bridges-and-distilled"))
        return _models(bridges), self._alone(student)

    def bridges_beside(
        self, source: nn.Module, plan: BridgePlan, temperatures: Sequence[float]
    ) -> list[FastEnsemble]:
        """Train bridges beside a distilled source, which is no member itself."""
        ensemble = Ensemble([source, *self.ensemble.members]).eval()
        moved = replace(plan, groups=[[index + 1 for index in group] for group in plan.groups])
        methods = self._bridges(ensemble, moved, temperatures)
        # A source that was distilled for longer has bridges of its own.
        self._train("bridges", methods, self.config, self._folder(f"bridges-{weights_digest(source)}"))
        models = _models(methods)
        for model in models:
            model.members, model.source_distilled = len(self.ensemble), True
        return models

    def _alone(self, student: nn.Module) -> FastEnsemble:
        return FastEnsemble(student, members=len(self.ensemble), source_distilled=True)

    def _folder(self, name: str) -> Path | None:
        return None if self.run_dir is None else self.run_dir / name

    def _distillation(self, student: nn.Module) -> EnsembleDistillation:
        return EnsembleDistillation(self.ensemble, student, tau=1.0, ema=EmaRule(EMA))

    def _bridges(
        self, ensemble: Ensemble, plan: BridgePlan, temperatures: Sequence[float]
    ) -> dict[str, DiffusionBridge]:
        """Untrained bridges, by temperature and number."""
        return {
            f"T{base:g}-{number}".replace(".", "_"): _bridge(  # a name holds no dot
                ensemble, plan.site, group, base, derive_seed(self.seed, "score", number)
            )
            for base in temperatures
            for number, group in enumerate(plan.groups)
        }

    def _train(
        self, name: str, methods: Mapping[str, AbstractMethod], config: Configs, folder: Path | None
    ) -> None:
        """Train; where there are minutes, these decide the epochs and how long it may take at most."""
        deadline, minutes, data = None, self.minutes, self.data
        if minutes is not None:
            begun = _epochs_begun(folder)
            epochs = begun or epochs_within(minutes, methods, data, config)
            config = with_epochs(config, epochs)
            length = f"{epochs:g} epochs on the {data.images.device}"
            allowed = f"{minutes:g} minute{'' if minutes == 1 else 's'}"
            if begun is None:
                self.say(f"training for {length}, about {allowed}")
            else:
                self.say(f"resuming a training of {length}, for {allowed} at most")
            deadline = time.monotonic() + 60 * SLACK * minutes
        one = config if isinstance(config, FitConfig) else config[DISTILLED]
        with progress_bars(self.quiet) as bars:
            progress = count_steps(bars.stage(name, one.total_steps(len(data))))
            try:
                fit(JointTraining(methods), data, config, folder, progress, deadline=deadline)
            except TimeBudgetExceeded as late:
                remedy = "give more max_minutes" if folder is None else "repeat the call to resume"
                self.say(f"time is up and {late}, so that the model is as trained so far; {remedy}")
            except FloatingPointError as error:
                if DISTILLED not in methods:
                    raise
                raise ValueError(
                    f"the distillation failed ({one_line(error)}); give a distil_lr below "
                    f"{self.distil.lr:g}, or source='frozen'"
                ) from error


def _models(bridges: Mapping[str, DiffusionBridge]) -> list[FastEnsemble]:
    """The models that trained bridges make, one for each temperature of their source."""
    groups: dict[float, list[DiffusionBridge]] = {}
    for method in bridges.values():
        groups.setdefault(method.bridge.config.temperature.base, []).append(method)
    return [FastEnsemble.of(*group) for group in groups.values()]


def _epochs_begun(folder: Path | None) -> float | None:
    """The length of a run that was begun in a folder, so that it can resume; None where there is none."""
    config = None if folder is None else folder / "config.json"
    if config is None or not config.exists():
        return None
    try:
        settings = read_json(config)["fit"]
        if "epochs" not in settings:  # a configuration for each method, all of the same length
            settings = next(iter(settings.values()))
        return float(settings["epochs"])
    except (KeyError, TypeError, AttributeError, StopIteration, OverflowError) as error:
        raise ValueError(f"{config} is not of a run of compress; choose another folder") from error


def _bridge(
    ensemble: Ensemble, site: FeatureChoice, target: Sequence[int], base: float, seed: int
) -> DiffusionBridge:
    """An untrained bridge towards a group of members, whose weights depend on the seed alone."""
    score = copy.deepcopy(site.score)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in score.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
    config = BridgeConfig(temperature=TemperatureLaw(base=base), ema=EMA)
    score = score.to(device_of(ensemble.source))
    return DiffusionBridge(ensemble, score, site.feature, loss="kl", target=target, config=config)
