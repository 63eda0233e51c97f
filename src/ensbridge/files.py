"""Files and folders: written whole or not at all, refused clearly. No torch here."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
    return folder


def read_json(path: Path) -> Any:
    """The JSON in a file, or ValueError with its name."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); restore it, or choose another folder") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder for one process; another is refused until this one ends, however it ends."""
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"{folder} is in use by another process; wait until it ends, or choose another folder"
            ) from error
        yield
