"""How long a training should be, by the time that a few of its steps take."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ensbridge.data.examples import ExampleSet
from ensbridge.methods.base import AbstractMethod, JointTraining
from ensbridge.training.config import FitConfig
from ensbridge.training.fit import fit
from ensbridge.training.optimizers import Configs, shared_config

TIMED, SPAN, MOST_EPOCHS = 4, 50, 200.0
MOST_TIMED = 40  # short steps vary much, so that more of them are timed, for a fiftieth of the time at most
RESERVE = 0.95  # of the time is planned for: a schedule that is cut off never reaches its low rates


class _Enough(Exception):
    """Ends a trial that takes long."""


def epochs_within(
    minutes: float, methods: Mapping[str, AbstractMethod], data: ExampleSet, config: Configs
) -> float:
    """How many epochs of methods trained together fit into so many minutes; the students stay as they were.

    At least one step and at most 200 epochs. A trial of slow steps ends after a quarter of the time.

    >>> import torch
    >>> from ensbridge.methods import DeepEnsemble
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> from ensbridge.data import ImageSet
    >>> data = ImageSet(torch.rand(8, 1, 2, 2), torch.arange(8) % 2)
    >>> epochs_within(1000, {"net": DeepEnsemble([net])}, data, FitConfig(epochs=1, batch_size=4, lr=0.1))
    200.0
    """
    together = JointTraining({name: copy.copy(method) for name, method in methods.items()})
    before = {name: tensor.clone() for name, tensor in together.student.state_dict().items()}
    span = SPAN if data.device.type == "cuda" else 1  # the first warms caches, on a GPU it compiles
    shared = shared_config(together, config)
    few = with_epochs(config, (1 + MOST_TIMED) * span * shared.batch_size / len(data), log_every=span)
    stamps: list[float] = [time.monotonic()]

    def stamp(*_: object) -> None:
        stamps.append(time.monotonic())
        passed = stamps[-1] - stamps[0]
        if (len(stamps) > 2 and passed > 15 * minutes) or (
            len(stamps) > 1 + TIMED and passed > 1.2 * minutes
        ):
            raise _Enough

    with suppress(_Enough):
        fit(together, data, few, progress=stamp)
    together.student.load_state_dict(before)
    ready, step = stamps[1] - stamps[0], (stamps[-1] - stamps[1]) / (span * (len(stamps) - 2))
    seconds = max(60 * minutes - ready, 30 * minutes)  # it is made ready once more for the training itself
    epochs = max(1.0, RESERVE * seconds / step) * shared.batch_size / len(data)
    return float(f"{min(MOST_EPOCHS, epochs):.3g}")


def with_epochs(config: Configs, epochs: float, **changes: Any) -> Configs:
    """A configuration, or one for each method, of another length."""
    if isinstance(config, FitConfig):
        return replace(config, epochs=epochs, **changes)
    return {name: replace(part, epochs=epochs, **changes) for name, part in config.items()}
