"""What studies share without torch: their command line, and what the JSON in results/ records of a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"
FIELDS = ("dataset", "preset", "schedule", "epochs", "teachers", "method", "seed")
MEMBER_EPOCHS = {"cifar10": 200, "cifar100": 200, "digits": 30}
PUBLISHED_EPOCHS = {"cifar10": 320, "cifar100": 158, "digits": 72}


def provenance(
    dataset: str, method: str, teachers: int, seed: int | list[int], epochs: int | None = None
) -> dict[str, Any]:
    """The record of a model; `seed` has several where a row is their mean.

    Members are trained as the paper has it; `epochs` is that of all else, the published schedule's unless
    given.

    >>> provenance("cifar10", "DE", 3, 0)["epochs"], provenance("cifar10", "ED", 3, 0)["epochs"]
    (200, 320)
    """
    published = PUBLISHED_EPOCHS[dataset]
    length = MEMBER_EPOCHS[dataset] if method == "DE" else epochs or published
    schedule = "published" if length in (published, MEMBER_EPOCHS[dataset]) else "short"
    values = (dataset, "default", schedule, length, teachers, method, seed)
    return dict(zip(FIELDS, values, strict=True))


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a file of results/."""
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def plain_parser(doc: str | None) -> argparse.ArgumentParser:
    """The command line of a script, of which its docstring is the help."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)


def study_parser(doc: str | None, seeds: Sequence[int] = ()) -> argparse.ArgumentParser:
    """The same of what is trained in a folder, for several seeds where there are such."""
    parser = plain_parser(doc)
    parser.add_argument("out", type=Path, help="the study's folder, in which a killed one resumes")
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
    return parser
