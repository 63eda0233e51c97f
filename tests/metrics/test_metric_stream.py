"""A stream of metrics: batches give what the whole set gives."""

from __future__ import annotations

import math

import pytest
from sklearn.metrics import log_loss

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


def test_wrong_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="bins is 0"):
        MetricStream(bins=0)
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temperature is {temperature}"):
            MetricStream(temperature=temperature)
    with pytest.raises(ValueError, match="0 images"):
        MetricStream().compute()
