"""The server as a process: its address, its signals and its end."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from ensbridge.deploy.serve.app import create_app
from ensbridge.deploy.serve.limits import GRACE
from ensbridge.deploy.serve.served import Registry


def bind(host: str, port: int) -> socket.socket:
    """An address of this machine, taken but not yet listened at; ValueError where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
        except OSError:
            taken.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"{host}:{port} cannot be listened at ({reason}); give another --host or --port"
        ) from error
    return taken


def address(taken: socket.socket) -> str:
    """The address for a browser."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """A server that says when it listens, and closes connections on which nothing is asked."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready
        self._idle: dict[Any, tuple[Any, float]] = {}  # by connection: its last request, and since when

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets=sockets)
        if self.started:
            self.ready()

    async def on_tick(self, counter: int) -> bool:
        """Every second also look for idle connections."""
        if counter % 10 == 0:
            self.close_idle(time.monotonic())
        return await super().on_tick(counter)

    def close_idle(self, now: float) -> None:
        """Close what has had no request for longer than a connection is kept.

        uvicorn itself does so only after an answer, and not once a part of the next request has come.
        """
        keep, idle = self.config.timeout_keep_alive, {}
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            request, transport = connection.cycle, connection.transport
            if not (request is None or request.response_complete or transport.is_closing()):
                continue
            last, since = self._idle.get(connection, (request, now))
            idle[connection] = request, since if last is request else now
            seconds = now - idle[connection][1]
            if seconds > 2 * keep:  # its client does not read what is left of an answer
                transport.abort()
            elif seconds > keep:
                transport.close()
        self._idle = idle


def make_server(
    models: Registry, token: str | None = None, ready: Callable[[], None] = lambda: None
) -> Server:
    """A server that is not yet started; `run(sockets=[…])` starts it."""
    # A client that sends nonsense must not fill the log.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        create_app(models, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=15,
        timeout_graceful_shutdown=int(GRACE),
        limit_concurrency=models.limits.connections,
    )
    return Server(config, ready)


def serve(
    models: Registry, taken: socket.socket, token: str | None = None, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or an interrupt; requests that were accepted are answered first."""
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal that ended it once more at its end, which is no failure here.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
    make_server(models, token, ready).run(sockets=[taken])
