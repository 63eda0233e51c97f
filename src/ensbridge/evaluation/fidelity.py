"""Is the compressed network worth it? How near it comes to the real ensemble, its cost, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ensbridge.data.examples import ExampleSet
from ensbridge.data.loader import Data, collect
from ensbridge.evaluation.evaluate import Evaluator
from ensbridge.evaluation.predict import predict, predict_each
from ensbridge.evaluation.scores import Row
from ensbridge.evaluation.scores.columns import dee_text
from ensbridge.metrics import (
    fit_temperature,
    format_dee,
    gap_closed,
    kl_per_image,
    nll_per_image,
    standard_error,
)
from ensbridge.metrics.checks import checked_labels
from ensbridge.metrics.cost import count_macs
from ensbridge.models.ensemble import Ensemble, checked_members, try_members, try_network
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.preprocessed import Preprocess, with_preprocessing
from ensbridge.utils.devices import evaluation_mode

CLEAR = 2.0  # a difference below this many standard errors is not called one
CHECKED_IMAGES = 8


@dataclass(frozen=True)
class Fidelity:
    """How near a network comes to the ensemble that it stands for.

    KL divergences are from the real ensemble, mean over images, in nats. What needs labels is None without.
    KL, and DEE and gap in `row`, are before calibration, as the members are; accuracy, NLL, Brier and ECE
    are those of the network as it is.
    """

    images: int
    temperature: float  # by which calibration divides the network's logits; 1 where there was none
    source_logit_weight: float  # how much of the source's logits it adds before that; 0 where there was none
    kl: float  # before calibration
    kl_error: float
    source_kl: float  # of the source alone: where the bridges started
    agreement: float  # share of images on which it names the ensemble's class
    source_agreement: float
    macs_ratio: float
    ensemble_macs_ratio: float
    row: Row | None
    source_row: Row | None
    ensemble_row: Row | None
    worth_it: bool
    verdict: str
    nll_gain_over_control: float | None = None  # None without a control, or without labels
    nll_gain_over_control_se: float | None = None

    def __str__(self) -> str:
        before = "" if (self.temperature, self.source_logit_weight) == (1, 0) else " before calibration"
        lines = [
            f"KL to the ensemble {self.kl:.4f} ± {self.kl_error:.4f}{before} (source alone "
            f"{self.source_kl:.4f})",
            f"agrees with the ensemble on {self.agreement:.2%} of {self.images} images (source alone "
            f"{self.source_agreement:.2%})",
            f"×{self.macs_ratio:.2f} the source's MACs (the ensemble ×{self.ensemble_macs_ratio:.2f})",
        ]
        for name, row in (("source", self.source_row), ("this", self.row), ("ensemble", self.ensemble_row)):
            if row is not None:
                dee = dee_text(row.dee).replace("<1", "<1 (worse than one member)")
                scores = f"NLL {row.nll:.4f}, Brier {row.brier:.4f}, ECE {row.ece:.4f}, DEE {dee}"
                lines.append(f"{name}: accuracy {row.acc:.2f} %, {scores}{before if name == 'this' else ''}")
        if self.nll_gain_over_control is not None:
            gain, error = self.nll_gain_over_control, self.nll_gain_over_control_se
            lines.append(f"NLL lower than the control's by {gain:.4f} ± {error:.4f}")
        return "\n".join([*lines, self.verdict])


def measure_fidelity(
    fast: FastEnsemble,
    test: Data,
    members: Iterable[nn.Module] | Ensemble,
    preprocess: Sequence[Preprocess | None] | None = None,
    control: FastEnsemble | None = None,
) -> Fidelity:
    """Compare a network with the real ensemble of `members` on test images, with or without labels.

    With labels the verdict is by NLL, against the source, and against the first members that cost no more,
    each at the temperature that is best for it on these very images: what a temperature alone can do is no
    merit of the bridges. Bridges beside a distilled source must be better than that source alone, likewise.
    "Source" is the first member. How near the ensemble is, and DEE, are before calibration; what is worse
    than one member by them is not called worth it. `control` is a network that was made in the same way
    without the ensemble: what is not clearly better than that is not worth it, either. Data is brought to
    where the networks are, and these are afterwards in the mode that they were in.

    >>> from ensbridge._compress import compress
    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)) for _ in range(3)]
    >>> images = torch.rand(64, 1, 4, 4)
    >>> fast = compress(nets, images, feature="1", budget=20, epochs=1, quiet=True)
    >>> fast.fidelity(images, members=nets).verdict.startswith(("worth it", "not worth it"))
    True
    """
    nets = checked_members(members, "fidelity")
    data = collect(test, "test")
    ensemble = Ensemble(with_preprocessing(nets, preprocess))
    with evaluation_mode([fast, ensemble]):
        fidelity = _measured(fast, data, ensemble)
    if control is None or data.labels is None:
        return fidelity
    log_probs = predict_each({"this": fast, "control": control}, data)
    gain = nll_per_image(log_probs["control"], data.labels) - nll_per_image(log_probs["this"], data.labels)
    mean, error = gain.mean().item(), standard_error(gain)
    fidelity = replace(fidelity, nll_gain_over_control=mean, nll_gain_over_control_se=error)
    if not fidelity.worth_it or _is_clear(gain):
        return fidelity
    verdict = (
        f"not worth it: it is not clearly better than its control, which never saw the ensemble (a gain of "
        f"{mean:.4f} ± {error:.4f} of NLL); keep the control, or give better members"
    )
    return replace(fidelity, worth_it=False, verdict=verdict)


def _measured(fast: FastEnsemble, data: ExampleSet, ensemble: Ensemble) -> Fidelity:
    few = data.first(CHECKED_IMAGES)
    _check(fast, ensemble, few, data.labels)
    costs = _costs(fast, ensemble, few)
    models = {**ensemble.by_size(), "this": fast, "its source": fast.source}
    *by_size, ours, alone = predict_each(models, data).values()
    real, source = by_size[-1], by_size[0]
    # As before calibration; the source's log-probabilities are its logits but for a constant.
    raw = (ours * fast.temperature - fast.source_logit_weight * alone).log_softmax(-1)
    kls, source_kls = kl_per_image(real, raw), kl_per_image(real, source)
    rows: dict[str, Row] = {}
    if data.labels is not None:
        evaluator = Evaluator(ensemble, data, by_size=by_size)
        models = {"source": ensemble.source, "this": fast, "ensemble": ensemble}
        rows = dict(zip(models, evaluator.measure(models, known={"this": ours}), strict=True))
        rows["this"] = _before_calibration(rows["this"], evaluator, raw)
        best = [_best_nll(log_probs, data.labels) for log_probs in by_size]
        distances = kls.mean().item(), source_kls.mean().item()
        nlls = nll_per_image(ours, data.labels)
        without = _best_nll(alone, data.labels) if fast.source_distilled and fast.bridges else None
        worth_it, verdict = _labelled_verdict(rows["source"].nll, best, nlls, without, distances, costs)
        if worth_it and (dee := dee_text(rows["this"].dee)) == "<1":
            worse = f"worse than one member, DEE {dee}"
            figures = verdict.split(": ", 1)[1]
            verdict = f"not worth it: before calibration it is {worse} ({figures}); train longer"
            worth_it = False
    else:
        worth_it, verdict = _unlabelled_verdict(source_kls, kls, costs)
    return Fidelity(
        images=len(data),
        temperature=fast.temperature,
        source_logit_weight=fast.source_logit_weight,
        kl=kls.mean().item(),
        kl_error=standard_error(kls),
        source_kl=source_kls.mean().item(),
        agreement=_agreement(real, ours),
        source_agreement=_agreement(real, source),
        macs_ratio=costs.model,
        ensemble_macs_ratio=costs.members[-1],
        row=rows.get("this"),
        source_row=rows.get("source"),
        ensemble_row=rows.get("ensemble"),
        worth_it=worth_it,
        verdict=verdict,
    )


class _Costs(NamedTuple):
    """MACs, as multiples of the source's: of the network, and of the first 1, 2, … M members together."""

    model: float
    members: list[float]


def _costs(fast: FastEnsemble, ensemble: Ensemble, few: ExampleSet) -> _Costs:
    image = next(few.batches(1))[0]
    macs = [count_macs(member, image) for member in ensemble.members]
    return _Costs(count_macs(fast, image) / macs[0], [total / macs[0] for total in accumulate(macs)])


def _check(fast: FastEnsemble, ensemble: Ensemble, few: ExampleSet, labels: Tensor | None) -> None:
    """Refuse images and labels that the networks cannot take, and a first member that is not the source."""
    images = next(iter(few.batches(len(few))))[0]
    try_network(fast, images, "this model", "give test images as compress had them")
    try_members(ensemble, images)
    mine, theirs = predict(fast.source, few), predict(ensemble.source, few)
    if mine.shape != theirs.shape or not (
        fast.source_distilled or torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3)
    ):
        raise ValueError(
            "the first of members does not predict as this model's source does; give the members in their "
            "order, with preprocess= as it was given to compress"
        )
    if labels is not None:
        checked_labels(labels, mine.shape[1])


def _before_calibration(row: Row, evaluator: Evaluator, raw: Tensor) -> Row:
    """The row with DEE and gap before calibration, since the members beside it are not calibrated."""
    nlls = nll_per_image(raw, evaluator.labels)
    gap, error = gap_closed(evaluator.nlls[0].numpy(), nlls.numpy(), evaluator.nlls[-1].numpy())
    dee = format_dee(nlls.mean().item(), [per_image.mean().item() for per_image in evaluator.nlls])
    return replace(row, dee=dee, gap=gap, gap_error=error)


def _best_nll(log_probs: Tensor, labels: Tensor) -> Tensor:
    """The NLL of each image at the temperature that is best for them together."""
    return nll_per_image((log_probs / fit_temperature(log_probs, labels)).log_softmax(-1), labels)


def _labelled_verdict(
    source_nll: float,
    by_size: Sequence[Tensor],
    nlls: Tensor,
    alone: Tensor | None,
    distances: tuple[float, float],
    costs: _Costs,
) -> tuple[bool, str]:
    """By NLL on labels: clearly better than the source could be, and than real members of the same cost.

    `by_size` has the NLL of DE-1 … DE-M at their best temperatures, for each image, as `nlls` has it;
    `alone` that of the distilled source that the bridges run beside, if there is one. `distances` are its KL
    to the ensemble and the source's.
    """
    gain, nll = by_size[0] - nlls, nlls.mean().item()
    mean, error = gain.mean().item(), standard_error(gain)
    best = [per_image.mean().item() for per_image in by_size]
    change = f"NLL {source_nll:.4f}, {best[0]:.4f} with the best temperature, → {nll:.4f}"
    if not _is_clear(gain):
        advice = "train longer, give more images, or raise budget"
        if not _is_clear(by_size[0] - by_size[-1]):
            advice = f"nor is the ensemble itself (NLL {best[-1]:.4f} likewise): give better members"
        return False, (
            f"not worth it: it is not clearly better than the source with a temperature ({change}, a gain of "
            f"{mean:.4f} ± {error:.4f}); {advice}"
        )
    if alone is not None and not _is_clear(alone - nlls):
        return False, (
            f"not worth it: {change}, but the distilled source without a bridge has "
            f"{alone.mean().item():.4f}, with the best temperature; give budget=1.0"
        )
    kl, source_kl = distances
    if not kl < source_kl:
        return False, (
            f"not worth it: {change}, but it is no nearer to the ensemble than the source is (KL {kl:.4f}, "
            f"source {source_kl:.4f}); train longer, or give better members"
        )
    change += f", at ×{costs.model:.2f} the source's cost"
    # Costs add up, so that the fewest members that are as good are also the cheapest.
    count = next((count for count, of_count in enumerate(best, 1) if of_count <= nll), len(best))
    cost, member_nll = costs.members[count - 1], best[count - 1]
    nll_there = f"NLL {member_nll:.4f} with the best temperature"
    members = f"the first {count} members, ×{cost:.2f} the cost, have {nll_there}"
    if member_nll <= nll and cost <= costs.model:
        return False, f"not worth it: {change}, but {members}; run them, or lower budget"
    return True, f"worth it: {change}; {members}"


def _is_clear(gain: Tensor) -> bool:
    """Whether a gain, by image, is above 0 on the mean by as much as makes it clear."""
    mean = gain.mean().item()
    return not (mean <= 0 or mean < CLEAR * standard_error(gain))  # of one image there is no error


def _unlabelled_verdict(source_kls: Tensor, kls: Tensor, costs: _Costs) -> tuple[bool, str]:
    """By KL to the real ensemble: at least half of the source's distance must be gone, clearly, for less."""
    if costs.members[-1] <= costs.model:
        return False, (
            f"not worth it: the whole ensemble costs ×{costs.members[-1]:.2f} the source, this "
            f"×{costs.model:.2f}; run the ensemble, or lower budget"
        )
    closed = source_kls / 2 - kls
    kl, source_kl = kls.mean().item(), source_kls.mean().item()
    advice = "train longer, give more images, or raise budget"
    if kl > source_kl:
        further = f"it is further from the ensemble than the source is (KL {kl:.4f}, source {source_kl:.4f})"
        return False, f"not worth it: {further}; {advice}"
    text = f"{1 - kl / max(source_kl, 1e-12):.0%} of the source's KL distance to the ensemble is gone"
    if closed.mean().item() > CLEAR * standard_error(closed):
        return True, f"worth it as far as images without labels tell: {text}; labelled images would decide it"
    return False, f"not worth it: {text}, which is not clearly half; {advice}"


def _agreement(one: Tensor, other: Tensor) -> float:
    return (one.argmax(-1) == other.argmax(-1)).double().mean().item()
