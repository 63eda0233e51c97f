"""Servers of tiny models for the tests, on a free port of this machine, in a thread of this process."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from ensbridge.deploy.serve.run import address, bind, make_server
from ensbridge.deploy.serve.served import Registry, Settings, parse_specs

NAMES = ("cat", "dog", "bird")


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def registry(*models: str | Path, members: tuple[str, ...] = (), **settings: Any) -> Registry:
    return Registry(parse_specs([str(model) for model in models], members), Settings(**settings))


@contextmanager
def serving(models: Registry, token: str | None = None) -> Iterator[str]:
    """The address of a server, which ends gracefully on leaving."""
    taken = bind("127.0.0.1", 0)
    server = make_server(models, token)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield address(taken)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


def send(
    base: str, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=20)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def multipart(*files: tuple[str, bytes], field: str = "images") -> tuple[bytes, dict[str, str]]:
    """The body and headers of an upload."""
    parts = [
        f'--edge\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n'
        f"Content-Type: image/png\r\n\r\n".encode()
        + content
        + b"\r\n"
        for name, content in files
    ]
    return b"".join(parts) + b"--edge--\r\n", {"Content-Type": "multipart/form-data; boundary=edge"}


def upload(base: str, *files: tuple[str, bytes], query: str = "", **headers: str) -> Answer:
    body, kind = multipart(*files)
    return send(base, "POST", f"/v1/predict{query}", body, {**kind, **headers})


def infer(base: str, model: str, request: Any, tail: bytes | None = None, **headers: str) -> Answer:
    content = request if isinstance(request, bytes) else json.dumps(request).encode()
    if tail is not None:
        headers = {"Inference-Header-Content-Length": str(len(content)), **headers}
    return send(base, "POST", f"/v2/models/{model}/infer", content + (tail or b""), headers)


def request_for(images: np.ndarray) -> dict[str, Any]:
    """The JSON of a request with images."""
    data = images.ravel().tolist()
    return {"inputs": [{"name": "images", "shape": list(images.shape), "datatype": "FP32", "data": data}]}


def pixels(seed: int = 0, size: tuple[int, ...] = (8, 8, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()
