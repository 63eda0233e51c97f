"""What a model's uncertainty is worth: scores of each image, and how well they find errors and other images.

A score is high where the model is uncertain:

    msp                 1 - the largest probability
    entropy             of the prediction
    mutual_information  of an ensemble: what its members disagree about
    disagreement        of a source with bridges: total variation between its prediction and the model's
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ensbridge import metrics
from ensbridge.data.examples import ExampleSet
from ensbridge.evaluation.predict import predict_batch, run_in_batches
from ensbridge.evaluation.scores import Detection, ImageScore, PredictionSets, Uncertainty
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.training.distributed import Engine
from ensbridge.utils.devices import evaluation_mode
from ensbridge.utils.inputs import Inputs
from ensbridge.utils.progress import Advance, ignore

ALPHA = 0.05  # prediction sets are to hold the label of 95 % of the images


@torch.no_grad()
def score_images(
    models: Mapping[str, nn.Module],
    data: ExampleSet,
    batch_size: int = 256,
    engine: Engine | None = None,
    advance: Advance = ignore,
) -> dict[str, dict[ImageScore, Tensor]]:
    """Every score (N,) that each model has of a set of images; networks that models share run once a batch.

    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)]
    >>> from ensbridge.data import ImageSet
    >>> images = ImageSet(torch.rand(5, 1, 2, 2))
    >>> scores = score_images({"one": nets[0], "both": Ensemble(nets)}, images)
    >>> [(name, list(by_name)) for name, by_name in scores.items()]
    [('one', ['msp', 'entropy']), ('both', ['msp', 'entropy', 'mutual_information'])]
    """
    networks, names = dict(models), {name: _names(model) for name, model in models.items()}
    for name, model in models.items():
        networks |= {f"{name}/{number}": part for number, part in enumerate(_parts(model))}

    def run(images: Inputs) -> Tensor:
        log_probs = predict_batch(networks, images)
        scores = []
        for name, model in models.items():
            parts = [log_probs[f"{name}/{number}"] for number, _ in enumerate(_parts(model))]
            scores += _scores(log_probs[name], parts, names[name])
        return torch.stack(scores)

    with evaluation_mode(models.values()):
        whole = run_in_batches(run, data, batch_size, engine, lambda images: advance(images * len(models)))
    rows = iter(whole.cpu())
    return {name: {score: next(rows) for score in names[name]} for name in models}


def _names(model: nn.Module) -> list[ImageScore]:
    """The scores that a model has."""
    parts: list[ImageScore] = ["mutual_information" if isinstance(model, Ensemble) else "disagreement"]
    return ["msp", "entropy", *(parts if _parts(model) else [])]


def _parts(model: nn.Module) -> list[nn.Module]:
    """The networks whose own predictions a score compares: the members, or the source beside its bridges."""
    if isinstance(model, Ensemble):
        return list(model.members) if len(model) > 1 else []
    return [model.source] if isinstance(model, FastEnsemble) and len(model.bridges) else []


def _scores(log_probs: Tensor, parts: list[Tensor], names: list[ImageScore]) -> list[Tensor]:
    """The scores of a batch, each (B,)."""
    scores = [metrics.msp_uncertainty(log_probs), metrics.entropy(log_probs)]
    if "mutual_information" in names:
        scores.append(metrics.decompose_entropy(torch.stack(parts)).mutual_information)
    if "disagreement" in names:
        scores.append(metrics.total_variation(log_probs, parts[0]))
    return scores


def measure_uncertainty(
    log_probs: Tensor, labels: Tensor, val: tuple[Tensor, Tensor] | None = None, seed: int = 0
) -> Uncertainty:
    """AURC and AUGRC of predictions (N, K) by MSP and, with validation predictions and labels, sets.

    >>> log_probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log()
    >>> measure_uncertainty(log_probs, torch.tensor([0, 1])).augrc
    0.125
    """
    labels = labels.cpu()
    scores, errors = metrics.msp_uncertainty(log_probs), log_probs.argmax(1).cpu() != labels
    sets = []
    for method in ("lac", "aps") if val is not None else ():
        assert val is not None
        generator = torch.Generator().manual_seed(seed)
        threshold = metrics.conformal_threshold(*val, ALPHA, method, generator)
        chosen = metrics.conformal_sets(log_probs, threshold, method, generator)
        size = chosen.sum(1).double().mean().item()
        sets.append(PredictionSets(method, ALPHA, metrics.coverage(chosen, labels), size))
    return Uncertainty(metrics.aurc(scores, errors), metrics.augrc(scores, errors), tuple(sets))


def measure_detection(
    models: Mapping[str, nn.Module],
    test: ExampleSet,
    ood: Mapping[str, ExampleSet],
    batch_size: int = 256,
    engine: Engine | None = None,
    advance: Advance = ignore,
) -> dict[str, tuple[Detection, ...]]:
    """How well each score of each model tells each set of `ood` from the test images."""
    if not ood:
        return dict.fromkeys(models, ())
    inside = score_images(models, test, batch_size, engine, advance)
    outside = {
        name: score_images(models, images, batch_size, engine, advance) for name, images in ood.items()
    }
    return {
        model: tuple(
            _detection(name, score, scores[score], outside[name][model][score])
            for name in ood
            for score in scores
        )
        for model, scores in inside.items()
    }


def _detection(images: str, score: ImageScore, inside: Tensor, outside: Tensor) -> Detection:
    area, covariance = metrics.delong(inside, outside)
    error = covariance.sqrt().item()
    auroc_se = None if math.isnan(error) else error
    return Detection(images, score, area.item(), auroc_se, metrics.fpr95(inside, outside))
