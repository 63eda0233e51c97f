"""Names of earlier versions, for files that they wrote and for what imports them: here and nowhere else.

No torch here.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# Modules that are public under another name too: `import ensbridge.nets` is `import ensbridge.models`.
MODULES = {"ensbridge.nets": "ensbridge.models", "ensbridge.cost": "ensbridge.metrics.cost"}


class _Finder(MetaPathFinder, Loader):
    """Finds a module under its other name."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Where to load it from."""
        return ModuleSpec(fullname, self) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, under its own name."""
        module = import_module(MODULES[spec.name])
        spec.loader_state = module.__spec__  # which the import system is about to replace
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do but to give the module its own description back."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Let modules be imported under their other names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def upgrade_scores(document: object) -> object:
    """A decoded `scores.json` with the names of today; what is no such document stays as it is."""
    if not isinstance(document, dict):
        return document
    upgraded = dict(document)
    for part in ("rows", "tradeoff", "capacity", "curves"):
        if isinstance(upgraded.get(part), list):
            upgraded[part] = [upgrade_row(row, upgraded.get("seed")) for row in upgraded[part]]
    return upgraded


def upgrade_row(document: object, seed: object = None) -> object:
    """A decoded row or curve, of which version 0.1 told by its name how a bridge was trained.

    >>> old = {"model": "control (KL, T = 4)", "method": "control", "owed": None}
    >>> upgrade_row(old, seed=1) == {
    ...     "model": "control (KL, T = 4)", "method": "DBN", "control": True, "loss": "kl",
    ...     "source_temperature": 4.0, "seed": 1, "nll_gain_over_control": None,
    ... }
    True
    """
    if not isinstance(document, dict) or "control" in document:
        return document
    row: dict[str, Any] = dict(document)
    for old, new in (("owed", "nll_gain_over_control"), ("owed_error", "nll_gain_over_control_se")):
        if old in row:
            row[new] = row.pop(old)
    method, name = row.get("method"), row.get("model")
    row["control"] = method == "control"
    if row["control"]:
        row["method"] = "DBN"
    if not isinstance(name, str):  # a curve has no more to tell
        return row
    if seed is not None:
        row["seed"] = seed
    if method in ("DBN", "control"):
        row["loss"] = "kl" if re.search(r"\(KL\b", name) else "bridge"
        if warm := re.search(r"\bT = ([0-9]{1,5}(?:\.[0-9]{1,5})?)\b(?! and)", name):
            row["source_temperature"] = float(warm[1])
    if method == "BN" and (width := re.search(r"\b(small|medium)\b", name)):
        row["width"] = width[1]
    return row


def find_folder(run: Path, name: str) -> Path:
    """The folder of a job in a run's folder, also where version 0.1 began it under another name.

    >>> find_folder(Path("run"), "baselines-bn").name
    'baselines-bn'
    """
    old = run / name.replace("baselines", "rivals", 1)
    return old if old.is_dir() and not (run / name).exists() else run / name


def upgrade_config(config: dict[str, Any]) -> dict[str, Any]:
    """The decoded config.json of a run with the names of today; what is no such thing stays as it is.

    >>> plan = {"name": "cifar10", "preset": "default", "changes": ["kl_heat=1"]}
    >>> recipe = {"kl_heat": 1.0, "bridge": {"temperature": {"base": 2.0}}, "rivals_of": [5]}
    >>> new = upgrade_config({"plan": plan, "recipe": recipe, "seed": 0})
    >>> new["plan"]["changes"], new["plan"]["schedule"], new["recipe"]["kl_temperature"]
    (['kl_temperature=2.0'], 'paper', 2.0)
    """
    plan, recipe = config.get("plan"), config.get("recipe")
    if not isinstance(plan, dict) or "schedule" in plan or not isinstance(recipe, dict):
        return config
    new = {_FIELDS.get(name, name): value for name, value in recipe.items()}
    heat = new.pop("kl_heat", 1.0)
    try:
        new["kl_temperature"] = heat * recipe["bridge"]["temperature"]["base"]
    except (KeyError, TypeError):
        return config
    changes = plan.get("changes")
    if isinstance(changes, list) and all(isinstance(change, str) for change in changes):
        named = [change.partition("=")[0].strip() for change in changes]
        warmer = {"kl_heat", "bridge.temperature.base"} & set(named)
        changes = [change for change, name in zip(changes, named, strict=True) if name != "kl_heat"]
        changes += [f"kl_temperature={new['kl_temperature']}"] if warmer else []
    schedule = "published" if plan.get("name") == "digits" else "paper"
    return config | {"plan": plan | {"changes": changes, "schedule": schedule}, "recipe": new}


_FIELDS = {"rivals_of": "baselines_for", "level_rivals": "match_compute"}


def upgrade_model(config: dict[str, Any]) -> dict[str, Any]:
    """The decoded config.json of a saved model with the names of today.

    >>> upgrade_model({"source_share": 0.25})
    {'source_logit_weight': 0.25}
    """
    return {
        "source_logit_weight" if name == "source_share" else name: value for name, value in config.items()
    }


RENAMED_FIELDS = {"kl_heat": "kl_temperature, which is absolute", "rivals_of": "baselines_for"}  # of a recipe
