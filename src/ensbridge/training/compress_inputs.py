"""What `compress` is given, checked before anything is trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.data.augment import Augment
from ensbridge.data.examples import ExampleSet, ImageSet
from ensbridge.models.features import find_module, read_logits, uncompiled
from ensbridge.models.preprocessed import Preprocess, with_preprocessing
from ensbridge.training.config import FitConfig, Precision, derive_seed
from ensbridge.utils.devices import device_of, find_device
from ensbridge.utils.inputs import NO_VALUES, call_network
from ensbridge.utils.text import one_line


def checked_config(
    epochs: float | None,
    max_minutes: float | None,
    batch_size: int,
    lr: float,
    augment: Augment | None,
    precision: Precision,
    seed: int,
) -> FitConfig:
    """How to train, with one epoch where minutes are to decide."""
    lengths = {"epochs": epochs, "max_minutes": max_minutes}
    check_numbers(**{name: value for name, value in lengths.items() if value is not None})
    check_numbers(batch_size=batch_size, lr=lr)
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be a whole number, 0 or above")
    if epochs is not None and max_minutes is not None:
        raise ValueError("epochs and max_minutes were both given; give one, since each decides the length")
    if augment is not None and not isinstance(augment, Augment):
        raise ValueError(f"augment is a {type(augment).__name__}; give an ensbridge.data.Augment")
    mixed = replace(augment or Augment(), mixup=0.4)
    length = 1.0 if epochs is None else float(epochs)
    return FitConfig(length, int(batch_size), float(lr), augment=mixed, seed=int(seed), precision=precision)


def check_numbers(**numbers: Any) -> None:
    """Refuse what is no number, or too small a one.

    >>> check_numbers(bridges="2")
    Traceback (most recent call last):
    ValueError: bridges is '2'; it must be a whole number above 0
    """
    for name, value in numbers.items():
        whole = name in ("bridges", "batch_size")
        known = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        number = float(value) if known else math.nan
        if not (1 <= number < math.inf if name == "budget" else 0 < number < math.inf):
            kind = f"a {'whole' if whole else 'finite'} number"
            least = "of 1 or more" if name == "budget" else "above 0"
            raise ValueError(f"{name} is {value!r}; it must be {kind} {least}")


def check_source(source: nn.Module, feature: str | None) -> None:
    """Refuse a feature that is not there, and scripted modules, whose outputs cannot be read."""
    read = source.modules() if feature is None else (source, find_module(source, feature))
    if any(isinstance(module, torch.jit.ScriptModule) for module in read):
        raise ValueError(
            "the first member is scripted by torch.jit, so that bridges cannot read its features; give the "
            "network that was scripted, or put another member first"
        )


def try_validation(source: nn.Module, train: ExampleSet, val: ExampleSet | None) -> None:
    """Refuse validation images that are not like those for training, and labels of no class, now."""
    if val is None:
        return
    if val.shapes != train.shapes:
        shapes = ["; ".join(map(str, data.shapes)) for data in (val, train)]
        raise ValueError(f"val has images of shape {shapes[0]}, train of {shapes[1]}; give them alike")
    if isinstance(train, ImageSet) and isinstance(val, ImageSet):
        (low, high), (least, most) = pixel_range(train), pixel_range(val)
        if not 0.02 <= (most - least + 1e-6) / (high - low + 1e-6) <= 50:  # such as 0 to 255 beside 0 to 1
            ranges = f"val has pixels from {least:.3g} to {most:.3g}, train from {low:.3g} to {high:.3g}"
            raise ValueError(f"{ranges}; give them alike")
    if val.labels is not None:
        try_labels(source, val, val.labels, "val")


def try_labels(source: nn.Module, data: ExampleSet, labels: Tensor, name: str) -> None:
    """Refuse labels of no class that the network has."""
    with torch.no_grad():
        classes = read_logits(call_network(source, next(data.batches(1))[0])).shape[-1]
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(f"{name} has labels from {low} to {high}; the members' are 0 to {classes - 1}")


def training_device(nets: Sequence[nn.Module], device: torch.device | str | None) -> torch.device:
    """The device that is asked for, or a GPU, or else where the first of the networks is."""
    for number, net in enumerate(nets, 1):
        if any(weight.is_meta for weight in (*net.parameters(), *net.buffers())):
            raise ValueError(f"member {number} {NO_VALUES}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else device_of(nets[0])
    return find_device(device)


def pixel_range(data: ImageSet) -> tuple[float, float]:
    """The smallest and the largest pixel, as the networks see them."""
    low, high = data.images.aminmax()
    scale = 255 if data.images.dtype == torch.uint8 else 1
    return float(low) / scale, float(high) / scale


def copy_of(source: nn.Module, say: Callable[[str], None]) -> nn.Module:
    """A copy of the source that is part of what is returned; the source itself where it cannot be copied."""
    try:
        return copy.deepcopy(source)
    except Exception as error:  # whatever a network keeps that cannot be copied
        say(f"the first member cannot be copied ({one_line(error)}), so that the result shares it with you")
        return source


class CannotDistil(ValueError):
    """No copy of the source can be distilled."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}, or give source='frozen'")
        self.reason, self.remedy = reason, remedy


def student_of(
    source: nn.Module,
    factory: Callable[[], nn.Module] | None,
    preprocess: Preprocess | None,
    seed: int,
    device: torch.device,
) -> nn.Module:
    """The network that is distilled: a copy of the source, or a fresh one that `factory` builds."""
    if factory is None:
        try:
            student = copy.deepcopy(source)
        except Exception as error:  # whatever a network keeps that cannot be copied
            raise CannotDistil(
                f"the first member cannot be copied ({one_line(error)})",
                "give factory=, which builds such a network",
            ) from error
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "distilled"))
            fresh = factory()
        if not isinstance(fresh, nn.Module):
            raise ValueError(f"factory returned a {type(fresh).__name__}; it must return a network")
        (student,) = with_preprocessing([uncompiled(fresh)], [preprocess])
        if _layout(student) != _layout(source):
            raise ValueError(
                f"factory returned a {type(fresh).__name__} whose weights are not of the names and shapes of "
                "the first member's; return an untrained network of its architecture"
            )
    weights = list(student.parameters())
    if not weights or any(weight.dtype not in (torch.float32, torch.float64) for weight in weights):
        kinds = ", ".join(sorted({str(weight.dtype) for weight in weights})) or "none"
        raise CannotDistil(
            f"the first member's weights are {kinds}, and only float32 or float64 can be distilled",
            "bring every network and the inputs to float32, each with .float()",
        )
    return student.to(device).requires_grad_()


def _layout(net: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in net.state_dict().items()}
