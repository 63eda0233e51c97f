"""Measuring a saved model again, on a data set that it was made for."""

from __future__ import annotations

from pathlib import Path

import torch

from ensbridge.data import open_splits
from ensbridge.data.digits import Splits
from ensbridge.deploy.saving import load
from ensbridge.evaluation.evaluate import Evaluator, environment, infer_info
from ensbridge.evaluation.scores import Scores
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.devices import find_device
from ensbridge.utils.progress import Stage, silent

BATCH = 500


def evaluate_saved(
    model: str,
    data: str,
    root: Path | str | None = None,
    progress: Stage = silent,
    device: str = "auto",
) -> Scores:
    """The scores of a saved model and of its source alone on the test images of a data set.

    `model` is what `load` takes, `data` what `open_splits` does; temperatures of the calibrated NLL are
    fitted on validation images. Without other members to compare with, DEE only says whether one is beaten.
    """
    fast = load(model)
    splits = open_splits(data, root)
    _check(fast, splits, model, data)
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    place = find_device(chosen)
    fast, splits = fast.to(place), Splits(*(part.to(place) for part in splits))
    source = Ensemble([fast.source])
    advance = progress("evaluate", 2 * (len(splits.test) + len(splits.val)), "images")
    evaluator = Evaluator(source, splits.test, splits.val, batch_size=BATCH, advance=advance)
    rows = evaluator.measure({"DE-1": source, model: fast}, {model: infer_info(fast)})
    names = fast.class_names or tuple(map(str, range(evaluator.classes)))
    return Scores(data, 0, names, environment(place), rows, target=1)


def _check(fast: FastEnsemble, splits: Splits, model: str, data: str) -> None:
    """Refuse images of another shape or range than the model takes."""
    shape = tuple(splits.test.images.shape[1:])
    if fast.image_shape is not None and tuple(fast.image_shape) != shape:
        raise ValueError(
            f"{model} takes images {fast.image_shape} and those of {data} are {shape}; give others"
        )
    if fast.pixel_range is not None and fast.pixel_range[1] > 1:
        raise ValueError(
            f"{model} takes pixels from {fast.pixel_range[0]:g} to {fast.pixel_range[1]:g}, data sets are "
            "read from 0 to 1; measure it in Python with evaluate"
        )
