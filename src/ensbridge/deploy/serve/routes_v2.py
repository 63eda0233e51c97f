"""The Open Inference Protocol v2 over HTTP, and Triton's model repository extension for reloading."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, Field, ValidationError

from ensbridge import __version__
from ensbridge.deploy.serve.answers import error_responses
from ensbridge.deploy.serve.limits import Refused
from ensbridge.deploy.serve.protocol import (
    EXTENSIONS,
    VERSION,
    InferResponse,
    ModelMetadata,
    ServerMetadata,
    first_error,
    metadata,
    parse_request,
    write_response,
)
from ensbridge.deploy.serve.served import Registry, ServedModel
from ensbridge.utils.text import one_line

router = APIRouter(prefix="/v2", tags=["Open Inference Protocol v2"])
SMALL = 2**16  # bytes that are read or written at once; more would keep other requests waiting
HEADER_LENGTH = "Inference-Header-Content-Length"
Name = Annotated[str, Path(description="A model's name.")]
Version = Annotated[str, Path(description="A model's version; there is only 1.")]


class Health(BaseModel):
    """Whether something is up."""

    live: bool | None = None
    ready: bool | None = None
    name: str | None = None


class RepositoryEntry(BaseModel):
    """A model of this server."""

    name: str
    version: str
    state: str
    reason: str


class IndexRequest(BaseModel):
    """Which models are listed; all of them are ready."""

    ready: bool = False


class LoadRequest(BaseModel):
    """A model is loaded from its own folder again; nothing else can be asked for."""

    parameters: dict[str, Any] | None = Field(None, description="Must be empty.")


Body = TypeVar("Body", bound=BaseModel)


def _optional(body: type[BaseModel]) -> dict[str, Any]:
    """The description of a JSON body that may be left out; Triton's client sends it without its type."""
    return {"requestBody": {"content": {"application/json": {"schema": body.model_json_schema()}}}}


def _parse(kind: type[Body], content: bytes) -> Body | None:
    if not content:
        return None
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise Refused(400, f"the request's JSON is wrong: {first_error(error)}") from error


def registry(request: Request) -> Registry:
    """The server's models."""
    return request.app.state.registry


@router.get("", response_model=ServerMetadata, responses=error_responses(401))
async def server_metadata() -> ServerMetadata:
    """The server's name, version and extensions."""
    return ServerMetadata(name="ensbridge", version=__version__, extensions=EXTENSIONS)


@router.get("/health/live", response_model_exclude_none=True)
async def live() -> Health:
    """Whether the server is up."""
    return Health(live=True)


@router.get("/health/ready", response_model_exclude_none=True)
async def ready() -> Health:
    """Whether every model is loaded: a server that listens has loaded all of them."""
    return Health(ready=True)


_MODEL = error_responses(401, 404, 422)


@router.get("/models/{name}/ready", response_model_exclude_none=True, responses=_MODEL)
async def model_ready(request: Request, name: Name) -> Health:
    """Whether a model is loaded."""
    return Health(name=registry(request).find(name).name, ready=True)


@router.get("/models/{name}/versions/{version}/ready", response_model_exclude_none=True, responses=_MODEL)
async def model_version_ready(request: Request, name: Name, version: Version) -> Health:
    """Whether a version of a model is loaded."""
    return Health(name=_versioned(request, name, version).name, ready=True)


@router.get("/models/{name}", responses=_MODEL)
async def model_metadata(request: Request, name: Name) -> ModelMetadata:
    """A model's inputs and outputs."""
    model = registry(request).find(name)
    return metadata(model.name, model.shape, model.classes, model.dtype)


@router.get("/models/{name}/versions/{version}", responses=_MODEL)
async def model_version_metadata(request: Request, name: Name, version: Version) -> ModelMetadata:
    """The inputs and outputs of a model's version."""
    return await model_metadata(request, _versioned(request, name, version).name)


_INFER: dict[str, Any] = {
    "response_model": InferResponse,
    "responses": {
        200: {
            "description": "The outputs: JSON, or JSON and binary data behind it.",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            "headers": {
                HEADER_LENGTH: {
                    "description": "Bytes of the JSON, where binary data follow it.",
                    "schema": {"type": "integer"},
                }
            },
        },
        **error_responses(400, 401, 404, 408, 413, 415, 422, 429, 500, 503),
    },
    "openapi_extra": {
        "parameters": [
            {
                "name": HEADER_LENGTH,
                "in": "header",
                "required": False,
                "description": "Bytes of the JSON, where binary data follow it.",
                "schema": {"type": "integer", "minimum": 1},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/InferRequest"}},
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            },
        },
    },
}


@router.post("/models/{name}/infer", **_INFER)
async def infer(request: Request, name: Name) -> Response:
    """Logits of images, as the model takes them: pixels are not normalised here.

    The input is `images`, the outputs are `logits` and `source_logits`. Tensors are lists in JSON or, with
    `binary_data_size`, bytes behind it.
    """
    return await _infer(request, registry(request).find(name))


@router.post("/models/{name}/versions/{version}/infer", **_INFER)
async def infer_version(request: Request, name: Name, version: Version) -> Response:
    """Logits of images from a version of a model."""
    return await _infer(request, _versioned(request, name, version))


async def _infer(request: Request, model: ServedModel) -> Response:
    content, convert = await request.body(), request.app.state.convert
    header, limits = request.headers.get(HEADER_LENGTH), model.settings.limits
    arguments = content, header, model.shape, model.dtype, limits
    small = len(content) < SMALL  # not worth a thread
    inference = parse_request(*arguments) if small else await convert(parse_request, *arguments)
    outputs = await model.predict(inference.images)
    written = model.name, inference, outputs, model.dtype
    small = sum(rows.nbytes for rows in outputs.values()) < SMALL
    body, length = write_response(*written) if small else await convert(write_response, *written)
    if length is None:
        return Response(body, media_type="application/json")
    return Response(body, media_type="application/octet-stream", headers={HEADER_LENGTH: str(length)})


@router.post(
    "/repository/index",
    openapi_extra=_optional(IndexRequest),
    responses=error_responses(400, 401, 408, 413, 415),
)
async def repository_index(request: Request) -> list[RepositoryEntry]:
    """The models of this server."""
    _parse(IndexRequest, await request.body())
    return [
        RepositoryEntry(name=name, version=VERSION, state="READY", reason="")
        for name in registry(request).models
    ]


@router.post(
    "/repository/models/{name}/load",
    response_model_exclude_none=True,
    openapi_extra=_optional(LoadRequest),
    responses=error_responses(400, 401, 403, 404, 408, 409, 413, 415, 422, 503),
)
async def load_model(request: Request, name: Name) -> Health:
    """Load a model from its folder again; requests go to the old one until the new one is ready.

    Only on a server with a token. Where loading takes longer than a request may, it goes on after the answer.
    """
    if not request.app.state.has_token:
        raise Refused(
            403, "this server has no token, so that nothing can be changed; send it SIGHUP to reload"
        )
    wanted = _parse(LoadRequest, await request.body())
    if wanted is not None and wanted.parameters:
        raise Refused(400, "parameters cannot be given; the model is loaded from its own folder")
    model = registry(request).find(name)
    try:
        await request.app.state.reload(model.name)
    except (ValueError, OSError) as error:
        raise Refused(409, f"{name} was not loaded again, the old one stays: {one_line(error)}") from error
    return Health(name=name, ready=True)


def _versioned(request: Request, name: str, version: str) -> ServedModel:
    model = registry(request).find(name)
    if version != VERSION:
        raise Refused(404, f"model {name} has no such version; there is only {VERSION}")
    return model
