"""How long a training should be, by the time that a few of its steps take."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ensbridge.methods.base import AbstractMethod, JointTraining
from ensbridge.training.batches import TrainData
from ensbridge.training.config import FitConfig
from ensbridge.training.distributed import Engine
from ensbridge.training.fit import fit
from ensbridge.training.optimizers import Configs
from ensbridge.training.output_cache import length_of

TIMED, SPAN, MOST_EPOCHS = 4, 50, 200.0
MOST_TIMED = 40  # short steps vary much, so that more of them are timed, for a fiftieth of the time at most
RESERVE = 0.95  # of the time is planned for: a schedule that is cut off never reaches its low rates


class _Enough(Exception):
    """Ends a trial that takes long."""


def epochs_within(
    minutes: float,
    methods: Mapping[str, AbstractMethod],
    data: TrainData,
    config: Configs,
    engine: Engine | None = None,
) -> float:
    """How many epochs of methods trained together fit into so many minutes; the students stay as they were.

    At least one step and at most 200 epochs. A trial of slow steps ends after a quarter of the time.

    >>> import torch
    >>> from ensbridge.data import ImageSet
    >>> from ensbridge.methods import DeepEnsemble
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> data = ImageSet(torch.rand(8, 1, 2, 2), torch.arange(8) % 2)
    >>> epochs_within(1000, {"net": DeepEnsemble([net])}, data, FitConfig(epochs=1, batch_size=4, lr=0.1))
    200.0
    """
    first = config if isinstance(config, FitConfig) else next(iter(config.values()))
    steps = steps_within(minutes, methods, data, config, engine)
    return float(f"{min(MOST_EPOCHS, steps * first.batch_size / length_of(data)):.3g}")


def steps_within(
    minutes: float,
    methods: Mapping[str, AbstractMethod],
    data: TrainData,
    config: Configs,
    engine: Engine | None = None,
) -> float:
    """How many steps fit into so many minutes, by a trial of a few; the students stay as they were."""
    together = JointTraining({name: copy.copy(method) for name, method in methods.items()})
    before = {name: tensor.clone() for name, tensor in together.student.state_dict().items()}
    # The first warms caches, on a GPU it compiles.
    span = SPAN if data.device.type == "cuda" else 1
    few = with_length(config, steps=(1 + MOST_TIMED) * span, log_every=span)
    stamps = [(0, time.monotonic())]

    def stamp(step: int, *_: object) -> None:
        stamps.append((step, time.monotonic()))
        passed = stamps[-1][1] - stamps[0][1]
        enough = passed > 15 * minutes if len(stamps) < 2 + TIMED else passed > 1.2 * minutes
        enough = enough and len(stamps) > 2
        if engine.any(enough) if engine else enough:
            raise _Enough

    with suppress(_Enough):
        fit(together, data, few, progress=stamp, engine=engine)
    together.student.load_state_dict(before)
    (_, begun), (first, ready), (last, ended) = stamps[0], stamps[1], stamps[-1]
    # It is made ready once more for the training itself.
    seconds = max(60 * minutes - (ready - begun), 30 * minutes)
    steps = max(1.0, RESERVE * seconds * (last - first) / (ended - ready))
    return engine.broadcast(lambda: steps) if engine else steps


def with_length(config: Configs, **changes: Any) -> Configs:
    """A configuration, or one for each method, with other `epochs` or `steps`."""
    if isinstance(config, FitConfig):
        return replace(config, **changes)
    return {name: replace(part, **changes) for name, part in config.items()}
