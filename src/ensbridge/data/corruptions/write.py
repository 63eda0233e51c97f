"""The corrupted set on disk, in the published layout: an array for each corruption, and the labels.

Each array holds its severities one after another, each the whole set of images in its order; labels.npy
repeats the labels as often. manifest.json says how the set was made and what is whole. Finished severities
wait in .parts until their corruption is whole, so that a killed run resumes; how many processes work
changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.metadata import version
from io import BytesIO
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ensbridge import __version__
from ensbridge.data.corruptions import apply
from ensbridge.data.corruptions.constants import CORRUPTIONS, FROST, SEVERITIES, digest
from ensbridge.data.npy import open_npy
from ensbridge.utils.files import (
    locked,
    open_folder,
    open_inner_folder,
    read_file,
    read_json,
    write_atomically,
)
from ensbridge.utils.progress import Advance, Stage, silent

CHUNK = 100  # images of one job
MANIFEST, LABELS, PARTS = "manifest.json", "labels.npy", ".parts"
NOTE = "made by ensbridge from the clean images; not bit-comparable with the published set"


class Job(NamedTuple):
    """Some images of the set under one corruption at one severity."""

    name: str
    severity: int
    seed: int
    first: int


Run = Callable[[Sequence[Job]], Iterator[NDArray[np.uint8]]]  # jobs to their images, in order


def write_corrupted(
    images: NDArray[np.uint8],
    labels: NDArray[np.integer],
    folder: Path | str,
    seed: int = 0,
    severities: Sequence[int] = SEVERITIES,
    processes: int | None = None,
    progress: Stage = silent,
) -> Path:
    """Write all corruptions of images (N, 32, 32, 3), uint8, with their labels (N,); run again, it resumes.

    It works in as many processes as there are cores, or in this one if `processes` is 1. They are spawned,
    so that a script which calls this guards its own start by `if __name__ == "__main__":`.
    """
    labels = _check(images, labels)
    severities = check_severities(severities)
    seed = apply.check_number("seed", seed)
    if processes is not None and processes < 1:
        raise ValueError(f"processes is {processes}; it must be 1 or more, or None for all cores")
    apply.corruption(CORRUPTIONS[0])  # what is missing is said before anything is made
    made = {
        "seed": seed,
        "severities": list(severities),
        "constants": digest(),
        "images": _checksum(images.tobytes()),
        "labels": _checksum(labels.tobytes()),
    }
    folder = open_folder(folder)
    total = len(CORRUPTIONS) * len(severities) * len(images)
    advance = progress("corrupt", total, "images")
    with locked(folder):
        manifest = _resume(folder, made)
        if LABELS not in manifest["files"]:  # first, so that whatever is whole can be read
            _finish(folder, manifest, LABELS, np.tile(labels, len(severities)))
        _make(folder, manifest, images, processes, advance)
        shutil.rmtree(folder / PARTS, ignore_errors=True)
    return folder


def _make(
    folder: Path,
    manifest: dict[str, Any],
    images: NDArray[np.uint8],
    processes: int | None,
    advance: Advance,
) -> None:
    """Make every file of a corruption that the manifest has not."""
    open_inner_folder(folder / PARTS)
    missing = [name for name in CORRUPTIONS if f"{name}.npy" not in manifest["files"]]
    paths = {
        (name, severity): folder / PARTS / f"{name}-{severity}.npy"
        for name in missing
        for severity in manifest["severities"]
    }
    jobs = [
        Job(name, severity, manifest["seed"], first)
        for (name, severity), path in paths.items()
        if not path.exists()
        for first in range(0, len(images), CHUNK)
    ]
    advance(len(CORRUPTIONS) * len(manifest["severities"]) * len(images) - _images_of(jobs, len(images)))
    with _workers(images, processes) as run:
        done = run(jobs)  # all at once, so that no process waits while a file is written
        for name in missing:
            parts = []
            for severity in manifest["severities"]:
                path = paths[name, severity]
                if not path.exists():
                    write_atomically(path, _npy(_gather(done, len(images), advance)))
                parts.append(open_npy(path))
            _finish(folder, manifest, f"{name}.npy", np.concatenate(parts))


def _images_of(jobs: Sequence[Job], count: int) -> int:
    return sum(min(CHUNK, count - job.first) for job in jobs)


def _gather(done: Iterator[NDArray[np.uint8]], count: int, advance: Advance) -> NDArray[np.uint8]:
    """The next `count` images, as they come."""
    chunks = []
    for chunk in islice(done, -(-count // CHUNK)):
        chunks.append(chunk)
        advance(len(chunk))
    return np.concatenate(chunks)


def default_folder(source: Path | str, severities: Sequence[int] = SEVERITIES) -> str:
    """The name of a corrupted set's folder: the published one where all severities are in it.

    >>> default_folder("cifar10"), default_folder("my/own.npz", [1, 2])
    ('CIFAR-10-C', 'own-C-severity-1-2')
    """
    name = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}.get(str(source)) or Path(source).stem
    chosen = "" if tuple(severities) == SEVERITIES else "-".join(["-severity", *map(str, severities)])
    return f"{name}-C{chosen}"


def check_severities(severities: Sequence[int]) -> tuple[int, ...]:
    """Severities in their order, each once."""
    for severity in severities:
        apply.check_severity(severity)
    if not severities:
        raise ValueError("severities is empty; give at least one of 1, 2, 3, 4 and 5")
    return tuple(sorted({int(severity) for severity in severities}))


def _check(images: NDArray[np.uint8], labels: NDArray[np.integer]) -> NDArray[np.integer]:
    """Refuse images and labels that do not belong together; labels of one column become a line."""
    apply.check_images(images)
    labels = np.asarray(labels)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels are {labels.dtype}; they must be integers")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"labels have shape {labels.shape}; {len(images)} images need ({len(images)},)")
    return labels


def _resume(folder: Path, made: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a folder, begun if it is empty; whatever is not of this very set is refused."""
    path = folder / MANIFEST
    if not path.exists():
        if strange := sorted(entry.name for entry in folder.iterdir() if entry.name not in (".lock", PARTS)):
            raise ValueError(
                f"{folder} holds {strange[0]} but no {MANIFEST}, so it is something else; choose another "
                "folder"
            )
        shutil.rmtree(folder / PARTS, ignore_errors=True)
        made_by = ", ".join(
            [
                f"ensbridge {__version__}",
                *(f"{entry} {version(entry)}" for entry in ("numpy", "scipy", "pillow")),
            ]
        )
        manifest = {"made_by": made_by, "note": NOTE, "frost": FROST, **made, "files": {}}
        _write_manifest(folder, manifest)
        return manifest
    manifest = read_json(path)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path} is not a manifest of a corrupted set; choose another folder")
    for field, value in made.items():
        if manifest.get(field) != value:
            raise ValueError(
                f"{folder} was made with {field} {manifest.get(field)}, not {value}; choose another folder"
            )
    names = [LABELS, *(f"{name}.npy" for name in CORRUPTIONS)]
    known = {name: manifest["files"].get(name) for name in names if (folder / name).exists()}
    manifest["files"] = {name: value for name, value in known.items() if value is not None}
    for name, value in manifest["files"].items():
        if _checksum(read_file(folder / name)) != value:
            raise ValueError(
                f"{folder / name} is not what was written there; delete it to have it made again"
            )
    return manifest


def _finish(folder: Path, manifest: dict[str, Any], name: str, array: NDArray[Any]) -> None:
    """Write a file, then its checksum into the manifest, then forget its parts."""
    content = _npy(array)
    write_atomically(folder / name, content)
    manifest["files"][name] = _checksum(content)
    _write_manifest(folder, manifest)
    for part in (folder / PARTS).glob(f"{Path(name).stem}-*.npy"):
        part.unlink()


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def _npy(array: NDArray[Any]) -> bytes:
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Processes. Each is given the images once, when it starts.

_images: NDArray[np.uint8] | None = None


@contextmanager
def _workers(images: NDArray[np.uint8], processes: int | None) -> Iterator[Run]:
    """What runs jobs, in processes or here."""
    count = processes or _cores()
    if count == 1:
        yield lambda jobs: (_do(job, images) for job in jobs)
        return
    pool = ProcessPoolExecutor(count, get_context("spawn"), _begin, (images,))
    try:
        yield lambda jobs: pool.map(_do, jobs)
    except BrokenProcessPool as error:
        raise OSError("a process of the work was ended from outside; run the same again to resume") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _cores() -> int:
    """How many cores this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(images: NDArray[np.uint8]) -> None:
    """Begin a process: it leaves interrupts to its parent, and ends when that one does, however."""
    global _images
    _images = images
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent := parent_process():
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _do(job: Job, images: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    images = _images if images is None else images
    assert images is not None
    return apply.corrupt(
        images[job.first : job.first + CHUNK], job.name, job.severity, job.seed, first=job.first
    )
