"""Requests to a server in the same watched process: 4xx with one sentence, or an answer."""

from __future__ import annotations

import json
import random
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch

import _saving
import _serving
import ensbridge as eb
from ensbridge.deploy.serve.limits import Limits
from ensbridge.methods import BridgeConfig
from faults.mutate import NUMBERS, TEXTS, mutate_bytes, mutate_json
from faults.sandbox import SECONDS, AbstractKind

INFER, PREDICT = "/v2/models/model/infer", "/v1/predict"
OFTEN = 10  # after so many requests a good one is sent, whose answer is checked


class Requests(AbstractKind):
    """Bodies and headers of JSON, binary and multipart requests; HTTP's own framing stays right."""

    name = "requests"
    allowed = ("socket.connect",)

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        model = _saving.small(BridgeConfig())
        model.save(folder / "model", image_shape=(3, 8, 8), class_names=_serving.NAMES)
        self.images = np.random.default_rng(0).random((1, 3, 8, 8), dtype=np.float32)
        with torch.inference_mode():
            self.logits = eb.load(folder / "model")(torch.from_numpy(self.images)).numpy()
        self.document = _serving.request_for(self.images)
        tensor = {"name": "images", "shape": [1, 3, 8, 8], "datatype": "FP32"}
        self.head = {"inputs": [{**tensor, "parameters": {"binary_data_size": self.images.nbytes}}]}
        self.picture = _serving.png(_serving.pixels())
        self.sent = 0
        self.held = ExitStack()
        models = _serving.registry(folder / "model", limits=Limits(wait_ms=0))
        self.address = urlsplit(self.held.enter_context(_serving.serving(models)))

    def valid(self) -> list[bytes]:
        head = json.dumps(self.head).encode()
        upload, headers = _serving.multipart(("a.png", self.picture))
        return [
            self._json(json.dumps(self.document).encode()),
            self._binary(head, self.images.tobytes()),
            request(PREDICT, upload, **headers),
        ]

    def _json(self, body: bytes) -> bytes:
        return request(INFER, body)

    def _binary(self, head: bytes, tail: bytes, length: object = None) -> bytes:
        said = str(len(head) if length is None else length)
        return request(INFER, head + tail, **{"Inference-Header-Content-Length": said})

    def mutated(self, draws: random.Random) -> bytes:
        kind, path = draws.randrange(4), draws.random()
        if kind == 0:
            return self._json(mutate_json(self.document, draws))
        if kind == 1:
            head, tail = json.dumps(self.head).encode(), self.images.tobytes()
            if draws.random() < 0.5:
                head = mutate_json(self.head, draws)
            if draws.random() < 0.3:
                tail = mutate_bytes(tail, draws)
            return self._binary(head, tail, draws.choice(NUMBERS) if draws.random() < 0.2 else None)
        if kind == 2:
            picture = mutate_bytes(self.picture, draws)
            body, headers = _serving.multipart(("a.png", picture), ("b.png", self.picture))
            return request(PREDICT, body, **headers)
        body, headers = _serving.multipart(("a.png", self.picture))
        if draws.random() < 0.3:
            headers["Content-Type"] = draws.choice(
                (*TEXTS, "multipart/form-data", "multipart/form-data; boundary=")
            )
        return request(PREDICT if path < 0.9 else INFER, mutate_bytes(body, draws), **headers)

    def read(self, content: bytes) -> None:
        status, body = self._send(content)
        self.sent += 1
        if self.sent % OFTEN == 0:
            self._check_others()
        if 400 <= status < 500:
            sentence = json.loads(body)["error"]
            raise ValueError(sentence)
        if not 200 <= status < 300:
            raise RuntimeError(f"status {status}: {body[:200]!r}")
        json.loads(body)

    def _check_others(self) -> None:
        status, body = self._send(self.valid()[0])
        assert status == 200, body
        logits = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}["logits"]
        assert np.allclose(logits, self.logits.ravel(), rtol=0, atol=1e-5 * max(1, np.abs(self.logits).max()))

    def _send(self, content: bytes) -> tuple[int, bytes]:
        assert self.address.hostname
        assert self.address.port
        with socket.create_connection(
            (self.address.hostname, self.address.port), timeout=2 * SECONDS
        ) as client:
            client.sendall(content)
            answer = b"".join(iter(lambda: client.recv(2**16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 "):
            raise ConnectionError("the connection was closed without an answer")
        return int(head[9:12]), body

    def close(self) -> None:
        """End the server."""
        self.held.close()


def request(path: str, body: bytes, **headers: str) -> bytes:
    """A whole request whose framing is right, whatever its headers say."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items() if value.isprintable()]
    return "\r\n".join([*lines, "", ""]).encode("latin1", "replace") + body
