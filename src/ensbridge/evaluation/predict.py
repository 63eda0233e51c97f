"""What models predict for a set of images: log-probabilities, in evaluation mode and at least float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ensbridge.bridge.sampler import Features
from ensbridge.data.examples import ExampleSet
from ensbridge.methods.base import Batch, feature_names_of
from ensbridge.models.ensemble import Ensemble, at_least_float32, ensemble_logit
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.training.distributed import Engine
from ensbridge.utils.devices import evaluation_mode
from ensbridge.utils.inputs import (
    Inputs,
    count_rows,
    kind_of,
    remedy_for,
    shapes_of,
    tensors_of,
    to_network,
)
from ensbridge.utils.progress import Advance, ignore
from ensbridge.utils.text import one_line


def predict(
    model: nn.Module,
    data: ExampleSet,
    batch_size: int = 256,
    engine: Engine | None = None,
    advance: Advance = ignore,
) -> Tensor:
    """Log-probabilities (N, K) of a whole set.

    With an `engine` several processes share the batches, and each gets all predictions. `advance` counts
    images times models.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> from ensbridge.data import ImageSet
    >>> predict(net, ImageSet(torch.rand(5, 1, 2, 2))).shape
    torch.Size([5, 3])
    """
    return predict_each({"model": model}, data, batch_size, engine, advance)["model"]


@torch.no_grad()
def predict_each(
    models: Mapping[str, nn.Module],
    data: ExampleSet,
    batch_size: int = 256,
    engine: Engine | None = None,
    advance: Advance = ignore,
) -> dict[str, Tensor]:
    """The same for several models at once: what they have in common, such as a source, runs once a batch.

    Batches are brought to where each model is, and its predictions to where the data is. Models are run in
    evaluation mode and are afterwards in the mode that they were in.
    """
    if not models:
        return {}

    def run(images: Inputs) -> Tensor:
        try:
            predictions = predict_batch(models, images)
        except (RuntimeError, TypeError) as error:
            sentence = _refusal(models, images)
            if sentence is None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"{sentence} ({one_line(error)})") from error
        classes = {name: log_probs.shape[-1] for name, log_probs in predictions.items()}
        first = next(iter(classes))
        for name, count in classes.items():
            if count != classes[first]:
                raise ValueError(
                    f"{first!r} has {classes[first]} classes, {name!r} {count}; compare models of the same"
                )
        return torch.stack(list(predictions.values()))

    with evaluation_mode(models.values()):
        whole = run_in_batches(run, data, batch_size, engine, lambda images: advance(images * len(models)))
    return dict(zip(models, whole, strict=True))


def _refusal(models: Mapping[str, nn.Module], images: Inputs) -> str | None:
    """Which model cannot take images and what to do, where that can be told."""
    for name, model in models.items():
        if remedy := remedy_for(to_network(images, model), model):
            return f"{name!r} cannot take {kind_of(images)} of {shapes_of(images)}; {remedy}"
    return None


def run_in_batches(
    run: Callable[[Inputs], Tensor],
    data: ExampleSet,
    batch_size: int = 256,
    engine: Engine | None = None,
    advance: Advance = ignore,
) -> Tensor:
    """What `run` makes of every batch, images in dimension 1; `advance` counts images of all processes."""
    elsewhere = len(data)  # images that other processes predict

    def run_and_report(images: Inputs) -> Tensor:
        nonlocal elsewhere
        outputs, count = run(images), count_rows(images)
        elsewhere -= count
        advance(count)
        return outputs

    if engine is None:
        return torch.cat([run_and_report(images) for images, _ in data.batches(batch_size)], dim=1)
    whole = engine.in_batches(run_and_report, data, batch_size, dim=1)
    advance(elsewhere)
    return whole


def predict_batch(models: Mapping[str, nn.Module], images: Inputs) -> dict[str, Tensor]:
    """Log-probabilities (B, K) of a batch by model, on the batch's device; models are in evaluation mode.

    A network that is a member or the source of several models runs once, and so does a bridge.
    """
    fast = [model for model in models.values() if type(model) is FastEnsemble]
    batch = Batch(
        images,
        None,
        feature_names=feature_names_of(
            [(Ensemble([model.source]), name) for model in fast for name in model.features or (None,)]
        ),
    )
    crossed: dict[tuple[nn.Module, Features], Tensor] = {}

    def call(bridge: nn.Module, h: Features, source_logits: Tensor) -> Tensor:
        key = bridge, h  # the same feature of the same source is the same tensor
        if key not in crossed:
            crossed[key] = bridge(h, source_logits)
        return crossed[key]

    def logits(model: nn.Module) -> Tensor:
        if type(model) is Ensemble:  # a class made of it may predict otherwise
            return ensemble_logit(batch.member_logits(model))
        if type(model) is FastEnsemble:
            return model.with_source(images, batch.run, call)[0]
        return batch.run(model, images)[0]

    device = tensors_of(images)[0].device
    return {
        name: at_least_float32(logits(model)).log_softmax(-1).to(device) for name, model in models.items()
    }
