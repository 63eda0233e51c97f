"""A model in each runtime: eager torch, torch.compile, onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ensbridge.deploy.benchmark.memory import peak_memory, resident
from ensbridge.deploy.cuda_graph import capture
from ensbridge.deploy.export import onnx_bytes, onnx_session, silence
from ensbridge.deploy.tracing import difference, input_names, tolerance, trace
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
    on_gpu = _on_gpu(images)
    if runtime == "compiled" and on_gpu and not isinstance(images, Tensor):
        raise CannotRun("compiled models of several inputs are measured on the CPU only")
    if runtime == "onnxruntime" and on_gpu:
        raise CannotRun("onnxruntime is measured on the CPU only")
    if runtime == "onnxruntime" and (lacking := missing("export")):
        raise CannotRun(lacking)
    try:
        with silence():
            # Before anything is measured: libraries take memory when first used.
            expected = _eager(truth, images)()
            runner = _BUILD[runtime](model, images, threads)
            logits = runner.call()
    except Exception as error:  # compilers and exporters have errors of their own, none of them public
        raise CannotRun(f"{runtime} cannot run this model: {one_line(error)}") from error
    gap = difference(expected.float().cpu(), logits.float().cpu())
    if not gap <= tolerance(truth, images):
        raise CannotRun(f"{runtime} gives other logits than the model itself, by {gap:.1e} of their scale")
    return runner


def _on_gpu(images: Inputs) -> bool:
    return tensors_of(images)[0].is_cuda


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
    if model not in _WRITTEN:  # for batches of any size
        _WRITTEN[model] = onnx_bytes(trace(model, images))[0]
    tensors = zip(input_names(images), tensors_of(images), strict=True)
    feed = {name: tensor.numpy() for name, tensor in tensors}
    before = resident()
    session = onnx_session(_WRITTEN[model], threads)

    def call() -> Tensor:
        return torch.from_numpy(session.run(None, feed)[0])

    return Runner(call, peak_memory(lambda: (call(), call()), before))


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


_BUILD = {"eager": _run_eager, "compiled": _run_compiled, "onnxruntime": _run_onnx}
