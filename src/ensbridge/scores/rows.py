"""The types of `scores.json`: what was measured of each model, and what the figures show of it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Annotated, Literal, NamedTuple

Method = Literal["DE", "ED", "EnD2", "BN", "DBN", "control", "other"]

MOST = 2**63 - 1  # beyond it whole numbers are no longer those of arrays


class Range(NamedTuple):
    """The least and the greatest value that a number in the file may have; absurd ones cannot be drawn."""

    low: float
    high: float


Seed = Annotated[int, Range(-MOST, MOST)]
Whole = Annotated[int, Range(0, MOST)]
Count = Annotated[int, Range(1, MOST)]
Few = Annotated[int, Range(0, 10**6)]
Members = Annotated[int, Range(1, 10**6)]
Severity = Annotated[int, Range(1, 5)]
Ratio = Annotated[float, Range(1e-3, 1e6)]
Percent = Annotated[float, Range(0, 100)]
Share = Annotated[float, Range(0, 1)]
Size = Annotated[float, Range(0, 1e6)]
Signed = Annotated[float, Range(-1e6, 1e6)]
Temperature = Annotated[float, Range(1e-6, 1e6)]
Loss = Annotated[float, Range(-1e12, 1e12)]


@dataclass(frozen=True)
class Bin:
    """One bin of a reliability diagram; without images it has neither confidence nor accuracy."""

    count: Whole
    confidence: Share | None
    accuracy: Share | None


@dataclass(frozen=True)
class Reliability:
    """Bins of equal width over confidence, before and after calibration."""

    before: tuple[Bin, ...]
    after: tuple[Bin, ...] | None  # None where there was nothing to calibrate on


@dataclass(frozen=True)
class Row:
    """One model's scores on the test split."""

    model: str
    method: Method
    members: Members  # members that the row uses (DE-k) or aims at (the others); the control aims at one
    bridges: Few
    steps: Few
    macs: Count
    macs_ratio: Ratio  # against one network, as are the parameters
    params: Count
    params_ratio: Ratio
    acc: Percent
    nll: Size
    brier: Size
    ece: Size
    cnll: Size | None  # None where there was no validation split to calibrate on, as is the temperature
    temperature: Temperature | None
    dee: Signed | str  # a string such as ">5" beyond the largest measured ensemble
    gap: Signed | None  # share of the NLL distance from DE-1 to the target ensemble that is closed
    gap_error: Size | None  # one standard error over test images
    reliability: Reliability | None = None
    owed: Signed | None = None  # NLL below that of `control_of` the bridge, None where it was not measured
    owed_error: Size | None = None  # one standard error over test images, each under both models


def control_of(bridge: str) -> str | None:
    """The name of the control that is trained as one bridge or several are, with the source as its target.

    >>> control_of("+1 DBN (KL)"), control_of("+1 DBN"), control_of("+2 DBN (KL, DE-5)"), control_of("ED")
    ('control (KL)', 'control', '+2 control (KL)', None)
    """
    found = re.fullmatch(r"(\+\d+ )DBN(.*)", bridge)
    if found is None:
        return None
    training = re.sub(r" \(DE-\d+\)|, DE-\d+", "", found[2])  # a control knows no member but the source
    return f"{found[1]}control{training}".removeprefix("+1 ")


@dataclass(frozen=True)
class Transition:
    """How the prediction for one image goes from the source through the bridge's steps to its end."""

    image: str  # PNG, base64
    label: Whole
    source: tuple[Share, ...]  # the source's own probabilities
    times: tuple[Share, ...]  # from 1 down to 0
    path: tuple[tuple[Share, ...], ...]  # probabilities at each of the times
    ensemble: tuple[Share, ...]


@dataclass(frozen=True)
class Curve:
    """A training loss over the images seen."""

    name: str
    method: Method
    images: tuple[Whole, ...]
    loss: tuple[Loss, ...]


@dataclass(frozen=True)
class CorruptedRow:
    """One model's scores on the test images under one corruption at one severity."""

    model: str
    severity: Severity
    corruption: str
    images: str  # a digest of these very images and their labels
    acc: Percent
    nll: Size
    brier: Size
    ece: Size
    cnll: Size | None  # at the temperature that was fitted on clean images


@dataclass(frozen=True)
class CorruptedSet:
    """Where corrupted images are from, as far as the manifest beside them says so."""

    made_by: str | None  # such as "ensbridge 0.1.0, …"; None without a manifest, as the published set is
    seed: Seed | None


@dataclass(frozen=True)
class Scores:
    """The rows of one evaluation, with the data, the seed and the machine that made them.

    `tradeoff` has one row for each number of members that a method was trained towards with as many bridges
    as it needs; `capacity` one for each number of teachers that a single network was trained towards;
    `corrupted` one for each model, severity and corruption.

    >>> row = Row(
    ...     "DE-1", "DE", 1, 0, 0, 400, 1.0, 30, 1.0, 91.5, 0.3166, 0.13, 0.046, None, None, 1.0, None, None
    ... )
    >>> print(Scores("cifar10", 0, ("cat", "dog"), {"python": "3.12"}, (row,)).table())
    model  MACs ×  params ×    ACC    NLL  Brier    ECE  cNLL   DEE  gap
    ─────  ──────  ────────  ─────  ─────  ─────  ─────  ────  ────  ───
    DE-1     1.00      1.00  91.50  0.317  0.130  0.046     –  1.00    –
    """

    dataset: str
    seed: Seed
    class_names: tuple[str, ...]
    environment: dict[str, str]
    rows: tuple[Row, ...]
    settings: dict[str, str] | None = None  # which recipe, preset and changes; None outside a recipe
    target: Members | None = None  # the size of the ensemble that every row's gap is measured to
    transitions: tuple[Transition, ...] = ()
    curves: tuple[Curve, ...] = ()
    tradeoff: tuple[Row, ...] = ()
    capacity: tuple[Row, ...] = ()
    corrupted: tuple[CorruptedRow, ...] = ()
    corrupted_set: CorruptedSet | None = None  # whose images those are; None where it is not known

    def table(self) -> str:
        """The rows as plain aligned text, names to the left and numbers to the right."""
        from ensbridge.scores.summary import summarise

        return summarise([self]).table()

    def to_json(self) -> str:
        """The text of `scores.json`."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
