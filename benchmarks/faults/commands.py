"""Commands that write into folders, on inputs of a few kilobytes, and what they leave there."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

import _named
import _saving
from ensbridge.methods import BridgeConfig
from faults.kills import watched
from faults.processes import command, fork
from faults.trainings import digest_of_tensors, train_command

SKIPPED = (".lock", "log.jsonl", "output.txt")  # of no content, or compared by what it leads to


@dataclass
class Command:
    """A command that writes into a folder; run again there, it resumes or does the same again."""

    name: str
    words: Callable[[Path], list[str]]
    start: Path | None = None  # what lies in the folder before it
    reference: dict[str, str] = field(default_factory=dict)  # what lies there after it, without a fault
    size: int = 0  # bytes of that
    operations: int = 0  # changes of files on the way

    def prepare(self, folder: Path) -> Path:
        """A folder for it."""
        shutil.rmtree(folder, ignore_errors=True)
        if self.start is None:
            folder.mkdir(parents=True)
        else:
            shutil.copytree(self.start, folder)
        return folder

    def run(self, folder: Path) -> None:
        """Run it in this process."""
        command(*self.words(folder))


def make_commands(folder: Path) -> list[Command]:
    """Every command with its inputs, and what it makes of them when nothing is wrong."""
    folder.mkdir(parents=True)
    members = [f"timm:{_named.TIMM}@{_named.weights(folder / f'{n}.safetensors', n)}" for n in range(2)]
    data, model = folder / "images.npz", folder / "model"
    np.savez(data, images=np.stack([_named.pixels(n) for n in range(60)]), labels=np.arange(60) % 3)
    _saving.small(BridgeConfig()).save(model, image_shape=(3, 8, 8), class_names=["a", "b", "c"])
    train = Command("train", train_command)
    commands = [
        train,
        Command("evaluate", lambda to: ["evaluate", str(to / "run"), "--quiet"], folder / "train"),
        Command("compress", partial(compress_words, members, data)),
        Command("predict --out", partial(predict_words, model, data)),
    ]
    for number, work in enumerate(commands):
        place = folder / ("train" if work is train else f"reference-{number}")
        work.prepare(place)
        counted = folder / f"operations-{number}"

        def run(work: Command = work, place: Path = place, counted: Path = counted) -> None:
            counted.write_text(str(watched(place, None, partial(work.run, place))))

        child = fork(run, folder / f"output-{number}.txt")
        if not child.wait() or child.code != 0:
            raise RuntimeError(f"{work.name} fails without any fault:\n{child.said()}")
        work.reference, work.size = snapshot(place), size_of(place)
        work.operations = int(counted.read_text())
    return commands


def compress_words(members: list[str], data: Path, folder: Path) -> list[str]:
    """The words of `ensbridge compress`, with a run folder and a cache."""
    folders = ["--out", folder / "model", "--run-dir", folder / "run", "--cache", folder / "cache"]
    options = ["--epochs", 2, "--batch", 10, "--budget", 3, "--size", 32, "--source", "frozen", "--quiet"]
    return ["compress", *members, "--data", str(data), *map(str, (*folders, *options))]


def predict_words(model: Path, data: Path, folder: Path) -> list[str]:
    """The words of `ensbridge predict`."""
    return ["predict", str(model), str(data), "--out", str(folder / "predictions"), "--quiet"]


def snapshot(folder: Path) -> dict[str, str]:
    """A digest of the content of every file that counts."""
    return {
        str(path.relative_to(folder)): digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in SKIPPED and path.suffix != ".tmp" and not _is_empty_cache(path)
    }


def newest_only(files: dict[str, str]) -> dict[str, str]:
    """Without checkpoints that a newer one has replaced, which a kill may have left there."""
    newest: dict[str, str] = {}
    for name in sorted(files):
        folder, _, file = name.rpartition("/")
        newest[f"{folder}/checkpoint" if file.startswith("checkpoint-") else name] = name
    return {name: files[name] for name in newest.values()}


def _is_empty_cache(path: Path) -> bool:
    """Whether it is room for outputs, of which none was recorded as written yet."""
    key = path.name.rpartition("-")[0]
    return path.suffix == ".npy" and not (path.parent / f"{key}.json").exists()


def digest(path: Path) -> str:
    """Of all tensors, where it holds some; a file of tensors that cannot be read raises ValueError."""
    if path.suffix == ".safetensors":
        return digest_of_tensors(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def size_of(folder: Path) -> int:
    """The bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def lost_since(before: dict[str, str], folder: Path, reference: dict[str, str]) -> list[str]:
    """Files that were there before and are neither as they were nor what the command makes of them.

    A checkpoint may have gone for a newer one; every file of tensors must be whole.
    """
    try:
        now = snapshot(folder)
    except Exception as error:
        return [f"a file cannot be read: {error}"]
    lost = []
    for name, content in before.items():
        if now.get(name) in (content, reference.get(name)) and name in now:
            continue
        parent, _, file = name.rpartition("/")
        newer = [other for other in now if other.startswith(f"{parent}/checkpoint-") and other > name]
        if not (file.startswith("checkpoint-") and newer):
            lost.append(name)
    return lost
