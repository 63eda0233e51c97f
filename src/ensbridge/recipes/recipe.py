"""What a recipe is: everything that decides a run, in one frozen value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_type_hints

import torch
from torch import nn

from ensbridge.data.digits import Splits
from ensbridge.methods.diffusion_bridge import BridgeConfig, Preset
from ensbridge.nets.score import ScoreNet, ZInput
from ensbridge.train.config import FitConfig, describe_config


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
    tail: Callable[[nn.Module, float], nn.Module]  # of the source, a bridge network of a width
    feature: str  # what diffusion bridges read of the source
    tail_feature: str  # what bridge networks read of it
    members: int  # how many are trained
    target: int  # how many of them one bridge stands for
    member_fit: FitConfig
    bridge_fit: FitConfig
    distill_fit: FitConfig
    kl_fit: FitConfig  # of the bridge that is trained straight with KL
    ed_fit: FitConfig
    end2_fit: FitConfig
    bn_fit: FitConfig
    curve_fit: FitConfig
    bridge: BridgeConfig
    ed_tau: float = 4.0
    end2_tau: float = 2.0
    end2_predict: Literal["dirichlet", "softmax"] = "dirichlet"
    end2_divisor: Literal["beta0", "s"] = "beta0"

    def check(self) -> Recipe:
        """The recipe itself, if its parts fit each other; asked when all changes are made."""
        if not 2 <= self.target <= self.members:
            raise ValueError(
                f"target is {self.target} and members {self.members}; a bridge needs 2 members or more, "
                "and no more than are trained"
            )
        return self


def build(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network whose starting weights depend on the seed alone; the global randomness is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def describe(recipe: Recipe) -> dict[str, Any]:
    """What decides a recipe's numbers, in JSON's types."""
    member = build(recipe.member, 0)
    nets = {
        "member": str(member),
        "score": str(build(lambda: recipe.score(recipe.bridge.z_input), 0)),
        "tail": str(build(lambda: recipe.tail(member, 1.0), 0)),
    }
    values: dict[str, Any] = {}
    for name, value in vars(recipe).items():
        if isinstance(value, FitConfig):
            values[name] = describe_config(value)
        elif isinstance(value, BridgeConfig):
            values[name] = asdict(value)
        elif not callable(value):
            values[name] = value
    return values | nets


def change(recipe: Recipe, assignment: str) -> Recipe:
    """The recipe with one field set, as in "bridge_fit.epochs=8"; its type is that of the old value.

    >>> from ensbridge.recipes import digits
    >>> change(digits(), "bridge.temperature.base=4").bridge.temperature.base
    4.0
    """
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise ValueError(f"{assignment!r} is not a change; write field=value, such as bridge_fit.epochs=8")
    return _changed(recipe, path.strip().split("."), text.strip(), path.strip())


def _changed(holder: Any, path: list[str], text: str, whole: str) -> Any:
    here = [each.name for each in fields(holder) if _settable(holder, each.name)]
    if path[0] not in here:
        raise ValueError(f"{whole} is not a field of the recipe; at {path[0]!r} there are: {', '.join(here)}")
    old = getattr(holder, path[0])
    if is_dataclass(old) and not isinstance(old, type):
        if len(path) == 1:
            inside = ", ".join(f"{whole}.{each.name}" for each in fields(old))
            raise ValueError(f"{whole} has fields of its own; set one of them: {inside}")
        return replace(holder, **{path[0]: _changed(old, path[1:], text, whole)})
    if len(path) > 1:
        raise ValueError(f"{whole} is not a field of the recipe; {path[0]} has no fields of its own")
    # By the declared type, as 64 may stand where 0.5 would do.
    kind = float if get_type_hints(type(holder))[path[0]] is float else type(old)
    return replace(holder, **{path[0]: _parsed(text, kind, whole)})


def _settable(holder: Any, name: str) -> bool:
    """Whether a field is the user's to set: not what names the recipe, nor the seed, which is the run's."""
    return name not in ("name", "preset", "class_names", "seed") and not callable(getattr(holder, name))


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
