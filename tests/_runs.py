"""Training runs of a dozen steps, and processes that are killed in the middle of one; used as `import _runs`.

Every network is a function of its seed, and a run has 12 steps with a checkpoint at 4, 8 and 12 and a log
line at 3, 6, 9 and 12: no multiple of an epoch, which is 2.5 steps.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge import files
from ensbridge.data import Augment, ImageSet
from ensbridge.ensemble import Ensemble
from ensbridge.methods import AbstractMethod, BridgeConfig, DeepEnsemble, DiffusionBridge
from ensbridge.nets import ScoreNet
from ensbridge.train import FitConfig, fit
from ensbridge.train import checkpoint as checkpoint_module

FEATURE = "1"
STEPS, IMAGES, BATCH = 12, 10, 4


def built(seed: int, factory: Callable[[], Any]) -> Any:
    """What the factory makes when torch starts from `seed`; the global random state returns afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def member(seed: int) -> nn.Module:
    """A classifier of 1×4×4 images into 3 classes with 8 channels at `FEATURE` and a batch norm."""
    return built(
        seed,
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 3)
        ),
    )


def score(seed: int = 7) -> ScoreNet:
    """A score network for the members' feature."""
    return built(seed, lambda: ScoreNet(3, 8, [(1, 8, 1, 1)], 8, z_input="none"))


def bridge(seed: int = 7, members: int = 2, **options: Any) -> DiffusionBridge:
    """A bridge from member 0; `options` go to its configuration."""
    ensemble = Ensemble([member(index) for index in range(members)])
    return DiffusionBridge(ensemble, score(seed), FEATURE, config=BridgeConfig(**{"ema": 0.9, **options}))


def data(seed: int = 0, images: int = IMAGES) -> ImageSet:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(seed)
    return ImageSet(torch.rand(images, 1, 4, 4, generator=generator), torch.arange(images) % 3)


def method(kind: str) -> AbstractMethod:
    """Untrained: "members" by SGD, with momentum and a batch norm; "bridge" by Adam, with an average too."""
    return DeepEnsemble([member(0), member(1)]) if kind == "members" else bridge()


def config(kind: str, **options: Any) -> FitConfig:
    """The configuration of a run of `STEPS` steps."""
    common: dict[str, Any] = {"epochs": STEPS * BATCH / IMAGES, "batch_size": BATCH}
    common |= {"checkpoint_every": 4, "log_every": 3}
    if kind == "members":
        common |= {"lr": 0.1, "optimizer": "sgd", "weight_decay": 1e-2, "augment": Augment(crop=1, flip=True)}
    else:
        common |= {"lr": 0.02, "augment": Augment(noise=0.1, mixup=0.4)}
    return FitConfig(**{**common, **options})


def state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, hidden ones too, with its bytes."""
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


# ------------------------------------------------------------------------------ processes that die

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "_runs"])  # imported once, not once for every death


def killed(kind: str, folder: Path, where: str, when: int) -> None:
    """Run `fit` in a process of its own that gets SIGKILL at a point given by `where` and the step `when`."""
    process = _CONTEXT.Process(target=_run_and_die, args=(kind, folder, where, when))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, f"the process ended with {process.exitcode}"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_and_die(kind: str, folder: Path, where: str, when: int) -> None:
    real_write, real_fsync, real_replace = files.write_atomically, os.fsync, os.replace
    doomed = f"checkpoint-{when:09d}.safetensors" if when else "config.json"
    writing = ""

    def write(path: Path, content: bytes) -> None:
        nonlocal writing
        writing = path.name
        real_write(path, content)

    def fsync(descriptor: int) -> None:
        if where == "half-written" and writing == doomed:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            _die()
        real_fsync(descriptor)

    def replace(source: Path, destination: Path) -> None:
        if where == "before-rename" and writing == doomed:
            _die()
        real_replace(source, destination)
        if where == "after-rename" and writing == doomed:
            _die()

    def log(run: checkpoint_module.RunFolder, line: Mapping[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        doomed_line = where == "half-logged" and line["step"] == when
        with open(run.path / "log.jsonl", "a") as file:
            file.write(text[: len(text) // 2] if doomed_line else text)
        if doomed_line:
            _die()

    def progress(step: int, total: int, loss: float) -> None:
        if where == "after-step" and step == when:
            _die()

    checkpoint_module.write_atomically = write
    os.fsync, os.replace = fsync, replace
    checkpoint_module.RunFolder.log = log  # type: ignore[method-assign]
    fit(method(kind), data(), config(kind), folder, progress)
