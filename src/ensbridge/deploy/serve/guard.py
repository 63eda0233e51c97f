"""What every request passes before the application sees it: token, size, time. Plain ASGI.

The whole body is read here, within its limits, so that nothing behind this waits for a client.
"""

from __future__ import annotations

import asyncio
import hmac
import time

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ensbridge.deploy.serve.limits import Limits, Refused, busy
from ensbridge.deploy.serve.metrics import Metrics

# What is answered without the token: the page, which holds no secret and asks for the token, and whether
# the server lives, for whoever restarts it.
OPEN = ("/", "/healthz", "/v2/health/live", "/v2/health/ready", "/openapi.json")
OPEN_FOLDERS = ("/page/", "/examples/")
UNTIL = "ensbridge.until"  # in a request's scope: when, by time.monotonic(), nobody waits for it any longer
HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]


class ClientGone(Exception):
    """The client closed the connection before its request was whole."""


class Guard:
    """ASGI middleware in front of the application."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics, token: str | None) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self._token = None if token is None else token.encode()
        self._bytes = 0  # of all requests together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        try:
            await self._within_limits(scope, receive, answer)
        except ClientGone:
            return
        except Refused as refusal:
            if not status:
                response = JSONResponse({"error": refusal.sentence}, refusal.status, refusal.headers)
                await response(scope, receive, answer)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.answered(route, status, time.perf_counter() - begun)

    async def _within_limits(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_token(scope)
        loop, body = asyncio.get_running_loop(), bytearray()
        deadline = loop.time() + self.limits.seconds
        scope[UNTIL] = time.monotonic() + self.limits.seconds
        try:
            try:
                await asyncio.wait_for(self._read(scope, receive, body), self.limits.seconds)
            except asyncio.TimeoutError:
                sentence = f"the request did not arrive within {self.limits.seconds:g} s"
                raise Refused(408, sentence, {"Connection": "close"}) from None
            left = max(0.01, deadline - loop.time())
            try:
                await asyncio.wait_for(self.app(scope, _replay(bytes(body), receive), send), left)
            except asyncio.TimeoutError:
                sentence = f"the answer was not ready within {self.limits.seconds:g} s; try again later"
                raise busy(503, sentence) from None
        finally:
            self._count(-len(body))

    def _count(self, size: int) -> None:
        self._bytes += size
        self.metrics.bodies.set(self._bytes)

    def _check_token(self, scope: Scope) -> None:
        if self._token is None or scope["path"] in OPEN or scope["path"].startswith(OPEN_FOLDERS):
            return
        kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        given = token.encode("latin-1").strip()  # the bytes that were sent
        if kind.lower() != "bearer" or not hmac.compare_digest(given, self._token):
            sentence = "the bearer token is missing or wrong; send Authorization: Bearer …"
            raise Refused(401, sentence, {"WWW-Authenticate": "Bearer"})

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> None:
        """Append the whole request to `body`; what was counted of it is in there, come what may."""
        headers = Headers(scope=scope)
        if (headers.get("content-encoding") or "identity").lower() != "identity":
            raise Refused(415, "the request is compressed; send it as it is")
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit():
            self._check_size(int(length), 0)
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            self._check_size(len(body) + len(part), len(body))
            body += part
            self._count(len(part))
            more = message.get("more_body", False)

    def _check_size(self, size: int, counted: int) -> None:
        if size > self.limits.body:
            sentence = f"the request has more than {self.limits.body:,} bytes; send less"
            raise Refused(413, sentence, {"Connection": "close"})
        others = self._bytes - counted
        if others and others + size > self.limits.bodies:
            raise busy(429, "too many large requests are waiting; try again later")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one message, then what the client does next."""
    read = False

    async def replay() -> Message:
        nonlocal read
        if read:
            return await receive()
        read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
