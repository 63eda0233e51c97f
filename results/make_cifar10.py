"""What was measured on CIFAR-10 as one file and one page, from the scores of each seed: no GPU.

    python results/make_cifar10.py

Writes cifar10.json beside this file, and cifar10/report.html. A seed's bridges may be of several runs, each
with a file of its own; they have the same members.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from itertools import pairwise
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ensbridge.evaluation.scores import Scores, Summary, read_scores, summarise
from ensbridge.metrics import deep_ensemble_equivalent as dee
from ensbridge.report import paper_rows, write_report

HERE = Path(__file__).parent
SEEDS = sorted((HERE / "cifar10").glob("seed[0-9]-test.json"))
MAIN = "+1 DBN (KL, T = 4)"  # by its NLL on validation
SCORES = ("acc", "nll", "brier", "ece", "cnll", "dee", "gap")
PAPER_DE = (0.3382, 0.2489, 0.2252, 0.2252 - (0.2252 - 0.2247) / 0.031)  # NLL of DE-1 … DE-4
CONFIDENCE = (0.0, 0.5, 0.9, 0.99, 1.0)


def read_seed(path: Path) -> Scores:
    """A seed's scores, with the rows of its later runs behind those of the first, without curves' centres."""
    first = read_scores(path)
    for more in sorted(path.parent.glob(path.name.replace("-test", "-more*-test"))):
        known = {row.model: row for row in first.rows}
        corrupted = {row.model for row in first.corrupted}
        later = read_scores(more)
        own = [row for row in later.rows if not row.model.startswith("centre")]
        for row in own:  # of the same members, on whatever machine
            assert row.model not in known or abs(row.nll - known[row.model].nll) < 1e-4, (more, row.model)
        first = replace(
            first,
            rows=first.rows + tuple(row for row in own if row.model not in known),
            corrupted=first.corrupted + tuple(row for row in later.corrupted if row.model not in corrupted),
        )
    return first


def rows(summary: Summary) -> list[dict[str, Any]]:
    """Each model with what its scores are on each seed, their mean and their standard deviation."""
    found = []
    for group in summary.rows:
        first = group.first
        found.append(
            {
                "model": group.model,
                "seeds": group.seeds,
                "macs_ratio": first.macs_ratio,
                "params_ratio": first.params_ratio,
                **{
                    name: {"mean": group.mean(name), "sd": group.spread(name), "each": group.values(name)}
                    for name in SCORES
                },
                "beyond the largest ensemble": [isinstance(row.dee, str) for row in group.rows],
                "below its control's NLL": [
                    [row.nll_gain_over_control, row.nll_gain_over_control_se] for row in group.rows
                ],
            }
        )
    return found


def corrupted(summary: Summary) -> list[dict[str, Any]]:
    """Each model's means over the corruptions, by severity, with frost and without."""
    found = []
    for group in summary.corrupted:
        for severity in group.severities:
            at = group.at(severity)
            of_18 = at.without("frost")
            found.append(
                {
                    "model": group.model,
                    "severity": severity,
                    **{f"{name}_19": at.mean(name) for name in ("acc", "nll", "brier", "ece", "cnll")},
                    **{f"{name}_18": of_18.mean(name) for name in ("acc", "nll", "cnll")},
                }
            )
    return found


def own_share(summary: Summary) -> dict[str, Any]:
    """How much lower a bridge's NLL is than its control's, paired over the test images, by training."""
    with np.load(HERE / "cifar10" / "test-nll.npz") as held:
        trainings = [name.removesuffix(" control") for name in held.files if name.endswith(" control")]
        better = {  # (seeds, images)
            each: held[f"{each} control"].astype(np.float64) - held[f"{each} bridge"] for each in trainings
        }
        confidence = held["confidence"]
    found: dict[str, Any] = {}
    for each in trainings:
        found[each] = {
            "each seed": [mean_of(one[None]) for one in better[each]],
            "all seeds": mean_of(better[each]),
            "by the source's confidence": by_confidence(better[each], confidence),
        }
    return found | {f"{kl} by severity": shares_by_severity(summary, kl) for kl in ("KL", "KL, T = 4")}


def dee_over_images(resamples: int = 2000) -> dict[str, Any]:
    """DEE of three seeds' mean NLL and its standard error over test images, resampled alike for all networks.

    The reference is either our DE-1 … DE-5 or the paper's, whose DE-4 its own DEE of 3.031 implies.
    """
    with np.load(HERE / "cifar10" / "test-nll.npz") as held:
        members = held["DE-k"].astype(np.float64)  # (5, images)
        models = {
            name: held[f"KL, T = 4 {name}"].astype(np.float64).mean(0) for name in ("bridge", "control")
        }
    generator = np.random.default_rng(0)
    draws = [generator.integers(0, members.shape[1], members.shape[1]) for _ in range(resamples)]
    sizes = [members[:, draw].mean(1) for draw in draws]
    found = {}
    for name, nll in models.items():
        resampled = [dee(nll[draw].mean(), size) for draw, size in zip(draws, sizes, strict=True)]
        found[name] = {
            "dee": dee(nll.mean(), members.mean(1)),
            "dee_se": float(np.std(resampled)),
            "dee_on_paper_ensembles": dee(nll.mean(), PAPER_DE),
        }
    return found


def by_confidence(better: np.ndarray, confidence: np.ndarray) -> list[dict[str, Any]]:
    """The same where the source is so sure."""
    bins = []
    for low, high in pairwise(CONFIDENCE):
        inside = (confidence >= low) & ((confidence < high) | (high == CONFIDENCE[-1]))
        bins.append({"confidence": [low, high], "images": int(inside.sum()), **mean_of(better[:, inside])})
    return bins


def shares_by_severity(summary: Summary, kl: str) -> list[dict[str, Any]]:
    """The same under corruptions, as a part of the way from DE-1 to DE-3 too."""
    groups = {group.model: group for group in summary.corrupted}
    shares = []
    for severity in groups["DE-1"].severities:

        def nll(model: str, severity: int = severity) -> list[float]:
            return [row.nll for row in groups[model].rows[0] if row.severity == severity]

        better = np.subtract(nll(f"control ({kl})"), nll(f"+1 DBN ({kl})"))
        way = np.mean(nll("DE-1")) - np.mean(nll("DE-3"))
        shares.append(
            {
                "severity": severity,
                "nll": better.mean(),
                "part of DE-1 to DE-3": better.mean() / way,
                "corruptions where it is better": int((better > 0).sum()),
            }
        )
    return shares


def mean_of(better: np.ndarray) -> dict[str, float]:
    """The mean over images and its standard error; seeds of one image are no images of their own."""
    each = better.mean(0)
    return {"nll": each.mean(), "error": each.std(ddof=1) / sqrt(len(each))}


def write_page(summary: Summary, folder: Path) -> Path:
    """The report of scores, as one file: the page has its figures in it."""
    with TemporaryDirectory() as aside:
        return Path(shutil.move(write_report(summary, aside), folder / "report.html"))


def main() -> None:
    summary = summarise([read_seed(path) for path in SEEDS], [path.name for path in SEEDS], MAIN)
    document = {
        "command": "python results/make_cifar10.py",
        "dataset": summary.dataset,
        "seeds": summary.seeds,
        "rows": rows(summary),
        "paper": [asdict(row) for row in paper_rows(summary.dataset)],
        "corrupted": corrupted(summary),
        "better than the control": own_share(summary),
        "DEE of KL, T = 4": dee_over_images(),
        "second set of members": rows(summarise([read_scores(HERE / "cifar10" / "job-test.json")])),
    }
    (HERE / "cifar10.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    page = write_page(summary, HERE / "cifar10")
    print(f"{HERE / 'cifar10.json'}\n{page}\n{json.dumps(document['better than the control'], indent=1)}")


if __name__ == "__main__":
    main()
