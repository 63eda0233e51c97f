"""Which kind of step a run takes: the fastest that works where it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch

from ensbridge.methods.base import AbstractTrainable
from ensbridge.training.batches import AbstractBatches, TrainData
from ensbridge.training.compiled import CapturedStep, CompiledStep
from ensbridge.training.config import FitConfig
from ensbridge.training.ema import Average
from ensbridge.training.optimizers import Optimizers
from ensbridge.training.step import AbstractStep, EagerStep
from ensbridge.training.timing import TimeSplit

StepKind = Literal["captured", "compiled", "eager"]
# What a step is made of.
Parts = tuple[AbstractTrainable, TrainData, FitConfig, Optimizers, Average, AbstractBatches, TimeSplit]

STEPS: dict[StepKind, type[AbstractStep]] = {
    "captured": CapturedStep,
    "compiled": CompiledStep,
    "eager": EagerStep,
}


def step_kinds(wish: StepKind | None, device: torch.device) -> Sequence[StepKind]:
    """The kinds to be tried on a device, in their order; a wish is the only one.

    >>> step_kinds(None, torch.device("cuda")), step_kinds(None, torch.device("cpu"))
    (('captured', 'compiled', 'eager'), ('eager',))
    """
    if wish is None:
        return get_args(StepKind) if device.type == "cuda" else ("eager",)
    if wish not in STEPS:
        raise ValueError(f"step is {wish!r}; it must be one of {', '.join(map(repr, STEPS))}")
    if wish == "captured" and device.type != "cuda":
        raise ValueError(f"step is 'captured' and the data is on the {device.type}; move it to a GPU")
    return (wish,)


def steps_that_work(kinds: Sequence[StepKind], parts: Parts, restore: Callable[[], None]) -> AbstractStep:
    """Steps of the first kind that can be prepared; a warning says why another could not.

    `restore` undoes what preparing did to weights and memory, whether it worked or not.
    """
    for kind, following in zip(kinds, (*kinds[1:], None), strict=True):
        steps = STEPS[kind](*parts)
        try:
            steps.prepare()
            return steps
        except Exception as error:  # compilers and drivers raise what they like
            steps.close()
            if following is None:
                raise
            warnings.warn(
                f"{kind} steps do not work here ({_reason(error)}); falling back to {following} ones",
                stacklevel=3,
            )
        finally:
            restore()
    raise AssertionError("there is always a last kind")


def _reason(error: Exception) -> str:
    """The first line of an error, and the second where the first only announces it.

    >>> _reason(RuntimeError("backend='inductor' raised:\\nno compiler was found\\nmore"))
    "backend='inductor' raised: no compiler was found"
    """
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {more[0]}" if first.endswith(":") and more else first
