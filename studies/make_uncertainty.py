"""What each score of uncertainty is worth, from what uncertainty.py left in OUT: results/uncertainty.json.

    python studies/make_uncertainty.py OUT

Errors are over images: DeLong's for AUROC and paired differences of it, else of 200 bootstrap resamples.
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import ensbridge as eb
from common import RESULTS
from ensbridge.metrics import augrc, aurc, auroc_difference, delong, fpr95, rank_correlation
from make_best import EPOCHS
from provenance import provenance

OOD = ("cifar100", "digits", "uniform", "gaussian", "textures")
OTHERS = ("one bridge", "second bridge", "two bridges", "control")
DISTILLED = ("distilled", "distilled, one bridge", "distilled, two bridges")  # those of the zoo
SOURCES = dict.fromkeys(OTHERS, "DE-1") | dict.fromkeys(DISTILLED[1:], "distilled")
AGAINST = ("DE-1", "control", "DE-5", "distilled")
Rows = list[dict[str, Any]]
Scores = dict[str, dict[str, Tensor]]  # by model and by name


def read(folder: Path, name: str) -> dict[str, Tensor]:
    """Each model's predictions (M, N, K) for a set of images, whose mean is its own, and the labels."""
    parts = sorted(folder.glob(f"{name}-*.safetensors"), key=lambda path: int(path.stem.split("-")[1]))
    loaded = [load_file(path) for path in parts]
    said = {key: torch.cat([part[key] for part in loaded]) for key in loaded[0]}
    members = torch.stack([said[f"member {number}"] for number in range(1, 6)])
    bridges = torch.stack([said["bridge 1"], said["bridge 2"]])
    models = {f"DE-{size}": members[:size] for size in range(1, 6)}
    models |= dict(zip(OTHERS, (bridges[:1], bridges[1:], bridges, said["control"][None]), strict=True))
    pair = torch.stack([said["coarse bridge"], said["fine bridge"]])
    models |= dict(zip(DISTILLED, (said["distilled"][None], pair[:1], pair), strict=True))
    return models | ({"labels": said["labels"]} if "labels" in said else {})


def log_probs_of(parts: Tensor) -> Tensor:
    """A model's log-probabilities (N, K)."""
    return eb.ensemble_logit(parts.double()).log_softmax(-1)


def scores_of(said: dict[str, Tensor], temperatures: Mapping[str, float] | None = None) -> Scores:
    """Every score of every model: with several parts mutual information, with bridges disagreement."""
    scores: Scores = {}
    for model in [name for name in said if name in (temperatures or said) and name != "labels"]:
        log_probs = log_probs_of(said[model])
        if temperatures is not None:
            log_probs = (log_probs / temperatures[model]).log_softmax(-1)
        scores[model] = {
            "msp": eb.metrics.msp_uncertainty(log_probs),
            "entropy": eb.metrics.entropy(log_probs),
        }
        if len(said[model]) > 1:
            scores[model]["mutual_information"] = eb.metrics.decompose_entropy(said[model]).mutual_information
        if model in SOURCES:
            source = log_probs_of(said[SOURCES[model]])
            scores[model]["disagreement"] = eb.metrics.total_variation(log_probs, source)
    return scores


def error_of(statistic: Callable[..., float], *columns: Tensor) -> float:
    """The error of a statistic over images."""
    return eb.metrics.bootstrap_error(statistic, *columns, generator=torch.Generator().manual_seed(0))


def detection(images: str, inside: Scores, outside: Scores, against: tuple[str, ...] = ()) -> Rows:
    """How well every score finds other images, and by how much better than other models' and than entropy."""
    rows = []
    for model, score in pairs_of(inside):
        low, high = inside[model][score], outside[model][score]
        area, variance = delong(low, high)
        row = {"images": images, "model": model, "score": score, "auroc": area.item()}
        row |= {"auroc_se": variance.sqrt().item(), "fpr95": fpr95(low, high)}
        row["fpr95_se"] = error_of(fpr95, low, high)
        for other in (model, *against):  # its own entropy; another's same score, or entropy where it has none
            same = score if other != model and score in inside[other] else "entropy"
            two = torch.stack([low, inside[other][same]]), torch.stack([high, outside[other][same]])
            row[f"over {'own entropy' if other == model else other}"] = auroc_difference(*two)
        rows.append(row)
    return rows


def pairs_of(scores: Scores) -> list[tuple[str, str]]:
    """Every model with every score that it has."""
    return [(model, score) for model, own_scores in scores.items() for score in own_scores]


def abstaining(
    scores: Scores, wrong: dict[str, Tensor], test: dict[str, Tensor], val: dict[str, Tensor]
) -> Rows:
    """AURC, AUGRC and prediction sets, and how much lower the AUGRC is than another model's."""
    columns = {model: torch.stack([scores[model]["msp"], bad.double()]) for model, bad in wrong.items()}

    def less(four: Tensor) -> float:
        return augrc(*four[2:]) - augrc(*four[:2])

    rows = []
    for model, two in columns.items():
        uncertainty = eb.evaluation.measure_uncertainty(
            log_probs_of(test[model]), test["labels"], (log_probs_of(val[model]), val["labels"])
        )
        row = {"model": model, "acc": 1 - two[1].mean().item(), **asdict(uncertainty)}
        row |= {
            "aurc_se": error_of(lambda two: aurc(*two), two),
            "augrc_se": error_of(lambda two: augrc(*two), two),
        }
        for other in AGAINST:
            four = torch.cat([two, columns[other]])
            row[f"below {other}"] = less(four), error_of(less, four)
        rows.append(row)
    return rows


def trained(model: str) -> dict[str, Any]:
    """How a model was trained."""
    if model.startswith("DE-"):
        return provenance("cifar10", "DE", int(model.removeprefix("DE-")), 0)
    if model in DISTILLED:
        return provenance("cifar10", "ED" if model == "distilled" else "DBN", 5, 0, EPOCHS)
    seeds = {"second bridge": 1, "two bridges": [0, 1]}
    return provenance("cifar10", "DBN", 1 if model == "control" else 3, seeds.get(model, 0))


def further(three: Tensor) -> float:
    """By how much the first score's rank correlation with the third is above the second's."""
    return rank_correlation(three[0], three[2]) - rank_correlation(three[1], three[2])


def correlation(images: str, target: str, scores: Scores) -> Rows:
    """Rank correlation of scores with an ensemble's mutual information, and given the source's entropy."""
    truth, base, rows = scores[target]["mutual_information"], scores["DE-1"]["entropy"], []
    for model, score in [pair for pair in pairs_of(scores) if pair[0] in ("DE-1", *OTHERS, *DISTILLED)]:
        value = scores[model][score]
        a, b, c = (rank_correlation(*two) for two in ((value, truth), (value, base), (base, truth)))
        row = {"images": images, "target": target, "model": model, "score": score, "rank": a}
        row["rank_se"] = error_of(lambda two: rank_correlation(*two), torch.stack([value, truth]))
        three = torch.stack([value, scores[model]["entropy"], truth])
        row["over own entropy"] = further(three), error_of(further, three)
        row["partial"] = None if model == "DE-1" else (a - b * c) / ((1 - b * b) * (1 - c * c)) ** 0.5
        rows.append(row)
    return rows


def recalibrated(said: dict[str, dict[str, Tensor]], scores: dict[str, Scores]) -> Rows:
    """What calibration on the validation images changes in the AUROC of the distilled networks' scores."""
    labels, rows = said["test"]["labels"], []
    log_probs = {model: log_probs_of(said["val"][model]) for model in DISTILLED}
    fitted = {
        model: eb.metrics.fit_temperature(values, said["val"]["labels"])
        for model, values in log_probs.items()
    }
    after = {name: scores_of(parts, fitted) for name, parts in said.items() if name != "val"}
    for model, temperature in fitted.items():
        wrong = log_probs_of(said["test"][model]).argmax(1) != labels
        for score in ("msp", "entropy", *(["disagreement"] if model in SOURCES else [])):
            for images in ("errors", *OOD):
                areas, two = [], (torch.empty(0), torch.empty(0))
                for measured in (scores, after):
                    low = torch.stack([measured["test"][model][name] for name in (score, "entropy")])
                    if images == "errors":
                        two = low[:, ~wrong], low[:, wrong]
                    else:
                        other = measured[images][model]
                        two = low, torch.stack([other[name] for name in (score, "entropy")])
                    areas.append(delong(two[0][0], two[1][0])[0].item())
                row = {"model": model, "temperature": temperature, "score": score, "images": images}
                row |= {"auroc": areas[1], "change": areas[1] - areas[0]}
                rows.append(row | {"over own entropy": auroc_difference(*two)})
    return rows


def main() -> None:
    """Measure and write."""
    said = {name: read(Path(sys.argv[1]), name) for name in ("test", "val", *OOD)}
    scores = {name: scores_of(parts) for name, parts in said.items() if name != "val"}
    labels, test = said["test"]["labels"], scores["test"]
    wrong = {model: log_probs_of(said["test"][model]).argmax(1) != labels for model in test}
    right_only, wrong_only = (
        {model: {name: value[wrong[model] == kind] for name, value in test[model].items()} for model in test}
        for kind in (False, True)
    )
    document: dict[str, Any] = {
        "commands": [
            "python studies/uncertainty.py cifar10 cifar100 OUT",
            "python studies/make_uncertainty.py OUT",
        ],
        "environment": {"torch": torch.__version__, "device": f"cpu ({platform.machine()})"},
        "not run": "ED by the paper's recipe and EnD²: their weights were not kept",
        "images": {name: parts["DE-1"].shape[1] for name, parts in said.items()},
        "abstaining": abstaining(test, wrong, said["test"], said["val"]),
        "detection": detection("errors", right_only, wrong_only),
        "correlation": [],
        "recalibrated": recalibrated(said, scores),
    }
    for name in OOD:
        document["detection"] += detection(name, test, scores[name], AGAINST)
    for name, target in itertools.product(scores, ("DE-3", "DE-5")):
        document["correlation"] += correlation(name, target, scores[name])
    for part in ("abstaining", "detection", "correlation", "recalibrated"):
        document[part] = [trained(row["model"]) | row for row in document[part]]
    rounded = json.loads(json.dumps(document), parse_float=lambda digits: round(float(digits), 6))
    text = json.dumps(rounded, indent=1, ensure_ascii=False) + "\n"
    (RESULTS / "uncertainty.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
