"""Tiny trainings through the public entry points, each of seconds, with many checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sklearn.datasets  # noqa: F401 - for the digits, once for all forked children
import torch
import torch._dynamo
from safetensors.torch import load_file
from torch import nn

import _tiny
import ensbridge as eb
import ensbridge.experiments
from faults.processes import command

STAGES = ("members", "bridge", "distill", "baselines")
FITS = ("member", "bridge", "kl", "distill", "ed", "end2", "bn", "curve", "headline")
SHORT = ("epochs=0.6", "checkpoint_every=3", "log_every=2")


@dataclass(frozen=True)
class Training:
    """What is trained into a folder; run again there, it resumes."""

    name: str
    run: Callable[[Path], None]


def train_digits(folder: Path) -> None:
    """`ensbridge train digits`, every stage of the table in a few steps, then `ensbridge evaluate`."""
    command(*train_command(folder))
    command("evaluate", folder / "run", "--quiet")


def train_command(folder: Path) -> list[str]:
    """The words of `ensbridge train`."""
    changes = [f"{fit}_fit.{change}" for fit in FITS for change in SHORT]
    stages = [word for stage in STAGES for word in ("--stage", stage)]
    out = str(folder / "run")
    return ["train", "digits", *stages, "--out", out, "--quiet", "members=2", "target=2", *changes]


def member(seed: int) -> nn.Module:
    """A classifier of 3×8×8 images into 3 classes."""
    with _tiny.seeded(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


def compress_members(folder: Path) -> None:
    """`eb.compress` of three small networks with a run folder, in 512 steps, then `save`."""
    fast = eb.compress(
        [member(seed) for seed in range(3)],
        _tiny.data(256, seed=1),
        _tiny.data(60, seed=2),
        feature="1",
        budget=30,
        epochs=20,
        batch_size=10,
        run_dir=folder / "run",
        quiet=True,
    )
    (folder / "choices.txt").write_text(repr(fast.choices))
    fast.save(folder / "model", build="faults.trainings:member", arguments={"seed": 0})


TRAININGS = (
    Training("ensbridge train digits", train_digits),
    Training("eb.compress", compress_members),
)


def weights_in(folder: Path) -> dict[str, str]:
    """A digest of every tensor in the last checkpoint of every job, and in a saved model."""
    last = {str(path.parent.relative_to(folder)): path for path in sorted(folder.rglob("*.safetensors"))}
    return {name: digest_of_tensors(path) for name, path in last.items()}


def digest_of_tensors(path: Path) -> str:
    """Not of the file: the order of the metadata in its header is another each time."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def scores_in(folder: Path) -> dict[str, str]:
    """A digest of what was measured."""
    paths = [folder / "run" / "scores.json", folder / "choices.txt"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.exists()}
