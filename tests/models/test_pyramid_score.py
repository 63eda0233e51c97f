"""The score network that reads several maps: its exact size and cost, how it is put together, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _tiny
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models import PyramidScore
from ensbridge.models.features import forward_with_features


def maps(count: int = 4, seed: int = 0) -> tuple[Tensor, ...]:
    """Maps as `_tiny.pyramid` reads them."""
    draws = _tiny.generator(seed)
    return tuple(torch.randn(count, *shape, generator=draws) for shape in ((8, 8, 8), (16, 4, 4), (8, 8, 8)))


class OfMaps(nn.Module):
    """The network as a function of its maps alone."""

    def __init__(self, net: PyramidScore) -> None:
        super().__init__()
        self.net = net

    def forward(self, *given: Tensor) -> Tensor:
        return self.net(given, None, None)


def test_it_has_the_exact_size_and_cost() -> None:
    net = PyramidScore(3, [8, 16, 8], [(1, 8, 1, 1), (2, 16, 2, 2)], joins=[1, 0], stem=4, stride=2, last=10)
    # The first map is 8×8 and is halved by the stem, then by the second stage.
    convolutions = [  # (weights, pixels of the output)
        (8 * 4 * 9, 16),  # stem
        (4 * 9, 16),  # first stage: depthwise and pointwise, of stride 1
        (4 * 8, 16),
        (8 * 16, 16),  # second stage, expansion 2: 8 → 16 → 16 channels of half the size
        (16 * 9, 4),
        (16 * 16, 4),
        (16 * 32, 4),  # and 16 → 32 → 16
        (32 * 9, 4),
        (32 * 16, 4),
        (16 * 16, 4),  # entry of the second map, behind the second stage
        (8 * 8, 16),  # entry of the third, behind the first
        (16 * 10, 4),  # tail
    ]
    normalised = 4 + (4 + 8) + (16 + 16 + 16) + (32 + 32 + 16) + 16 + 8 + 10
    head = 10 * 3
    assert count_params(net) == sum(weights for weights, _ in convolutions) + 2 * normalised + head + 3
    given = torch.zeros(1, 8, 8, 8), torch.zeros(1, 16, 2, 2), torch.zeros(1, 8, 4, 4)
    macs = sum(weights * pixels for weights, pixels in convolutions)
    assert count_macs(OfMaps(net.eval()), *given, convs_only=True) == macs
    assert net.eval()(given, None, None).shape == (1, 3)


@torch.no_grad()
def test_each_later_map_is_added_behind_its_stage() -> None:
    net, (first, second, third) = _tiny.pyramid(), maps()
    entries, stages = list(net.entries), list(net.stages)
    x = stages[0](net.stem(first)) + entries[1](third)
    x = stages[1](x) + entries[0](second)
    expected = net.head(net.tail(x).mean((2, 3)))
    torch.testing.assert_close(net((first, second, third), None, None), expected)


@torch.no_grad()
def test_later_maps_matter_and_without_their_entries_it_is_the_network_of_the_first() -> None:
    net, given = _tiny.pyramid(), maps()
    whole = net(given, None, None)
    for index in range(3):
        other = [*given]
        other[index] = other[index] + 1
        assert not net(tuple(other), None, None).allclose(whole, atol=1e-3)
    for entry in net.entries:
        nn.init.zeros_(entry[0].weight)  # type: ignore[index,arg-type]
    alone = PyramidScore(3, [8], [(1, 8, 1, 1), (2, 16, 1, 2)], joins=[], stem=8, last=16).eval()
    alone.load_state_dict({name: each for name, each in net.state_dict().items() if "entries" not in name})
    expected = alone(given[0], None, None)
    assert net(given, None, None).equal(expected)
    assert alone(given[:1], None, None).equal(expected)
    assert net((given[0], *(torch.randn_like(each) for each in given[1:])), None, None).equal(expected)


def test_gradients_reach_every_weight_and_map() -> None:
    net, given = _tiny.pyramid().train(), [each.requires_grad_() for each in maps()]
    net(tuple(given), None, None).square().sum().backward()
    tensors = [*net.parameters(), *given]
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in tensors)


def test_its_arguments_build_it_again() -> None:
    net = _tiny.pyramid()
    again = PyramidScore(**net.arguments)
    again.load_state_dict(net.state_dict())
    assert again.eval()(maps(), None, None).equal(net(maps(), None, None))
    assert str(again) == str(net)


def test_it_reads_what_a_source_gives() -> None:
    logits, *read = forward_with_features(_tiny.member(), _tiny.images(), *_tiny.FEATURES)
    assert [tuple(each.shape[1:]) for each in read] == [(8, 8, 8), (16, 4, 4), (8, 8, 8)]
    assert _tiny.pyramid()(tuple(read), None, None).shape == logits.shape


STAGES = [(1, 8, 1, 1), (2, 16, 1, 2)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"classes": 0}, "'classes': 0"),
        ({"channels": []}, r"'channels': \[\]"),
        ({"channels": [8, 0]}, r"\[8, 0\]"),
        ({"stages": []}, r"'stages': \[\]"),
        ({"stages": [(1, 8, 0, 1), (2, 16, 1, 2)]}, r"\[1, 8, 0, 1\]"),
        ({"stem": -1}, "'stem': -1"),
        ({"stride": 0}, "'stride': 0"),
        ({"last": 0}, "'last': 0"),
        ({"joins": []}, r"joins are \[\] for 2 maps"),
        ({"joins": [0, 1]}, r"joins are \[0, 1\] for 2 maps"),
        ({"joins": [2]}, r"joins are \[2\].*2 stages"),
        ({"joins": [-1]}, r"joins are \[-1\].*2 stages"),
    ],
)
def test_wrong_numbers_are_refused(changes: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"classes": 3, "channels": [8, 16], "stages": STAGES, "joins": [1]}
    with pytest.raises(ValueError, match=named):
        PyramidScore(**{**arguments, "stem": 8, "last": 16, **changes})


@pytest.mark.parametrize(
    "shapes",
    [
        [],
        [(2, 8, 8, 8)],
        [(2, 8, 8, 8), (2, 16, 4, 4)],
        [(2, 8, 8, 8), (2, 16, 4, 4), (2, 8, 8, 8), (2, 8, 8, 8)],
        [(2, 16, 4, 4), (2, 8, 8, 8), (2, 8, 8, 8)],
        [(2, 8, 8, 8), (2, 16), (2, 8, 8, 8)],
    ],
)
def test_other_maps_than_it_takes_are_refused(shapes: Sequence[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"takes \(B, 8, H, W\), \(B, 16, H, W\), \(B, 8, H, W\)") as caught:
        _tiny.pyramid()(tuple(map(torch.zeros, shapes)), None, None)
    assert str([*shapes]) in str(caught.value)


def test_one_map_in_place_of_several_is_refused_even_where_the_batch_is_as_large() -> None:
    with pytest.raises(ValueError, match=r"\[\(3, 8, 8, 8\)\]"):
        _tiny.pyramid()(torch.zeros(3, 8, 8, 8), None, None)


@pytest.mark.parametrize("size", [8, 1])  # one of 1×1 could be added to all
def test_a_map_of_another_size_than_what_it_is_added_to_is_refused(size: int) -> None:
    first, _, third = maps()
    with pytest.raises(ValueError, match=f"{size}×{size} .*stage 1's of 4×4"):
        _tiny.pyramid()((first, torch.zeros(4, 16, size, size), third), None, None)
