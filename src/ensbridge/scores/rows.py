"""The types of `scores.json`: what was measured of each model, and what the figures show of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal, NamedTuple, get_args

Method = Literal["DE", "ED", "EnD2", "BN", "DBN", "control", "other"]
METHODS: tuple[Method, ...] = get_args(Method)


class AtLeast(NamedTuple):
    """The least value that a number in the file may have."""

    low: float


Whole = Annotated[int, AtLeast(0)]
Count = Annotated[int, AtLeast(1)]
Positive = Annotated[float, AtLeast(1e-12)]


@dataclass(frozen=True)
class Bin:
    """One bin of a reliability diagram; without images it has neither confidence nor accuracy."""

    count: Whole
    confidence: float | None
    accuracy: float | None


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
    members: Count  # members that the row uses (DE-k) or aims at (the others); the control aims at one
    bridges: Whole
    steps: Whole
    macs: Count
    macs_ratio: Positive  # against one network, as are the parameters
    params: Count
    params_ratio: Positive
    acc: float  # percent
    nll: float
    brier: float
    ece: float
    cnll: float | None  # None where there was no validation split to calibrate on, as is the temperature
    temperature: Positive | None
    dee: float | str  # a string such as ">5" beyond the largest measured ensemble
    gap: float | None
    gap_error: float | None
    reliability: Reliability | None = None


@dataclass(frozen=True)
class Transition:
    """How the prediction for one image goes from the source through the bridge's steps to its end."""

    image: str  # PNG, base64
    label: Whole
    source: tuple[float, ...]  # the source's own probabilities
    times: tuple[float, ...]  # from 1 down to 0
    path: tuple[tuple[float, ...], ...]  # probabilities at each of the times
    ensemble: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """A training loss over the images seen."""

    name: str
    method: Method
    images: tuple[int, ...]
    loss: tuple[float, ...]


@dataclass(frozen=True)
class Scores:
    """The rows of one evaluation, with the data, the seed and the machine that made them.

    `tradeoff` has one row for each number of members that a method was trained towards with as many bridges
    as it needs; `capacity` one for each number of teachers that a single network was trained towards.

    >>> row = Row(
    ...     "DE-1", "DE", 1, 0, 0, 400, 1.0, 30, 1.0, 91.5, 0.3166, 0.13, 0.046, None, None, 1.0, None, None
    ... )
    >>> print(Scores("cifar10", 0, ("cat", "dog"), {"python": "3.12"}, (row,)).table())
    model  MACs ×  params ×    ACC    NLL  Brier    ECE  cNLL   DEE  gap
    ─────  ──────  ────────  ─────  ─────  ─────  ─────  ────  ────  ───
    DE-1     1.00      1.00  91.50  0.317  0.130  0.046     –  1.00    –
    """

    dataset: str
    seed: int
    class_names: tuple[str, ...]
    environment: dict[str, str]
    rows: tuple[Row, ...]
    settings: dict[str, str] | None = None  # which recipe, preset and changes; None outside a recipe
    transitions: tuple[Transition, ...] = ()
    curves: tuple[Curve, ...] = ()
    tradeoff: tuple[Row, ...] = ()
    capacity: tuple[Row, ...] = ()

    def table(self) -> str:
        """The rows as plain aligned text, names to the left and numbers to the right."""
        from ensbridge.scores.summary import summarise

        return summarise([self]).table()

    def to_json(self) -> str:
        """The text of `scores.json`."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
