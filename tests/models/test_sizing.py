"""What score networks cost, counted without values, and the largest that fits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ensbridge.metrics.cost import count_macs
from ensbridge.models.score_net import TokenScore
from ensbridge.models.sizing import MapScore, _priced, fitting_score

FEATURES = [
    ((1, 12, 16, 16), False),
    ((1, 16, 8, 8), False),
    ((1, 20, 7, 5), False),
    ((1, 4, 1, 1), False),
    ((1, 8, 8, 24), True),
    ((1, 16, 17, 10), True),
    ((1, 5, 24), False),
    ((1, 40), False),
]


@pytest.mark.parametrize(("shape", "channels_last"), FEATURES)
def test_macs_without_values_are_those_of_a_real_run(shape: tuple[int, ...], channels_last: bool) -> None:
    h, state, now = torch.rand(shape), torch.rand(1, 3), torch.ones(1)
    for pair in _priced(h, 3, channels_last):
        assert len(pair) == 2
        for macs, build in pair:
            assert macs == count_macs(build(), h, state, now)


@pytest.mark.parametrize("size", [7, 16])
@pytest.mark.parametrize("channels", [9, 31, 64, 256])
def test_of_each_kind_the_wider_is_the_dearer(channels: int, size: int) -> None:
    for shape in ((1, channels, size, size), (1, size, channels), (1, channels)):
        prices = [[macs for macs, _ in pair] for pair in _priced(torch.zeros(shape), 3, False)]
        for kind in zip(*prices, strict=True):
            assert all(one < wider for one, wider in pairwise(kind))


def test_the_largest_that_fits_is_built_with_weights() -> None:
    h = torch.rand(1, 24, 8, 8)
    prices = [macs for pair in _priced(h, 3, False) for macs, _ in pair]
    for most in prices:
        fitting = fitting_score(h, 3, most)
        assert fitting is not None
        macs, score = fitting
        assert macs == most == count_macs(score, h, torch.zeros(1, 3), torch.ones(1))
        assert all(not tensor.is_meta for tensor in score.state_dict().values())
    assert fitting_score(h, 3, min(prices) - 1) is None


def test_a_large_map_is_priced_without_being_computed() -> None:
    large = torch.zeros(1, 256, 8192, 8192, device="meta")  # 64 GiB
    fitting = fitting_score(large, 3, 1e15)
    assert fitting is not None
    assert isinstance(fitting[1], MapScore)
    tokens = fitting_score(large.flatten(2).mT, 3, 1e15)
    assert tokens is not None
    assert isinstance(tokens[1], TokenScore)


def test_pricing_draws_nothing() -> None:
    before = torch.get_rng_state()
    assert fitting_score(torch.zeros(1, 8, 4, 4), 3, 1) is None
    assert torch.get_rng_state().equal(before)
