"""Training runs of a dozen steps, and processes that are killed in the middle of one; used as `import _runs`.

Every network is a function of its seed, and a run has 12 steps with a checkpoint at 4, 8 and 12 and a log
line at 3, 6, 9 and 12: no multiple of an epoch, which is 2.5 steps.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _tiny import same as same
from _tiny import state as state
from ensbridge.data import Augment, ImageSet
from ensbridge.methods import (
    AbstractMethod,
    Batch,
    BridgeConfig,
    DeepEnsemble,
    DiffusionBridge,
    EnsembleDistillation,
    JointTraining,
    ProxyEnD2,
)
from ensbridge.methods.base import Teacher
from ensbridge.models import ScoreNet
from ensbridge.models.ensemble import Ensemble
from ensbridge.training import FitConfig, FitResult, fit
from ensbridge.training import checkpoint as checkpoint_module
from ensbridge.training.optimizers import Configs
from ensbridge.utils import files

FEATURE = "1"
STEPS, IMAGES, BATCH = 12, 10, 4
KINDS = ("members", "bridge", "together")
Run = tuple[dict[str, Tensor], Path]


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


def member_with_matrices(seed: int) -> nn.Module:
    """Another, one of whose convolutions is a matrix to Muon; filters lie in memory with channels last."""
    return built(
        seed,
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(64, 3)
        ).to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
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


def method(kind: str) -> AbstractMethod | JointTraining:
    """Untrained: "members" by SGD, with momentum and a batch norm; "bridge" by Adam, with an average too.

    "together" is three methods at once: one by SGD, one by Adam, and the bridge with its average. "muon",
    which is not among `KINDS`, is one member by Muon.
    """
    if kind == "muon":
        return DeepEnsemble([member_with_matrices(0)])
    if kind == "members":
        return DeepEnsemble([member(0), member(1)])
    if kind == "bridge":
        return bridge()
    return JointTraining(baselines())


def baselines() -> dict[str, AbstractMethod]:
    """A student of each kind, taught by one ensemble, the first by labels too."""
    one = bridge()
    return {
        "ed": EnsembleDistillation(one.ensemble, member(11), label_weight=0.5),
        "end2": ProxyEnD2(one.ensemble, member(12)),
        "dbn": one,
    }


def config(kind: str, **options: Any) -> Any:
    """The configuration of a run of `STEPS` steps, or one for each method."""
    common: dict[str, Any] = {"epochs": STEPS * BATCH / IMAGES, "batch_size": BATCH}
    common |= {"checkpoint_every": 4, "log_every": 3}
    if kind == "members":
        common |= {"lr": 0.1, "optimizer": "sgd", "weight_decay": 1e-2, "augment": Augment(crop=1, flip=True)}
    elif kind == "muon":
        common |= {"lr": 0.05, "optimizer": "muon", "weight_decay": 1e-2}
    else:
        common |= {"lr": 0.02, "augment": Augment(noise=0.1, mixup=0.4)}
    one = FitConfig(**{**common, **options})
    if kind != "together":
        return one
    sgd = replace(one, lr=0.1, optimizer="sgd", weight_decay=1e-2)
    return {"ed": sgd, "end2": replace(one, warmup_steps=3), "dbn": one}


def whole(kind: str, folder: Path) -> Run:
    """The weights and the folder of a run that nothing interrupts."""
    trained = method(kind)
    fit(trained, data(), config(kind), folder)
    return state(trained.student), folder


class Stopped(Exception):
    """Raised out of a run on purpose."""


def stop_at(when: int) -> Callable[[int, int, float], None]:
    """A progress that stops the run after a step."""

    def progress(step: int, total: int, loss: float) -> None:
        if step == when:
            raise Stopped

    return progress


def unexpected(step: int, total: int, loss: float) -> None:
    """A progress for runs that must take no step; a complete one tells its end once, without a loss."""
    assert step == total, f"step {step} was taken"
    assert math.isnan(loss), f"step {step} was taken"


def begin(kind: str, folder: Path, until: int = 9, **options: Any) -> None:
    """A run that stops after so many of its 12 steps."""
    with pytest.raises(Stopped):
        fit(method(kind), data(), config(kind, **options), folder, stop_at(until))


def finish(kind: str, folder: Path, expected: Mapping[str, Run], **options: Any) -> FitResult:
    """Run again to the end, which must be where the uninterrupted run ended."""
    again = method(kind)
    configs: Configs = config(kind, **options)
    result = fit(again, data(), configs, folder)
    assert result.steps == STEPS
    assert same(state(again.student), expected[kind][0])
    return result


class Spoilt(AbstractMethod):
    """A method whose loss, or its gradient, goes wrong at one step; otherwise it is the method inside."""

    def __init__(self, inner: AbstractMethod, at: int = 0, how: str = "never") -> None:
        self.inner, self.at, self.how = inner, at, how
        self.seen: list[float] = []
        self.student, self.ema = inner.student, inner.ema

    def loss(self, batch: Batch) -> Tensor:
        """The loss of the method inside, but for one step."""
        loss = self.inner.loss(batch)
        self.seen.append(loss.item())
        if len(self.seen) != self.at:
            return loss
        if self.how == "gradient":
            weight = next(iter(self.student.parameters()))
            return loss + (weight - weight.detach()).sum().sqrt()  # 0, with an infinite slope
        return loss * float(self.how)

    def model(self) -> nn.Module:
        """That of the method inside."""
        return self.inner.model()

    def networks(self) -> Sequence[nn.Module]:
        """Those of the method inside."""
        return self.inner.networks()

    def teachers(self) -> Sequence[Teacher]:
        """Those of the method inside."""
        return self.inner.teachers()

    def describe(self) -> dict[str, Any]:
        """As the method inside, so that both are one run."""
        return self.inner.describe()


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, in their order."""
    return sorted(folder.glob("checkpoint-*.safetensors"))


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
