"""A recipe by its name, preset and changes: what a command line says and a run folder remembers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ensbridge.methods.diffusion_bridge import Preset
from ensbridge.recipes.digits import digits
from ensbridge.recipes.paper import cifar10, cifar100, imagenet64, tiny_imagenet
from ensbridge.recipes.recipe import RIVALS, Recipe, change, level
from ensbridge.words import short

RECIPES: dict[str, Callable[[Preset], Recipe]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tiny-imagenet": tiny_imagenet,
    "imagenet64": imagenet64,
}
MOST_CHANGES, LONGEST_CHANGE = 1000, 1000  # the latter in characters
MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Plan:
    """A recipe in words.

    Rivals get as many epochs as the bridge after the changes, unless a change sets theirs.

    >>> recipe = Plan("digits", changes=("bridge_fit.epochs=12", "ed_fit.epochs=5")).recipe()
    >>> recipe.bn_fit.epochs, recipe.ed_fit.epochs
    (20.0, 5.0)
    """

    name: str
    preset: Preset = "default"
    changes: tuple[str, ...] = ()

    def recipe(self) -> Recipe:
        """The recipe itself, checked."""
        if self.name not in RECIPES:
            raise ValueError(f"{self.name!r} is not a recipe; there are: {', '.join(RECIPES)}")
        if self.preset not in get_args(Preset):
            raise ValueError(f"preset is {self.preset!r}; it must be one of {', '.join(get_args(Preset))}")
        if len(self.changes) > MOST_CHANGES:
            raise ValueError(f"there are {len(self.changes):,} changes; give at most {MOST_CHANGES:,}")
        for assignment in self.changes:
            if len(assignment) > LONGEST_CHANGE:
                raise ValueError(
                    f"{short(assignment)} has {len(assignment):,} characters; it must have at most "
                    f"{LONGEST_CHANGE:,}"
                )
        recipe = RECIPES[self.name](self.preset)
        for assignment in self.changes:
            recipe = change(recipe, assignment)
        fields = {assignment.partition("=")[0].strip() for assignment in self.changes}
        return level(recipe, [name for name in RIVALS if f"{name}_fit.epochs" in fields]).check()

    def to_json(self) -> dict[str, Any]:
        """What a run folder remembers of it."""
        return {"name": self.name, "preset": self.preset, "changes": list(self.changes)}

    @classmethod
    def from_config(cls, config: object, folder: Path) -> tuple[Plan, int]:
        """The plan and the seed that a run folder's config.json holds."""
        foreign = ValueError(
            f"{folder} is a part of a run, or foreign; give the folder that was --out of train"
        )
        plan = config.get("plan") if isinstance(config, dict) else None
        if not isinstance(config, dict) or not isinstance(plan, dict):
            raise foreign
        changes, seed = plan.get("changes"), config.get("seed")
        if not isinstance(changes, list) or isinstance(seed, bool) or not isinstance(seed, int):
            raise foreign
        if not all(isinstance(text, str) for text in (plan.get("name"), plan.get("preset"), *changes)):
            raise foreign
        if abs(seed) > MOST_SEED:
            raise ValueError(f"{folder / 'config.json'}: seed is {short(seed)}; it must be below 2**63")
        return cls(plan["name"], plan["preset"], tuple(changes)), seed

    def words(self) -> dict[str, str]:
        """The plan as a report shows it."""
        return {"recipe": self.name, "preset": self.preset, "changes": ", ".join(self.changes) or "none"}

    def command(self, out: Path, seed: int, stage: str) -> str:
        """The command that trains a stage of it."""
        words = ["ensbridge", "train", self.name, *self.changes, "--stage", stage, "--out", str(out)]
        words += ["--seed", str(seed)] if seed else []
        words += ["--preset", self.preset] if self.preset != "default" else []
        return shlex.join(words)
