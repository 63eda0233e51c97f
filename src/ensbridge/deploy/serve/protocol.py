"""The Open Inference Protocol v2, with binary tensors, into a tensor and back. No HTTP here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from ensbridge.deploy.serve.batching import Outputs
from ensbridge.deploy.serve.limits import Limits, Refused
from ensbridge.utils.text import visible

INPUT, OUTPUTS = "images", ("logits", "source_logits")
VERSION = "1"
EXTENSIONS = ["binary_tensor_data", "model_repository"]
_NUMPY: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP64": np.dtype("<f8")}

Size = Annotated[int, Field(ge=0, le=2**31)]
Parameters = dict[str, str | int | float | bool]


class InputTensor(BaseModel):
    """A tensor of the request; its data are here, flat or nested, or behind the JSON."""

    name: str
    shape: list[Size] = Field(min_length=1, max_length=8)
    datatype: str
    parameters: Parameters | None = None
    data: list[Any] | None = None


class RequestedOutput(BaseModel):
    """An output that is wanted."""

    name: str
    parameters: Parameters | None = None


class InferRequest(BaseModel):
    """The JSON of an inference request."""

    id: str | None = None
    parameters: Parameters | None = None
    inputs: list[InputTensor] = Field(min_length=1)
    outputs: list[RequestedOutput] | None = None


class OutputTensor(BaseModel):
    """A tensor of the answer; with `binary_data_size` its data follow the JSON."""

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters | None = None
    data: list[float] | None = None


class InferResponse(BaseModel):
    """The JSON of an inference answer."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class TensorMetadata(BaseModel):
    """A tensor that a model takes or gives; -1 is the batch."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """A model's tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(BaseModel):
    """The server and the extensions of the protocol that it has."""

    name: str
    version: str
    extensions: list[str]


@dataclass(frozen=True)
class Inference:
    """A request that is understood: its images, and the outputs that are wanted, each with whether binary."""

    id: str | None
    images: Tensor
    outputs: tuple[tuple[str, bool], ...]


def datatype_of(dtype: torch.dtype) -> str:
    """The protocol's name for what a model takes and gives; half precision is converted on the way in.

    >>> datatype_of(torch.bfloat16), datatype_of(torch.float64)
    ('FP32', 'FP64')
    """
    return "FP64" if dtype == torch.float64 else "FP32"


def metadata(name: str, shape: Sequence[int], classes: int, dtype: torch.dtype) -> ModelMetadata:
    """The tensors of a model."""
    kind = datatype_of(dtype)
    return ModelMetadata(
        name=name,
        versions=[VERSION],
        platform="ensbridge_fastensemble",
        inputs=[TensorMetadata(name=INPUT, datatype=kind, shape=[-1, *shape])],
        outputs=[TensorMetadata(name=output, datatype=kind, shape=[-1, classes]) for output in OUTPUTS],
    )


def parse_request(
    body: bytes, header_length: str | None, shape: Sequence[int], dtype: torch.dtype, limits: Limits
) -> Inference:
    """Read a request for a model that takes images of `shape`; `Refused` with one sentence."""
    head, tail = _split(body, header_length)
    if len(head) > limits.json:
        raise Refused(
            413, f"the request's JSON has {len(head):,} bytes of at most {limits.json:,}; send binary tensors"
        )
    try:
        request = InferRequest.model_validate_json(head)
    except ValidationError as error:
        raise Refused(400, f"the request is no inference request: {first_error(error)}") from error
    if len(request.inputs) != 1 or request.inputs[0].name != INPUT:
        names = ", ".join(tensor.name for tensor in request.inputs)
        raise Refused(400, visible(f"the inputs are {names[:100]}; give the one input {INPUT!r}"))
    images = _images(request.inputs[0], tail, shape, dtype, limits.images)
    return Inference(request.id, images, _wanted(request))


def _split(body: bytes, header_length: str | None) -> tuple[bytes, memoryview | None]:
    """The JSON and what follows it, or None where there is JSON alone."""
    if header_length is None:
        return body, None
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 12):
        raise Refused(
            400, "Inference-Header-Content-Length is no whole number; give the JSON's length in bytes"
        )
    length = int(header_length)
    if not 0 < length <= len(body):
        raise Refused(
            400, f"Inference-Header-Content-Length is {length}, and the request has {len(body)} bytes"
        )
    return body[:length], memoryview(body)[length:]


def _images(
    tensor: InputTensor, tail: memoryview | None, shape: Sequence[int], dtype: torch.dtype, most: int
) -> Tensor:
    kind = datatype_of(dtype)
    if tensor.datatype != kind:
        raise Refused(400, visible(f"datatype is {tensor.datatype[:20]!r}; this model takes {kind}"))
    count, *rest = tensor.shape
    if rest != list(shape) or count == 0:
        raise Refused(
            400, f"shape is {tensor.shape}; this model takes {[-1, *shape]}, where -1 is 1 or more images"
        )
    if count > most:
        raise Refused(413, f"the request has {count} images; give at most {most} at once")
    numbers, size = math.prod(tensor.shape), (tensor.parameters or {}).get("binary_data_size")
    if size is not None:
        array = _binary(size, tail, numbers, _NUMPY[kind])
    elif tail:
        raise Refused(400, "there are bytes behind the JSON, and the input has no binary_data_size")
    else:
        array = _listed(tensor.data, numbers, _NUMPY[kind])
    images = torch.from_numpy(array.reshape(tensor.shape)).to(dtype)
    if not images.isfinite().all():
        raise Refused(400, "the images hold numbers that are not finite; give finite ones")
    return images


def _binary(size: object, tail: memoryview | None, numbers: int, kind: np.dtype[Any]) -> np.ndarray:
    needed = numbers * kind.itemsize
    content = tail or b""
    follow = len(content)
    if size != needed or follow != needed:
        raise Refused(
            400,
            f"the shape needs {needed} bytes, binary_data_size is {str(size)[:20]}, {follow} follow the JSON",
        )
    return np.frombuffer(content, kind).astype(kind.newbyteorder("="))  # a copy, that may be written to


def _listed(data: list[Any] | None, numbers: int, kind: np.dtype[Any]) -> np.ndarray:
    if data is None:
        raise Refused(400, "the input has neither data nor binary_data_size; give one")
    try:
        array = np.asarray(data)
    except (ValueError, OverflowError) as error:
        raise Refused(400, "data is no regular array of numbers") from error
    if array.dtype.kind not in "iuf":
        raise Refused(400, "data holds something that is not a number, or lists of different lengths")
    if array.size != numbers:
        raise Refused(400, f"data has {array.size} numbers, and the shape {numbers}")
    with np.errstate(over="ignore"):  # it becomes infinite, which is refused
        return array.astype(kind.newbyteorder("="))


def _wanted(request: InferRequest) -> tuple[tuple[str, bool], ...]:
    every = (request.parameters or {}).get("binary_data_output") is True
    if not request.outputs:
        return tuple((name, every) for name in OUTPUTS)
    wanted = []
    for output in request.outputs:
        parameters = output.parameters or {}
        if output.name not in OUTPUTS:
            raise Refused(
                400, visible(f"there is no output {output.name[:64]!r}; there are {', '.join(OUTPUTS)}")
            )
        if "classification" in parameters or "shared_memory_region" in parameters:
            raise Refused(400, "classification and shared memory are not supported; ask for the logits")
        wanted.append((output.name, parameters.get("binary_data", every) is True))
    return tuple(wanted)


def write_response(
    model: str, inference: Inference, outputs: Outputs, dtype: torch.dtype
) -> tuple[bytes, int | None]:
    """An answer's body, and the length of its JSON where binary data follow that."""
    kind = datatype_of(dtype)
    tensors, tail = [], []
    for name, binary in inference.outputs:
        rows = outputs[name]
        if not rows.isfinite().all():
            raise Refused(422, "the model's logits for these images are not finite")
        array = rows.numpy().astype(_NUMPY[kind])
        tensor: dict[str, Any] = {"name": name, "shape": list(array.shape), "datatype": kind}
        if binary:
            tail.append(array.tobytes())
            tensor["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            tensor["data"] = array.ravel().tolist()
        tensors.append(tensor)
    head: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": tensors}
    if inference.id is not None:
        head["id"] = inference.id
    content = json.dumps(head, allow_nan=False).encode()
    return (b"".join([content, *tail]), len(content)) if tail else (content, None)


def first_error(error: ValidationError) -> str:
    """Where the first thing that is wrong stands, and what it is."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return visible(f"{where}: {first['msg']}" if where else first["msg"])[:200]
