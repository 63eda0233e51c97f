"""Two processes as torchrun starts them, and what they run; used as `import _world`."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import _recipe
import _runs
import _tiny
from ensbridge.data import Augment, ImageSet
from ensbridge.evaluation.evaluate import evaluate
from ensbridge.evaluation.predict import predict
from ensbridge.experiments import evaluate_run, runner, train_recipe
from ensbridge.methods import AbstractMethod, Batch, BridgeConfig, DiffusionBridge, StepDistillation
from ensbridge.methods.base import Teacher
from ensbridge.models.ensemble import Ensemble
from ensbridge.training import FitConfig, fit
from ensbridge.training.compiled import StepKind, step_kinds
from ensbridge.training.distributed import Engine, join
from ensbridge.training.fit import TimeBudgetExceeded

FABRIC = next(
    (name for name in ("lightning_fabric", "lightning.fabric") if find_spec(name.split(".")[0])), None
)
FORK = multiprocessing.get_context("fork")
GONE = "the images went away; bring them back"


class Both:
    """Runs work in two processes; they are forked from one that imports everything, once."""

    def __init__(self) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.home = _runs._CONTEXT.Process(target=_serve, args=(theirs,))
        self.home.start()
        theirs.close()

    def __call__(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `work(engine, *arguments)` returns, or says when it fails, in each of the two."""
        self.pipe.send((work, arguments))
        return [pickle.loads(each) for each in self.pipe.recv()]

    def close(self) -> None:
        """End the process that was forked from."""
        self.pipe.close()
        self.home.join()


def _serve(pipe: Any) -> None:
    importlib.import_module(str(FABRIC))
    with suppress(EOFError):
        while True:
            pipe.send(_both(*pipe.recv()))


def _both(work: Callable[..., Any], arguments: tuple[Any, ...], seconds: float = 60) -> list[bytes]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ends = [FORK.Pipe(duplex=False) for _ in range(2)]
    processes = []
    for rank, (_, writing) in enumerate(ends):
        processes.append(FORK.Process(target=_work, args=(rank, port, writing, work, arguments)))
        processes[-1].start()
        writing.close()
    answers = []
    end = time.monotonic() + seconds
    for process, (reading, _) in zip(processes, ends, strict=True):
        try:
            there = reading.poll(max(0, end - time.monotonic()))
            answers.append(reading.recv_bytes() if there else pickle.dumps("no answer"))
        except EOFError:
            answers.append(pickle.dumps("killed"))
        process.join(10)
        if process.is_alive():
            process.kill()
    return answers


def _work(rank: int, port: int, writing: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        engine = join()
        assert engine
        engine.start(torch.device("cpu"))
        with engine.together():
            answer = work(engine, *arguments)
        writing.send_bytes(pickle.dumps(answer))  # torch would share memory, which ends with the process
    except Exception as error:
        writing.send_bytes(pickle.dumps(f"{type(error).__name__}: {error}"))
        if os.environ.get("SHOW"):
            traceback.print_exc()


# ------------------------------------------------------------------------------ what is trained


class PlainScore(nn.Module):
    """A score network without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(_tiny.CHANNELS + _tiny.CLASSES + 1, 16), nn.SiLU(), nn.Linear(16, 3)
        )
        self.unused = nn.Linear(2, 2)  # no gradient ever comes here

    def forward(self, h: Tensor, z: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([h.mean((2, 3)), z, t[:, None]], dim=1))


CONFIG = FitConfig(
    epochs=0.85, batch_size=5, lr=0.02, augment=Augment(crop=1, flip=True, noise=0.1, mixup=0.4)
)
PLAIN = (
    "members",
    "end2",
    "bezier",
    "bridge",
    "shared",
    "direct",
    "progressive",
)  # no batch norm


def plain(kind: str) -> AbstractMethod:
    """A method without batch norm: its networks normalise filter responses, or nothing."""
    if kind in ("members", "end2", "bezier"):
        return _tiny.method(kind, _tiny.ensemble(2))
    draws: dict[str, Any] = (
        {"train_times": "uniform", "temperature_draw": "batch"} if kind == "shared" else {}
    )
    config = BridgeConfig(ema=0.9, **draws)
    with _tiny.seeded(5):
        score = PlainScore()
    bridge = DiffusionBridge(_tiny.ensemble(2), score, _tiny.FEATURE, config=config)
    if kind == "direct":
        return StepDistillation(bridge)
    return StepDistillation(bridge, (0.0, 0.2, 1.0), mode="progressive") if kind == "progressive" else bridge


def train_plain(
    engine: Engine | None, kinds: Sequence[str] = PLAIN, step: StepKind | None = None
) -> dict[str, tuple[dict[str, Tensor], float]]:
    """The weights and the loss of every plain method."""
    done = {}
    for kind in kinds:
        method = plain(kind)
        # Mixed labels would be wrong for members and curves, but not for this comparison.
        config = replace(CONFIG, optimizer="sgd", weight_decay=0.01)
        result = fit(method, _tiny.data(), config, step=step, engine=engine)
        done[kind] = _runs.state(method.student), result.loss
    return done


def train_compiled(
    engine: Engine, kinds: Sequence[str]
) -> tuple[dict[str, tuple[dict[str, Tensor], float]], int]:
    """The same by compiled steps, whose graphs run as autograd traced them; and how many graphs there are."""
    counters = importlib.import_module("torch._dynamo.utils").counters
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    done = train_plain(engine, kinds, "compiled")
    return done, counters["stats"]["unique_graphs"]


def train_kind(
    engine: Engine | None, kind: str, folder: Path, die: int = 0, step: StepKind | None = None
) -> tuple[dict[str, Tensor], int]:
    """A run of `_runs`, whose networks have batch norm; at step `die` every process is killed."""

    def progress(step: int, total: int, loss: float) -> None:
        if step == die:
            os.kill(os.getpid(), signal.SIGKILL)

    method = _runs.method(kind)
    with torch.compiler.set_stance("force_eager"):
        result = fit(method, _runs.data(), _runs.config(kind), folder, progress, step=step, engine=engine)
    return _runs.state(method.student), result.resumed_from


def train_every_kind(
    engine: Engine, folder: Path, step: StepKind | None = None
) -> dict[str, dict[str, Tensor]]:
    return {kind: train_kind(engine, kind, folder / kind, step=step)[0] for kind in _runs.KINDS}


def fail_to_compile(engine: Engine, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """What is trained where one process has no compiler, what eager steps train, and the warnings."""

    def compile(*_: Any, **options: Any) -> None:
        raise RuntimeError("no compiler was found")

    fit_module = importlib.import_module("ensbridge.training.fit")
    expected, method = _runs.method("together"), _runs.method("together")
    fit(expected, _runs.data(), _runs.config("together"), engine=engine)
    fit_module.step_kinds = lambda *_: step_kinds(None, torch.device("cuda"), engine)
    if engine.rank == rank:
        torch.compile = compile  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as said, torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("always")
        fit(method, _runs.data(), _runs.config("together"), engine=engine)
    assert all(network._compiled_call_impl is None for network in method.networks())
    told = [str(each.message) for each in said if each.filename == __file__]
    return _runs.state(method.student), _runs.state(expected.student), told


class Spoilt(AbstractMethod):
    """A method that goes wrong at one step in one process."""

    def __init__(self, at: int, how: str) -> None:
        self.inner = _runs.method("members")
        self.student, self.at, self.how, self.seen = self.inner.student, at, how, 0

    def loss(self, batch: Batch) -> Tensor:
        self.seen += 1
        loss = self.inner.loss(batch)
        if self.seen != self.at:
            return loss
        if self.how == "error":
            raise ValueError(GONE)
        return loss + float(self.how)

    def model(self) -> nn.Module:
        return self.inner.model()

    def networks(self) -> Sequence[nn.Module]:
        return self.inner.networks()

    def teachers(self) -> Sequence[Teacher]:
        return []

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()


def go_wrong(engine: Engine, rank: int, how: str, step: StepKind | None = None) -> str:
    """Fit a method that goes wrong at step 3 of one process; its first loss is a trial's."""
    method = Spoilt(4 if engine.rank == rank else 0, how)
    with torch.compiler.set_stance("force_eager"):
        fit(method, _runs.data(), _runs.config("members"), step=step, engine=engine)
    return "trained"


def run_late(engine: Engine, rank: int, folder: Path) -> str:
    """A run whose time is up in one process only."""
    deadline = 0.0 if engine.rank == rank else time.monotonic() + 1e6
    try:
        fit(
            _runs.method("bridge"),
            _runs.data(),
            _runs.config("bridge"),
            folder,
            deadline=deadline,
            engine=engine,
        )
    except TimeBudgetExceeded as error:
        return f"{error}; {[path.name for path in _runs.checkpoints(folder)]}"
    return "trained"


def fail_apart(engine: Engine) -> str:
    """Work of one process goes wrong while the other's goes on and on."""

    def work() -> None:
        if engine.rank == 1:
            raise ValueError(GONE)
        while True:
            engine.check_peers()
            time.sleep(0.01)

    engine.run_independently(work, late=TimeBudgetExceeded)
    return "done"


def late_apart(engine: Engine) -> str:
    """One process is out of time while the other still has to save."""
    saved = []

    def work() -> None:
        if engine.rank == 1:
            raise TimeBudgetExceeded("member-2 is at step 3 of 9")
        time.sleep(0.2)
        saved.append(1)

    with suppress(TimeBudgetExceeded):
        engine.run_independently(work, late=TimeBudgetExceeded)
        return "done"
    return f"late, {len(saved)} saved"


def other_data(engine: Engine) -> str:
    fit(_runs.method("members"), _runs.data(engine.rank), _runs.config("members"), engine=engine)
    return "trained"


# ------------------------------------------------------------------------------ what is measured


def measure(engine: Engine | None) -> str:
    """The scores of an ensemble, a member and a distilled network on 1,001 images, as JSON."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(1001, 1, 4, 4, generator=generator)
    test = ImageSet(images, torch.randint(0, 3, (1001,), generator=generator))
    members = Ensemble([_runs.member(index) for index in range(3)])
    models = {"one": members.source, "all": members, "other": _runs.member(8)}
    scores = evaluate(models, test, _runs.data(1, 77), engine=engine, batch_size=64)
    return replace(scores, environment={}).to_json()  # the number of threads is not what is compared


def recorded_progress(engine: Engine | None) -> tuple[int, int]:
    """How many images are reported as measured, and in how many reports."""
    told: list[int] = []
    predict(_runs.member(8), ImageSet(torch.rand(1001, 1, 4, 4)), 64, engine, told.append)
    return sum(told), len(told)


def recipe(engine: Engine, folder: Path, together: int = 1) -> tuple[list[str], str]:
    """Train a recipe and measure it; which parts this process trained, and how."""
    told: list[str] = []
    tiny = _recipe.tiny(members_together=together)
    real = runner.fit

    def spy(method: Any, data: Any, config: Any, place: Path, progress: Any, **options: Any) -> Any:
        told.append(f"{place.name} {'alone' if options['engine'] is None else 'together'}")
        return real(method, data, config, place, progress, **options)

    runner.fit = spy
    train_recipe(tiny, folder, 0, ("members", "distill"))
    train_recipe(tiny, folder, 0, ("members", "distill"))  # of which all is there
    scores, _ = evaluate_run(folder, tiny)
    return told, json.dumps(json.loads(scores.to_json()), sort_keys=True)
