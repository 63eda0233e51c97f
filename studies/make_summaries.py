"""What was measured on CIFAR-10 and CIFAR-100 as one JSON and one report page each: no torch, no GPU.

    python studies/make_summaries.py

From the scores in results/cifar10 and results/cifar100; then `make_pages.py` writes the other pages.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import ensbridge as eb
from ensbridge.evaluation import Row, Scores, Summary, read_scores, summarise
from provenance import RESULTS, provenance, write_json

COMMAND = "python studies/make_summaries.py"
TEN, HUNDRED = RESULTS / "cifar10", RESULTS / "cifar100"
MAIN = {"cifar10": "+1 DBN (KL, T = 4)", "cifar100": "+1 DBN (KL, T = 3)"}  # by their NLL on validation
SCORES = ("acc", "nll", "brier", "ece", "cnll", "dee", "gap")
IDENTITY = ("method", "members", "bridges", "steps", "loss", "source_temperature", "control")
PAPER_DE = (0.3382, 0.2489, 0.2252, 0.2252 - (0.2252 - 0.2247) / 0.031)  # NLL of DE-1 … DE-4
CONFIDENCE = (0.0, 0.5, 0.9, 0.99, 1.0)
PARTS = ("test", "validation")
CONTROLS = {"+1 DBN": "control", "+1 DBN (KL, T = 3)": "control (KL, T = 3)"}  # of CIFAR-100
PAIRS = {"two bridges": tuple(CONTROLS), "control of two": tuple(CONTROLS.values())}


def rows(summary: Summary) -> list[dict[str, Any]]:
    """Each model with what its scores are on each seed, their mean and their standard deviation."""
    lines = []
    for group in summary.rows:
        first = group.first
        scores = {
            name: {"mean": group.mean(name), "sd": group.spread(name), "each": group.values(name)}
            for name in SCORES
        }
        costs = {"macs_ratio": first.macs_ratio, "params_ratio": first.params_ratio}
        gains = [[row.nll_gain_over_control, row.nll_gain_over_control_se] for row in group.rows]
        beyond = [isinstance(row.dee, str) for row in group.rows]
        teachers = 1 if first.control else first.members
        trained = provenance(summary.dataset.split()[0], first.method, teachers, list(group.seeds))
        identity = {name: getattr(first, name) for name in IDENTITY}
        lines.append({"model": group.model, **trained, **identity, **costs, **scores})
        lines[-1] |= {"beyond the largest ensemble": beyond, "below its control's NLL": gains}
    return lines


def mean_of(better: np.ndarray) -> dict[str, float]:
    """The mean over images and its standard error; seeds of one image are no images of their own."""
    of_images = better.mean(0)
    return {"nll": of_images.mean(), "error": of_images.std(ddof=1) / sqrt(len(of_images))}


def write(name: str, summary: Summary, document: Mapping[str, Any]) -> None:
    """Write a summary and its report page."""
    whole = {"command": COMMAND, "dataset": summary.dataset, "seeds": summary.seeds} | dict(document)
    write_json(RESULTS / f"{name}.json", whole)
    with TemporaryDirectory() as aside:
        shutil.move(eb.report.write_report(summary, aside), RESULTS / name / "report.html")
    print(f"results/{name}.json\nresults/{name}/report.html")


# ------------------------------------------------------------------------------ CIFAR-10


def read_seed(path: Path) -> Scores:
    """A seed's scores, with the rows of its later runs behind those of the first, without curves' centres."""
    first = read_scores(path)
    for more in sorted(path.parent.glob(path.name.replace("-test", "-more*-test"))):
        known = {row.model: row for row in first.rows}
        corrupted = {row.model for row in first.corrupted}
        later = read_scores(more)
        measured = [row for row in later.rows if row.method != "other"]
        for row in measured:  # of the same members, on whatever machine
            assert row.model not in known or abs(row.nll - known[row.model].nll) < 1e-4, (more, row.model)
        first = replace(
            first,
            rows=first.rows + tuple(row for row in measured if row.model not in known),
            corrupted=first.corrupted + tuple(row for row in later.corrupted if row.model not in corrupted),
        )
    return first


def corrupted(summary: Summary) -> list[dict[str, Any]]:
    """Each model's means over the corruptions, by severity, with frost and without."""
    lines = []
    for group in summary.corrupted:
        for severity in group.severities:
            at = group.at(severity)
            of_18 = at.without("frost")
            means = {f"{name}_19": at.mean(name) for name in ("acc", "nll", "brier", "ece", "cnll")}
            means |= {f"{name}_18": of_18.mean(name) for name in ("acc", "nll", "cnll")}
            lines.append({"model": group.model, "severity": severity, **means})
    return lines


def gains_over_controls(summary: Summary) -> dict[str, Any]:
    """How much lower a bridge's NLL is than its control's, paired over the test images, by training."""
    with np.load(TEN / "test-nll.npz") as held:
        trainings = [name.removesuffix(" control") for name in held.files if name.endswith(" control")]
        better = {  # (seeds, images)
            training: held[f"{training} control"].astype(np.float64) - held[f"{training} bridge"]
            for training in trainings
        }
        confidence = held["confidence"]
    gains: dict[str, Any] = {}
    for training in trainings:
        gains[training] = {
            "each seed": [mean_of(one[None]) for one in better[training]],
            "all seeds": mean_of(better[training]),
            "by the source's confidence": by_confidence(better[training], confidence),
        }
    return gains | {f"{kl} by severity": gains_by_severity(summary, kl) for kl in ("KL", "KL, T = 4")}


def by_confidence(better: np.ndarray, confidence: np.ndarray) -> list[dict[str, Any]]:
    """The same where the source is so sure."""
    bins = []
    for low, high in pairwise(CONFIDENCE):
        inside = (confidence >= low) & ((confidence < high) | (high == CONFIDENCE[-1]))
        bins.append({"confidence": [low, high], "images": int(inside.sum()), **mean_of(better[:, inside])})
    return bins


def gains_by_severity(summary: Summary, kl: str) -> list[dict[str, Any]]:
    """The same under corruptions, as a part of the distance from DE-1 to DE-3 too."""
    groups = {group.model: group for group in summary.corrupted}

    def nll(model: str, severity: int) -> list[float]:
        return [row.nll for row in groups[model].rows[0] if row.severity == severity]

    gains = []
    for severity in groups["DE-1"].severities:
        better = np.subtract(nll(f"control ({kl})", severity), nll(f"+1 DBN ({kl})", severity))
        distance = np.mean(nll("DE-1", severity)) - np.mean(nll("DE-3", severity))
        gains.append(
            {
                "severity": severity,
                "nll": better.mean(),
                "part of DE-1 to DE-3": better.mean() / distance,
                "corruptions where it is better": int((better > 0).sum()),
            }
        )
    return gains


def dee_over_images(resamples: int = 2000) -> dict[str, Any]:
    """DEE of three seeds' mean NLL and its standard error over test images, resampled alike for all networks.

    The reference is either our DE-1 … DE-5 or the paper's, whose DE-4 its own DEE of 3.031 implies.
    """
    dee = eb.metrics.deep_ensemble_equivalent
    with np.load(TEN / "test-nll.npz") as held:
        members = held["DE-k"].astype(np.float64)  # (5, images)
        models = {
            name: held[f"KL, T = 4 {name}"].astype(np.float64).mean(0) for name in ("bridge", "control")
        }
    generator = np.random.default_rng(0)
    draws = [generator.integers(0, members.shape[1], members.shape[1]) for _ in range(resamples)]
    sizes = [members[:, draw].mean(1) for draw in draws]
    dees = {}
    for name, nll in models.items():
        resampled = [dee(nll[draw].mean(), size) for draw, size in zip(draws, sizes, strict=True)]
        dees[name] = {
            "dee": dee(nll.mean(), members.mean(1)),
            "dee_se": float(np.std(resampled)),
            "dee_on_paper_ensembles": dee(nll.mean(), PAPER_DE),
        }
    return dees


def make_cifar10() -> None:
    """results/cifar10.json and its report page."""
    seeds = sorted(TEN.glob("seed[0-9]-test.json"))
    summary = summarise([read_seed(path) for path in seeds], [path.name for path in seeds], MAIN["cifar10"])
    document = {
        "rows": rows(summary),
        "paper": [asdict(row) for row in eb.report.paper_rows(summary.dataset)],
        "corrupted": corrupted(summary),
        "better than the control": gains_over_controls(summary),
        "DEE of KL, T = 4": dee_over_images(),
        "second set of members": rows(summarise([read_scores(TEN / "job-test.json")])),
    }
    write("cifar10", summary, document)


# ------------------------------------------------------------------------------ CIFAR-100


def differences(one: str, other: str) -> dict[str, dict[str, float]]:
    """How much lower the NLL of one is and how much higher its accuracy, on each part and on both."""
    better: dict[str, list[np.ndarray]] = {"nll": [], "right": []}
    for part in PARTS:
        with np.load(HUNDRED / f"{part}-nll.npz") as held:
            better["nll"].append(held[f"{other} nll"].astype(np.float64) - held[f"{one} nll"])
            better["right"].append(100.0 * held[f"{one} right"] - 100.0 * held[f"{other} right"])
    by_part = {}
    for index, part in enumerate((*PARTS, "both")):
        nll, right = (
            np.concatenate(arrays) if part == "both" else arrays[index] for arrays in better.values()
        )
        points = mean_of(right[None])
        by_part[part] = mean_of(nll[None]) | {"points": points["nll"], "points error": points["error"]}
    return by_part


def calibrated_ece(row: Row) -> float:
    """ECE at the temperature that was fitted on validation."""
    bins = (row.reliability.after if row.reliability else None) or ()
    gaps = [bin_.count * abs((bin_.confidence or 0) - (bin_.accuracy or 0)) for bin_ in bins]
    return sum(gaps) / sum(bin_.count for bin_ in bins)


def averaged(name: str) -> dict[str, dict[str, float]]:
    """Accuracy and NLL of two bridges' averaged predictions."""
    by_part = {}
    for part in PARTS:
        with np.load(HUNDRED / f"{part}-nll.npz") as held:
            nll, right = held[f"{name} nll"].astype(np.float64), held[f"{name} right"]
            by_part[part] = {"acc": 100 * right.mean(), "nll": nll.mean()}
    return by_part


def make_cifar100() -> None:
    """results/cifar100.json and its report page."""
    test, validation = (
        summarise([read_scores(HUNDRED / f"seed0-{part}.json")], main=MAIN["cifar100"]) for part in PARTS
    )
    gains: dict[str, Any] = {name: differences(name, control) for name, control in CONTROLS.items()}
    document = {
        "rows": rows(test),
        "validation": rows(validation),
        "paper": [asdict(row) for row in eb.report.paper_rows(test.dataset)],
        "better than the control": gains | {"two bridges": differences(*PAIRS)},
        "averaged": {name: averaged(name) for name in PAIRS},
        "calibrated ece": {group.model: calibrated_ece(group.first) for group in test.rows},
    }
    write("cifar100", test, document)


if __name__ == "__main__":
    make_cifar10()
    make_cifar100()
