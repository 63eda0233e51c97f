"""A stream of metrics: batches, shards and sums of states give what the whole set gives."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import log_loss
from torch import Tensor

import _tiny
from ensbridge.metrics import (
    MetricStream,
    accuracy,
    brier,
    ece,
    nll,
)


@pytest.mark.parametrize("chunk", [1, 10, 64, 157, 1000])
def test_streaming_equals_one_pass(chunk: int) -> None:
    log_probs, labels = _tiny.predictions()
    stream = MetricStream(temperature=1.7)
    for some_log_probs, some_labels in zip(log_probs.split(chunk), labels.split(chunk), strict=True):
        stream.update(some_log_probs, some_labels)
    scores = stream.compute()
    tempered = (log_probs / 1.7).log_softmax(-1)
    truths = {
        "acc": accuracy(log_probs, labels),
        "nll": nll(log_probs, labels),
        "brier": brier(log_probs, labels),
        "ece": ece(log_probs, labels),
        "cnll": log_loss(labels, tempered.exp(), labels=range(7)),
        "count": 157,
    }
    assert scores == pytest.approx(truths, rel=1e-12)
    assert scores["acc"] == truths["acc"]
    assert isinstance(scores["count"], int)


def shards_of(log_probs: Tensor, labels: Tensor, sizes: list[int], bins: int = 15) -> list[MetricStream]:
    shards = []
    for some_log_probs, some_labels in zip(log_probs.split(sizes), labels.split(sizes), strict=True):
        shards.append(MetricStream(bins=bins, temperature=0.6))
        shards[-1].update(some_log_probs, some_labels)
    return shards


def test_merged_shards_equal_the_whole() -> None:
    log_probs, labels = _tiny.predictions()
    (whole,) = shards_of(log_probs, labels, [157])
    first, *others = shards_of(log_probs, labels, [100, 0, 56, 1])
    for other in others:
        before = other.state()
        first.merge(other)
        assert torch.equal(other.state(), before)
    assert first.compute() == pytest.approx(whole.compute(), rel=1e-12)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_summed_states_equal_the_whole(bins: int) -> None:
    log_probs, labels = _tiny.predictions()
    (whole,) = shards_of(log_probs, labels, [157], bins)
    total = torch.stack([shard.state() for shard in shards_of(log_probs, labels, [31, 126], bins)]).sum(0)
    summed = MetricStream.from_state(total, temperature=0.6)
    assert summed.bins == bins
    assert summed.compute() == pytest.approx(whole.compute(), rel=1e-12)


def test_a_state_makes_the_round_trip_and_is_a_copy() -> None:
    (stream,) = shards_of(*_tiny.predictions(), [157])
    state = stream.state()
    assert state.dtype == torch.float64
    assert state.ndim == 1
    copy = MetricStream.from_state(state, temperature=0.6)
    scores = stream.compute()
    assert copy.compute() == scores
    state.zero_()
    assert stream.compute() == copy.compute() == scores
    copy.update(*_tiny.predictions(count=5))
    assert copy.compute()["count"] == 162
    assert stream.compute()["count"] == 157
    copy.merge(stream)  # the temperature came along, so that they may be merged


def test_wrong_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="bins is 0"):
        MetricStream(bins=0)
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temperature is {temperature}"):
            MetricStream(temperature=temperature)
    with pytest.raises(ValueError, match="0 images"):
        MetricStream().compute()
    for other in (MetricStream(bins=10), MetricStream(temperature=2.0)):
        with pytest.raises(ValueError, match="make them equal"):
            MetricStream().merge(other)
    for state in (
        torch.zeros(7).double(),
        torch.zeros(3).double(),
        torch.zeros(2, 3).double(),
        torch.zeros(48),
    ):
        with pytest.raises(ValueError, match="not one of a MetricStream"):
            MetricStream.from_state(state)
