"""A recipe by its name, preset and changes: what a command line says and a run folder remembers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from ensbridge._aliases import upgrade_config
from ensbridge.bridge.bridge import Preset
from ensbridge.data import DATASETS, open_splits
from ensbridge.evaluation.scores.rows import Seed
from ensbridge.experiments.digits import digits
from ensbridge.experiments.paper import cifar10, cifar100, imagenet64, tiny_imagenet
from ensbridge.experiments.recipe import BASELINES, Recipe, Schedule, change, match_compute
from ensbridge.utils.text import short
from ensbridge.utils.typed_json import JsonReader

RECIPES: dict[str, Callable[[Preset, Schedule], Recipe]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tiny-imagenet": tiny_imagenet,
    "imagenet64": imagenet64,
}
MAX_CHANGES, MAX_CHANGE_LENGTH = 1000, 1000  # the latter in characters


@dataclass(frozen=True)
class Plan:
    """A recipe in words.

    `preset` chooses the method's switches, `schedule` the length, batch and rate of training. Baselines get
    as many epochs as the bridge after the changes, unless a change sets theirs. Data sets lie in `root`, by
    default where ENSBRIDGE_DATA says; it is no part of what a run folder remembers.

    >>> recipe = Plan("digits", changes=("bridge_fit.epochs=12", "ed_fit.epochs=5")).recipe()
    >>> recipe.bn_fit.epochs, recipe.ed_fit.epochs
    (20.0, 5.0)
    """

    name: str
    preset: Preset = "default"
    changes: tuple[str, ...] = ()
    schedule: Schedule = "published"
    root: Path | None = field(default=None, compare=False)

    def recipe(self) -> Recipe:
        """The recipe itself, checked."""
        if self.name not in RECIPES:
            raise ValueError(f"{self.name!r} is not a recipe; there are: {', '.join(RECIPES)}")
        for name, choices in (("preset", get_args(Preset)), ("schedule", get_args(Schedule))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}")
        if len(self.changes) > MAX_CHANGES:
            raise ValueError(f"there are {len(self.changes):,} changes; give at most {MAX_CHANGES:,}")
        for assignment in self.changes:
            if len(assignment) > MAX_CHANGE_LENGTH:
                raise ValueError(
                    f"{short(assignment)} has {len(assignment):,} characters; it must have at most "
                    f"{MAX_CHANGE_LENGTH:,}"
                )
        recipe = RECIPES[self.name](self.preset, self.schedule)
        if self.root is not None and self.name in DATASETS:
            recipe = replace(recipe, load=lambda: open_splits(self.name, self.root))
        for assignment in self.changes:
            recipe = change(recipe, assignment)
        fields = {assignment.partition("=")[0].strip() for assignment in self.changes}
        return match_compute(recipe, [name for name in BASELINES if f"{name}_fit.epochs" in fields]).check()

    def to_json(self) -> dict[str, Any]:
        """What a run folder remembers of it."""
        words = {"name": self.name, "preset": self.preset, "schedule": self.schedule}
        return words | {"changes": list(self.changes)}

    @classmethod
    def from_config(cls, config: object, folder: Path) -> tuple[Plan, int]:
        """The plan and the seed that a run folder's config.json holds."""
        config = upgrade_config(config) if isinstance(config, dict) else config
        held = _READER.read(_RunConfig, config, str(folder / "config.json"))
        return held.plan, held.seed

    def settings(self) -> dict[str, str]:
        """The plan as a report shows it."""
        words = {"recipe": self.name, "preset": self.preset, "schedule": self.schedule}
        return words | {"changes": ", ".join(self.changes) or "none"}

    def command(self, out: Path, seed: int, stage: str) -> str:
        """The command that trains a stage of it."""
        words = ["ensbridge", "train", self.name, *self.changes, "--stage", stage, "--out", str(out)]
        words += ["--seed", str(seed)] if seed else []
        words += ["--preset", self.preset] if self.preset != "default" else []
        words += ["--schedule", self.schedule] if self.schedule != "published" else []
        words += ["--root", str(self.root)] if self.root is not None else []
        return shlex.join(words)


@dataclass(frozen=True)
class _RunConfig:
    plan: Plan
    seed: Seed


# Of a part of a run, whose config.json is a method's, too.
_READER = JsonReader("give the folder that was --out of train", ignore_unknown=True)
