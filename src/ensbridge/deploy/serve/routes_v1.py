"""For people: images in, predictions with their uncertainty out; the model's description; health; metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, File, Query, Request, Response, UploadFile
from pydantic import BaseModel

from ensbridge.deploy.serve.answers import ModelAnswer, PredictAnswer, answer, describe, error_responses
from ensbridge.deploy.serve.guard import UNTIL
from ensbridge.deploy.serve.limits import Refused
from ensbridge.deploy.serve.routes_v2 import registry
from ensbridge.deploy.serve.uploads import file_name, read_uploads

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
    return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
