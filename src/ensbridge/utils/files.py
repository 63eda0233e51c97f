"""Files and folders: written whole or not at all, read only where they are regular files. No torch here."""

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
from typing import IO, Any

REMEDY = "restore it, or choose another folder"
MOST_JSON = 64 * 2**20  # bytes of a JSON file; those of runs and models have a few MB
_TEMPORARY = re.compile(r"\.ensbridge-[0-9a-f]{16}\.tmp")
# What opening a link, a folder or a pipe ends with where a regular file is expected.
_NOT_REGULAR = (errno.ELOOP, errno.EISDIR, errno.ENXIO)


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
    with errors_name(path):
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
    """Add a line to a regular file, which is made if it is not there."""
    with errors_name(path), open(path, "ab", opener=nofollow) as file:
        file.write(f"{line}\n".encode())


def nofollow(path: str, flags: int) -> int:
    """An `opener` for `open` that follows no link and refuses what is not a regular file.

    >>> open("/dev/null", "w", opener=nofollow)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: /dev/null is not a regular file but a link, folder, pipe or device; ...
    """
    return _open_regular(path, flags | os.O_NOFOLLOW, "delete it, or choose another folder")


def _open_regular(path: Path | str, flags: int, remedy: str) -> int:
    """A descriptor of a regular file, or ValueError.

    A pipe keeps its reader waiting, a device may never end, and a link may lead anywhere. What was opened is
    what is looked at, so that nothing can take its place in between; without O_NONBLOCK, opening a pipe would
    already wait.
    """
    refused = ValueError(f"{path} is not a regular file but a link, folder, pipe or device; {remedy}")
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise refused from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    return descriptor


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
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
        paths = [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]
    except OSError:
        return
    for path in paths:
        with suppress(OSError, ValueError), open(path, "rb+", opener=nofollow) as file:
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


def open_inner_folder(path: Path) -> Path:
    """A folder inside one that is written to; a link there is refused, which could lead anywhere."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link; delete it, or choose another folder with --out")
    return open_folder(path)


@contextmanager
def opened_folder(path: Path | str) -> Iterator[Path]:
    """`open_folder`, undone as far as folders are still empty where what follows fails."""
    made = [part for part in (Path(path), *Path(path).parents) if not part.exists()]
    try:
        yield open_folder(path)
    except BaseException:
        with suppress(OSError):  # not empty
            for part in made:
                part.rmdir()
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder for one process; another is refused until this one ends, however it ends.

    The folder itself is locked, so that deleting `.lock` lets nobody in, and the file `.lock` as well for
    file systems that lock no folders, as NFS: there a second process can come in once `.lock` is deleted.
    """
    with ExitStack() as held:

        def hold(descriptor: int) -> int:
            _HELD.add(descriptor)
            held.callback(_let_go, descriptor)
            return descriptor

        directory = hold(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        with suppress(OSError):
            _lock(directory, folder)
        path = folder / ".lock"
        while True:
            file = hold(nofollow(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC))
            try:
                _lock(file, folder)
            except OSError as error:
                reason = f"{path} cannot be locked ({error.strerror})"
                raise CannotLock(f"{reason}; choose a folder elsewhere") from error
            with suppress(FileNotFoundError):  # it may have been deleted between opening and locking
                if os.path.samestat(os.fstat(file), os.lstat(path)):
                    break
        yield


_HELD: set[int] = set()  # descriptors of locks


def _let_go(descriptor: int) -> None:
    if descriptor in _HELD:  # a forked process has none
        _HELD.remove(descriptor)
        os.close(descriptor)


def _forget_locks() -> None:
    """Close a forked process's copies, with which it would keep folders locked after its parent's end."""
    for descriptor in [*_HELD]:
        _let_go(descriptor)


os.register_at_fork(after_in_child=_forget_locks)


class CannotLock(ValueError):
    """A folder on a file system without locks."""


def _lock(descriptor: int, folder: Path) -> None:
    """Lock what is open; where the file system has no locks for it, OSError says so."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"{folder} is in use by another process; wait until it ends, or choose another folder"
        ) from error


# ------------------------------------------------------------------------------------------ reading


def open_regular_file(path: Path, limit: int | None = None, remedy: str = "give another") -> IO[bytes]:
    """Open a regular file of at most `limit` bytes, which may be behind a link, for reading."""
    try:
        file = os.fdopen(_open_regular(path, os.O_RDONLY, remedy), "rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    size = os.fstat(file.fileno()).st_size
    if limit is not None and size > limit:
        file.close()
        raise ValueError(f"{path} has {size:,} bytes, and at most {limit:,} are read; {remedy}")
    return file


def read_file(path: Path, limit: int | None = None, remedy: str = "give another") -> bytes:
    """The content of a regular file of at most `limit` bytes, which may be behind a link."""
    with open_regular_file(path, limit, remedy) as file:
        try:
            return file.read(os.fstat(file.fileno()).st_size)
        except MemoryError as error:
            raise ValueError(f"{path} needs more memory than there is; free some, and try again") from error


def read_json(path: Path, remedy: str = REMEDY) -> Any:
    """The JSON in a file, or ValueError with its name."""
    return parse_json(read_file(path, MOST_JSON, remedy), str(path), remedy)


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
    except KeyError as error:  # Python would take the last
        what, cause = f"it has the key {json.dumps(error.args[0])} twice", error
    except ValueError as error:  # Python reads no whole number of more than some thousand digits
        what, cause = "a whole number has too many digits", error
    raise ValueError(f"{where} is not JSON ({what}); {remedy}") from cause


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        raise KeyError(next(key for key, _ in pairs if key in seen or seen.add(key))[:60])
    return values
