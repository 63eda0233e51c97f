"""One run over every model, runtime and batch size, and what it found."""

from __future__ import annotations

import copy
import math
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ensbridge.deploy.benchmark.memory import RESOLUTION, cores, pinned
from ensbridge.deploy.benchmark.runtimes import RUNTIMES, CannotRun, Runner, Runtime, ready
from ensbridge.deploy.benchmark.timing import SPREAD, Clock, Ratio, ratio_of, time_rounds
from ensbridge.deploy.export import cannot_take, check_fast, example_like
from ensbridge.deploy.fuse import prepare_for_inference
from ensbridge.deploy.saving import load
from ensbridge.deploy.saving.description import LARGEST_BATCH
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.features import read_logits
from ensbridge.utils.inputs import Inputs, count_rows, map_inputs, tensors_of
from ensbridge.utils.progress import Stage, silent

ONE = "one member"
Tell = Callable[["Table"], None]  # hears of each table once it is measured
MOST_IMAGES = 2**16  # in a batch
LARGEST_ENSEMBLE = 10  # that is timed, each of copies of its own: a file may claim a thousand members


@dataclass(frozen=True)
class Row:
    """One model in one runtime at one batch size."""

    model: str
    macs: int  # for one image
    params: int
    memory: int | None  # bytes at the peak; None where it cannot be told
    memory_below: int | None  # bytes that it is below, where that is all that can be told
    median: float  # seconds for one batch
    low: float  # 25th percentile of the rounds
    high: float  # 75th
    ratio: Ratio | None  # to one member; None for itself


@dataclass(frozen=True)
class Table:
    """The models side by side; where there is no row, `problem` says why."""

    runtime: Runtime
    batch: int
    rounds: int
    calls: int  # of each model in a round
    rows: tuple[Row, ...]
    problem: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """All tables, and the machine that they hold for."""

    model: str
    bridges: int
    members: int
    image_shape: tuple[int, ...] | None  # None where it takes more than one tensor
    device: str
    threads: int
    machine: dict[str, str | None]
    tables: tuple[Table, ...]

    @property
    def fast(self) -> str:
        """The name of source and bridges in the tables."""
        return _fast_name(self.bridges)

    @property
    def stand_ins(self) -> str:
        """What DE-k is here."""
        return (
            "a saved model has no other members, so k copies of its source stand for DE-k; members of other "
            "sizes would take more or less"
        )

    @property
    def memory_means(self) -> str:
        """What memory is here."""
        coarse = f"the growth of the process, which is too coarse below {RESOLUTION / 1e6:g} MB"
        how = "torch's count" if self.device == "cuda" else coarse
        return f"memory is the weights and what a call needs beside them, by {how}"

    def to_json(self) -> dict[str, Any]:
        """Everything in JSON's types; what is not claimed is null, with a reason or a bound."""
        return {**asdict(self), "stand_ins": self.stand_ins, "memory_means": self.memory_means}


def bench_folder(
    folder: Path | str,
    *,
    image_shape: Sequence[int] | None = None,
    allow: Collection[str] = (),
    device: str = "cpu",
    **choices: Any,
) -> Benchmark:
    """Measure a saved model; choices are those of `bench`."""
    fast = load(folder, allow=allow)
    example = map_inputs(lambda tensor: tensor.to(device), example_like(fast, folder, image_shape))
    return bench(fast.to(device), example, name=str(folder), **choices)


def bench(
    fast: FastEnsemble,
    example: Inputs,
    *,
    name: str = "",
    runtimes: Sequence[Runtime] = RUNTIMES,
    batches: Sequence[int] = (1, 128),
    threads: int | None = None,
    rounds: int = 20,
    seconds: float = math.inf,
    begin: Stage = silent,
    tell: Tell = lambda table: None,
    clock: Clock = time.perf_counter,
) -> Benchmark:
    """Measure one member, source + bridge and DE-2 … DE-M on batches like `example`, on its device.

    Floats are drawn at random; whole numbers, such as tokens and their masks, are rows of the example.
    M is the members that the model stands for, or 10 if they are more.
    Source and bridges are run as `prepare_for_inference` has them, in every runtime. MACs and parameters are
    those of the model itself. Memory is the weights and what a call needs beside them: on a GPU by torch's
    count, on the CPU by how far the process's resident memory rises in a call, at its peak as the kernel has
    it; since that differs by a part of a MB from run to run, less than 2 MB is told as that. `tell` gets each
    table once it is measured. A runtime that is missing or fails, or whose logits are not the model's, says
    so in its table.

    >>> from ensbridge.methods import Bridge
    >>> from ensbridge.models import TokenScore
    >>> source = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> fast = FastEnsemble(source, [Bridge(TokenScore(3, 8, 8)).one_step()], feature="1", members=3)
    >>> result = bench(fast, torch.rand(1, 1, 4, 4), runtimes=["eager"], batches=[2], threads=1, rounds=1)
    >>> [row.model for row in result.tables[0].rows], result.tables[0].rows[1].ratio.reason
    (['one member', 'source + bridge', 'DE-2', 'DE-3'], '1 round: too few; give at least 6')
    """
    _check(fast, example, runtimes, batches, rounds, seconds)
    device = tensors_of(example)[0].device
    threads = len(cores()) if threads is None else threads
    fast = copy.deepcopy(fast).eval().requires_grad_(False)
    tables: list[Table] = []

    def measure(runtime: Runtime, batch: int) -> Table:
        images, words = _batch(example, batch), f"{runtime} {batch}"
        advance = begin(f"{words}: build", len(candidates), "models")
        runners: dict[str, Runner] = {}
        try:
            if runtime == "onnxruntime":  # once unmeasured, for what the library takes at its first use
                ready(runtime, candidates[ONE].net, images, threads, candidates[ONE].truth)
            for name, model in candidates.items():
                runners[name] = ready(runtime, model.net, images, threads, model.truth)
                advance(1)
        except CannotRun as error:
            return Table(runtime, batch, 0, 0, (), str(error))
        calls = {name: runner.call for name, runner in runners.items()}
        advance = begin(f"{words}: time", rounds, "rounds")
        timings = time_rounds(calls, rounds, seconds, clock=clock, advance=advance)
        rows = tuple(
            _row(name, model, runners[name].memory, timings.times, device)
            for name, model in candidates.items()
        )
        return Table(runtime, batch, len(timings.times[ONE]), timings.calls, rows)

    with pinned(threads):
        candidates = _candidates(fast, map_inputs(lambda tensor: tensor[:1], example))
        for runtime in dict.fromkeys(runtimes):
            for batch in dict.fromkeys(batches):
                tables.append(measure(runtime, batch))
                tell(tables[-1])
    return Benchmark(
        name,
        len(fast.bridges),
        fast.members,
        tuple(example.shape[1:]) if isinstance(example, Tensor) else None,
        device.type,
        threads,
        _machine(device),
        tuple(tables),
    )


class _Member(nn.Module):
    """A network whose output is its logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return read_logits(self.net(*inputs, **named))


@dataclass(frozen=True)
class _Candidate:
    net: nn.Module  # as it is timed
    truth: nn.Module  # whose logits it must give
    macs: int  # of the network as it was trained
    params: int


def _candidates(fast: FastEnsemble, image: Inputs) -> dict[str, _Candidate]:
    """What is timed, by name; the first look at the images."""
    try:
        macs, fast_macs = count_macs(fast.source, image), count_macs(fast, image)
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise ValueError(cannot_take(image, error)) from error
    params, member = count_params(fast.source), _Member(fast.source).eval()
    candidates = {
        ONE: _Candidate(member, member, macs, params),
        _fast_name(len(fast.bridges)): _Candidate(
            prepare_for_inference(fast), fast, fast_macs, count_params(fast)
        ),
    }
    for count in range(2, min(fast.members, LARGEST_ENSEMBLE) + 1):
        ensemble = Ensemble([copy.deepcopy(fast.source) for _ in range(count)]).eval()
        candidates[f"DE-{count}"] = _Candidate(ensemble, ensemble, count * macs, count * params)
    return candidates


def _row(
    name: str,
    model: _Candidate,
    memory: int | None,
    times: Mapping[str, Sequence[float]],
    device: torch.device,
) -> Row:
    median, low, high = map(float, np.quantile(times[name], (0.5, *SPREAD)))
    ratio = None if name == ONE else ratio_of(times[name], times[ONE])
    below = None
    if memory is not None and memory < RESOLUTION and device.type == "cpu":  # which is told coarsely
        memory, below = None, RESOLUTION
    return Row(name, model.macs, model.params, memory, below, median, low, high, ratio)


def _batch(example: Inputs, count: int) -> Inputs:
    """So many examples: floats at random, whole numbers from rows of the example."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(count) % count_rows(example)

    def draw(part: Tensor) -> Tensor:
        if not part.is_floating_point():
            return part[rows.to(part.device)]
        return torch.rand(count, *part.shape[1:], generator=generator).to(part.device, part.dtype)

    return map_inputs(draw, example)


def _check(
    fast: FastEnsemble,
    example: Inputs,
    runtimes: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    seconds: float,
) -> None:
    check_fast(fast)
    size = sum(tensor[0].numel() for tensor in tensors_of(example))
    for runtime in runtimes:
        if runtime not in RUNTIMES:
            raise ValueError(f"runtime is {runtime!r}; it must be one of {', '.join(RUNTIMES)}")
    for batch in batches:
        if not 1 <= batch <= MOST_IMAGES:
            raise ValueError(f"batch is {batch}; give 1 to {MOST_IMAGES} images")
        if batch > 1 and batch * size > LARGEST_BATCH:
            raise ValueError(
                f"batch is {batch} images of {size:,} numbers; at most {LARGEST_BATCH:,} are timed "
                f"at once, so give --batch {max(1, LARGEST_BATCH // size)} or less"
            )
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; give at least 1, and 6 or more for ratios")
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; give more than 0")


def _machine(device: torch.device) -> dict[str, str | None]:
    """What a reader has to know beside the numbers."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnxruntime": _version("onnxruntime"),
        "ensbridge": _version("ensbridge"),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _fast_name(bridges: int) -> str:
    return {0: "source alone", 1: "source + bridge"}.get(bridges, f"source + {bridges} bridges")
