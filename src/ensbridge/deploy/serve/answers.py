"""What `/v1` answers with: predictions, their uncertainty in numbers and words, and a model's description."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, Field
from torch import Tensor

from ensbridge.deploy.serve.batching import Outputs
from ensbridge.deploy.serve.limits import Refused
from ensbridge.deploy.serve.served import ServedModel
from ensbridge.metrics.information import entropy, msp_uncertainty, total_variation

# One minus the largest probability, below which a prediction is called so.
WORDS = ((0.02, "Very sure"), (0.1, "Sure"), (0.3, "Fairly sure"), (0.6, "Unsure"), (math.inf, "Guessing"))
MANY = 1.5  # equal classes, from which on their number is said


class ErrorAnswer(BaseModel):
    """Why there is no answer, in one sentence."""

    error: str


class ClassProbability(BaseModel):
    """A class and its probability."""

    label: str
    class_index: int = Field(ge=0)
    probability: float = Field(ge=0, le=1)


class Opinion(ClassProbability):
    """What one predictor says: its most probable class, and the first few with their probabilities."""

    probabilities: list[ClassProbability]


class Uncertainty(BaseModel):
    """How unsure the model is of one image."""

    entropy: float = Field(ge=0, description="Of the prediction, in nats.")
    msp: float = Field(ge=0, le=1, description="One minus the largest probability.")
    disagreement: float = Field(
        ge=0, le=1, description="Total variation between the model's prediction and its source's."
    )
    words: str = Field(description="The same in a sentence.")


class BridgePath(BaseModel):
    """The states along one bridge, from the source's tempered prediction to the bridge's."""

    times: list[float] = Field(description="From 1, the source, down to 0.")
    states: list[list[ClassProbability]] = Field(
        description="For each time the classes of `probabilities` of the model."
    )


class Prediction(Opinion):
    """The model's answer for one image."""

    image: str = Field(description="The name of the uploaded file.")
    source: Opinion = Field(description="What the source network says by itself.")
    ensemble: Opinion | None = Field(None, description="What the true ensemble says, when asked and served.")
    uncertainty: Uncertainty
    steps: list[BridgePath] | None = Field(None, description="The states along each bridge, when asked.")


class PredictAnswer(BaseModel):
    """The predictions of a request, in the order of its images."""

    model: str
    predictions: list[Prediction]


class CostAnswer(BaseModel):
    """What one image costs."""

    macs: int = Field(description="Multiply-accumulates.")
    parameters: int
    ratio: float = Field(description="Multiply-accumulates as a multiple of the source's.")


class ModelAnswer(BaseModel):
    """What a model is, what it takes and what it costs."""

    name: str
    models: list[str] = Field(description="The names of all models of this server; the first is the default.")
    backend: str
    image_shape: list[int]
    classes: list[str]
    members: int = Field(description="How many networks the model stands for.")
    bridges: int
    steps: list[int] = Field(description="Of each bridge.")
    temperature: float
    has_ensemble: bool = Field(description="Whether the true ensemble is served beside the model.")
    cost: dict[str, CostAnswer] = Field(description="Of `source`, `model` and, where served, `ensemble`.")
    card: str = Field(description="The model card, in Markdown.")


def describe(model: ServedModel, names: list[str]) -> ModelAnswer:
    """A model's description."""
    one = max(1, model.costs["source"][0])
    return ModelAnswer(
        name=model.name,
        models=names,
        backend=model.settings.backend,
        image_shape=list(model.shape),
        classes=list(model.class_names),
        members=model.fast.members,
        bridges=len(model.fast.bridges),
        steps=[bridge.steps for bridge in model.fast.each_bridge()],
        temperature=model.fast.temperature,
        has_ensemble=model.members is not None,
        cost={
            name: CostAnswer(macs=macs, parameters=parameters, ratio=macs / one)
            for name, (macs, parameters) in model.costs.items()
        },
        card=model.card,
    )


def answer(
    model: ServedModel, images: list[str], outputs: Outputs, *, top: int, steps: bool, ensemble: bool
) -> PredictAnswer:
    """The predictions for images of these names."""
    log_probs = {
        name: rows.double().log_softmax(-1) for name, rows in outputs.items() if name.endswith("logits")
    }
    for number, image in enumerate(images):
        # -inf alone is let through, for a class that is ruled out.
        if any(rows[number].isnan().any() for rows in log_probs.values()):
            raise Refused(422, f"the model has no finite prediction for image {number + 1} ({image})")
    logits, source = log_probs["logits"], log_probs["source_logits"]
    scores = entropy(logits), msp_uncertainty(logits).clamp(0, 1), total_variation(logits, source).clamp(0, 1)
    paths = [rows.double().log_softmax(-1) for name, rows in outputs.items() if name.startswith("path")]
    predictions = []
    for number, image in enumerate(images):
        ours = _opinion(model, logits[number], top)
        alone = _opinion(model, source[number], top)
        true = _opinion(model, log_probs["ensemble_logits"][number], top) if ensemble else None
        nats, msp, apart = (float(score[number]) for score in scores)
        chosen = [entry.class_index for entry in ours.probabilities]
        predictions.append(
            Prediction(
                **dict(ours),
                image=image,
                source=alone,
                ensemble=true,
                uncertainty=Uncertainty(
                    entropy=max(0.0, nats),
                    msp=msp,
                    disagreement=apart,
                    words=in_words(ours, alone, max(0.0, nats), msp),
                ),
                steps=[
                    BridgePath(times=times, states=[_entries(model, state, chosen) for state in path[number]])
                    for path, times in zip(paths, model.path_times(), strict=True)
                ]
                if steps
                else None,
            )
        )
    return PredictAnswer(model=model.name, predictions=predictions)


def in_words(ours: Opinion, source: Opinion, nats: float, msp: float) -> str:
    """How sure a prediction is and whether the source would say the same.

    >>> cat = Opinion(label="cat", class_index=0, probability=0.75, probabilities=[])
    >>> in_words(cat, cat, 0.56, 0.25)
    'Fairly sure: 75 % cat, as unsure as between 1.8 equal classes. The source alone says cat too, with 75 %.'
    """
    words = next(text for limit, text in WORDS if msp < limit)
    says = f"{source.label} too" if source.class_index == ours.class_index else source.label
    classes = math.exp(nats)
    spread = f", as unsure as between {classes:.1f} equal classes" if classes >= MANY else ""
    return (
        f"{words}: {_percent(ours.probability)} {ours.label}{spread}. "
        f"The source alone says {says}, with {_percent(source.probability)}."
    )


def _percent(probability: float) -> str:
    """A probability in words: with a digit more where rounding would make it certain.

    >>> _percent(0.714), _percent(0.9976), _percent(0.99999)
    ('71 %', '99.8 %', 'over 99.9 %')
    """
    if probability >= 0.9995:
        return "over 99.9 %"
    return f"{100 * probability:.{1 if probability >= 0.99 else 0}f} %"


def _opinion(model: ServedModel, log_probs: Tensor, top: int) -> Opinion:
    best = log_probs.topk(min(top, model.classes)).indices.tolist()
    entries = _entries(model, log_probs, best)
    return Opinion(**dict(entries[0]), probabilities=entries)


def _entries(model: ServedModel, log_probs: Tensor, classes: list[int]) -> list[ClassProbability]:
    probabilities = log_probs.exp().clamp(max=1.0)[classes].tolist()
    return [
        ClassProbability(label=model.class_names[index], class_index=index, probability=probability)
        for index, probability in zip(classes, probabilities, strict=True)
    ]


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI description says of refusals."""
    return {status: {"model": ErrorAnswer, "description": _REASONS[status]} for status in statuses}


_REASONS = {
    400: "The request cannot be understood.",
    401: "The bearer token is missing or wrong.",
    403: "This server has no token, so that nothing can be changed from outside.",
    404: "There is no such model or page.",
    408: "The request took too long to arrive.",
    409: "The model cannot be loaded again; the old one stays.",
    411: "The length of the request is missing.",
    413: "The request is larger than what is allowed.",
    415: "The request's encoding is not supported.",
    422: "The request is understood, and something in it is wrong.",
    429: "Too much is waiting; Retry-After says when to come again.",
    500: "The server failed; the sentence says no more.",
    503: "The answer was not ready in time; Retry-After says when to come again.",
}
