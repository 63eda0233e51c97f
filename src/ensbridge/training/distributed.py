# pyright: reportPrivateImportUsage=false
"""Several processes that train and measure as one, as torchrun starts them."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ensbridge.data.examples import ExampleSet
from ensbridge.data.stream import Stream, is_map_style

TIMEOUT = timedelta(minutes=10)  # for an answer inside one operation; waits for long work have no end
Losses = Callable[[], dict[str, Tensor]]
Result = TypeVar("Result")


class StoppedElsewhere(ValueError):
    """Another process of the run stopped, and this one with it."""


class World(NamedTuple):
    """A process's place among all: its rank, and on its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def find_world() -> World | None:
    """The place that torchrun gave this process, or None where it is alone.

    >>> find_world() is None
    True
    """
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or size is None:
        return None
    local = os.environ.get("LOCAL_RANK") or rank, os.environ.get("LOCAL_WORLD_SIZE") or size
    try:
        world = World(*map(int, (rank, size, *local)))
    except ValueError as error:
        raise ValueError("RANK and WORLD_SIZE are not both whole numbers; start with torchrun") from error
    if world.size % world.local_size:
        raise ValueError(
            f"{world.local_size} of {world.size} processes are on this machine; start as many on each"
        )
    return world if world.size > 1 else None


_joined: list[Engine] = []  # a process joins its world once


def join() -> Engine | None:
    """The engine of this process among those that torchrun started, or None where it is alone."""
    world = find_world()
    if world is None:
        return None
    if not _joined:
        _joined.append(Engine(world))
    return _joined[0]


@contextmanager
def errors_shared() -> Iterator[None]:
    """Where an error of one process, if there are several, ends all of them."""
    engine = join()
    with engine.together() if engine else nullcontext():
        yield


@contextmanager
def rank_zero_only() -> Iterator[bool]:
    """Whether this process is the one that prints; of an error all processes together print one sentence."""
    world = find_world()
    if world is None:
        yield True
        return
    if world.rank:
        warnings.showwarning = lambda *_: None
    engine = None
    try:
        engine = join()
        assert engine
        with engine.together():
            yield engine.first
    except BaseException:
        if not (engine.failed_first if engine else world.rank == 0):
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        raise


class Engine:
    """One of several processes: what it does with the others, through Lightning Fabric.

    Values that every process must agree on are exchanged by collective operations, which all processes reach
    in the same order. Errors and the end of long work go through the store, which waits for nobody.
    """

    def __init__(self, world: World) -> None:
        self.world, self.rank, self.size, self.first = world, world.rank, world.size, world.rank == 0
        self.device = torch.device("cpu")
        self.failed_first = False  # whether it is this process's error that stopped all
        self._meetings, self._checked = 0, 0.0
        self._fabric: Any = None
        self._store = _rendezvous()

    def start(self, device: torch.device) -> torch.device:
        """Get ready to work on a kind of device; the answer is this process's own."""
        world, fabric = self.world, _find_fabric()
        self.device = device
        if device.type == "cuda":
            if (count := torch.cuda.device_count()) < world.local_size:
                raise ValueError(
                    f"{world.local_size} processes were started here and torch sees {count} GPUs; "
                    "start one for each GPU, or give --device cpu"
                )
            self.device = torch.device("cuda", world.local_rank)
            torch.cuda.set_device(self.device)
        if self._fabric:
            return self.device
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        logging.getLogger(fabric.__name__).setLevel(logging.WARNING)  # one voice, which is not Fabric's
        atexit.register(lambda: distributed.is_initialized() and distributed.destroy_process_group())
        # Gradients of convolutions of one channel; it costs nothing here.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # where Fabric looks
        os.environ.setdefault("GROUP_RANK", str(world.rank // world.local_size))
        environments = import_module(f"{fabric.__name__}.plugins.environments")
        strategies = import_module(f"{fabric.__name__}.strategies")
        strategy = strategies.DDPStrategy(process_group_backend=backend, timeout=TIMEOUT)
        # Fabric would wrap on a stream of its own, where torch would add all gradients from then on.
        strategy.setup_module = DistributedDataParallel
        self._fabric = fabric.Fabric(
            accelerator=device.type,
            devices=world.local_size,
            num_nodes=world.size // world.local_size,
            strategy=strategy,
            plugins=[environments.TorchElasticEnvironment()],
        )
        self._fabric.launch()
        return self.device

    # ------------------------------------------------------------------ in step with each other

    def wrap(self, weights: Sequence[nn.Parameter]) -> Callable[[Losses], dict[str, Tensor]]:
        """A call of losses of these weights whose gradients will be the mean over processes.

        Nothing but what is trained is wrapped; the teachers that the losses run stay outside.
        """
        return self._fabric.setup_module(_Wrapped(weights), move_to_device=False)

    def rows(self, count: int) -> slice:
        """This process's part of so many images; parts differ by one image at most."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes, in the tensor's own memory where that is on the engine's device."""
        total = tensor.to(self.device)
        distributed.all_reduce(total)  # Fabric's own waits at a barrier before each
        return total

    def shard(self, stream: Stream) -> Stream:
        """A stream that gives this process its part, where that can be had without reading the rest.

        Otherwise its reader takes every so many-th entry. A Dataset is read by index, so needs none of it.
        """
        if stream.sharded or stream.is_indexed:
            return stream
        data = stream.data
        if isinstance(data, DataLoader) and is_map_style(data.dataset):
            loader = self._fabric.setup_dataloaders(data, move_to_device=False)
            return replace(stream, data=loader, sharded=True)
        if type(data).__module__.startswith("datasets."):
            split = import_module("datasets.distributed").split_dataset_by_node
            return replace(stream, data=split(data, self.rank, self.size), sharded=True)
        return stream

    def with_length(self, stream: Stream) -> Stream:
        """A stream whose length is that of all processes' parts, where each has one of its own."""
        if not stream.sharded or stream.length is None:
            return stream
        return replace(stream, length=int(self.sum(torch.tensor(float(stream.length)))))

    def gather(self, text: str) -> list[str]:
        """What every process says, in the order of their ranks."""
        texts: list[Any] = [None] * self.size
        distributed.all_gather_object(texts, text)
        return texts

    def any(self, here: bool) -> bool:
        """Whether something holds in any process."""
        return bool(self.sum(torch.tensor(float(here))) > 0)

    def broadcast(self, make: Callable[[], Result]) -> Result:
        """What the first process makes, in all; what it raises too."""
        made, raised = None, None
        if self.first:
            try:
                made = make()
            except Exception as error:  # whatever it is, the others must not wait for an answer
                raised = error
        made, sent = self._fabric.broadcast((made, raised and _portable(raised)))
        if raised or sent:
            raise raised or sent
        return made

    def begin(self, student: nn.Module, run: Mapping[str, object]) -> None:
        """Start from the first process's weights; processes that were given another `run` are refused."""
        theirs = self.broadcast(lambda: json.dumps(run, sort_keys=True, default=str))
        if self.any(theirs != json.dumps(run, sort_keys=True, default=str)):
            raise ValueError(
                "processes were given other data or configurations than the first; make them the same"
            )
        state = student.state_dict()
        student.load_state_dict(
            self.broadcast(lambda: {name: tensor.cpu() for name, tensor in state.items()})
        )

    def in_batches(self, run: Callable[[Any], Tensor], data: ExampleSet, size: int, dim: int = 0) -> Tensor:
        """`run` of every batch, joined along `dim`, to the bit as one process would.

        Batches are those of one process, none is padded, and each is run by one process alone.
        """
        starts = range(0, len(data), size)[self.rank :: self.size]
        index = torch.arange(len(data), device=data.device)
        parts = [run(data.batch(index[start : start + size])[0]) for start in starts]
        shape, dtype = self.broadcast(lambda: (list(parts[0].shape), parts[0].dtype))
        shape[dim] = len(data)
        whole = torch.zeros(shape, dtype=dtype, device=self.device)
        for start, part in zip(starts, parts, strict=True):
            whole.narrow(dim, start, part.shape[dim]).copy_(part)
        # Bits are added, as 0 + -0 would lose the sign.
        bits = self.sum(whole.view(torch.int64 if dtype == torch.float64 else torch.int32))
        return bits.view(dtype)

    # ------------------------------------------------------------------ each for itself

    def run_independently(self, work: Callable[[], None], late: type[Exception]) -> None:
        """Work without the others, then wait for them; an error of kind `late` waits too and is all's."""
        outcome = ""
        try:
            work()
        except late as error:
            outcome = str(error)
        for sentence in self.wait(outcome):
            if sentence:
                raise late(sentence)

    def wait(self, word: str = "") -> list[str]:
        """Wait until every process has come here, however long it takes; what each of them says."""
        self._meetings += 1
        prefix = f"meeting/{self._meetings}"
        keys = [f"{prefix}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], word)
        self._until(lambda: self._store.check(keys))
        words = [self._store.get(key).decode() for key in keys]
        seen = self._store.add(f"{prefix}/seen", 1)
        if self.first:  # its end may be the store's
            self._until(lambda: self._store.add(f"{prefix}/seen", 0) == self.size or seen == self.size)
        return words

    def check_peers(self) -> None:
        """Stop where another process has stopped; asked often, it looks once a second."""
        if time.monotonic() - self._checked >= 1:
            self._checked = time.monotonic()
            if self._store.check(["error"]):
                raise StoppedElsewhere(self._store.get("error").decode())

    def _until(self, done: Callable[[], bool]) -> None:
        pause = 1e-3
        while not done():
            self.check_peers()
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    # ------------------------------------------------------------------ errors

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error of this process ends the others, and theirs ends this one."""
        try:
            yield
        except StoppedElsewhere:
            raise
        except BaseException as error:
            lost = _is_of_connection(error)
            sentence = f"process {self.rank} of {self.size} stopped: {str(error) or type(error).__name__}"
            known = False  # whether another has said why
            first_error = sentence
            with suppress(RuntimeError):  # the store may be gone too
                if lost:
                    sentence = (
                        "another process of the run ended or did not answer; run the same command again"
                    )
                    first_error = sentence
                    end = time.monotonic() + 5  # to say why, for the process that failed
                    while not known and time.monotonic() < end:
                        known = self._store.check(["error"])
                        time.sleep(0.05)
                # Why this process stops, unless another was first to say so.
                first_error = self._store.compare_set("error", "", sentence).decode()
            self.failed_first = first_error == sentence and not (lost and known)
            if lost:
                raise StoppedElsewhere(first_error) from error
            raise


class _Wrapped(nn.Module):
    """What is trained, with a forward pass that runs whatever it is given."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, losses: Losses) -> dict[str, Tensor]:
        """The losses."""
        return losses()


def _find_fabric() -> Any:
    """Lightning Fabric, which comes by itself or inside lightning."""
    for name in ("lightning_fabric", "lightning.fabric"):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != name.split(".")[0]:
                raise
    raise ValueError("several processes need Lightning Fabric; pip install 'ensbridge[distributed]'")


def _rendezvous() -> distributed.Store:
    """The store that all processes reach, at the address that torchrun set."""
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        os.environ.setdefault(name, value)
    store, _, _ = next(distributed.rendezvous("env://", timeout=TIMEOUT))
    # Attempts of torchrun share its store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"ensbridge/{attempt}", store)


def _portable(error: Exception) -> Exception:
    """An error that another process can be sent: of the same kind where a sentence is all that makes it."""
    try:
        copy = type(error)(str(error))
    except Exception:
        return RuntimeError(str(error))
    return copy if str(copy) == str(error) else RuntimeError(str(error))


def _is_of_connection(error: BaseException) -> bool:
    """Whether an error says that others are gone."""
    named = any(
        word in str(error) for word in ("gloo", "NCCL", "onnection closed", "TCPStore", "Broken pipe")
    )
    return isinstance(error, RuntimeError) and (isinstance(error, distributed.DistError) or named)
