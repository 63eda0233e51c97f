"""The corrupted set on disk, in the published layout: an array for each corruption, and the labels.

Each array holds its severities one after another, each the whole set of images in its order; labels.npy
repeats the labels as often. manifest.json records how the set was made and which files are complete, so that
an interrupted run resumes with the next corruption. The number of processes does not change the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.metadata import version
from io import BytesIO
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ensbridge import __version__
from ensbridge.data.corruptions import apply
from ensbridge.data.corruptions.apply import CORRUPTIONS, FROST, SEVERITIES, digest
from ensbridge.utils.files import locked, open_folder, read_file, read_json, write_atomically
from ensbridge.utils.progress import Stage, silent

CHUNK = 100  # images per job
MANIFEST, LABELS = "manifest.json", "labels.npy"
NOTE = "made by ensbridge from the clean images; not bit-comparable with the published set"


class Job(NamedTuple):
    """A chunk of the images under one corruption at one severity."""

    name: str
    severity: int
    seed: int
    first: int


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

    It uses as many processes as there are cores, or only this one if `processes` is 1. They are spawned, so
    a script that calls this must guard its entry point by `if __name__ == "__main__":`.
    """
    labels = _check(images, labels)
    severities = check_severities(severities)
    seed = apply.check_number("seed", seed)
    if processes is not None and processes < 1:
        raise ValueError(f"processes is {processes}; it must be 1 or more, or None for all cores")
    apply.corruption(CORRUPTIONS[0])  # raises where a dependency is missing, before anything is written
    settings = {
        "seed": seed,
        "severities": list(severities),
        "constants": digest(),
        "images": _checksum(images.tobytes()),
        "labels": _checksum(labels.tobytes()),
    }
    folder = open_folder(folder)
    per_corruption = len(severities) * len(images)
    advance = progress("corrupt", len(CORRUPTIONS) * per_corruption, "images")
    with locked(folder):
        manifest = _resume(folder, settings)
        if LABELS not in manifest["files"]:  # first, so that every complete array can be read
            _finish(folder, manifest, LABELS, np.tile(labels, len(severities)))
        missing = [name for name in CORRUPTIONS if f"{name}.npy" not in manifest["files"]]
        advance((len(CORRUPTIONS) - len(missing)) * per_corruption)
        starts = range(0, len(images), CHUNK)
        jobs = [Job(name, level, seed, first) for name in missing for level in severities for first in starts]
        with _workers(images, processes) as run:
            chunks = run(jobs)  # all at once, so that no process waits while a file is written
            for name in missing:
                parts = []
                for _ in range(len(severities) * len(starts)):
                    parts.append(next(chunks))
                    advance(len(parts[-1]))
                _finish(folder, manifest, f"{name}.npy", np.concatenate(parts))
    return folder


def default_folder(source: Path | str, severities: Sequence[int] = SEVERITIES) -> str:
    """The name of a corrupted set's folder: the published one where it has all severities.

    >>> default_folder("cifar10"), default_folder("my/own.npz", [1, 2])
    ('CIFAR-10-C', 'own-C-severity-1-2')
    """
    name = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}.get(str(source)) or Path(source).stem
    chosen = "" if tuple(severities) == SEVERITIES else "-".join(["-severity", *map(str, severities)])
    return f"{name}-C{chosen}"


def check_severities(severities: Sequence[int]) -> tuple[int, ...]:
    """Severities in ascending order, without duplicates."""
    for severity in severities:
        apply.check_severity(severity)
    if not severities:
        raise ValueError("severities is empty; give at least one of 1, 2, 3, 4 and 5")
    return tuple(sorted({int(severity) for severity in severities}))


def _check(images: NDArray[np.uint8], labels: NDArray[np.integer]) -> NDArray[np.integer]:
    """Refuse images and labels that do not match; labels of one column are flattened."""
    apply.check_images(images)
    labels = np.asarray(labels)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels are {labels.dtype}; they must be integers")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"labels have shape {labels.shape}; {len(images)} images need ({len(images)},)")
    return labels


def _resume(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a folder, begun if it is empty; a folder with other content or settings is refused."""
    path = folder / MANIFEST
    if not path.exists():
        if others := sorted(entry.name for entry in folder.iterdir() if entry.name != ".lock"):
            raise ValueError(f"{folder} holds {others[0]} but no {MANIFEST}; choose an empty folder")
        packages = [f"{package} {version(package)}" for package in ("numpy", "scipy", "pillow")]
        made_by = ", ".join([f"ensbridge {__version__}", *packages])
        manifest = {"made_by": made_by, "note": NOTE, "frost": FROST, **settings, "files": {}}
        _write_manifest(folder, manifest)
        return manifest
    manifest = read_json(path)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path} is not a manifest of a corrupted set; choose another folder")
    for field, value in settings.items():
        if manifest.get(field) != value:
            raise ValueError(
                f"{folder} was made with {field} {manifest.get(field)}, not {value}; choose another folder"
            )
    names = [LABELS, *(f"{name}.npy" for name in CORRUPTIONS)]
    recorded = {name: manifest["files"].get(name) for name in names if (folder / name).exists()}
    manifest["files"] = {name: value for name, value in recorded.items() if value is not None}
    for name, value in manifest["files"].items():
        if _checksum(read_file(folder / name)) != value:
            raise ValueError(f"{folder / name} has a wrong checksum; delete it to have it made again")
    return manifest


def _finish(folder: Path, manifest: dict[str, Any], name: str, array: NDArray[Any]) -> None:
    """Write a file, then its checksum into the manifest."""
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    write_atomically(folder / name, file.getvalue())
    manifest["files"][name] = _checksum(file.getvalue())
    _write_manifest(folder, manifest)


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ------------------------------------------------------------------------------ worker processes

_images: NDArray[np.uint8] | None = None  # given to each process once, when it starts


@contextmanager
def _workers(
    images: NDArray[np.uint8], processes: int | None
) -> Iterator[Callable[[Sequence[Job]], Iterator[NDArray[np.uint8]]]]:
    """A function that runs jobs, in worker processes or in this one, and yields their images in order."""
    count = processes or _cores()
    if count == 1:
        yield lambda jobs: (_run_job(job, images) for job in jobs)
        return
    pool = ProcessPoolExecutor(count, get_context("spawn"), _start_worker, (images,))
    try:
        yield lambda jobs: pool.map(_run_job, jobs)
    except BrokenProcessPool as error:
        raise OSError("a worker process was killed; run the same again to resume") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _cores() -> int:
    """How many cores this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_worker(images: NDArray[np.uint8]) -> None:
    """Set up a worker: it leaves interrupts to its parent, and exits when the parent does, even if killed."""
    global _images
    _images = images
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent := parent_process():
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _run_job(job: Job, images: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    images = _images if images is None else images
    assert images is not None
    chunk = images[job.first : job.first + CHUNK]
    return apply.corrupt(chunk, job.name, job.severity, job.seed, first=job.first)
