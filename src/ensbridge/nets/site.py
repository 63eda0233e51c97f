"""Where bridges read a source: every feature that it has, and the earliest that leaves room for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ensbridge.cost import count_macs
from ensbridge.nets.sizing import fitting_score, priced_scores
from ensbridge.nets.tap import run_tapped

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
EARLIEST, LATEST = 0.05, 0.8  # a stem tells little, and behind the last layers there is nothing to save


@dataclass(frozen=True)
class Feature:
    """The output of a module that runs once, and the share of the network's work that is done by then."""

    name: str
    output: Tensor  # (1, …)
    share: float


def walk_features(net: nn.Module, image: Tensor) -> list[Feature]:
    """Every module's output that is a map, tokens or a vector, in the order in which they are computed.

    >>> net = nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU()), nn.Flatten(), nn.Linear(16, 3))
    >>> [(each.name, tuple(each.output.shape)) for each in walk_features(net, torch.rand(1, 1, 2, 2))]
    [('0.0', (1, 4, 2, 2)), ('0.1', (1, 4, 2, 2)), ('0', (1, 4, 2, 2)), ('1', (1, 16)), ('2', (1, 3))]
    """
    seen: list[tuple[str, object, int]] = []
    counter = FlopCounterMode(display=False)
    handles = [
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.append((name, output, counter.get_total_flops()))
        )
        for name, module in net.named_modules()
        if name
    ]
    training = net.training
    try:
        with torch.no_grad(), counter:
            net.eval()(image)
    finally:
        net.train(training)
        for handle in handles:
            handle.remove()
    total = max(counter.get_total_flops(), 1)
    runs = [name for name, _, _ in seen]
    found: list[Feature] = []
    for name, output, flops in seen:
        tensor = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or runs.count(name) > 1:
            continue
        if tensor.ndim not in (2, 3, 4) or len(tensor) != len(image):
            continue
        found.append(Feature(name, tensor.detach(), flops / total))
    return found


@dataclass(frozen=True)
class Site:
    """Where bridges read the source, and what reads it there."""

    feature: str
    score: nn.Module  # one of the right size, to be copied
    macs_ratio: float  # of the source with all bridges
    words: str


def choose_site(
    source: nn.Module, image: Tensor, feature: str | None, budget: float, bridges: int = 1
) -> Site:
    """The feature that is named, or the earliest whose bridges fit the budget, with a score network for it.

    Features count from where the source has done a twentieth of its work, and up to four fifths of it; in a
    network of a few large layers, where there are none such, all but the last.

    >>> layers = [nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)]
    >>> choose_site(nn.Sequential(nn.Flatten(), *layers), torch.rand(1, 1, 4, 4), None, budget=1.4).words
    "bridges read '1', the earliest that fits ×1.4 (its output is 256); ×1.25 the source's MACs"
    """
    if not budget > 1:
        raise ValueError(f"budget is {budget}; it must be above 1, such as 1.2 times the source's cost")
    with torch.no_grad():
        classes = run_tapped(source, image)[0].shape[-1]
    whole = count_macs(source, image)
    allowed = (budget - 1) * whole / bridges
    if feature is not None:
        found = [Feature(feature, run_tapped(source, image, feature)[1].detach(), 1.0)]
        why = "as asked"
    else:
        found = _stages(source, walk_features(source, image))
        why = f"the earliest that fits ×{budget:g}"
    for each in found:
        score = fitting_score(each.output, classes, allowed)
        if score is not None:
            words = f"bridges read {each.name!r}, {why}"
            return _site(each.name, score, each.output, whole, bridges, words)
    prices = [macs for each in found for macs, _ in priced_scores(each.output, classes)]
    if not prices:
        raise ValueError(
            "the source has no feature there that a bridge can read; name a module that returns a map, "
            "tokens or a vector"
        )
    cheapest = 1 + bridges * min(prices) / whole
    raise ValueError(
        f"no bridge fits ×{budget:g} the source's cost: the cheapest makes ×{cheapest:.2f}; raise budget to "
        "that, or name another feature"
    )


def _stages(source: nn.Module, features: list[Feature]) -> list[Feature]:
    """The features that are worth reading: of whole blocks, not of layers inside them."""
    within = [each for each in features if EARLIEST <= each.share <= LATEST] or features[:-1]
    modules = dict(source.named_modules())
    blocks = [each.name for each in within if not isinstance(modules[each.name], CONTAINERS)]
    return [each for each in within if not any(each.name.startswith(f"{block}.") for block in blocks)]


def _site(feature: str, score: nn.Module, tapped: Tensor, whole: int, bridges: int, words: str) -> Site:
    state = tapped.new_zeros(1, score.classes), tapped.new_ones(1)  # type: ignore[arg-type]
    ratio = 1 + bridges * count_macs(score, tapped, *state) / whole
    shape = "×".join(map(str, tapped.shape[1:]))
    return Site(feature, score, ratio, f"{words} (its output is {shape}); ×{ratio:.2f} the source's MACs")
