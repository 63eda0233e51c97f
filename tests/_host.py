"""A server of one file on this machine, which misbehaves as a test wants; used as `import _host`."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Host:
    """The server, its misbehaviour, and which ranges it was asked for."""

    def __init__(self, content: bytes, tls: ssl.SSLContext | None = None) -> None:
        self.content = content
        self.cut: int | None = None  # bytes of an answer before the connection ends
        self.cuts = 10**9  # how many answers are cut
        self.status = 200
        self.ranges = True
        self.length = True
        self.claims: int | None = None  # what the answer says of its length
        self.moved: str | None = None  # where it says that the file is now
        self.stall = threading.Event()
        self.stalls = False
        self.asked: list[str | None] = []
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.server.server_port}/file.tar.gz"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append(wanted)
        if self.moved is not None:
            request.send_response(302)
            request.send_header("Location", self.moved)
            request.end_headers()
            return
        if self.status != 200:
            request.send_error(self.status)
            return
        start = int(wanted[6:-1]) if wanted and self.ranges else 0
        if start and start >= len(self.content):
            request.send_error(416)
            return
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        if self.length:
            request.send_header("Content-Length", str(self.claims or len(self.content) - start))
        request.end_headers()
        rest = self.content[start:]
        if self.cut is not None and self.cuts > 0:
            self.cuts -= 1
            rest = rest[: self.cut]
        request.wfile.write(rest)
        if self.stalls:
            request.wfile.flush()
            self.stall.wait(30)


@contextmanager
def serving(content: bytes, tls: ssl.SSLContext | None = None) -> Iterator[Host]:
    made = Host(content, tls)
    yield made
    made.stall.set()
    made.server.shutdown()
    made.server.server_close()
