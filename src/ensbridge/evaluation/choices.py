"""Which of several models is kept, by labelled validation images, and how that is calibrated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ensbridge.bridge.bridge import Bridge
from ensbridge.data.examples import ExampleSet
from ensbridge.evaluation.predict import predict_each
from ensbridge.metrics import fit_temperature, nll, nll_per_image, standard_error
from ensbridge.metrics.cost import count_macs
from ensbridge.metrics.predictions import calibrated, fit_calibration
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.training.candidates import Candidate
from ensbridge.training.distributed import Engine

Say = Callable[[str], None]

MIN_TO_CALIBRATE = 20  # images
FOLDS = 5


@dataclass(frozen=True)
class Choice:
    """One of the models that `compress(…, source="auto")` tried.

    Its NLL is that of validation images on which its calibration was not fitted: in turn, each fifth of them
    is predicted with what was fitted on the others. The bridges' T was chosen on all of them.
    """

    name: str
    macs_ratio: float
    nll: float
    nll_se: float  # standard error over images
    chosen: bool


@dataclass(frozen=True)
class _Predictions:
    """Log-probabilities (N, K) of a candidate's models and of the source that they share."""

    bridged: bool
    models: list[Tensor]
    source: Tensor
    labels: Tensor

    @classmethod
    def of(cls, candidate: Candidate, val: ExampleSet, labels: Tensor, engine: Engine | None) -> _Predictions:
        first = candidate.models[0]
        numbered: dict[str, nn.Module] = {str(number): fast for number, fast in enumerate(candidate.models)}
        *log_probs, source = predict_each({**numbered, "source": first.source}, val, engine=engine).values()
        return cls(len(first.bridges) > 0, log_probs, source, labels)

    def part(self, images: Tensor) -> _Predictions:
        models = [log_probs[images] for log_probs in self.models]
        return _Predictions(self.bridged, models, self.source[images], self.labels[images])

    def losses(self) -> list[float]:
        """The NLL of each model."""
        return [nll(log_probs, self.labels) for log_probs in self.models]

    def best(self) -> int:
        return min(range(len(self.models)), key=self.losses().__getitem__)

    def fit(self, best: int) -> tuple[float, float] | None:
        """A model's temperature and share of the source; None where these images are too few for them."""
        if len(self.labels) < MIN_TO_CALIBRATE:
            return None
        temperature = fit_temperature(self.models[best], self.labels)
        if not 0.02 < temperature < 50:
            return None
        if self.bridged:
            return fit_calibration(self.models[best], self.source, self.labels)
        return temperature, 0.0

    def calibrated(self, best: int, temperature: float, source_logit_weight: float) -> Tensor:
        logits = calibrated(self.models[best], self.source, temperature, source_logit_weight)
        return logits.log_softmax(-1)


def choose(
    candidates: Sequence[Candidate],
    val: ExampleSet | None,
    calibrate: bool,
    say: Say,
    engine: Engine | None = None,
) -> FastEnsemble:
    """The best on labelled validation images, calibrated there; the first model where there are none.

    Of several candidates the one with the lowest cross-fitted NLL is taken; what was tried is in `choices`.
    With an `engine` several processes share the predictions, so that all choose the same.
    """
    if val is None or val.labels is None:
        say("there are no labelled validation images, so nothing was chosen or calibrated on any")
        return candidates[0].models[0]
    predictions = [_Predictions.of(candidate, val, val.labels, engine) for candidate in candidates]
    chosen, choices = 0, ()
    if len(candidates) > 1:
        choices = _compared(candidates, predictions, val, calibrate)
        chosen = [choice.chosen for choice in choices].index(True)
        say(f"validation chose {choices[chosen].name!r}, the lowest NLL of\n{choices_table(choices)}")
    fast = _calibrated(candidates[chosen], predictions[chosen], calibrate, say)
    fast.choices = choices
    return fast


def cross_fitted_nll(predictions: _Predictions, calibrate: bool) -> Tensor:
    """The NLL of each image by the best model, as calibrated on the other folds.

    Which model is the best is not cross-fitted: between two that are nearly as good, the other folds prefer
    the one that is worse on this one.
    """
    fold = torch.arange(len(predictions.labels), device=predictions.labels.device) % FOLDS
    losses, best = torch.empty(len(fold), dtype=torch.float64), predictions.best()
    for number in range(min(FOLDS, len(fold))):
        fitted, judged = predictions.part(fold != number), predictions.part(fold == number)
        calibration = (fitted.fit(best) if calibrate else None) or (1.0, 0.0)
        calibrated = nll_per_image(judged.calibrated(best, *calibration), judged.labels)
        losses[(fold == number).cpu()] = calibrated.cpu().double()
    return losses


def choices_table(choices: Sequence[Choice]) -> str:
    """What was tried, a line each.

    >>> print(choices_table([Choice("distilled", 1.0, 0.5, 0.01, True)]))
      MACs ×   validation NLL
        1.00  0.5000 ± 0.0100  distilled (chosen)
    """
    lines = ["  MACs ×   validation NLL"]
    for choice in choices:
        figures = f"{choice.macs_ratio:8.2f}  {choice.nll:.4f} ± {choice.nll_se:.4f}"
        lines.append(f"{figures}  {choice.name}{' (chosen)' if choice.chosen else ''}")
    return "\n".join(lines)


def _compared(
    candidates: Sequence[Candidate], predictions: Sequence[_Predictions], val: ExampleSet, calibrate: bool
) -> tuple[Choice, ...]:
    image = next(val.batches(1))[0]
    choices = []
    for candidate, prediction in zip(candidates, predictions, strict=True):
        first, losses = candidate.models[0], cross_fitted_nll(prediction, calibrate)
        ratio = count_macs(first, image) / count_macs(first.source, image)
        choices.append(Choice(candidate.name, ratio, losses.mean().item(), standard_error(losses), False))
    best = min(choices, key=lambda choice: choice.nll)
    return tuple(replace(choice, chosen=choice is best) for choice in choices)


def _calibrated(candidate: Candidate, predictions: _Predictions, calibrate: bool, say: Say) -> FastEnsemble:
    """A candidate's best model, calibrated on all validation images."""
    losses, best = predictions.losses(), predictions.best()
    fast = candidate.models[best]
    if len(losses) > 1:
        bridges = [model.each_bridge()[0] for model in candidate.models]
        bases = [f"{bridge.config.temperature.base:g}" for bridge in bridges if isinstance(bridge, Bridge)]
        tried = ", ".join(f"{base} (NLL {loss:.4f})" for base, loss in zip(bases, losses, strict=True))
        say(f"validation chose T = {bases[best]} of {tried}")
    if not calibrate:
        return fast
    calibration = predictions.fit(best)
    if calibration is None:
        fitted = fit_temperature(predictions.models[best], predictions.labels)
        count = len(predictions.labels)
        say(f"not calibrated: {count} validation images gave a temperature of {fitted:.3g}; give more")
        return fast
    fast.temperature, fast.source_logit_weight = calibration
    after = nll(predictions.calibrated(best, *calibration), predictions.labels)
    weight = fast.source_logit_weight
    share = f" and {weight:+.3f} of the source's logits" if weight else ""
    change = f"validation NLL {losses[best]:.4f} before, {after:.4f} after"
    say(f"calibrated by a temperature of {fast.temperature:.3f}{share}: {change}")
    return fast
