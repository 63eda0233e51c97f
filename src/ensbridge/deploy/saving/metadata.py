"""The head of a model card: what the Hugging Face hub reads of a model, in YAML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ensbridge.deploy.saving.folder import CARD_START
from ensbridge.evaluation.scores import Row

# By its first lines a card of ours is known, so that nobody else's README is ever overwritten.
TAGS = ("ensbridge", "image-classification", "deep-ensembles", "uncertainty")
TASK = "image-classification"
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}", re.ASCII | re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


class Result(NamedTuple):
    """A figure of a model on a part of a data set."""

    dataset: str
    split: str
    metric: str  # as the hub's evaluate calls it
    name: str
    value: float


def results_of(row: Row, dataset: str | None, split: str) -> list[Result]:
    """A row's figures; accuracy as a share, as the hub has it."""
    name = dataset or "unknown"
    figures = {
        "accuracy": ("accuracy", row.acc / 100),
        "nll": ("NLL", row.nll),
        "ece": ("expected calibration error", row.ece),
        "brier_score": ("Brier score", row.brier),
    }
    return [
        Result(name, split, metric, title, value)
        for metric, (title, value) in figures.items()
        if value is not None and math.isfinite(value)
    ]


def is_licence(text: str) -> bool:
    """Whether the hub may take it for a licence's identifier.

    >>> is_licence("apache-2.0"), is_licence("Apache 2.0")
    (True, False)
    """
    return _LICENCE.fullmatch(text) is not None


def is_hub_name(text: str) -> bool:
    """Whether a model on the hub may have this name.

    >>> is_hub_name("timm/resnet18.a1_in1k"), is_hub_name("/models/resnet18")
    (True, False)
    """
    return _HUB_NAME.fullmatch(text) is not None


def check_origin(licence: str | None, base_models: Sequence[str] = ()) -> None:
    """Refuse what a card could not say of a model's licence and of what it was made of."""
    if licence is not None and not is_licence(licence):
        raise ValueError(f"license is {licence!r}; give an identifier such as 'apache-2.0' or 'mit'")
    for name in base_models:
        if not is_hub_name(name):
            raise ValueError(
                f"base_models has {name!r}; give names on the hub, such as 'timm/resnet18.a1_in1k'"
            )


def write_head(
    title: str, licence: str | None = None, base_models: Sequence[str] = (), results: Sequence[Result] = ()
) -> str:
    """The lines between "---", which huggingface_hub's ModelCardData reads.

    >>> print(write_head("One network", "mit"))
    ---
    library_name: ensbridge
    pipeline_tag: image-classification
    license: "mit"
    tags:
    - ensbridge
    - image-classification
    - deep-ensembles
    - uncertainty
    ---
    """
    check_origin(licence, base_models)
    models = list(dict.fromkeys(base_models))
    lines = [CARD_START.rstrip(), f"pipeline_tag: {TASK}"]
    if licence is not None:
        lines.append(f"license: {json.dumps(licence)}")
    if models:
        lines += ["base_model:", *(f"- {json.dumps(name)}" for name in models)]
    lines += ["tags:", *(f"- {tag}" for tag in TAGS)]
    if results:
        lines += ["model-index:", f"- name: {json.dumps(title)}", "  results:"]
        for (dataset, split), figures in groupby(results, key=lambda result: (result.dataset, result.split)):
            lines += [
                "  - task:",
                f"      type: {TASK}",
                "    dataset:",
                f"      name: {json.dumps(dataset)}",
                f"      type: {json.dumps(_slug(dataset))}",
                f"      split: {split}",
                "    metrics:",
            ]
            for figure in figures:
                lines += [
                    f"    - type: {figure.metric}",
                    f"      value: {figure.value:.8f}",  # YAML reads 1e-05 as text
                    f"      name: {json.dumps(figure.name)}",
                ]
    return "\n".join([*lines, "---"])


def _slug(name: str) -> str:
    """A data set's name as an identifier."""
    return re.sub(r"[^a-z0-9_/-]+", "-", name.lower()).strip("-/") or "unknown"
