"""Measuring a saved model again, on a data set that it was made for."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from ensbridge.data import DATASETS, class_folders, class_names, open_splits
from ensbridge.data.digits import Splits
from ensbridge.deploy.batch import Pixels
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
    allow: Collection[str] = (),
) -> Scores:
    """The scores of a saved model and of its source alone on the test images of a data set.

    `model` and `allow` are what `load` takes, `data` what `open_splits` does; temperatures of the calibrated
    NLL are fitted on validation images. Without other members, DEE only says whether one is beaten.
    """
    fast = load(model, allow=allow)
    Pixels.of(fast, None, None)  # refuses a model of pixels that are not from 0 to 1, as data sets are read
    splits = open_splits(data, root)
    _check(fast, splits, model, data)
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    where = find_device(chosen)
    fast, splits = fast.to(where), splits.to(where)
    source = Ensemble([fast.source])
    advance = progress("evaluate", 2 * (len(splits.test) + len(splits.val)), "images")
    evaluator = Evaluator(source, splits.test, splits.val, batch_size=BATCH, advance=advance)
    rows = evaluator.measure({"DE-1": source, model: fast}, {model: infer_info(fast)})
    names = fast.class_names or tuple(map(str, range(evaluator.classes)))
    return Scores(data, 0, names, environment(where), rows, target=1)


def _check(fast: FastEnsemble, splits: Splits, model: str, data: str) -> None:
    """Refuse images of another shape, or of other classes, than the model's."""
    ours, theirs = fast.class_names, _class_names(data)
    if ours is not None and theirs is not None and tuple(ours) != tuple(theirs):
        pairs = enumerate(zip(ours, theirs, strict=False))
        other = next((f"{label} is {a!r} there and {b!r} here" for label, (a, b) in pairs if a != b), None)
        which = other or f"there are {len(ours)} there and {len(theirs)} here"
        raise ValueError(
            f"{model} and {data} differ in their classes ({which}); give a set of the same classes"
        )
    shape = tuple(splits.test.images.shape[1:])
    if fast.image_shape is not None and tuple(fast.image_shape) != shape:
        raise ValueError(f"{model} takes images {fast.image_shape}, those of {data} are {shape}; give others")


def _class_names(data: str) -> tuple[str, ...] | None:
    """The classes of a data set by label, where they have names."""
    if data in DATASETS:
        return class_names(data)
    return class_folders(data) or None if Path(data).is_dir() else None
