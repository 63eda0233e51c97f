"""What was measured on CIFAR-100 as one file and one page: no torch, no GPU.

    python results/make_cifar100.py
    python results/make_cifar100.py --keep OUT --data cifar100.npz

Writes cifar100.json beside this file, and cifar100/report.html. --keep first takes over the scores that
`run_cifar.py bridges` left in OUT, and of its predictions each image's NLL and whether its label was found.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from make_cifar10 import mean_of, rows, write_page

from ensbridge.evaluation.scores import Row, read_scores, summarise
from ensbridge.report import paper_rows

HERE = Path(__file__).parent
FOLDER = HERE / "cifar100"
MAIN = "+1 DBN (KL, T = 3)"  # by its NLL on validation
PARTS = ("test", "validation")
CONTROLS = {"+1 DBN": "control", MAIN: "control (KL, T = 3)"}
PAIRS = {"two bridges": tuple(CONTROLS), "control of two": tuple(CONTROLS.values())}


def keep(out: Path, data: Path) -> None:
    """Take over a run's scores, and of its predictions, and those of averaged pairs, what is needed."""
    with np.load(data) as arrays:
        labels = {"test": arrays["test_labels"], "validation": arrays["train_labels"][40_960:]}
    for part in PARTS:
        shutil.copy(out / f"c100-{part}.json", FOLDER / f"seed0-{part}.json")
        found: dict[str, np.ndarray] = {}
        with np.load(out / f"c100-{part}.npz") as held:
            probs = {name: np.exp(held[name].astype(np.float64)) for name in held.files}
        for name, pair in PAIRS.items():
            probs[name] = np.mean([probs[each] for each in pair], axis=0)
        for name, each in probs.items():
            own = each / each.sum(1, keepdims=True)
            found[f"{name} nll"] = -np.log(own[np.arange(len(own)), labels[part]]).astype(np.float32)
            found[f"{name} right"] = own.argmax(1) == labels[part]
        np.savez_compressed(FOLDER / f"{part}-nll.npz", **found)


def differences(one: str, other: str) -> dict[str, dict[str, float]]:
    """How much lower the NLL of one is and how much higher its accuracy, on each part and on both."""
    better: dict[str, list[np.ndarray]] = {"nll": [], "right": []}
    for part in PARTS:
        with np.load(FOLDER / f"{part}-nll.npz") as held:
            better["nll"].append(held[f"{other} nll"].astype(np.float64) - held[f"{one} nll"])
            better["right"].append(100.0 * held[f"{one} right"] - 100.0 * held[f"{other} right"])
    found = {}
    for index, part in enumerate((*PARTS, "both")):
        nll, right = (
            np.concatenate(each) if part == "both" else each[index]
            for each in (better["nll"], better["right"])
        )
        points = mean_of(right[None])
        found[part] = mean_of(nll[None]) | {"points": points["nll"], "points error": points["error"]}
    return found


def calibrated_ece(row: Row) -> float:
    """ECE at the temperature that was fitted on validation."""
    bins = [each for each in row.reliability.after if each.count] if row.reliability else []
    apart = sum(each.count * abs(each.confidence - each.accuracy) for each in bins)
    return apart / sum(each.count for each in bins)


def averaged(name: str) -> dict[str, dict[str, float]]:
    """Accuracy and NLL of two bridges' averaged predictions."""
    found = {}
    for part in PARTS:
        with np.load(FOLDER / f"{part}-nll.npz") as held:
            nll, right = held[f"{name} nll"].astype(np.float64), held[f"{name} right"]
            found[part] = {"acc": 100 * right.mean(), "nll": nll.mean()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="OUT")
    parser.add_argument("--data", type=Path, help="the npz, for its labels")
    options = parser.parse_args()
    if options.keep and not options.data:
        parser.error("--keep needs the labels; give --data cifar100.npz")
    if options.keep:
        keep(options.keep, options.data)
    test, validation = (summarise([read_scores(FOLDER / f"seed0-{part}.json")], main=MAIN) for part in PARTS)
    owed: dict[str, Any] = {name: differences(name, control) for name, control in CONTROLS.items()}
    document = {
        "command": "python results/make_cifar100.py",
        "dataset": test.dataset,
        "seeds": test.seeds,
        "rows": rows(test),
        "validation": rows(validation),
        "paper": [asdict(row) for row in paper_rows(test.dataset)],
        "better than the control": owed | {"two bridges": differences(*PAIRS)},
        "averaged": {name: averaged(name) for name in PAIRS},
        "calibrated ece": {group.model: calibrated_ece(group.first) for group in test.rows},
    }
    (HERE / "cifar100.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    page = write_page(test, FOLDER)
    shown = {key: document[key] for key in ("better than the control", "averaged")}
    print(f"{HERE / 'cifar100.json'}\n{page}\n{json.dumps(shown, indent=1)}")


if __name__ == "__main__":
    main()
