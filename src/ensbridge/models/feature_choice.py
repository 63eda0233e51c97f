"""Where bridges read a source: every feature that it has, and the earliest whose bridges fit the budget."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ensbridge.metrics.cost import count_macs, without_fused_kernels
from ensbridge.models.features import Hook, forward_with_features, plain_name, run_with_hooks, uncompiled
from ensbridge.models.sizing import cheapest_macs, fitting_score, has_channels_last
from ensbridge.utils.devices import evaluation_mode
from ensbridge.utils.inputs import Inputs, map_inputs

EARLIEST, LATEST = 0.05, 0.8  # a stem tells little, and behind the last layers there is nothing to save


@dataclass(frozen=True)
class Feature:
    """The output of a module that runs once, and the share of the network's work that is done by then."""

    name: str
    output: Tensor  # (1, …)
    share: float


def list_features(net: nn.Module, image: Inputs) -> list[Feature]:
    """Every module's output that is a map, tokens or a vector, in the order in which they are computed.

    >>> net = nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU()), nn.Flatten(), nn.Linear(16, 3))
    >>> [(f.name, tuple(f.output.shape)) for f in list_features(net, torch.rand(1, 1, 2, 2))]
    [('0.0', (1, 4, 2, 2)), ('0.1', (1, 4, 2, 2)), ('0', (1, 4, 2, 2)), ('1', (1, 16)), ('2', (1, 3))]
    """
    net = uncompiled(net)
    seen: list[tuple[str, object, int]] = []
    counter = FlopCounterMode(display=False)

    def record(name: str) -> Hook:
        return lambda _module, _inputs, output: seen.append((name, output, counter.get_total_flops()))

    hooks = {module: [record(name)] for name, module in _names_of(net).items()}
    with torch.no_grad(), evaluation_mode([net]), without_fused_kernels(net), counter:
        run_with_hooks(net, _two_of(image), hooks)
    total = max(counter.get_total_flops(), 1)
    runs = Counter(name for name, _, _ in seen)
    features: list[Feature] = []
    for name, output, flops in seen:
        tensor = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(tensor, Tensor) and runs[name] == 1 and _trouble(tensor) is None:
            features.append(Feature(name, tensor[:1].detach(), flops / total))
    return features


def _names_of(net: nn.Module) -> dict[str, nn.Module]:
    """A network's modules by the names that `find_module` knows, each once."""
    return {plain_name(name): module for name, module in net.named_modules() if plain_name(name)}


def _two_of(image: Inputs) -> Inputs:
    """Two images, so that what is not of one image each, such as an embedding of positions, shows itself."""
    return map_inputs(lambda tensor: torch.cat([tensor[:1], tensor[:1]]), image)


def _trouble(feature: Tensor) -> str | None:
    """What keeps a bridge from reading a module's output for two images; None where nothing does."""
    if not feature.is_floating_point():
        return f"is of {feature.dtype}"
    if feature.ndim not in (2, 3, 4) or len(feature) != 2:
        return f"is of shape {tuple(feature.shape)} for 2 images"
    return None


class NoBridgeFits(ValueError):
    """There is nothing that a bridge could read, or no bridge for the budget."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


@dataclass(frozen=True)
class FeatureChoice:
    """Where bridges read the source, and what reads it there."""

    feature: str
    score: nn.Module  # one of the right size, to be copied
    macs_ratio: float  # of the source with all bridges
    summary: str  # a sentence about the choice


def choose_feature(
    source: nn.Module, image: Inputs, feature: str | None, budget: float, bridges: int = 1
) -> FeatureChoice:
    """The feature that is named, or the earliest whose bridges fit the budget, with a score network for it.

    Features count from where the source has done a twentieth of its work, and up to four fifths of it; in a
    network of a few large layers, where there are none such, all but the last. Blocks of several layers come
    before single ones.

    >>> layers = [nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)]
    >>> choose_feature(nn.Sequential(nn.Flatten(), *layers), torch.rand(1, 1, 4, 4), None, budget=1.4).summary
    "bridges read '1', the earliest that fits ×1.4 (its output is 256); ×1.25 the source's MACs"
    """
    source = uncompiled(source)
    if not budget > 1:
        raise ValueError(f"budget is {budget}; it must be above 1, such as 1.2 times the source's cost")
    if feature is not None:
        candidates, why = [_named(source, image, feature)], "as asked"
    else:
        candidates, why = _stages(source, list_features(source, image)), f"the earliest that fits ×{budget:g}"
    with torch.no_grad(), evaluation_mode([source]):
        classes = forward_with_features(source, _two_of(image))[0].shape[-1]
    whole = count_macs(source, image)
    allowed = (budget - 1) * whole / bridges
    for candidate in candidates:
        last = has_channels_last(candidate.output, image)
        fitting = fitting_score(candidate.output, classes, allowed, last)
        if fitting is not None:
            macs, score = fitting
            ratio = 1 + bridges * macs / whole
            shape = "×".join(map(str, candidate.output.shape[1:])) + (", channels last" if last else "")
            output = f"its output is {shape}"
            summary = f"bridges read {candidate.name!r}, {why} ({output}); ×{ratio:.2f} the source's MACs"
            return FeatureChoice(candidate.name, score, ratio, summary)
    prices = [
        cheapest_macs(candidate.output, classes, has_channels_last(candidate.output, image))
        for candidate in candidates
    ]
    if not prices:
        raise NoBridgeFits(
            "the source has no feature that a bridge can read",
            "name a module that returns a map, tokens or a vector, or give budget=1.0 for a network without "
            "bridges",
        )
    cheapest = math.ceil(100 * (1 + bridges * min(prices) / whole)) / 100  # rounded up: it is to be followed
    raise NoBridgeFits(
        f"no bridge fits ×{budget:g} the source's cost: the cheapest makes ×{cheapest:.2f}",
        "raise budget to that, name another feature, or give budget=1.0 for a network without bridges",
    )


def _named(source: nn.Module, image: Inputs, feature: str) -> Feature:
    """The feature that the user names."""
    with torch.no_grad(), evaluation_mode([source]):
        output = forward_with_features(source, _two_of(image), feature)[1]
    if trouble := _trouble(output):
        raise ValueError(
            f"the output of feature {feature!r} {trouble}; name a module that returns a map (B, C, H, W), "
            "tokens (B, N, C) or a vector (B, C)"
        )
    return Feature(plain_name(feature), output[:1], 1.0)


def _stages(source: nn.Module, features: list[Feature]) -> list[Feature]:
    """The features that are worth reading, the best first: of blocks, not of layers inside them or alone."""
    within = [feature for feature in features if EARLIEST <= feature.share <= LATEST] or features[:-1]
    modules = _names_of(source)
    whole = [
        feature.name for feature in within if type(modules[feature.name]).forward is not nn.Sequential.forward
    ]
    outer = [feature for feature in within if not any(feature.name.startswith(f"{name}.") for name in whole)]
    return sorted(outer, key=lambda feature: not _is_block(modules[feature.name]))


def _is_block(module: nn.Module) -> bool:
    """Whether there is more to a module than one layer of weights, which a stem of a few parts has not."""
    return sum(weight.ndim > 1 for weight in module.parameters()) > 1
