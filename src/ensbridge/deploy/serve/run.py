"""The server as a process: its address, its signals and its end."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

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
    """A server that says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets=sockets)
        if self.started:
            self.ready()


def make_server(
    models: Registry, token: str | None = None, ready: Callable[[], None] = lambda: None
) -> Server:
    """A server that is not yet started; `run(sockets=[…])` starts it."""
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
