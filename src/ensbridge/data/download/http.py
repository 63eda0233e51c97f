"""Download a file, resuming a partial one, and verify its checksum."""

from __future__ import annotations

import hashlib
import os
import re
from errno import EDQUOT, ENOSPC
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ensbridge.utils.files import errors_name, nofollow, open_regular_file
from ensbridge.utils.progress import Stage, silent
from ensbridge.utils.text import one_line

_BLOCK = 2**20
_ATTEMPTS = 20


class Unavailable(Exception):
    """The reason why a source does not provide a file."""


def download(
    url: str, part: Path, sha256: str, size: int, stage: Stage = silent, timeout: float = 10.0
) -> None:
    """Download the file of `size` bytes at `url` to `part`, resuming a partial one, or raise Unavailable.

    Once this returns, the checksum of `part` is right. A partial file that turns out wrong is downloaded
    once more from the start. Never more than `size` bytes are kept, whatever the server says or sends.
    """
    old = part.exists()
    if old and is_right(part, sha256, size):
        return
    _fill(url, part, size, stage, timeout)
    if is_right(part, sha256, size):
        return
    part.unlink()
    if not old:
        raise Unavailable(f"{urlsplit(url).netloc} gave a file with a wrong checksum")
    download(url, part, sha256, size, stage, timeout)


def is_right(path: Path, sha256: str, size: int) -> bool:
    """Whether a file has this size and SHA-256."""
    digest = hashlib.sha256()
    with open_regular_file(path) as file:
        if os.fstat(file.fileno()).st_size != size:
            return False
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest() == sha256


def _fill(url: str, part: Path, size: int, stage: Stage, timeout: float) -> None:
    """Download until the part is complete, resuming after each interruption while there is progress."""
    host, cut = urlsplit(url).netloc, ""
    for _ in range(_ATTEMPTS):
        before = _size(part)
        try:
            _append(url, part, size, stage, timeout)
            cut = "the connection ended"
        except HTTPError as error:
            if error.code != 416 or not before:
                raise Unavailable(f"{host} responds {error.code} {error.reason}") from error
            part.unlink()  # longer than the file: it belongs to another one
            continue
        except (OSError, HTTPException) as error:
            if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT):
                raise  # the disk's error, not the server's
            cut = one_line(getattr(error, "reason", None) or error)
            if not before and not _size(part):
                raise Unavailable(f"{host} cannot be reached ({cut})") from error
        if _size(part) == size:
            return
        if _size(part) <= before:
            break
    done = f"{_size(part) / 1e6:,.1f} MB"
    raise Unavailable(f"{host} stopped after {done} ({cut}); the same command resumes there")


class _Redirects(HTTPRedirectHandler):
    """Redirections, except from https to another scheme."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise Unavailable(f"{req.host} redirects to {newurl[:80]!a}, which is not encrypted")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _append(url: str, part: Path, size: int, stage: Stage, timeout: float) -> None:
    """Append what the server sends to the part, up to the size of the complete file."""
    start = _size(part)
    request = Request(
        url, headers={"User-Agent": "ensbridge"} | ({"Range": f"bytes={start}-"} if start else {})
    )
    with build_opener(_Redirects).open(request, timeout=timeout) as response:
        resumed, total = _parse_range(response, start)
        if total not in (None, size):
            host = urlsplit(url).netloc
            raise Unavailable(f"{host} has a file of {total:,} bytes; it should have {size:,}")
        advance = stage("download", size // _BLOCK, "MiB")
        done = start if resumed else 0
        advance(done // _BLOCK)
        # Flushed at once, so that an interruption loses nothing.
        with open(part, "ab" if resumed else "wb", opener=nofollow) as file:
            while done < size and (block := response.read1(min(_BLOCK, size - done))):
                with errors_name(part):
                    file.write(block)
                    file.flush()
                advance((done + len(block)) // _BLOCK - done // _BLOCK)
                done += len(block)


def _parse_range(response: HTTPResponse, start: int) -> tuple[bool, int | None]:
    """Whether the response begins at `start`, and the length of the complete file if the server states it."""
    content_range = response.headers.get("Content-Range", "")
    span = re.fullmatch(r"bytes ([0-9]{1,18})-[0-9]+/([0-9]{1,18})", content_range)
    if response.status == 206 and span and int(span[1]) == start:
        return True, int(span[2])
    if response.status != 200:
        raise OSError(f"the response to a range request has status {response.status}")
    length = re.fullmatch(r"[0-9]{1,18}", response.headers.get("Content-Length", ""))
    return False, int(length[0]) if length else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
