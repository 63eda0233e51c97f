"""For people: images in, predictions with their uncertainty out; the model's description; health; metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import torch
from fastapi import APIRouter, File, Query, Request, Response, UploadFile
from prometheus_client import generate_latest
from pydantic import BaseModel
from torch import Tensor

from ensbridge.data.image_io import picture
from ensbridge.deploy.batch import MODES, fit_picture
from ensbridge.deploy.serve.answers import ModelAnswer, PredictAnswer, answer, describe, error_responses
from ensbridge.deploy.serve.guard import UNTIL
from ensbridge.deploy.serve.limits import Limits, Refused, busy
from ensbridge.deploy.serve.routes_v2 import registry
from ensbridge.deploy.serve.served import ServedModel
from ensbridge.models.named import input_of
from ensbridge.utils.text import visible

router = APIRouter()
ModelName = Annotated[str | None, Query(description="A model's name; by default the server's first.")]


class Healthy(BaseModel):
    """The server is up."""

    status: str


@router.post(
    "/v1/predict",
    response_model=PredictAnswer,
    tags=["predict"],
    responses=error_responses(400, 401, 404, 408, 413, 415, 422, 429, 500, 503),
)
async def predict(
    request: Request,
    images: Annotated[
        list[UploadFile], File(min_length=1, description="Image files: PNG, JPEG, BMP, WEBP or PPM.")
    ],
    model: ModelName = None,
    top: Annotated[int, Query(ge=1, le=1000, description="How many classes are listed.")] = 5,
    steps: Annotated[bool, Query(description="Also the states along the bridges.")] = False,
    ensemble: Annotated[bool, Query(description="Also the true ensemble, where it is served.")] = False,
) -> Response:
    """What the model, and its source alone, see in one or many images.

    An image of another size is cropped around its middle and resampled. If one cannot be read, none is
    predicted, and the answer names it.
    """
    served, limits = registry(request).find(model), registry(request).limits
    if not served.takes_files:
        raise Refused(422, f"model {served.name} takes {list(served.shape)}, which is no image; use /v2")
    if ensemble and served.members is None:
        raise Refused(422, f"the members of {served.name} are not served; start the server with --members")
    if len(images) > limits.images:
        raise Refused(413, f"the request has {len(images)} images; give at most {limits.images} at once")
    names = [file_name(image.filename, number) for number, image in enumerate(images, start=1)]
    contents = [await image.read() for image in images]
    until = request.scope[UNTIL] - limits.seconds / 4  # which is left for the model
    pixels = await request.app.state.decode(
        read_uploads, served, list(zip(names, contents, strict=True)), limits, until
    )
    compute = served.explain if steps or ensemble else served.predict
    outputs = await compute(pixels)

    def write() -> str:
        return answer(served, names, outputs, top=top, steps=steps, ensemble=ensemble).model_dump_json()

    return Response(await request.app.state.convert(write), media_type="application/json")


@router.get("/v1/model", tags=["predict"], responses=error_responses(401, 404, 422))
async def model_description(request: Request, model: ModelName = None) -> ModelAnswer:
    """What a model is: its card, classes and cost."""
    models = registry(request)
    return describe(models.find(model), list(models.models))


@router.get("/healthz", tags=["operation"])
async def healthz() -> Healthy:
    """Whether the server is up."""
    return Healthy(status="ok")


@router.get(
    "/metrics",
    tags=["operation"],
    response_class=Response,
    responses={
        200: {
            "content": {"text/plain": {"schema": {"type": "string"}}},
            "description": "Prometheus' text format.",
        },
        **error_responses(401),
    },
)
async def metrics(request: Request) -> Response:
    """What Prometheus reads."""
    content = generate_latest(request.app.state.metrics.registry)
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")


def read_uploads(
    model: ServedModel, files: Sequence[tuple[str, bytes]], limits: Limits, until: float
) -> Tensor:
    """Named image files as one batch that the model takes; `Refused` that names the file that is wrong.

    Nothing more is decoded once `time.monotonic()` has reached `until`: nobody waits for it any longer.
    """
    images, decoded = [], 0
    for number, (name, content) in enumerate(files, start=1):
        if time.monotonic() >= until:
            raise busy(503, "the images could not be decoded in time; send fewer or smaller ones")
        try:
            image = picture(content, MODES[model.shape[0]], limits.pixels)
        except ValueError as error:
            sentence = (
                f"image {number} ({name}) cannot be read: {visible(str(error))}; send a PNG or JPEG of 8 bits"
            )
            raise Refused(422, sentence) from error
        decoded += image.width * image.height
        if decoded > limits.request_pixels:
            raise Refused(
                413,
                f"the images up to number {number} ({name}) have {decoded:,} pixels, where a request may "
                f"have {limits.request_pixels:,}; send fewer or smaller ones",
            )
        images.append(fit_picture(image, model.shape, input_of(model.fast.source)).float() / 255)
    return model.pixels(torch.stack(images).to(model.dtype))


def file_name(name: str | None, number: int) -> str:
    """What an uploaded file is called in answers.

    >>> file_name("a/b\\ncat.png", 1), file_name("", 2)
    ('b\\\\ncat.png', 'image 2')
    """
    return visible((name or "").replace("\\", "/").rpartition("/")[2][:100]) or f"image {number}"
