"""A model in the runtime that serves it: images in, its logits and its source's own out of one pass.

Shapes: B images, K classes; a runtime returns (B, 2K), logits before source logits, so that one tensor
leaves every kind of graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ensbridge.deploy.cuda_graph import capture
from ensbridge.deploy.export import onnx_bytes, onnx_session, silence
from ensbridge.deploy.fuse import InferenceModel, draws, prepare_for_inference
from ensbridge.deploy.tracing import difference, tolerance, trace
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.extras import need
from ensbridge.utils.inputs import pack
from ensbridge.utils.text import one_line

Backend = Literal["eager", "compiled", "cuda-graph", "onnxruntime"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
Run: TypeAlias = Callable[[Tensor], Tensor]


class BothLogits(InferenceModel):
    """A model for inference that returns its logits and its source's side by side, (B, 2K)."""

    def forward(self, *inputs: Any, **named: Tensor) -> Tensor:
        """Logits and source logits in one tensor."""
        return torch.cat(self.with_source(pack(inputs, named)), -1)


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that there is not, or not on that device, before anything is loaded."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    if backend == "cuda-graph" and device.type != "cuda":
        raise ValueError("backend cuda-graph needs a GPU; give --device cuda, or another backend")
    if backend == "onnxruntime":
        need("export")
        if device.type != "cpu":
            raise ValueError(f"backend onnxruntime runs on the CPU; the device is {str(device)!r}")


def is_random(fast: FastEnsemble) -> bool:
    """Whether a bridge draws numbers by an image's place in its batch: requests must not share one."""
    return any(map(draws, fast.bridges))


def build_backend(backend: Backend, fast: FastEnsemble, example: Tensor, batch: int) -> Run:
    """Bring a model into a runtime that takes 1 to `batch` images, and see that its logits are the model's.

    `example` is one image (1, …) on the device that serves.
    """
    if backend != "eager" and is_random(fast):
        raise ValueError(
            f"this model draws a temperature or noise for each image, which backend {backend} cannot; give "
            "--backend eager"
        )
    generator = torch.Generator().manual_seed(0)
    sizes = sorted({1, min(2, batch), min(3, batch), batch})
    probes = [torch.rand(size, *example.shape[1:], generator=generator).to(example) for size in sizes]
    with torch.inference_mode():
        expected = [torch.cat(fast.with_source(images), -1) for images in probes]
    try:
        with silence():
            run = _BUILD[backend](fast, example, batch)
            gaps = [difference(ours, run(images)) for ours, images in zip(expected, probes, strict=True)]
    except Exception as error:  # compilers and exporters have errors of their own, none of them public
        raise ValueError(
            f"backend {backend} cannot run this model ({one_line(error)}); give --backend eager"
        ) from error
    if not max(gaps) <= tolerance(fast, example):
        raise ValueError(
            f"backend {backend} gives other logits than the model, by {max(gaps):.1e} of their scale; give "
            "--backend eager"
        )
    return run


def _eager(fast: FastEnsemble, example: Tensor, batch: int) -> Run:
    model = fast if is_random(fast) else prepare_for_inference(fast)

    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        return torch.cat(model.with_source(images), -1)

    return run


def _compiled(fast: FastEnsemble, example: Tensor, batch: int) -> Run:
    """One graph for one image and one for more: torch.compile gives up after a few sizes of one function."""
    with torch.no_grad():
        program = trace(BothLogits(fast).eval(), example).module(check_guards=False)
    several = torch.compile(program, dynamic=True)
    single = torch.compile(program, dynamic=False)

    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        return single(images) if len(images) == 1 else several(images)

    return run


def _cuda_graph(fast: FastEnsemble, example: Tensor, batch: int) -> Run:
    """A graph for each of a few sizes; a batch in between is filled up with black images."""
    sizes = graph_sizes(batch)
    graphs = {
        size: capture(BothLogits(fast).eval(), example.expand(size, *example.shape[1:]).clone())
        for size in sizes
    }

    def run(images: Tensor) -> Tensor:
        size = next(size for size in sizes if size >= len(images))
        padded = images.new_zeros(size, *images.shape[1:])
        padded[: len(images)] = images
        return graphs[size](padded)[: len(images)]

    return run


def graph_sizes(batch: int) -> list[int]:
    """The batches that are compiled and captured, four times as large each: every one takes its seconds.

    >>> graph_sizes(1), graph_sizes(16), graph_sizes(32)
    ([1], [1, 4, 16], [1, 4, 16, 32])
    """
    sizes = [1]
    while 4 * sizes[-1] < batch:
        sizes.append(4 * sizes[-1])
    return sizes if batch == 1 else [*sizes, batch]


def _onnxruntime(fast: FastEnsemble, example: Tensor, batch: int) -> Run:
    content, _ = onnx_bytes(trace(BothLogits(fast).eval(), example))
    session = onnx_session(content, torch.get_num_threads())

    def run(images: Tensor) -> Tensor:
        (both,) = session.run(["logits"], {"images": images.numpy()})
        return torch.from_numpy(both)

    return run


_BUILD: dict[str, Callable[[FastEnsemble, Tensor, int], Run]] = {
    "eager": _eager,
    "compiled": _compiled,
    "cuda-graph": _cuda_graph,
    "onnxruntime": _onnxruntime,
}
