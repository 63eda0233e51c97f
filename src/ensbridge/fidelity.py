"""Is the compressed network worth it? How near it comes to the real ensemble, its cost, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ensbridge.cost import count_macs
from ensbridge.data.loader import Data, ImageSet, collect
from ensbridge.ensemble import Ensemble, list_members
from ensbridge.evaluation import Ruler, predict
from ensbridge.fast_ensemble import FastEnsemble
from ensbridge.metrics import fit_temperature, nll_per_image
from ensbridge.nets.preprocessed import Preprocess, with_preprocessing
from ensbridge.scores import Row

CLEAR = 2.0  # a difference below this many standard errors is not called one


@dataclass(frozen=True)
class Fidelity:
    """How near a network comes to the ensemble that it stands for.

    KL divergences are from the real ensemble, mean over images, in nats. What needs labels is None without.
    """

    images: int
    kl: float
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

    def __str__(self) -> str:
        lines = [
            f"KL to the ensemble {self.kl:.4f} ± {self.kl_error:.4f} (source alone {self.source_kl:.4f})",
            f"agrees with the ensemble on {self.agreement:.2%} of {self.images} images (source alone "
            f"{self.source_agreement:.2%})",
            f"×{self.macs_ratio:.2f} the source's MACs (the ensemble ×{self.ensemble_macs_ratio:.2f})",
        ]
        for name, row in (("source", self.source_row), ("this", self.row), ("ensemble", self.ensemble_row)):
            if row is not None:
                dee = row.dee if isinstance(row.dee, str) else f"{row.dee:.2f}"
                scores = f"NLL {row.nll:.4f}, Brier {row.brier:.4f}, ECE {row.ece:.4f}, DEE {dee}"
                lines.append(f"{name}: accuracy {row.acc:.2f} %, {scores}")
        return "\n".join([*lines, self.verdict])


def measure_fidelity(
    fast: FastEnsemble,
    test: Data,
    members: Sequence[nn.Module] | Ensemble,
    preprocess: Sequence[Preprocess | None] | None = None,
) -> Fidelity:
    """Compare a network with the real ensemble of `members` on test images, with or without labels.

    With labels the verdict is by the gain over the source at the temperature that is best for it on these
    very images: what a temperature alone can do is no merit of the bridges.

    >>> from ensbridge.compression import compress
    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)) for _ in range(3)]
    >>> images = torch.rand(64, 1, 4, 4)
    >>> fast = compress(nets, images, feature="1", budget=20, epochs=1, quiet=True)
    >>> fast.fidelity(images, members=nets).verdict.startswith(("worth it", "not worth it"))
    True
    """
    if len(members) < 2:
        raise ValueError(f"{len(members)} members were given to compare with; an ensemble has at least 2")
    data = collect(test, "test")
    ensemble = Ensemble(with_preprocessing(list_members(members), preprocess)).eval()
    _check_source(fast, ensemble.source, data)
    real, source, ours = (predict(net, data) for net in (ensemble, ensemble.source, fast))
    kls = _kl(real, ours)
    source_kls = _kl(real, source)
    rows: dict[str, Row] = {}
    if data.labels is not None:
        ruler = Ruler(ensemble, data)
        models = {"source": ensemble.source, "this": fast, "ensemble": ensemble}
        rows = dict(zip(models, ruler.measure(models), strict=True))
        best = (source / fit_temperature(source, data.labels)).log_softmax(-1)
        before, after = (nll_per_image(each, data.labels) for each in (best, ours))
        nearer = kls.mean().item() < source_kls.mean().item()
        worth_it, verdict = _labelled_verdict(rows["this"], rows["source"], before, before - after, nearer)
    else:
        worth_it, verdict = _unlabelled_verdict(source_kls, kls)
    image = data.batch(torch.arange(1, device=data.images.device))[0]
    costs = [count_macs(net, image) for net in (ensemble.source, fast, ensemble)]
    return Fidelity(
        images=len(data),
        kl=kls.mean().item(),
        kl_error=_error(kls),
        source_kl=source_kls.mean().item(),
        agreement=_agreement(real, ours),
        source_agreement=_agreement(real, source),
        macs_ratio=costs[1] / costs[0],
        ensemble_macs_ratio=costs[2] / costs[0],
        row=rows.get("this"),
        source_row=rows.get("source"),
        ensemble_row=rows.get("ensemble"),
        worth_it=worth_it,
        verdict=verdict,
    )


def _check_source(fast: FastEnsemble, source: nn.Module, data: ImageSet) -> None:
    """Refuse members whose first is not the network that the bridges stand beside."""
    few = ImageSet(data.images[:8])
    mine, theirs = predict(fast.source, few), predict(source, few)
    if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3):
        raise ValueError(
            "the first of members does not predict as this model's source does; give the members in their "
            "order, with preprocess= as it was given to compress"
        )


def _labelled_verdict(row: Row, source: Row, best: Tensor, gain: Tensor, nearer: bool) -> tuple[bool, str]:
    """By NLL on labels: clearly better than the source could be, and than real members of the same cost."""
    mean, error = gain.mean().item(), _error(gain)
    calibrated = f"{best.mean().item():.4f} with the best temperature"
    change = f"NLL {source.nll:.4f}, {calibrated}, → {row.nll:.4f}"
    if mean < CLEAR * error or mean <= 0:
        return False, (
            f"not worth it: it is not clearly better than the source with a temperature ({change}, a gain of "
            f"{mean:.4f} ± {error:.4f}); train longer, give more images, or raise budget"
        )
    if not nearer:
        return False, (
            f"not worth it: {change}, but it is no nearer to the ensemble than the source is; train longer, "
            "or give better members"
        )
    dee = float(str(row.dee).lstrip(">"))
    if dee < row.macs_ratio:
        return False, (
            f"not worth it: {change}, the NLL of {dee:.2f} real members at the cost of {row.macs_ratio:.2f}; "
            "run that many members, or lower budget"
        )
    more = "more than " if isinstance(row.dee, str) else ""
    cost = f"×{row.macs_ratio:.2f} the cost of one"
    return True, f"worth it: {change}, the NLL of {more}{dee:.2f} real members at {cost}"


def _unlabelled_verdict(source_kls: Tensor, kls: Tensor) -> tuple[bool, str]:
    """By KL to the real ensemble: at least half of the source's distance must be gone, clearly."""
    closed = source_kls / 2 - kls
    share = 1 - kls.mean().item() / max(source_kls.mean().item(), 1e-12)
    text = f"{share:.0%} of the source's KL distance to the ensemble is gone"
    if closed.mean().item() > CLEAR * _error(closed):
        return True, f"worth it as far as images without labels tell: {text}; labelled ones would settle it"
    return False, (
        f"not worth it: {text}, which is not clearly half; train longer, give more images, or raise budget"
    )


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) of each image; a class of probability zero under p costs nothing."""
    each = log_p.exp() * (log_p - log_q)
    return torch.where(log_p == -math.inf, 0.0, each).sum(-1).double()


def _error(values: Tensor) -> float:
    """The standard error of a mean; infinite for a single value, of which nothing is known."""
    return values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _agreement(one: Tensor, other: Tensor) -> float:
    return (one.argmax(-1) == other.argmax(-1)).double().mean().item()
