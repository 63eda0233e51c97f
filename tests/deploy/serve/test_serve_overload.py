"""What a client sends to wear a server out: many large images, large JSON, connections that say nothing."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn

import _serving
from _saving import small
from _serving import infer, pixels, png, request_for, serving, upload
from ensbridge.deploy.serve import routes_v1
from ensbridge.deploy.serve.limits import Limits, Refused
from ensbridge.deploy.serve.protocol import parse_request
from ensbridge.deploy.serve.run import Server
from ensbridge.deploy.serve.served import Registry
from ensbridge.methods import BridgeConfig

LIMITS = Limits(pixels=64, request_pixels=160, json=100_000, seconds=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    folder = tmp_path_factory.mktemp("overload") / "model"
    small(BridgeConfig()).save(folder, image_shape=(3, 8, 8), class_names=_serving.NAMES)
    return _serving.registry(folder, limits=LIMITS)


# ------------------------------------------------------------------------------ images


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pictures that are decoded, as they are."""
    pictures: list[Any] = []
    decode = routes_v1.picture

    def picture(*arguments: Any) -> Any:
        pictures.append(decode(*arguments))
        return pictures[-1]

    monkeypatch.setattr(routes_v1, "picture", picture)
    return pictures


def test_the_pixels_of_all_images_together_are_bounded(models: Registry, opened: list[Any]) -> None:
    image = png(pixels())  # of 64 pixels: two and a half are allowed
    with pytest.raises(Refused) as refused:
        routes_v1.read_uploads(models.find(), [("a.png", image)] * 100, LIMITS, time.monotonic() + 60)
    assert refused.value.status == 413
    assert "number 3 (a.png)" in refused.value.sentence
    assert len(opened) == 3
    batch = routes_v1.read_uploads(models.find(), [("a.png", image)] * 2, LIMITS, time.monotonic() + 60)
    assert batch.shape == (2, 3, 8, 8)


def test_no_image_is_decoded_when_nobody_waits_any_longer(
    models: Registry, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 10.0 + len(opened))  # an image takes a second
    monkeypatch.setattr(routes_v1, "time", clock)
    with pytest.raises(Refused) as refused:
        routes_v1.read_uploads(models.find(), [("a.png", png(pixels(0, (2, 2, 3))))] * 9, LIMITS, 13.0)
    assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "1"})
    assert len(opened) == 3


def test_a_request_is_decoded_until_its_own_time_is_over(
    models: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, given = time.monotonic(), []
    read = routes_v1.read_uploads

    def reading(*arguments: Any) -> Any:
        given.append(arguments[-1])
        return read(*arguments)

    monkeypatch.setattr("ensbridge.deploy.serve.routes_v1.read_uploads", reading)
    with serving(models) as base:
        image = png(pixels())
        assert upload(base, ("a.png", image)).status == 200
        assert upload(base, *[("a.png", image)] * 3).status == 413
    assert all(begun < until < time.monotonic() + 0.75 * LIMITS.seconds for until in given)
    assert len(given) == 2


# ------------------------------------------------------------------------------ JSON


def test_large_json_is_refused_before_it_is_parsed(models: Registry) -> None:
    for length in (None, "100001"):
        with pytest.raises(Refused, match="send binary tensors") as refused:
            parse_request(b"[" * 100_001, length, (3, 8, 8), torch.float32, LIMITS)
        assert refused.value.status == 413
    with pytest.raises(Refused, match="no inference request"):
        parse_request(b"[" * 100_000, None, (3, 8, 8), torch.float32, LIMITS)


def test_what_is_parsed_in_a_thread_gets_the_same_answer(models: Registry) -> None:
    images = np.random.default_rng(0).random((100, 3, 8, 8), np.float32).round(3)
    with serving(models) as base:
        asked = request_for(images[:1])
        few = infer(base, "model", asked).json()["outputs"]
        padded = json.dumps(asked).encode() + b" " * 2**16
        assert infer(base, "model", padded).json()["outputs"] == few
        assert infer(base, "model", b"[" * 2**16).status == 400
        head = request_for(images)
        del head["inputs"][0]["data"]
        head["inputs"][0]["parameters"] = {"binary_data_size": images.nbytes}
        many = infer(base, "model", head, images.tobytes())
    for one, all_ in zip(few, many.json()["outputs"], strict=True):
        assert all_["shape"] == [100, 3]
        np.testing.assert_allclose(all_["data"][:3], one["data"], atol=1e-5)


# ------------------------------------------------------------------------------ connections


class Connection:
    """A connection of uvicorn's, as far as closing it goes."""

    def __init__(self, cycle: Any = None) -> None:
        self.cycle, self.transport, self.closed = cycle, self, ""

    def is_closing(self) -> bool:
        return self.closed != ""

    def close(self) -> None:
        self.closed = "closed"

    def abort(self) -> None:
        self.closed = "aborted"


def request(complete: bool) -> SimpleNamespace:
    return SimpleNamespace(response_complete=complete)


def test_connections_without_a_request_are_closed() -> None:
    server = Server(uvicorn.Config(lambda: None, timeout_keep_alive=15), lambda: None)
    silent, answered, busy, used = (
        Connection(),
        Connection(request(True)),
        Connection(request(False)),
        Connection(request(True)),
    )
    connections = (silent, answered, busy, used)
    server.server_state.connections = set(connections)  # type: ignore[arg-type]
    server.close_idle(100)
    server.close_idle(115)
    assert [connection.closed for connection in connections] == ["", "", "", ""]
    used.cycle = request(True)  # one more was answered between two looks
    server.close_idle(116)
    assert [connection.closed for connection in connections] == ["closed", "closed", "", ""]
    server.server_state.connections.remove(answered)  # type: ignore[arg-type]
    server.close_idle(131)
    assert [connection.closed for connection in connections] == ["aborted", "closed", "", ""]
    server.close_idle(132)
    assert used.closed == "closed"
    assert busy.closed == ""
    assert set(server._idle) == {silent, used}
