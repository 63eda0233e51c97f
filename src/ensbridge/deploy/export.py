"""A fast ensemble as one file for other runtimes: ONNX, or torch.export's pt2.

The file is run again and compared with the model before it gets its name: none that differs ever has one.
Only what was written a moment ago is ever loaded here.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from ensbridge.bridge.bridge import Bridge
from ensbridge.deploy.agreement import TOLERANCE, difference, tolerance
from ensbridge.deploy.fuse import prepare_for_inference
from ensbridge.deploy.saving import load
from ensbridge.deploy.saving.description import LARGEST_BATCH, LARGEST_IMAGE
from ensbridge.deploy.tracing import BATCHES, batch_sizes, inputs, trace
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.extras import need
from ensbridge.utils.files import open_folder, write_atomically
from ensbridge.utils.input_specs import made_up_inputs
from ensbridge.utils.inputs import Inputs, call_network, count_rows, map_inputs, shapes_of, tensors_of
from ensbridge.utils.text import one_line

Target = Literal["onnx", "pt2"]
Run = Callable[[Inputs], Tensor]  # (B, K), or (2·B, K) with the source's logits behind the model's
Images = Tensor | np.ndarray[Any, Any]
Example = Images | tuple[Images, ...] | Mapping[str, Images]

OUTPUTS = ("logits", "source_logits")  # of ONNX
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# torch's ONNX exporter rounds Python's numbers, such as temperatures, to float32 in float64 graphs too, which
# was measured as 2e-8.
ONNX_TOLERANCE = 1e-6
MADE_UP = 32  # examples of inputs that are no images
# How many times the model's own error in float32 that of an export may be, where the model's is larger than
# what is allowed.
ROUNDING = 4


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how it compared with the model."""

    path: Path
    size: int  # bytes
    opset: int | None  # of ONNX
    batches: int  # how many were compared
    difference: float  # the largest, as a share of the logits' scale, on batches that float32 can tell
    tolerance: float
    coarse: int = 0  # batches on which the model's own rounding is larger than that, and the file's no larger
    batch_sizes: tuple[int, ...] = BATCHES  # of those that were made up
    made_up: str = "images: random, zeros, ones, times 1000, negative"

    def __str__(self) -> str:
        opset = "" if self.opset is None else f", opset {self.opset}"
        coarse = ""
        if self.coarse:
            coarse = f"; on {self.coarse} the model's own logits are rounded further, and the file's no more"
        sizes = ", ".join(map(str, self.batch_sizes))
        return (
            f"{self.path}: {self.size / 1e6:.3g} MB{opset}\n"
            f"run again beside the model on {self.batches} batches ({sizes} {self.made_up}; the example): "
            f"logits differ by at most "
            f"{self.difference:.1e} of their scale, allowed are {self.tolerance:.0e}{coarse}"
        )


def export(fast: FastEnsemble, path: Path | str, to: Target, example: Example) -> Exported:
    """Write a model as one file, `to` "onnx" or "pt2", that takes batches of any size and gives logits.

    Source, bridges and calibration are all inside. `example` is a batch of images, a tensor or an array, or
    a tuple or mapping of them as the model takes it: its shapes and types are taken over, and it is among
    the inputs that the file is checked with, but it is not kept in the file. ONNX has its input under
    "images", of a tuple under "input_0" and so on, of a mapping under its keys; its outputs are `logits` and
    `source_logits`, from which the disagreement can be computed, and `class_names`, where the model has
    them, are in its metadata as JSON.

    >>> from torch import nn
    >>> from ensbridge.models import TokenScore
    >>> source = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> fast = FastEnsemble(source, [Bridge(TokenScore(3, 8, 8)).one_step()], feature="1", temperature=1.3)
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     done = export(fast, f"{folder}/model.pt2", to="pt2", example=torch.rand(4, 1, 4, 4))
    ...     done.path.name, done.difference <= done.tolerance
    ('model.pt2', True)
    """
    path = Path(path)
    _check_request(fast, path, to)
    model = copy.deepcopy(fast).cpu().eval().requires_grad_(False)
    images = _batch(example)
    eager = _eager(model, images, with_source=to == "onnx")
    open_folder(path.parent)
    metadata = {} if fast.class_names is None else {"class_names": json.dumps(fast.class_names)}
    with silence():
        program = trace(prepare_for_inference(model), images, with_source=to == "onnx")
        content, opset = _serialise(program, to, metadata)
        run = _open(content, to, path.name)
        allowed = max(tolerance(model, images), ONNX_TOLERANCE if to == "onnx" else 0.0)
        gaps = [_compare(model, eager, run, each, allowed, path.name) for each in inputs(images)]
    write_atomically(path, content)
    fine = [gap for gap in gaps if gap <= allowed]
    worst, coarse = max(fine, default=0.0), len(gaps) - len(fine)
    done = Exported(path, len(content), opset, len(gaps), worst, allowed, coarse, batch_sizes(images))
    floats = any(tensor.is_floating_point() for tensor in tensors_of(images))
    return done if floats else replace(done, made_up="rows of the example")


def export_folder(
    folder: Path | str,
    to: Target,
    out: Path | str | None = None,
    image_shape: Sequence[int] | None = None,
    allow: Collection[str] = (),
) -> Exported:
    """Export a saved model, into its own folder unless `out` names a file."""
    _check_target(to)  # before what may take longer
    fast = load(folder, allow=allow)
    if out is None and not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder of yours; say where the file goes with --out model.{to}")
    place = Path(folder) / f"model.{to}" if out is None else out
    return export(fast, place, to, example_like(fast, folder, image_shape))


def example_like(fast: FastEnsemble, folder: Path | str, image_shape: Sequence[int] | None) -> Inputs:
    """Made-up examples of what a saved model is called with, as far as the model says it, or an image."""
    if image_shape is None and fast.image_shape is None and fast.input_specs is not None:
        numbers = sum(math.prod(spec.shape) for spec in fast.input_specs)
        return made_up_inputs(fast.input_specs, max(1, min(MADE_UP, LARGEST_BATCH // numbers)))
    return image_like(fast, folder, image_shape)


def image_like(fast: FastEnsemble, folder: Path | str, image_shape: Sequence[int] | None) -> Tensor:
    """A black image of the shape that a saved model takes, or that is given, in the type of its weights."""
    shape = fast.image_shape if image_shape is None else tuple(image_shape)
    if shape is None and fast.input_specs is not None:
        takes = "; ".join(map(str, fast.input_specs))
        raise ValueError(
            f"{folder} takes no images ({takes}); call it from Python, or export it to onnx or pt2"
        )
    if shape is None:
        raise ValueError(f"{folder} does not say what images it takes; give --image-shape, such as 3,32,32")
    if not shape or min(shape) < 1 or math.prod(shape) > LARGEST_IMAGE:
        raise ValueError(f"the image shape is {shape}; give that of one image, such as 3,32,32")
    dtype = next((each.dtype for each in fast.source.parameters() if each.is_floating_point()), torch.float32)
    return torch.zeros(1, *shape, dtype=dtype)


def parse_shape(text: str) -> tuple[int, ...]:
    """A shape as it is typed.

    >>> parse_shape("3,32,32")
    (3, 32, 32)
    """
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text, re.ASCII):
        raise ValueError(f"the image shape is {text!r}; give whole numbers with commas, such as 3,32,32")
    return tuple(map(int, text.split(",")))


def check_fast(fast: object) -> None:
    """Refuse what is no FastEnsemble."""
    if not isinstance(fast, FastEnsemble):
        raise ValueError(
            f"the model is a {type(fast).__name__}; give a FastEnsemble, as compress or load returns it"
        )


def cannot_take(images: Inputs, error: Exception) -> str:
    """Why a model fails on images, and what to do."""
    if not isinstance(images, Tensor):
        return (
            f"the model cannot take {shapes_of(images)} ({one_line(error)}); give an example as it takes it"
        )
    shape, kind = tuple(images.shape[1:]), str(images.dtype).removeprefix("torch.")
    return (
        f"the model cannot take images of shape {shape} and type {kind} ({one_line(error)}); give theirs, "
        "such as --image-shape 3,32,32"
    )


def _check_target(to: str) -> None:
    if to not in get_args(Target):
        raise ValueError(f"to is {to!r}; it must be 'onnx' or 'pt2'")
    if to == "onnx":
        need("export")


def _check_request(fast: FastEnsemble, path: Path, to: Target) -> None:
    _check_target(to)
    check_fast(fast)
    if path.suffix != f".{to}" or path.is_dir():
        raise ValueError(f"{path} is no name for this export; give a file such as model.{to}")
    for bridge in fast.each_bridge():
        if not isinstance(bridge, Bridge):
            continue
        if bridge.schedule.variance == "released":
            raise ValueError(
                "this bridge adds noise in every step (variance 'released'), and an exported graph must not "
                "be random; build it with BridgeConfig(variance='exact')"
            )
        if bridge.config.test_temperature == "drawn":
            raise ValueError(
                "this bridge draws a temperature for each image (test_temperature 'drawn'), and an exported "
                "graph must not be random; build it with BridgeConfig(test_temperature='mean')"
            )


def _batch(example: Example) -> Inputs:
    try:
        if isinstance(example, Mapping):
            return {name: torch.as_tensor(part).detach().cpu() for name, part in example.items()}
        if isinstance(example, tuple):
            return tuple(torch.as_tensor(part).detach().cpu() for part in example)
        return torch.as_tensor(example).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"example is a {type(example).__name__}; give a batch of images as a tensor or an array"
        ) from error


def _eager(model: FastEnsemble, example: Inputs, with_source: bool) -> Run:
    """The model itself, once it is seen to work on the example."""

    @torch.no_grad()
    def run(images: Inputs) -> Tensor:
        return torch.cat(model.with_source(images)[: 1 + with_source])

    for tensor in tensors_of(example):
        known = tensor.dtype in TOLERANCE or (tensor.ndim < 4 and tensor.dtype in WHOLE)
        if tensor.ndim < 1 + (tensor is example) or len(tensor) == 0 or not known:
            raise ValueError(
                f"example is {tensor.dtype} of shape {tuple(tensor.shape)}; give a batch of images as floats"
            )
    try:
        logits = torch.cat([run(each) for each in islice(inputs(example), 2)])
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise ValueError(cannot_take(example, error)) from error
    if not logits.isfinite().all():
        raise ValueError(
            "the model's logits are not finite, so that no export could be checked; train it again"
        )
    return run


def _serialise(program: ExportedProgram, to: Target, metadata: Mapping[str, str]) -> tuple[bytes, int | None]:
    """The file's content, and ONNX's opset.

    In memory: torch's own writer ends the process where the disk is full.
    """
    try:
        return onnx_bytes(program, metadata) if to == "onnx" else (_pt2_bytes(program), None)
    except Exception as error:  # whatever an operation without a counterpart in the format brings
        raise ValueError(
            f"this model cannot be written as {to} ({one_line(error)}); try the other --to"
        ) from error


def _open(content: bytes, to: Target, name: str) -> Run:
    """The file's content in its runtime."""
    try:
        return _open_onnx(content) if to == "onnx" else _open_pt2(content)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be opened again ({one_line(error)}) and was not kept; try the other --to"
        ) from error


def onnx_bytes(
    program: ExportedProgram, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, int | None]:
    """A traced model as ONNX, and its opset; `metadata` are properties that the file carries."""
    signature = program.graph_signature
    made = torch.onnx.export(
        program,
        dynamo=True,
        input_names=[str(name) for name in signature.user_inputs],
        output_names=list(OUTPUTS[: len(signature.user_outputs)]),
        verbose=False,
    )
    assert made is not None
    _tidy(made)
    made.model.metadata_props.update(metadata or {})
    return made.model_proto.SerializeToString(), made.model.opset_imports.get("")


def _tidy(made: torch.onnx.ONNXProgram) -> None:
    """Call the free size "batch" wherever it stands, and leave out how each node came to be."""
    graph = made.model.graph
    (free,) = {str(images.shape[0]) for images in graph.inputs if images.shape is not None}
    for node in graph:
        node.metadata_props.clear()
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = type(value.shape)(["batch" if str(d) == free else d for d in value.shape])


def _pt2_bytes(program: ExportedProgram) -> bytes:
    file = BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def _open_onnx(content: bytes) -> Run:
    import onnxruntime  # pyright: ignore[reportMissingTypeStubs]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    names = [given.name for given in session.get_inputs()]

    def run(images: Inputs) -> Tensor:
        feed = {name: tensor.numpy() for name, tensor in zip(names, tensors_of(images), strict=True)}
        return torch.cat([torch.from_numpy(logits) for logits in session.run(list(OUTPUTS), feed)])

    return run


def _open_pt2(content: bytes) -> Run:
    net = torch.export.load(BytesIO(content)).module()

    @torch.no_grad()
    def run(images: Inputs) -> Tensor:
        return call_network(net, images)

    return run


def _compare(model: FastEnsemble, eager: Run, run: Run, images: Inputs, tolerance: float, name: str) -> float:
    """How far the export is from the model on one batch; too far, or a failing run, is an error."""
    expected = eager(images)
    try:
        found = run(images)
    except Exception as error:  # runtimes have errors of their own
        raise ValueError(
            f"{name} fails on {count_rows(images)} images ({one_line(error)}) and was not kept; try the "
            "other --to"
        ) from error
    gap = difference(expected, found)
    if not gap <= tolerance and not _is_rounding(model, eager, images, expected, found):
        raise FloatingPointError(
            f"{name} differs from the model by {gap:.1e} of the logits' scale on {count_rows(images)} "
            f"images, more than {tolerance:.0e}, and was not kept; try the other --to"
        )
    return gap


def _is_rounding(model: FastEnsemble, eager: Run, images: Inputs, expected: Tensor, found: Tensor) -> bool:
    """Whether the model in double precision tells that its own logits are about as far off as the file's.

    Some networks take images that are a thousand times too bright to logits of which float32 knows three
    digits.
    """
    if expected.dtype != torch.float32 or not expected.equal(eager(images)):  # or it is random
        return False
    try:
        with torch.no_grad():
            doubles = map_inputs(lambda part: part.double() if part.is_floating_point() else part, images)
            exact = torch.cat(
                copy.deepcopy(model).double().with_source(doubles)[: len(expected) // count_rows(images)]
            )
    except (RuntimeError, TypeError, ValueError):  # its code asks for float32
        return False
    return difference(exact, found) <= min(ROUNDING * difference(exact, expected), TOLERANCE[torch.float16])


@contextmanager
def silence() -> Iterator[None]:
    """Keep the exporters' remarks, which are for their developers, from the user's terminal."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
