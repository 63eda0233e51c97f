"""What every row of the JSON in results/ records of how its model was trained."""

from __future__ import annotations

from typing import Any

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
