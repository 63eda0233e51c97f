"""Where files of a set come from: a folder, or an archive that is read without being unpacked."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

Read = Callable[[str], bytes]  # the content of a file by its name in the set; ValueError where it is missing

_LARGEST = 2**29  # bytes of one file in an archive: the largest of the official ones has 154 million


def from_folder(folder: Path) -> Read:
    """Files of a folder."""

    def read(name: str) -> bytes:
        try:
            return (folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ValueError(f"{folder / name} is missing; get the set again, or restore the file") from error

    return read


def from_tar(path: Path, inside: str, names: Collection[str]) -> Read:
    """Files `names` of the folder `inside` in a tar archive, read in one pass into memory."""
    wanted = {f"{inside}/{name}": name for name in names}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                if (name := wanted.get(member.name)) is None or not member.isreg():
                    continue
                if member.size > _LARGEST or (file := archive.extractfile(member)) is None:
                    raise ValueError(
                        f"{path.name}: {member.name} has {member.size:,} bytes, too many to be right"
                    )
                found[name] = file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{path} is cut short or damaged ({error}); delete it and get it again") from error

    def read(name: str) -> bytes:
        if name not in found:
            raise ValueError(f"{path} holds no {inside}/{name}; delete it and get it again")
        return found[name]

    return read


@contextmanager
def from_zip(path: Path, inside: str) -> Iterator[Read]:
    """Files of the folder `inside` in a zip archive, each read when it is asked for."""
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is cut short or damaged ({error}); delete it and get it again") from error

    def read(name: str) -> bytes:
        try:
            if archive.getinfo(f"{inside}/{name}").file_size > _LARGEST:
                raise ValueError(f"{path}: {inside}/{name} is too large to be right")
            return archive.read(f"{inside}/{name}")
        except KeyError as error:
            raise ValueError(f"{path} holds no {inside}/{name}; delete it and get it again") from error
        except (zipfile.BadZipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: {inside}/{name} is damaged ({error}); get it again") from error

    with archive:
        yield read
