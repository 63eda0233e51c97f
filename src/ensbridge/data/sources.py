"""The files of a set, read from a folder or from an archive without unpacking it."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ensbridge.utils.files import open_regular_file, read_file
from ensbridge.utils.text import one_line

Read = Callable[[str], bytes]  # the content of a file by its name in the set; ValueError where it is missing

LARGEST_BATCH = 2**29  # bytes of one file of a set; the largest of CIFAR's has 154 million


@contextmanager
def damage_named(where: object, kind: str = "damaged", remedy: str = "get it again") -> Iterator[None]:
    """Any error of a decoder, for which a damaged file has many kinds, as ValueError that names the file."""
    try:
        yield
    except MemoryError as error:
        raise ValueError(
            f"{where} needs more memory than there is ({one_line(error)}); free some, or give a smaller set"
        ) from error
    except Exception as error:
        raise ValueError(f"{where} is cut short or {kind} ({one_line(error)}); {remedy}") from error


def from_folder(folder: Path, limit: int = LARGEST_BATCH) -> Read:
    """Files of a folder, none of which has more than `limit` bytes."""

    def read(name: str) -> bytes:
        try:
            return read_file(folder / name, limit)
        except FileNotFoundError as error:
            raise ValueError(f"{folder / name} is missing; get the set again, or restore the file") from error

    return read


def from_tar(path: Path, inside: str, names: Collection[str]) -> Read:
    """Files `names` of the folder `inside` in a tar archive, read in one pass into memory."""
    wanted = {f"{inside}/{name}": name for name in names}
    contents: dict[str, bytes] = {}
    with (
        damage_named(path, remedy="delete it and get it again"),
        open_regular_file(path) as opened,
        tarfile.open(fileobj=opened, mode="r:*") as archive,
    ):
        for member in archive:
            if (name := wanted.get(member.name)) is None or not member.isreg():
                continue
            if member.size > LARGEST_BATCH or (file := archive.extractfile(member)) is None:
                raise ValueError(f"{member.name} has {member.size:,} bytes, more than {LARGEST_BATCH:,}")
            contents[name] = file.read()

    def read(name: str) -> bytes:
        if name not in contents:
            raise ValueError(f"{path} holds no {inside}/{name}; delete it and get it again")
        return contents[name]

    return read


@contextmanager
def from_zip(path: Path, inside: str) -> Iterator[Read]:
    """Files of the folder `inside` in a zip archive, each read when it is requested."""
    with open_regular_file(path) as file:
        with damage_named(path, remedy="delete it and get it again"):
            archive = zipfile.ZipFile(file)

        def read(name: str) -> bytes:
            try:
                info = archive.getinfo(f"{inside}/{name}")
            except KeyError as error:
                raise ValueError(f"{path} holds no {inside}/{name}; delete it and get it again") from error
            with damage_named(f"{path}: {inside}/{name}"):
                if info.file_size > LARGEST_BATCH:
                    raise ValueError(f"{info.file_size:,} bytes, more than {LARGEST_BATCH:,}")
                return archive.read(info)

        with archive:
            yield read
