"""A recipe that is trained in a second, and progress that remembers; used as `import _recipe`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import _runs
from ensbridge.bridge.bridge import ZInput
from ensbridge.data import Splits
from ensbridge.experiments import Recipe, digits
from ensbridge.models import ResNet, ScoreNet
from ensbridge.models.tail import Tail


def load() -> Splits:
    return Splits(_runs.data(0, 40), _runs.data(1, 20), _runs.data(2, 30))


def member() -> nn.Module:
    return ResNet((1, 1), (8, 8), 3, stem=8, mean=(0.5,), std=(0.3,))


def tail(source: nn.Module, feature: str, width: float) -> nn.Module:
    assert isinstance(source, ResNet)
    return Tail(source, feature, width)


def score(z_input: ZInput) -> ScoreNet:
    return ScoreNet(3, 8, [(1, 8, 1, 1)], 8, z_input=z_input)


def tiny(**changes: Any) -> Recipe:
    """The digits' recipe with networks, data and times that are tiny."""
    recipe = digits()
    small = {"epochs": 0.5, "batch_size": 5, "checkpoint_every": 2, "log_every": 1}  # 4 steps
    return replace(
        recipe,
        **{
            "load": load,
            "member": member,
            "score": score,
            "tail": tail,
            "class_names": ("a", "b", "c"),
            "feature": "stages.0.0",
            "tail_feature": "stages.0.0",
            "members": 3,
            "target": 2,
            **{name: replace(config, **small) for name, config in vars(recipe).items() if "_fit" in name},
            **changes,
        },
    )


class RecordedProgress:
    """Progress that remembers what it was told and may stop the run at a step of a stage."""

    def __init__(self, stop: tuple[str, int] | None = None) -> None:
        self.stages: dict[str, tuple[int, list[int]]] = {}
        self.units: dict[str, str] = {}
        self.stop = stop
        self.lock = threading.Lock()

    def __call__(self, name: str, total: int, unit: str = "steps") -> Callable[[int], None]:
        done: list[int] = []
        self.stages[name], self.units[name] = (total, done), unit

        def advance(steps: int) -> None:
            with self.lock:
                done.append(steps)
                stop = (name, len(done)) == self.stop
            if stop:
                raise ConnectionError("stopped by the test")

        return advance


def results(folder: Path) -> bytes:
    """The bytes of a run's scores."""
    return (folder / "scores.json").read_bytes()
