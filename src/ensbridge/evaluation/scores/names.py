"""The names that rows have in tables, made of what the models are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ensbridge.evaluation.scores.rows import ModelInfo


def name_rows(models: Sequence[ModelInfo], target: int | None = None) -> list[str]:
    """A name for each model; those that aim at `target` members do not say so.

    Where two would have the same name, bridges say at which temperature their source is.

    >>> bridge = ModelInfo("DBN", members=3, bridges=1, steps=1, loss="kl", source_temperature=2.0)
    >>> name_rows([ModelInfo("DE", 3), bridge, bridge.as_control(), ModelInfo("ED", 5)], target=3)
    ['DE-3', '+1 DBN (KL)', 'control (KL)', 'ED (DE-5)']
    >>> name_rows([ModelInfo("DBN", 3, 1, 1, "kl", 2.0, source="distilled"), ModelInfo("ED", 3, tau=1.0)], 3)
    ['+1 DBN (distilled source)', 'ED (τ = 1)']
    """
    names = [_name(model, target) for model in models]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [
        _name(model, target, temperature=name in twice) for model, name in zip(models, names, strict=True)
    ]


def name_by_teachers(models: Sequence[ModelInfo]) -> list[str]:
    """Names for single networks that were trained towards ever more teachers.

    >>> name_by_teachers([ModelInfo("EnD2", 2)])
    ['EnD², 2 teachers']
    """
    return [f"{_label(model)}, {model.members} teachers" for model in models]


def _label(model: ModelInfo) -> str:
    return {"EnD2": "EnD²"}.get(model.kind, model.kind)


def _name(model: ModelInfo, target: int | None, temperature: bool = False) -> str:
    if model.method == "DE":
        return f"DE-{model.members}"
    said = []
    if model.method == "DBN":
        if model.source == "distilled":
            said.append("distilled source")
        elif model.loss == "kl":
            said.append("KL")
        said += [f"{model.steps} steps"] if model.steps > 1 else []
        warm = temperature and model.source_temperature is not None
        said += [f"T = {model.source_temperature:g}"] if warm else []
    said += [f"τ = {model.tau:g}"] if model.tau is not None else []
    if not model.control and model.members != target and model.width is None:
        said.append(f"DE-{model.members}")
    words = [_label(model)]
    if model.bridges > 1 or (model.bridges and not model.control):
        words.insert(0, f"+{model.bridges}")
    words += [model.width] if model.width else []
    words += [f"({', '.join(said)})"] if said else []
    return " ".join(words)
