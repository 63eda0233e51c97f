"""Models and data in, `Scores` out: every row on the same images, beside the same ladder of ensembles."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge import metrics
from ensbridge.cost import count_macs, count_params
from ensbridge.data.loader import ImageSet, as_image_set
from ensbridge.ensemble import Ensemble, at_least_float32, ensemble_logit
from ensbridge.fast_ensemble import FastEnsemble
from ensbridge.scores import Row, Scores

Data = ImageSet | tuple[Tensor, Tensor]


def evaluate(
    models: Mapping[str, nn.Module],
    test: Data,
    val: Data | None = None,
    *,
    reference: Ensemble | None = None,
    target: int | None = None,
    dataset: str = "test",
    seed: int = 0,
    batch_size: int = 256,
) -> Scores:
    """Measure classifiers that return logits (B, K) on labelled images.

    `reference` is the ensemble whose members 1..k make the ladder DE-1 … DE-M for DEE, and whose first
    member is the unit of cost; the largest Ensemble among `models` unless given. `target` is the size of
    the ensemble to which the gap is measured, all of the reference unless given. `val` with labels fits
    the temperature of the calibrated NLL. Models are run in evaluation mode.

    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)]
    >>> test = (torch.rand(20, 1, 2, 2), torch.arange(20) % 3)
    >>> scores = evaluate({"one": nets[0], "ensemble": Ensemble(nets)}, test)
    >>> [(row.model, row.dee, row.macs_ratio) for row in scores.rows]
    [('one', 1.0, 1.0), ('ensemble', 2.0, 2.0)]
    """
    if not models:
        raise ValueError("there are 0 models to evaluate; give at least 1")
    test_set, labels = _labelled(test, "test")
    val_set, val_labels = (None, None) if val is None else _labelled(val, "val")
    ensemble = _find_reference(models) if reference is None else reference
    size = len(ensemble) if target is None else target
    if not 1 <= size <= len(ensemble):
        raise ValueError(f"target is {target}; the reference has {len(ensemble)} members")

    ladder = _ladder(ensemble, test_set, batch_size)
    val_ladder = None if val_set is None else _ladder(ensemble, val_set, batch_size)
    nlls = [metrics.nll_per_image(log_probs, labels) for log_probs in ladder]
    ladder_nll = [each.mean().item() for each in nlls]
    image = test_set.batch(torch.arange(1, device=test_set.images.device))[0]

    def measure(name: str, model: nn.Module) -> Row:
        rung = _rung(model, ensemble)
        log_probs = ladder[rung - 1] if rung else predict(model, test_set, batch_size)
        temperature = None
        if val_set is not None and val_ladder is not None and val_labels is not None:
            val_log_probs = val_ladder[rung - 1] if rung else predict(model, val_set, batch_size)
            temperature = metrics.fit_temperature(val_log_probs, val_labels)
        gap, error = None, None
        if not rung and size > 1:
            own = metrics.nll_per_image(log_probs, labels)
            gap, error = metrics.gap_closed(nlls[0].numpy(), own.numpy(), nlls[size - 1].numpy())
        own_nll = metrics.nll(log_probs, labels)
        dee = float(rung) if rung else metrics.format_dee(own_nll, ladder_nll)
        cost = _cost(model, image, ensemble.source)
        return _row(name, model, cost, log_probs, labels, temperature, dee, gap, error)

    rows = tuple(measure(name, model) for name, model in models.items())
    return Scores(dataset, seed, ladder[0].shape[1], environment(test_set.images.device), rows)


@torch.no_grad()
def predict(model: nn.Module, data: ImageSet, batch_size: int = 256) -> Tensor:
    """Log-probabilities (N, K) of a whole set, in evaluation mode and at least float32.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> predict(net, ImageSet(torch.rand(5, 1, 2, 2))).shape
    torch.Size([5, 3])
    """
    model.eval()
    return torch.cat(
        [at_least_float32(model(images)).log_softmax(-1) for images, _ in data.batches(batch_size)]
    )


def environment(device: torch.device | str = "cpu") -> dict[str, str]:
    """The machine as far as it can change numbers: no times, no paths."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "device": f"{torch.device(device).type} ({name})",
        "threads": str(torch.get_num_threads()),
    }


@torch.no_grad()
def _ladder(ensemble: Ensemble, data: ImageSet, batch_size: int) -> list[Tensor]:
    """Log-probabilities of DE-1 … DE-M, each (N, K), from one pass of every member."""
    ensemble.eval()
    logits = torch.cat([ensemble.member_logits(images) for images, _ in data.batches(batch_size)], dim=1)
    return [ensemble_logit(logits[:count]).log_softmax(-1) for count in range(1, len(ensemble) + 1)]


def _cost(model: nn.Module, image: Tensor, one: nn.Module) -> dict[str, Any]:
    """MACs and parameters of a model for one image, and as multiples of one member's."""
    macs, params = count_macs(model, image), count_params(model)
    return {
        "macs": macs,
        "macs_ratio": macs / count_macs(one, image),
        "params": params,
        "params_ratio": params / count_params(one),
    }


def _row(
    name: str,
    model: nn.Module,
    cost: dict[str, Any],
    log_probs: Tensor,
    labels: Tensor,
    temperature: float | None,
    dee: float | str,
    gap: float | None,
    gap_error: float | None,
) -> Row:
    """One model's line, from its predictions."""
    members, bridges, steps = _anatomy(model)
    stream = metrics.MetricStream(temperature=temperature or 1.0)
    stream.update(log_probs, labels)
    measured = stream.compute()
    return Row(
        model=name,
        members=members,
        bridges=bridges,
        steps=steps,
        **cost,
        acc=100 * measured["acc"],
        nll=measured["nll"],
        brier=measured["brier"],
        ece=measured["ece"],
        cnll=None if temperature is None else measured["cnll"],
        temperature=temperature,
        dee=dee,
        gap=gap,
        gap_error=gap_error,
    )


def _rung(model: nn.Module, reference: Ensemble) -> int:
    """k where the model is DE-k of the reference, else 0."""
    members = list(model.members) if isinstance(model, Ensemble) else [model]
    same = len(members) <= len(reference)
    same = same and all(a is b for a, b in zip(members, reference.members, strict=False))
    return len(members) if same else 0


def _anatomy(model: nn.Module) -> tuple[int, int, int]:
    """Members that a model has or stands for, its bridges and their steps."""
    if isinstance(model, Ensemble):
        return len(model), 0, 0
    if isinstance(model, FastEnsemble):
        return model.members, len(model.bridges), max(bridge.steps for bridge in model.each_bridge())
    return 1, 0, 0


def _find_reference(models: Mapping[str, nn.Module]) -> Ensemble:
    ensembles = [model for model in models.values() if isinstance(model, Ensemble)]
    if not ensembles:
        raise ValueError(
            f"none of the models ({', '.join(models)}) is an Ensemble; pass reference=Ensemble(members)"
        )
    return max(ensembles, key=len)


def _labelled(data: Data, name: str) -> tuple[ImageSet, Tensor]:
    images = as_image_set(data)
    if images.labels is None:
        raise ValueError(f"{name} has no labels; give (images, labels)")
    return images, images.labels
