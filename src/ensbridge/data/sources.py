"""Where files of a set come from: a folder, or an archive that is read without being unpacked."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ensbridge.utils.files import open_regular_file, read_file
from ensbridge.utils.text import one_line

Read = Callable[[str], bytes]  # the content of a file by its name in the set; ValueError where it is missing

LARGEST_BATCH = 2**29  # bytes of one file of a set: the largest of CIFAR's has 154 million


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
    try:
        with open_regular_file(path) as opened, tarfile.open(fileobj=opened, mode="r:*") as archive:
            for member in archive:
                if (name := wanted.get(member.name)) is None or not member.isreg():
                    continue
                if member.size > LARGEST_BATCH or (file := archive.extractfile(member)) is None:
                    raise ValueError(f"{member.name} has {member.size:,} bytes, too many to be right")
                contents[name] = file.read()
    except Exception as error:  # a damaged archive fails in the ways of its format and of its compression
        raise ValueError(
            f"{path} is cut short or damaged ({one_line(error)}); delete it and get it again"
        ) from error

    def read(name: str) -> bytes:
        if name not in contents:
            raise ValueError(f"{path} holds no {inside}/{name}; delete it and get it again")
        return contents[name]

    return read


@contextmanager
def from_zip(path: Path, inside: str) -> Iterator[Read]:
    """Files of the folder `inside` in a zip archive, each read when it is asked for."""
    with open_regular_file(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except Exception as error:
            raise ValueError(
                f"{path} is cut short or damaged ({one_line(error)}); delete it and get it again"
            ) from error

        def read(name: str) -> bytes:
            try:
                if (size := archive.getinfo(f"{inside}/{name}").file_size) > LARGEST_BATCH:
                    raise ValueError(f"{size:,} bytes are too many to be right")
                return archive.read(f"{inside}/{name}")
            except KeyError as error:
                raise ValueError(f"{path} holds no {inside}/{name}; delete it and get it again") from error
            except Exception as error:  # also of a member that is encrypted, or compressed in an odd way
                raise ValueError(
                    f"{path}: {inside}/{name} is damaged ({one_line(error)}); get it again"
                ) from error

        with archive:
            yield read
