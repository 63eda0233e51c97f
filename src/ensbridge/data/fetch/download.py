"""A file from the web: in a part that a later call goes on with, whole once its checksum is right."""

from __future__ import annotations

import hashlib
import re
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from ensbridge.data.known import Stage, silent
from ensbridge.files import plain_file

_BLOCK = 2**20
_ATTEMPTS = 20
_LARGEST = 2**31  # bytes; nothing that is fetched here comes near


class Unavailable(Exception):
    """Why a source does not give what is wanted, in words."""


def download(url: str, part: Path, md5: str, stage: Stage = silent, timeout: float = 10.0) -> None:
    """Bring the file at `url` to `part`, going on after what is there; Unavailable where that fails.

    What is at `part` may be read only after this returned: its checksum is right then. A part that turns out
    wrong at the end, perhaps of another file, is fetched once more from the start.
    """
    old = part.exists()
    if old and file_md5(part) == md5:
        return
    _fill(url, part, stage, timeout)
    if file_md5(part) == md5:
        return
    part.unlink()
    if not old:
        raise Unavailable(f"{urlsplit(url).netloc} gave a file with a wrong checksum")
    download(url, part, md5, stage, timeout)


def file_md5(path: Path) -> str:
    """The md5 of a file, by which official archives are known."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _fill(url: str, part: Path, stage: Stage, timeout: float) -> None:
    """Fetch until the part is whole, going on after each cut as long as every attempt brings something."""
    host, cut = urlsplit(url).netloc, ""
    for _ in range(_ATTEMPTS):
        before = _size(part)
        try:
            total = _append(url, part, stage, timeout)
            cut = "the connection ended"
        except HTTPError as error:
            if error.code != 416 or not before:
                raise Unavailable(f"{host} answers {error.code} {error.reason}") from error
            part.unlink()  # longer than the file: it belongs to another one
            continue
        except (OSError, HTTPException) as error:
            total, cut = None, _reason(error)
            if not before and not _size(part):
                raise Unavailable(f"{host} cannot be reached ({cut})") from error
        else:
            if total is None or _size(part) == total:
                return
        if _size(part) <= before:
            break
    done = f"{_size(part) / 1e6:,.1f} MB"
    raise Unavailable(f"{host} stopped after {done} ({cut}); the same command goes on from there")


def _append(url: str, part: Path, stage: Stage, timeout: float) -> int | None:
    """Add to the part what the server sends; the length of the whole file, where the server says it."""
    start = _size(part)
    request = Request(
        url, headers={"User-Agent": "ensbridge"} | ({"Range": f"bytes={start}-"} if start else {})
    )
    with urlopen(request, timeout=timeout) as response:
        going_on, total = _place(response, start)
        advance = stage("download", (total or 0) // _BLOCK)
        size = start if going_on else 0
        advance(size // _BLOCK)
        # What has come is on disk at once, so that a cut or a kill loses nothing.
        with open(part, "ab" if going_on else "wb", opener=plain_file) as file:
            while size != total and (block := response.read1(_BLOCK)):
                file.write(block)
                file.flush()
                advance((size + len(block)) // _BLOCK - size // _BLOCK)
                size += len(block)
                if size > (total or _LARGEST):
                    raise Unavailable(f"{urlsplit(url).netloc} sends more than the file has")
    return total


def _place(response: HTTPResponse, start: int) -> tuple[bool, int | None]:
    """Whether the answer goes on at `start`, and the whole file's length."""
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
    if response.status == 206 and span and int(span[1]) == start:
        return True, int(span[2])
    if response.status != 200:
        raise OSError(f"it answers {response.status} to a request for the rest")
    length = response.headers.get("Content-Length", "")
    return False, int(length) if length.isdigit() else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, URLError) else error
    words = inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner)
    return " ".join(words.split())[:100] or type(inner).__name__
