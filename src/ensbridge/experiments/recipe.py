"""What a recipe is: everything that decides a run, in one frozen value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn

from ensbridge._aliases import RENAMED_FIELDS
from ensbridge.bridge.bridge import BridgeConfig, Preset, ZInput
from ensbridge.data.digits import Splits
from ensbridge.evaluation.scores import Loss
from ensbridge.models.features import forward_with_features
from ensbridge.models.score_net import ScoreNet
from ensbridge.training.config import FitConfig, describe_config
from ensbridge.training.distill import distillation_grids
from ensbridge.utils.text import one_line

MAX_MEMBERS = 100
# Fields that came later, which runs made before do not have, and what they are where they change nothing.
LATER_FIELDS = {"members_together": 1, "count_distillation": True, "headline_bridge_fit": None}
LATER_FIELDS |= {"headline_features": (), "headline_score": None, "headline_new": False}
LATER_FIELDS |= {"headline_teachers": 0}
HEADLINE_FIELDS = {
    "headline_fit",
    "headline_temperature",
    *(name for name in LATER_FIELDS if "headline" in name),
}
Schedule = Literal["published", "paper"]  # lengths, batches and rates: those of our results, or the paper's


@dataclass(frozen=True)
class Recipe:
    """Data, networks and training of one experiment; seeds are set by the run.

    `preset` is which of the paper's and its released code's slips it has, as in `BridgeConfig.preset`, and
    whether ED and EnD² get the bridges' augmentation ("default", the fair comparison) or not.
    """

    name: str
    preset: Preset
    class_names: tuple[str, ...]
    load: Callable[[], Splits]
    member: Callable[[], nn.Module]
    score: Callable[[ZInput], ScoreNet]
    tail: Callable[[nn.Module, str, float], nn.Module]  # source, feature, width: a bridge network
    feature: str  # what diffusion bridges read of the source
    tail_feature: str  # what bridge networks read of it
    members: int  # how many are trained
    target: int  # how many of them one bridge stands for
    member_fit: FitConfig
    bridge_fit: FitConfig
    distill_fit: FitConfig
    kl_fit: FitConfig  # of the bridges that are trained with KL
    ed_fit: FitConfig
    end2_fit: FitConfig
    bn_fit: FitConfig
    curve_fit: FitConfig
    bridge: BridgeConfig
    headline_fit: FitConfig | None = None  # of the distilled source; None where the recipe has no headline
    headline_temperature: float = 2.0
    headline_bridge_fit: FitConfig | None = None  # of the bridge beside it; that of KL unless given
    headline_features: tuple[str, ...] = ()  # what that bridge reads; `feature` unless given
    headline_score: Callable[[], nn.Module] | None = None  # its network; that of other bridges unless given
    headline_new: bool = False  # whether the source starts from new weights, not as a copy of a member
    headline_teachers: int = 0  # how many members teach it; `target` unless given
    kl_temperature: float = 2.0  # of the bridges that are trained with KL
    ed_tau: float = 4.0
    end2_tau: float = 2.0
    end2_predict: Literal["dirichlet", "softmax"] = "dirichlet"
    end2_divisor: Literal["beta0", "s"] = "beta0"
    train_images: int = 0  # how many there are, where that is known before the data is loaded
    baselines_for: tuple[int, ...] = ()  # sizes of ensembles for ED, EnD² and BN small, besides the target
    figure_members: int = 0  # of the trade-off and the capacity, where they are more than the table's
    members_together: int = 1  # how many are trained side by side, where a GPU has the memory
    match_compute: bool = True  # whether baselines get as many epochs as the bridge
    count_distillation: bool = True  # whether those of its distillation count among them
    on_gpu: bool = True  # whether it is worth a GPU, where there is one

    @property
    def most_members(self) -> int:
        """How many members the figures are made of."""
        return max(self.members, self.figure_members)

    def bridge_config(self, loss: Loss) -> BridgeConfig:
        """The switches of the bridges that are trained with a loss."""
        if loss == "bridge":
            return self.bridge
        return replace(self.bridge, temperature=replace(self.bridge.temperature, base=self.kl_temperature))

    def check(self) -> Recipe:
        """The recipe itself, if its parts fit each other; asked when all changes are made."""
        if not 2 <= self.target <= self.members <= MAX_MEMBERS:
            raise ValueError(
                f"target is {self.target} and members {self.members}; a bridge needs 2 members or more, "
                f"no more than are trained, and those at most {MAX_MEMBERS}"
            )
        if self.figure_members > MAX_MEMBERS:
            raise ValueError(f"figure_members is {self.figure_members}; it must be at most {MAX_MEMBERS}")
        if not 0 <= self.headline_teachers <= self.members:
            raise ValueError(
                f"headline_teachers is {self.headline_teachers}; it must be at most {self.members}, as there "
                "are members, or 0 for as many as target"
            )
        if not 1 <= self.members_together <= MAX_MEMBERS:
            raise ValueError(
                f"members_together is {self.members_together}; it must be 1, which is each by itself, or "
                f"more, at most {MAX_MEMBERS}"
            )
        for name in ("headline_temperature", "kl_temperature", "ed_tau", "end2_tau"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0, such as 2")
        for name, hint in get_type_hints(Recipe).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                choices = ", ".join(map(repr, get_args(hint)))
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {choices}")
        return self

    def try_networks(self, data: Splits) -> None:
        """Run one image through untrained networks, so that what cannot work says so before any training."""
        member = build(self.member, 0).eval()
        image = data.train.batch(torch.zeros(1, dtype=torch.long))[0]
        height, width = image.shape[-2:]
        for name, value in vars(self).items():
            if isinstance(value, FitConfig) and value.augment.crop > max(height, width):
                raise ValueError(
                    f"{name}.augment.crop is {value.augment.crop}; images have {height}×{width} pixels, so "
                    f"it must be at most {max(height, width)}"
                )
        with torch.no_grad():
            logits, feature, inner = forward_with_features(member, image, self.feature, self.tail_feature)
            score, now = build(lambda: self.score(self.bridge.z_input), 0).eval(), logits.new_ones(1)
            tail = build(lambda: self.tail(member, self.tail_feature, 1.0), 0)
            networks = {"feature": (score, feature, logits, now), "tail_feature": (tail, inner)}
            if self.headline_features and self.headline_score is not None:
                _, *maps = forward_with_features(member, image, *self.headline_features)
                networks["headline_features"] = (build(self.headline_score, 0).eval(), maps, None, None)
            for name, (net, *inputs) in networks.items():
                try:
                    net(*inputs)
                except (RuntimeError, ValueError) as error:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, which the network behind it cannot read "
                        f"({one_line(error)}); name another"
                    ) from error


def build(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network whose starting weights depend on the seed alone; the global randomness is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def describe(recipe: Recipe) -> dict[str, Any]:
    """What decides a recipe's numbers, in JSON's types.

    A switch that came later is left out where it is off, so that runs made before it resume.
    """
    member = build(recipe.member, 0)
    nets = {
        "member": str(member),
        "score": str(build(lambda: recipe.score(recipe.bridge.z_input), 0)),
        "tail": str(build(lambda: recipe.tail(member, recipe.tail_feature, 1.0), 0)),
    }
    values: dict[str, Any] = {}
    for name, value in vars(recipe).items():
        if isinstance(value, FitConfig):
            values[name] = describe_config(value)
        elif isinstance(value, BridgeConfig):
            values[name] = asdict(value)
        elif not callable(value):
            values[name] = value
    if recipe.headline_score is not None:
        nets["headline_score"] = str(build(recipe.headline_score, 0))
    absent = {name for name, off in LATER_FIELDS.items() if values.get(name) == off}
    absent |= HEADLINE_FIELDS if recipe.headline_fit is None else set()
    return {name: value for name, value in values.items() if name not in absent} | nets


def baseline_sizes(recipe: Recipe) -> tuple[int, ...]:
    """The sizes of ensembles that baselines stand for: the bridge's target first."""
    return recipe.target, *(size for size in recipe.baselines_for if recipe.target < size <= recipe.members)


BASELINES = ("headline", "kl", "ed", "end2", "bn")  # whose `…_fit` has as many image passes as the bridge


def match_compute(recipe: Recipe, but: Sequence[str] = ()) -> Recipe:
    """The recipe with as many epochs for each baseline as the bridge has.

    `but` names baselines whose epochs were set on purpose. A headline with new weights keeps its own.

    >>> from ensbridge.experiments import digits
    >>> match_compute(change(digits(), "bridge_fit.epochs=32")).ed_fit.epochs
    40.0
    """
    if not recipe.match_compute:
        return recipe
    but = (
        (*but, "headline") if recipe.headline_new else but
    )  # new weights were trained for a time of their own
    stages = distillation_grids(recipe.bridge.schedule.times().tolist(), recipe.bridge.distillation)
    epochs = recipe.bridge_fit.epochs
    epochs += len(stages) * recipe.distill_fit.epochs if recipe.count_distillation else 0
    fits = {f"{name}_fit": getattr(recipe, f"{name}_fit") for name in BASELINES if name not in but}
    return replace(recipe, **{name: replace(fit, epochs=epochs) for name, fit in fits.items() if fit})


def change(recipe: Recipe, assignment: str) -> Recipe:
    """The recipe with one field set, as in "bridge_fit.epochs=8"; its type is that of the old value.

    >>> from ensbridge.experiments import digits
    >>> change(digits(), "bridge.temperature.base=4").bridge.temperature.base
    4.0
    """
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise ValueError(f"{assignment!r} is not a change; write field=value, such as bridge_fit.epochs=8")
    return _changed(recipe, path.strip().split("."), text.strip(), path.strip())


def _changed(holder: Any, path: list[str], text: str, whole: str) -> Any:
    names = [field.name for field in fields(holder) if _settable(holder, field.name)]
    if path[0] in RENAMED_FIELDS:
        raise ValueError(f"{whole} is now {RENAMED_FIELDS[path[0]]}; set that")
    if path[0] not in names:
        raise ValueError(
            f"{whole} is not a field of the recipe; at {path[0]!r} there are: {', '.join(names)}"
        )
    old = getattr(holder, path[0])
    if is_dataclass(old) and not isinstance(old, type):
        if len(path) == 1:
            inside = ", ".join(f"{whole}.{field.name}" for field in fields(old) if _settable(old, field.name))
            raise ValueError(f"{whole} has fields of its own; set one of them: {inside}")
        return replace(holder, **{path[0]: _changed(old, path[1:], text, whole)})
    if len(path) > 1:
        raise ValueError(f"{whole} is not a field of the recipe; {path[0]} has no fields of its own")
    # By the declared type, as 64 may stand where 0.5 would do.
    kind = float if get_type_hints(type(holder))[path[0]] is float else type(old)
    return replace(holder, **{path[0]: _parsed(text, kind, whole)})


_FIXED = (
    "name",
    "preset",
    "class_names",
    "seed",
    "train_images",
    "baselines_for",
    "match_compute",
    "count_distillation",
    "on_gpu",
)


def _settable(holder: Any, name: str) -> bool:
    """Whether a field is the user's to set: not what names the recipe, nor the seed, which is the run's."""
    value = getattr(holder, name)
    return name not in _FIXED and (is_dataclass(value) or not callable(value))


def _parsed(text: str, kind: type, whole: str) -> object:
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is str:
        return text
    try:
        if kind in (int, float) and math.isfinite(float(text)):
            return kind(text)
    except ValueError:
        pass
    wanted = {bool: "true or false", int: "a whole number", float: "a finite number"}
    raise ValueError(f"{whole} is {text!r}; it must be {wanted.get(kind, 'left as it is')}")
