"""Files and folders: written whole or not at all, read only where they are plain files. No torch here."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

REMEDY = "restore it, or choose another folder"
MOST_JSON = 64 * 2**20  # bytes of a JSON file; those of runs and models have a few MB
_TEMPORARY = re.compile(r"\.ensbridge-[0-9a-f]{16}\.tmp")
# What opening a link, a folder or a pipe ends with where a plain file is expected.
_NOT_PLAIN = (errno.ELOOP, errno.EISDIR, errno.ENXIO)


# ------------------------------------------------------------------------------------------ writing


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one, never a part."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` once all of it is on disk; after an error nothing changed.

    A link at `path` is replaced, not followed.
    """
    with _errors_name(path):
        temporary, file = _open_temporary(path.parent)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)  # before closing the file, which gives up its lock
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def append_line(path: Path, line: str) -> None:
    """Add a line to a plain file, which is made if it is not there."""
    with _errors_name(path), open(path, "ab", opener=plain_file) as file:
        file.write(f"{line}\n".encode())


def plain_file(path: str, flags: int) -> int:
    """An `opener` for `open` that follows no link and refuses what is not a plain file.

    >>> open("/dev/null", "w", opener=plain_file)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: /dev/null is not a plain file but a link, folder, pipe or device; ...
    """
    return _open_plain(path, flags | os.O_NOFOLLOW, "delete it, or choose another folder")


def _open_plain(path: str, flags: int, remedy: str) -> int:
    refused = ValueError(f"{path} is not a plain file but a link, folder, pipe or device; {remedy}")
    try:
        # Without blocking, as a pipe would until somebody opens its other end.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _NOT_PLAIN:
            raise refused from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    return descriptor


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Name the file that was to be written in errors of the system, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _open_temporary(folder: Path) -> tuple[Path, IO[bytes]]:
    """A new file under a name that nobody can have prepared, locked for as long as it is open."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        temporary = folder / f".ensbridge-{secrets.token_hex(8)}.tmp"
        file = open(os.open(temporary, flags, 0o666), "wb")  # noqa: SIM115
        taken = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = True
        except OSError:  # a file system without locks, on which nothing is taken for left behind either
            pass
        if not taken and os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # `_remove_left_behind` in another process came between opening and locking it


def _remove_left_behind(folder: Path) -> None:
    """Delete temporary files of processes that were killed; those of running ones are locked."""
    try:
        found = [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]
    except OSError:
        return
    for path in found:
        with suppress(OSError, ValueError), open(path, "rb+", opener=plain_file) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


# ------------------------------------------------------------------------------------------ folders


def open_folder(path: Path | str) -> Path:
    """The folder at `path`, made if it is not there; a file in its place is refused."""
    folder = Path(path)
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            raise ValueError(f"{part} is a file where a folder is expected; choose another path")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be made ({error.strerror}); choose another folder") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written to; choose another folder")
    _remove_left_behind(folder)
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder for one process; another is refused until this one ends, however it ends.

    The folder itself is locked, so that deleting `.lock` lets nobody in, and the file `.lock` as well for
    file systems that lock no folders, as NFS: there a second process can come in once `.lock` is deleted.
    """
    with ExitStack() as held:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, descriptor)
        with suppress(_NoLocks):
            _lock(descriptor, folder)
        path = folder / ".lock"
        while True:
            file = held.enter_context(open(path, "ab", opener=plain_file))
            try:
                _lock(file.fileno(), folder)
            except _NoLocks as error:
                raise ValueError(f"{path} cannot be locked ({error}); choose a folder elsewhere") from error
            if _is_at(file.fileno(), path):  # and was not deleted between opening and locking
                break
        yield


class _NoLocks(Exception):
    """The file system cannot lock this."""


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"{folder} is in use by another process; wait until it ends, or choose another folder"
        ) from error
    except OSError as error:
        raise _NoLocks(error.strerror) from error


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------------------------------ reading


def read_file(path: Path, remedy: str = REMEDY, most: int | None = None) -> bytes:
    """The content of a plain file, which may be behind a link, of `most` bytes where that is given."""
    with open(path, "rb", opener=lambda name, flags: _open_plain(name, flags, remedy)) as file:
        content = file.read(-1 if most is None else most + 1)
    if most is not None and len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes; {remedy}")
    return content


def read_json(path: Path, remedy: str = REMEDY) -> Any:
    """The JSON in a file, or ValueError with its name."""
    return parse_json(read_file(path, remedy, MOST_JSON), str(path), remedy)


def parse_json(content: bytes, where: str, remedy: str = REMEDY) -> Any:
    """JSON in UTF-8 that has every key once, or ValueError with `where` and the remedy.

    >>> parse_json(b'{"a": 1, "a": 2}', "x.json", "write it again")
    Traceback (most recent call last):
    ValueError: x.json is not JSON (it has the key "a" twice); write it again
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_each_once)
    except UnicodeDecodeError as error:
        what, cause = f"byte {error.start} is not UTF-8 text", error
    except json.JSONDecodeError as error:
        what, cause = f"{error.msg} in line {error.lineno}", error
    except RecursionError as error:
        what, cause = "nested too deeply", error
    except _Twice as error:
        what, cause = str(error), error
    except ValueError as error:  # Python reads no whole number of more than some thousand digits
        what, cause = "a whole number has too many digits", error
    raise ValueError(f"{where} is not JSON ({what}); {remedy}") from cause


class _Twice(ValueError):
    """A key is twice in an object, of which Python would take the last."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Twice(f"it has the key {json.dumps(twice[:60])} twice")
    return found


def open_regular_file(path: Path, limit: int | None = None) -> BinaryIO:
    """Open a file of at most `limit` bytes for reading; ValueError where it is larger, a pipe or a device.

    A pipe keeps its reader waiting and a device may never end. What was opened is what is looked at, so that
    nothing can take its place in between, and without O_NONBLOCK opening a pipe would already wait.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check what it is") from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (limit is None or status.st_size <= limit):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is a folder, a pipe or a device; give a regular file")
    raise ValueError(f"{path} has {status.st_size:,} bytes; at most {limit:,} are read")
