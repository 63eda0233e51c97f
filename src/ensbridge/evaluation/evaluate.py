"""Models and data in, `Scores` out: every row on the same images, beside the same ensembles DE-1 … DE-M."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ensbridge import metrics
from ensbridge.bridge.bridge import Bridge
from ensbridge.data.examples import ExampleSet
from ensbridge.data.loader import Data, collect
from ensbridge.evaluation.predict import predict, predict_each
from ensbridge.evaluation.scores import Bin, ModelInfo, Reliability, Row, Scores, find_control
from ensbridge.evaluation.uncertainty import measure_detection, measure_uncertainty
from ensbridge.metrics.checks import checked_labels
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.training.distributed import Engine
from ensbridge.utils.progress import Advance, ignore

MODELS_PER_PASS = 8  # models that share a pass over the images: as many predictions are in memory at once


def evaluate(
    models: Mapping[str, nn.Module],
    test: Data,
    val: Data | None = None,
    *,
    reference: Ensemble | None = None,
    target: int | None = None,
    info: Mapping[str, ModelInfo] | None = None,
    dataset: str = "test",
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 256,
    engine: Engine | None = None,
    ood: Mapping[str, Data] | None = None,
) -> Scores:
    """Measure classifiers that return logits (B, K) on labelled images.

    Data is brought to where models are, which run in evaluation mode and are afterwards in the mode that
    they were in.

    Args:
        models: The classifiers, by the names that their rows get.
        test: Labelled images.
        val: Labelled images that the temperature of the calibrated NLL is fitted on.
        reference: The ensemble whose first k members are DE-k, and whose first member is the unit of cost;
            by default the largest `Ensemble` among `models`.
        target: The size of the ensemble to which the gap is measured; by default all of the reference.
        info: What models are where they do not show it, such as a network that was distilled.
        dataset: A name for the data, for tables and reports.
        class_names: Names of the classes, likewise.
        seed: Of what is measured, for tables over several seeds.
        batch_size: Images that run at a time.
        engine: Several processes then share the batches; each gets the scores, which are those of one
            process.
        ood: Other images, by the name of their set. Asks what each model's uncertainty is worth, in
            `row.uncertainty`: AURC and AUGRC, with `val` conformal prediction sets, and how well MSP,
            entropy, an ensemble's mutual information and a bridge's disagreement with its source tell those
            images from the test images. It takes another pass over the test images; an empty mapping takes
            none.

    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)]
    >>> test = (torch.rand(20, 1, 2, 2), torch.arange(20) % 3)
    >>> scores = evaluate({"one": nets[0], "ensemble": Ensemble(nets)}, test)
    >>> [(row.model, row.dee, row.macs_ratio) for row in scores.rows]
    [('one', 1.0, 1.0), ('ensemble', 2.0, 2.0)]
    """
    if not models:
        raise ValueError("there are 0 models to evaluate; give at least 1")
    reference = _find_reference(models) if reference is None else reference
    evaluator = Evaluator(reference, test, val, target, batch_size, engine, seed=seed, ood=ood)
    rows = evaluator.measure(models, info)
    names = tuple(map(str, range(evaluator.classes)) if class_names is None else class_names)
    if len(names) != evaluator.classes:
        raise ValueError(f"class_names are {len(names)}; the members have {evaluator.classes} classes")
    return Scores(dataset, seed, names, environment(evaluator.test.device), rows, target=evaluator.target)


class Evaluator:
    """What every model is measured against: the test split, the ensembles DE-1 … DE-M, and the costs."""

    def __init__(
        self,
        reference: Ensemble,
        test: Data,
        val: Data | None = None,
        target: int | None = None,
        batch_size: int = 256,
        engine: Engine | None = None,
        by_size: list[Tensor] | None = None,
        advance: Advance = ignore,
        seed: int = 0,
        ood: Mapping[str, Data] | None = None,
    ) -> None:
        """Run every member, unless `by_size`, the predictions of DE-1 … DE-M on the test split, is known."""
        self.reference, self.seed = reference, seed
        self._predict = partial(predict_each, batch_size=batch_size, engine=engine, advance=advance)
        self._detect = partial(measure_detection, batch_size=batch_size, engine=engine, advance=advance)
        self.target = len(reference) if target is None else target
        if not 1 <= self.target <= len(reference):
            raise ValueError(f"target is {target}; the reference has {len(reference)} members")
        self.test, self.labels = _labelled(test, "test")
        self.val, self.val_labels = (None, None) if val is None else _labelled(val, "val")
        self.ood = None if ood is None else _other_images(ood, self.test)
        self._check_labels(by_size)
        ensembles = reference.by_size()
        self.by_size = by_size or [*self._predict(ensembles, self.test).values()]
        self.val_by_size = [] if self.val is None else [*self._predict(ensembles, self.val).values()]
        self.nlls = [metrics.nll_per_image(log_probs, self.labels) for log_probs in self.by_size]
        self.image = next(self.test.batches(1))[0]

    def _check_labels(self, by_size: list[Tensor] | None) -> None:
        """Refuse labels that are no classes of the members before these see more than one image."""
        one = self.test.first(1)
        classes = (by_size[0] if by_size else predict(self.reference.source, one)).shape[1]
        for labels in (self.labels, self.val_labels):
            if labels is not None:
                checked_labels(labels, classes)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.by_size[0].shape[1]

    def measure(
        self,
        models: Mapping[str, nn.Module],
        info: Mapping[str, ModelInfo] | None = None,
        known: Mapping[str, Tensor] | None = None,
    ) -> tuple[Row, ...]:
        """One row for each model; one whose log-probabilities on the test split are `known` is not run."""
        for name in info or {}:
            if name not in models:
                raise ValueError(f"info names {name!r}; the models are {', '.join(models)}")
        rows: dict[str, Row] = {}
        nlls: dict[str, Tensor] = {}
        names = list(models)
        for start in range(0, len(names), MODELS_PER_PASS):
            together = {name: models[name] for name in names[start : start + MODELS_PER_PASS]}
            for name, (row, per_image) in self._measure(together, info or {}, known or {}).items():
                rows[name], nlls[name] = row, per_image
        return tuple(_beside_control(row, rows, nlls) for row in rows.values())

    def _measure(
        self, models: Mapping[str, nn.Module], info: Mapping[str, ModelInfo], known: Mapping[str, Tensor]
    ) -> dict[str, tuple[Row, Tensor]]:
        """Rows of models that are run together, and each image's NLL."""
        ensemble_sizes = {name: _ensemble_size(model, self.reference) for name, model in models.items()}
        others = {name: model for name, model in models.items() if not ensemble_sizes[name]}
        new = {name: model for name, model in others.items() if name not in known}
        predictions = {**known, **self._predict(new, self.test)}
        for name in others:
            if (classes := predictions[name].shape[-1]) != self.classes:
                raise ValueError(
                    f"{name!r} has {classes} classes, the members {self.classes}; compare models of the same"
                )
        val_predictions = {} if self.val is None else self._predict(others, self.val)
        detections = None if self.ood is None else self._detect(models, self.test, self.ood)
        measured = {}
        for name, model in models.items():
            size, val = ensemble_sizes[name], None
            log_probs = self.by_size[size - 1] if size else predictions[name]
            nlls = metrics.nll_per_image(log_probs, self.labels)
            if self.val_labels is not None:
                val = self.val_by_size[size - 1] if size else val_predictions[name], self.val_labels
            temperature = None if val is None else metrics.fit_temperature(*val)
            row = self._row(name, model, info.get(name), log_probs, nlls, size, temperature)
            if detections is not None:
                uncertainty = measure_uncertainty(log_probs, self.labels, val, self.seed)
                row = replace(row, uncertainty=replace(uncertainty, ood=detections[name]))
            measured[name] = row, nlls
        return measured

    def _row(
        self,
        name: str,
        model: nn.Module,
        info: ModelInfo | None,
        log_probs: Tensor,
        nlls: Tensor,
        ensemble_size: int,
        temperature: float | None,
    ) -> Row:
        size = self.target
        gap, error = None, None
        if not ensemble_size and size > 1:
            gap, error = metrics.gap_closed(self.nlls[0].numpy(), nlls.numpy(), self.nlls[size - 1].numpy())
        nll_by_size = [per_image.mean().item() for per_image in self.nlls]
        one, macs, params = self.reference.source, count_macs(model, self.image), count_params(model)
        measured, reliability = _measured(log_probs, self.labels, temperature)
        info = ModelInfo("DE", ensemble_size) if ensemble_size else info or infer_info(model)
        return Row(
            model=name,
            **vars(info),
            seed=self.seed,
            macs=macs,
            macs_ratio=macs / count_macs(one, self.image),
            params=params,
            params_ratio=params / count_params(one),
            acc=100 * measured["acc"],
            nll=measured["nll"],
            brier=measured["brier"],
            ece=measured["ece"],
            cnll=None if temperature is None else measured["cnll"],
            temperature=temperature,
            dee=float(ensemble_size) if ensemble_size else metrics.format_dee(measured["nll"], nll_by_size),
            gap=gap,
            gap_error=error,
            reliability=reliability,
        )


def environment(device: torch.device | str = "cpu") -> dict[str, str]:
    """The machine as far as it can change numbers: no times, no paths."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "device": f"{torch.device(device).type} ({name})",
        "threads": str(torch.get_num_threads()),
    }


def _measured(
    log_probs: Tensor, labels: Tensor, temperature: float | None
) -> tuple[dict[str, float], Reliability]:
    """The metrics of predictions, and their reliability before and after calibration."""
    stream = metrics.MetricStream(temperature=temperature or 1.0)
    stream.update(log_probs, labels)
    before, after = tuple(Bin(*values) for values in stream.by_bin()), None
    if temperature is not None:
        calibrated = metrics.MetricStream()
        calibrated.update((log_probs / temperature).log_softmax(-1), labels)
        after = tuple(Bin(*values) for values in calibrated.by_bin())
    return stream.compute(), Reliability(before, after)


def _beside_control(row: Row, rows: Mapping[str, Row], nlls: Mapping[str, Tensor]) -> Row:
    """A bridge's row with what it gains over its control, where that was measured too."""
    control = find_control(row, rows.values())
    if control is None:
        return row
    gain = nlls[control.model] - nlls[row.model]
    error = metrics.standard_error(gain)
    return replace(
        row,
        nll_gain_over_control=gain.mean().item(),
        nll_gain_over_control_se=error if math.isfinite(error) else None,
    )


def _ensemble_size(model: nn.Module, reference: Ensemble) -> int:
    """k where the model is DE-k of the reference, else 0."""
    members = list(model.members) if isinstance(model, Ensemble) else [model]
    same = len(members) <= len(reference)
    same = same and all(a is b for a, b in zip(members, reference.members, strict=False))
    return len(members) if same else 0


def infer_info(model: nn.Module) -> ModelInfo:
    """What a model shows of what it is; with which loss a bridge was trained it does not show."""
    if isinstance(model, Ensemble):
        return ModelInfo("DE", len(model))
    if not isinstance(model, FastEnsemble):
        return ModelInfo()
    bridges = model.each_bridge()
    if not bridges:
        return ModelInfo("ED", model.members) if model.source_distilled else ModelInfo()
    bases = {bridge.config.temperature.base for bridge in bridges if isinstance(bridge, Bridge)}
    return ModelInfo(
        "BN" if model.average_source else "DBN",
        model.members,
        len(bridges),
        max(bridge.steps for bridge in bridges),
        source_temperature=bases.pop() if len(bases) == 1 else None,
        control=model.members == 1,
    )


def _find_reference(models: Mapping[str, nn.Module]) -> Ensemble:
    ensembles = [model for model in models.values() if isinstance(model, Ensemble)]
    if not ensembles:
        raise ValueError(
            f"none of the models ({', '.join(models)}) is an Ensemble; pass reference=Ensemble(members)"
        )
    return max(ensembles, key=len)


def _labelled(data: Data, name: str) -> tuple[ExampleSet, Tensor]:
    images = collect(data, name)
    if images.labels is None:
        raise ValueError(f"{name} has no labels; give (images, labels)")
    return images, images.labels


def _other_images(ood: Mapping[str, Data], test: ExampleSet) -> dict[str, ExampleSet]:
    """Sets of other images, on the device of the test images and of their shape."""
    sets = {name: collect(images, name).without_labels() for name, images in ood.items()}
    for name, images in sets.items():
        if images.shapes != test.shapes:
            raise ValueError(
                f"the images of {name!r} in ood have shape {images.shapes[0]}, the test images "
                f"{test.shapes[0]}; bring them to that"
            )
    return {name: images.to(test.device) for name, images in sets.items()}
