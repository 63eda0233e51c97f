"""The types of `scores.json`: what was measured of each model, and what the figures show of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Literal

from ensbridge.utils.text import short
from ensbridge.utils.typed_json import Range

Method = Literal["DE", "ED", "EnD2", "BN", "DBN", "other"]
Kind = Literal["DE", "ED", "EnD2", "BN", "DBN", "control", "other"]  # as tables and figures tell rows apart
Loss = Literal["bridge", "kl"]
Width = Literal["small", "medium"]
Source = Literal["member", "distilled"]
ImageScore = Literal["msp", "entropy", "mutual_information", "disagreement"]  # of uncertainty

MAX_INT = 2**63 - 1  # beyond it whole numbers are no longer those of arrays

# Numbers beyond these cannot be drawn.
Seed = Annotated[int, Range(-MAX_INT, MAX_INT)]
Whole = Annotated[int, Range(0, MAX_INT)]
Count = Annotated[int, Range(1, MAX_INT)]
Few = Annotated[int, Range(0, 10**6)]
Members = Annotated[int, Range(1, 10**6)]
Severity = Annotated[int, Range(1, 5)]
Ratio = Annotated[float, Range(1e-3, 1e6)]
Percent = Annotated[float, Range(0, 100)]
Share = Annotated[float, Range(0, 1)]
Size = Annotated[float, Range(0, 1e6)]
Signed = Annotated[float, Range(-1e6, 1e6)]
Temperature = Annotated[float, Range(1e-6, 1e6)]
LossValue = Annotated[float, Range(-1e12, 1e12)]
Name = Annotated[str, Range(1, 1000)]
PNG = Annotated[str, Range(1, 2**24)]  # as base64


@dataclass(frozen=True)
class Bin:
    """One bin of a reliability diagram; without images it has neither confidence nor accuracy."""

    count: Whole
    confidence: Share | None
    accuracy: Share | None

    def __post_init__(self) -> None:
        for name in ("confidence", "accuracy"):
            if self.count and getattr(self, name) is None:
                raise ValueError(f"{name} is null, expected a number from 0 to 1, as count is {self.count}")


@dataclass(frozen=True)
class Reliability:
    """Bins of equal width over confidence, before and after calibration."""

    before: tuple[Bin, ...]
    after: tuple[Bin, ...] | None  # None where there was nothing to calibrate on


@dataclass(frozen=True)
class Detection:
    """How well a score of uncertainty tells the images of another set from test images."""

    images: Name  # the name of the set
    score: ImageScore
    auroc: Share
    auroc_se: Share | None  # over images; None where there is one image alone
    fpr95: Share


@dataclass(frozen=True)
class PredictionSets:
    """Conformal prediction sets for a coverage of 1 - alpha: the coverage of the test split, and the size."""

    method: Literal["lac", "aps"]
    alpha: Share
    coverage: Share
    size: Size  # the mean number of classes


@dataclass(frozen=True)
class Uncertainty:
    """What a model's uncertainty is worth: for abstaining, for prediction sets, for finding other images."""

    aurc: Share  # both by MSP
    augrc: Share
    sets: tuple[PredictionSets, ...] = ()  # none without a validation split
    ood: tuple[Detection, ...] = ()


class _OfMethod:
    """What is of a method, or is its control."""

    method: Method
    control: bool

    @property
    def kind(self) -> Kind:
        """The method, or that it is a control."""
        return "control" if self.control else self.method


@dataclass(frozen=True)
class ModelInfo(_OfMethod):
    """What a model is: by this rows are matched, and from it their printed names are made.

    >>> ModelInfo("DBN", members=3, bridges=1, steps=1, loss="kl").as_control().members
    1
    """

    method: Method = "other"
    members: Members = 1  # members that the model uses (DE-k) or aims at (the others); a control aims at one
    bridges: Few = 0
    steps: Few = 0
    loss: Loss | None = None  # of diffusion bridges: the paper's regression, or KL; None where unknown
    source_temperature: Temperature | None = None  # of diffusion bridges: what divides the source's logits
    control: bool = False  # a bridge with the source alone as its target
    width: Width | None = None  # of bridge networks
    source: Source = "member"  # what bridges run beside: the first member, or a network distilled
    tau: Temperature | None = None  # of distillation, where it is not the only one

    def as_control(self) -> ModelInfo:
        """What the control of a bridge is: all the same, but that it has the source alone as its target."""
        return replace(self, members=1, control=True)


@dataclass(frozen=True)
class Row(_OfMethod):
    """One model's scores on the test split."""

    model: Name
    method: Method
    members: Members
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
    loss: Loss | None = None
    source_temperature: Temperature | None = None
    control: bool = False
    width: Width | None = None
    source: Source = "member"
    tau: Temperature | None = None
    seed: Seed = 0
    headline: bool = False  # whether it is the model that the report is about, by what was chosen before
    nll_gain_over_control: Signed | None = None  # None where the bridge's control was not measured
    nll_gain_over_control_se: Size | None = None  # over test images, each under both models
    uncertainty: Uncertainty | None = None  # None where it was not asked for

    def __post_init__(self) -> None:
        if isinstance(self.dee, str) and not re.fullmatch(r">[1-9][0-9]{0,5}", self.dee):
            raise ValueError(f'dee is {short(self.dee)}, expected a number or a string such as ">5"')

    @property
    def info(self) -> ModelInfo:
        """What the model is."""
        return ModelInfo(**{field.name: getattr(self, field.name) for field in fields(ModelInfo)})


def find_control(bridge: Row, rows: Iterable[Row]) -> Row | None:
    """The row of the control that was trained as one bridge or several were."""
    if bridge.kind != "DBN":
        return None
    return next((row for row in rows if row.info == bridge.info.as_control()), None)


@dataclass(frozen=True)
class Transition:
    """How the prediction for one image goes from the source through the bridge's steps to its end."""

    image: PNG | None  # PNG, base64; None where the data may not be passed on
    label: Whole
    source: tuple[Share, ...]  # the source's own probabilities
    times: tuple[Share, ...]  # from 1 down to 0
    path: tuple[tuple[Share, ...], ...]  # probabilities at each of the times
    ensemble: tuple[Share, ...]
    index: Whole | None = None  # of the image in the test split


@dataclass(frozen=True)
class Curve(_OfMethod):
    """A training loss over the images seen."""

    name: Name
    method: Method
    images: tuple[Whole, ...]
    loss: tuple[LossValue, ...]
    control: bool = False


@dataclass(frozen=True)
class CorruptedRow:
    """One model's scores on the test images under one corruption at one severity."""

    model: Name
    severity: Severity
    corruption: Name
    images: Name  # a digest of these very images and their labels
    acc: Percent
    nll: Size
    brier: Size
    ece: Size
    cnll: Size | None  # at the temperature that was fitted on clean images


@dataclass(frozen=True)
class CorruptedSet:
    """Where corrupted images are from, as far as the manifest beside them says so."""

    made_by: Name | None  # such as "ensbridge 0.1.0, …"; None without a manifest, as the published set is
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

    dataset: Name
    seed: Seed
    class_names: tuple[Name, ...]
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
        from ensbridge.evaluation.scores.summary import summarise

        return summarise([self]).table()

    def to_json(self) -> str:
        """The text of `scores.json`."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def name_rows(models: Sequence[ModelInfo], target: int | None = None) -> list[str]:
    """A name for each model; those that aim at `target` members do not say so.

    Where two would have the same name, bridges say at which temperature their source is.

    >>> bridge = ModelInfo("DBN", members=3, bridges=1, steps=1, loss="kl", source_temperature=2.0)
    >>> name_rows([ModelInfo("DE", 3), bridge, bridge.as_control(), ModelInfo("ED", 5)], target=3)
    ['DE-3', '+1 DBN (KL)', 'control (KL)', 'ED (DE-5)']
    >>> name_rows([ModelInfo("DBN", 3, 1, 1, "kl", 2.0, source="distilled"), ModelInfo("ED", 3, tau=1.0)], 3)
    ['+1 DBN (distilled source)', 'ED (τ = 1)']
    """
    names = [_name(model, target) for model in models]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [
        _name(model, target, temperature=name in twice) for model, name in zip(models, names, strict=True)
    ]


def name_by_teachers(models: Sequence[ModelInfo]) -> list[str]:
    """Names for single networks that were trained towards ever more teachers.

    >>> name_by_teachers([ModelInfo("EnD2", 2)])
    ['EnD², 2 teachers']
    """
    return [f"{_label(model)}, {model.members} teachers" for model in models]


def _label(model: ModelInfo) -> str:
    return {"EnD2": "EnD²"}.get(model.kind, model.kind)


def _name(model: ModelInfo, target: int | None, temperature: bool = False) -> str:
    if model.method == "DE":
        return f"DE-{model.members}"
    details = []
    if model.method == "DBN":
        if model.source == "distilled":
            details.append("distilled source")
        elif model.loss == "kl":
            details.append("KL")
        if model.steps > 1:
            details.append(f"{model.steps} steps")
        if temperature and model.source_temperature is not None:
            details.append(f"T = {model.source_temperature:g}")
    if model.tau is not None:
        details.append(f"τ = {model.tau:g}")
    if not model.control and model.members != target and model.width is None:
        details.append(f"DE-{model.members}")
    words = [_label(model)]
    if model.bridges > 1 or (model.bridges and not model.control):
        words.insert(0, f"+{model.bridges}")
    words += [model.width] if model.width else []
    words += [f"({', '.join(details)})"] if details else []
    return " ".join(words)
