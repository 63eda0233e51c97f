"""Models on corrupted test images: a row for each model, severity and corruption.

Images are read one corruption and severity at a time. Rows that were measured before, of the same weights,
temperature and images, are kept in a file, so that a killed run resumes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ensbridge.data.cifar import corruptions_in, read_corrupted
from ensbridge.data.corruptions import CORRUPTIONS, SEVERITIES
from ensbridge.data.corruptions.write import MANIFEST, check_severities
from ensbridge.data.loader import ImageSet, as_image_set
from ensbridge.evaluation.predict import predict_batch
from ensbridge.evaluation.scores import CorruptedRow, CorruptedSet, Scores, parse_corrupted
from ensbridge.metrics import MetricStream
from ensbridge.models.ensemble import weights_digest
from ensbridge.utils.files import open_folder, read_json, write_atomically
from ensbridge.utils.progress import Advance, Stage, silent

CORRUPTED_FILE = "corrupted.jsonl"  # beside a run's scores.json


def measure_corrupted(
    models: Mapping[str, nn.Module],
    folder: Path | str,
    temperatures: Mapping[str, float] | None = None,
    severities: Sequence[int] | None = None,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    test: ImageSet | tuple[Tensor, Tensor] | None = None,
    keep: Path | str | None = None,
    batch_size: int = 256,
    stage: Stage = silent,
) -> tuple[CorruptedRow, ...]:
    """Measure classifiers on a folder of CIFAR-10-C's layout, on the device where they are.

    `temperatures`, fitted on clean validation images, are for the calibrated NLL of the models that have
    one. Severities are all of the folder's unless given. The images must be those of `test`, where it is
    given: as many, of the same shape and with the same labels. `keep` is a file for what is measured; with
    it a run that was killed resumes, and nothing is measured twice. Models are run in evaluation mode.

    >>> import tempfile
    >>> import numpy as np
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/fog.npy", np.zeros((5 * 4, 2, 2, 3), np.uint8))
    ...     np.save(f"{folder}/labels.npy", np.arange(5 * 4) % 3)
    ...     rows = measure_corrupted({"one": net}, folder, severities=[1, 5], corruptions=["fog"])
    >>> [(row.model, row.severity, row.corruption, row.cnll) for row in rows]
    [('one', 1, 'fog', None), ('one', 5, 'fog', None)]
    """
    folder, temperatures = Path(folder), dict(temperatures or {})
    conditions = _conditions(folder, severities, corruptions)
    device = _check(models, temperatures)
    clean = None if test is None else as_image_set(test)
    kept = {} if keep is None else _read_kept(Path(keep))
    weights = {name: _digest(model) for name, model in models.items()}
    advance: Advance | None = None
    rows: dict[tuple[str, tuple[int, str]], CorruptedRow] = {}
    for condition in conditions:
        images = _read(folder, condition, clean)
        if advance is None:
            total = len(conditions) * len(models) * len(images)
            advance = stage("corrupted", total, "images")
        digest = images.fingerprint()
        keys = {name: _Key(weights[name], temperatures.get(name), digest) for name in models}
        new = {name: model for name, model in models.items() if keys[name] not in kept}
        advance((len(models) - len(new)) * len(images))
        measured = _measure(new, images.to(device), temperatures, batch_size, advance)
        kept |= {keys[name]: CorruptedRow(name, *condition, digest, **measured[name]) for name in new}
        if keep is not None and new:
            _write_kept(Path(keep), kept)
        for name, key in keys.items():
            # What has the same images, or the same weights, may have another name.
            row = replace(kept[key], model=name, severity=condition[0], corruption=condition[1])
            rows[name, condition] = row
    return tuple(rows[name, condition] for name in models for condition in conditions)


def check_corrupted(folder: Path | str, test: ImageSet | tuple[Tensor, Tensor] | None = None) -> None:
    """Refuse a folder that lacks a corruption, or whose images are not those of a test split."""
    conditions = _conditions(Path(folder), None, CORRUPTIONS)
    _read(Path(folder), conditions[0], None if test is None else as_image_set(test))


def describe_corrupted(folder: Path | str) -> CorruptedSet:
    """Where a folder's corrupted images are from, by the manifest beside them."""
    manifest = _manifest(Path(folder))
    made_by, seed = manifest.get("made_by"), manifest.get("seed")
    named = isinstance(made_by, str) and bool(made_by) and made_by.isprintable()
    return CorruptedSet(made_by if named else None, seed if type(seed) is int else None)


def add_corrupted(
    scores: Scores,
    models: Mapping[str, nn.Module],
    folder: Path | str,
    *,
    test: ImageSet | tuple[Tensor, Tensor] | None = None,
    keep: Path | str | None = None,
    batch_size: int = 256,
    stage: Stage = silent,
) -> Scores:
    """The scores with their models measured under corruptions too, at the temperatures of their rows."""
    fitted = {row.model: row.temperature for row in scores.rows if row.model in models}
    temperatures = {name: value for name, value in fitted.items() if value is not None}
    rows = measure_corrupted(
        models, folder, temperatures, test=test, keep=keep, batch_size=batch_size, stage=stage
    )
    return replace(scores, corrupted=rows, corrupted_set=describe_corrupted(folder))


@torch.no_grad()
def _measure(
    models: Mapping[str, nn.Module],
    images: ImageSet,
    temperatures: Mapping[str, float],
    batch_size: int,
    advance: Advance,
) -> dict[str, dict[str, Any]]:
    """The metrics of each model on a set of images."""
    streams = {name: MetricStream(temperature=temperatures.get(name, 1.0)) for name in models}
    for batch, labels in images.batches(batch_size) if models else ():
        assert labels is not None
        for name, log_probs in predict_batch(models, batch).items():
            streams[name].update(log_probs, labels)
        advance(len(models) * len(batch))
    metrics: dict[str, dict[str, Any]] = {}
    for name, stream in streams.items():
        values = stream.compute()
        metrics[name] = {"acc": 100 * values["acc"], **{key: values[key] for key in ("nll", "brier", "ece")}}
        metrics[name]["cnll"] = values["cnll"] if name in temperatures else None
    return metrics


# ------------------------------------------------------------------------------------------ what is given


def _conditions(
    folder: Path, severities: Sequence[int] | None, corruptions: Sequence[str]
) -> list[tuple[int, str]]:
    """Every severity with every corruption, the mildest first; what is not there is said at once."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder; give one of corrupted images, such as ensbridge data corrupt makes"
        )
    complete = set(corruptions_in(folder))
    missing = [name for name in corruptions if name not in complete]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(corruptions)} corruptions ({', '.join(missing)}); finish "
            "the set by the command that makes it, or get it again"
        )
    if severities is None:  # those of the manifest; `read_corrupted` refuses what it cannot have
        listed = _manifest(folder).get("severities")
        severities = listed if isinstance(listed, list) and listed else SEVERITIES
    else:
        severities = check_severities(severities)
    return [(severity, name) for severity in severities for name in dict.fromkeys(corruptions)]


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    manifest = read_json(path) if path.is_file() else {}
    return manifest if isinstance(manifest, dict) else {}


def _check(models: Mapping[str, nn.Module], temperatures: Mapping[str, float]) -> torch.device:
    """The one device of all models, in evaluation mode from here."""
    if not models:
        raise ValueError("there are 0 models to measure; give at least 1")
    for name in temperatures:
        if name not in models:
            raise ValueError(f"temperatures name {name!r}; the models are {', '.join(models)}")
    devices = {str(weight.device) for model in models.values() for weight in model.eval().parameters()}
    if len(devices) > 1:
        raise ValueError(f"the models are on {' and '.join(sorted(devices))}; bring them to one device")
    return torch.device(devices.pop() if devices else "cpu")


def _read(folder: Path, condition: tuple[int, str], clean: ImageSet | None) -> ImageSet:
    """The images of a severity and corruption; those that are not of the test split are refused."""
    severity, corruption = condition
    images = read_corrupted(folder, corruption, severity)
    if clean is None:
        return images
    remedy = "give the corrupted images of its own test split"
    if len(images) != len(clean):
        raise ValueError(f"{folder} has {len(images):,} test images, the run's data {len(clean):,}; {remedy}")
    shapes = ["×".join(map(str, data.images.shape[1:])) for data in (images, clean)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{folder} has images of {shapes[0]}, the run's data of {shapes[1]}; {remedy}")
    assert images.labels is not None
    if clean.labels is None:
        raise ValueError("test has no labels; give (images, labels)")
    differ = (images.labels != clean.labels.cpu()).nonzero()
    if len(differ):
        first = int(differ[0])
        labels = f"image {first} is of class {int(images.labels[first])}"
        raise ValueError(
            f"{folder}: {labels}, in the run's data of class {int(clean.labels[first])}; {remedy}"
        )
    return images


# ---------------------------------------------------------------------------------------- what is kept


class _Key(NamedTuple):
    """What decides a row's numbers."""

    weights: str
    temperature: float | None
    images: str


def _read_kept(path: Path) -> dict[_Key, CorruptedRow]:
    """Rows that were measured before, one JSON object in each line."""
    open_folder(path.parent)
    rows: dict[_Key, CorruptedRow] = {}
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else (), 1):
        try:
            document = json.loads(line)
            row = parse_corrupted(document)
            rows[_Key(document["weights"], document["temperature"], row.images)] = row
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} is damaged or foreign: its line {number} is no row that was measured; move the "
                "file away, and all is measured anew"
            ) from error
    return rows


def _write_kept(path: Path, rows: Mapping[_Key, CorruptedRow]) -> None:
    lines = [
        json.dumps({"weights": key.weights, "temperature": key.temperature, **asdict(row)}) + "\n"
        for key, row in rows.items()
    ]
    write_atomically(path, "".join(lines).encode())


def _digest(model: nn.Module) -> str:
    """A digest of a model's weights and of the plain settings of its modules, such as a bridge's times."""
    digest = hashlib.sha256(weights_digest(model).encode())
    for name, module in model.named_modules():
        plain = {
            key: value
            for key, value in sorted(vars(module).items())
            if not key.startswith("_")
            and key != "training"
            and (isinstance(value, bool | int | float | str | tuple) or is_dataclass(value))
        }
        digest.update(f"{name} {type(module).__qualname__} {plain!r}".encode())
    return digest.hexdigest()[:16]
