"""A model in each runtime: eager torch, torch.compile, onnxruntime."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ensbridge.deploy.agreement import TOLERANCE, difference, tolerance
from ensbridge.deploy.benchmark.memory import peak_memory, resident
from ensbridge.deploy.cuda_graph import capture
from ensbridge.deploy.export import onnx_bytes, silence, trace
from ensbridge.deploy.tracing import input_names
from ensbridge.utils.extras import missing
from ensbridge.utils.inputs import Inputs, call_network, tensors_of, unpack
from ensbridge.utils.text import one_line

Runtime = Literal["eager", "compiled", "onnxruntime"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
_WRITTEN: WeakKeyDictionary[nn.Module, bytes] = WeakKeyDictionary()


class CannotRun(Exception):
    """A runtime that is not there or cannot run a model, in one line."""


@dataclass(frozen=True)
class Runner:
    """A model that is ready to be timed on one batch."""

    call: Callable[[], Tensor]
    memory: int | None  # bytes: weights and what a call needs beside them


def ready(runtime: Runtime, model: nn.Module, images: Inputs, threads: int, truth: nn.Module) -> Runner:
    """Bring a model into a runtime, run it, and see that its logits are those of `truth` in eager torch."""
    _check(runtime, images)
    try:
        with _quiet():
            # Before anything is measured: libraries take memory when first used.
            expected = _eager(truth, images)()
            runner = _BUILD[runtime](model, images, threads)
            logits = runner.call()
    except CannotRun:
        raise
    except Exception as error:  # compilers and exporters have errors of their own, none of them public
        raise CannotRun(f"{runtime} cannot run this model: {one_line(error)}") from error
    gap = difference(expected.float().cpu(), logits.float().cpu())
    # A GPU multiplies float32 with fewer digits inside of convolutions.
    allowed = max(tolerance(truth, images), TOLERANCE[torch.float16] if _on_gpu(images) else 0.0)
    if not gap <= allowed:
        raise CannotRun(f"{runtime} gives other logits than the model itself, by {gap:.1e} of their scale")
    return runner


def _on_gpu(images: Inputs) -> bool:
    return tensors_of(images)[0].is_cuda


def _check(runtime: Runtime, images: Inputs) -> None:
    if runtime == "compiled" and _on_gpu(images) and not isinstance(images, Tensor):
        raise CannotRun("compiled models of several inputs are measured on the CPU only")
    if runtime != "onnxruntime":
        return
    if _on_gpu(images):
        raise CannotRun("onnxruntime is measured on the CPU only")
    if lacking := missing("export"):
        raise CannotRun(lacking)


def _eager(model: Callable[..., Tensor], images: Inputs) -> Callable[[], Tensor]:
    on_gpu = _on_gpu(images)

    @torch.inference_mode()
    def call() -> Tensor:
        logits = call_network(model, images)
        if on_gpu:
            torch.cuda.synchronize()
        return logits

    return call


def _run_eager(model: nn.Module, images: Inputs, threads: int) -> Runner:
    call = _eager(model, images)
    return Runner(call, _torch_memory(call, model, images))


def _run_compiled(model: nn.Module, images: Inputs, threads: int) -> Runner:
    """As torch.export traces it: torch.compile gives up after a few models or batch sizes of one class."""
    if isinstance(images, Tensor) and images.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call = _eager(capture(model, images), images)
        return Runner(call, torch.cuda.max_memory_allocated() - before)  # it has weights of its own
    graph = torch.export.export(model, *unpack(images), strict=False).module()
    options = {"freezing": True}
    call = _eager(torch.compile(graph, dynamic=False, options=options), images)  # type: ignore[arg-type]
    return Runner(call, _torch_memory(call, model, images))


def _run_onnx(model: nn.Module, images: Inputs, threads: int) -> Runner:
    import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    graph = _onnx(model, images)
    tensors = zip(input_names(images), tensors_of(images), strict=True)
    feed = {name: tensor.numpy() for name, tensor in tensors}
    before = resident()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def call() -> Tensor:
        return torch.from_numpy(session.run(None, feed)[0])

    return Runner(call, peak_memory(lambda: (call(), call()), before))


def _onnx(model: nn.Module, images: Inputs) -> bytes:
    """The model as ONNX, for batches of any size, written once."""
    if model not in _WRITTEN:
        _WRITTEN[model] = onnx_bytes(trace(model, images))[0]
    return _WRITTEN[model]


def _torch_memory(call: Callable[[], object], model: nn.Module, images: Inputs) -> int | None:
    tensors = [*model.parameters(), *model.buffers()]
    weights = sum(tensor.nbytes for tensor in tensors)
    if _on_gpu(images):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before + weights
    call()
    need = peak_memory(call)
    return None if need is None else need + weights


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the compilers' remarks, which are for their developers, from the user's terminal."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._inductor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with silence():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_BUILD = {"eager": _run_eager, "compiled": _run_compiled, "onnxruntime": _run_onnx}
