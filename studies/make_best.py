"""What best_for_cost.py measured, as one JSON for the pages: means over seeds, and paired differences.

    python studies/make_best.py cifar10 OUT/distilled-0-1-2 [OUT/self-0-1-2 …]

Adds to results/cifar10/best.json what the folders hold of models that are not in it with as many seeds, of
the validation images and, where they were measured, of the test images, and compares all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ensbridge as eb
from common import RESULTS
from ensbridge.evaluation import Row
from provenance import provenance

OUT = RESULTS / "cifar10" / "best.json"
EPOCHS, SEEDS = 130, (0, 1, 2)
COMMANDS = [
    "python studies/best_for_cost.py cifar10 OUT --seeds 0 1 2 --epochs 130 --final",
    "python studies/best_for_cost.py cifar10 OUT --methods self --seeds 0 1 2 --epochs 130 --final",
    "python studies/best_for_cost.py cifar10 OUT --methods labels --seeds 0 1 2 --epochs 130 --final",
    "python studies/make_best.py cifar10 OUT/distilled-0-1-2 OUT/self-0-1-2 OUT/labels-0-1-2",
]
SUFFIXES = {  # a model's name after its seed, and what its row is called
    "": "",
    " + fine": "+ fine bridge",
    " + coarse": "+ coarse bridge",
    " + fine + coarse": "+ both bridges",
}
METHODS = {  # of best_for_cost.py
    "distilled": "distilled network",
    "self": "control",
    "three": "three teachers",
    "wider": "wider student",
    "end2": "EnD², τ = 1",
    "labels": "mixed labels",
}
DIFFERENCES = (
    ("+ coarse bridge", "distilled network"),
    ("+ fine bridge", "distilled network"),
    ("+ both bridges", "+ coarse bridge"),
    ("distilled network", "DE-3"),
    ("distilled network", "DE-5"),
    ("+ coarse bridge", "DE-5"),
    ("+ both bridges", "DE-5"),
    ("distilled network", "control"),
    ("+ coarse bridge", "control + coarse bridge"),
    ("distilled network", "three teachers"),
    ("+ coarse bridge", "wider student"),
    ("distilled network", "EnD², τ = 1"),
    ("distilled network", "mixed labels"),
    ("mixed labels", "DE-5"),
    ("control", "DE-1"),
    ("control + coarse bridge", "control"),
)
# Short runs on validation images by an earlier script with the settings of best_for_cost.py: mixup α = 1,
# three teachers, one seed, EMA. By SGD is 0.2 with weight decay 5e-4 for the network and Adam at 2e-3 for its
# bridges. "late" reads the maps of the last two stages alone.
TRIED = (  # epochs, optimiser, bridge, ACC, NLL, ECE
    (40, "SGD 0.2", "", 87.59, 0.3740, 0.0134),
    (40, "SGD 0.2", "the paper's", 89.58, 0.3045, 0.0084),
    (40, "SGD 0.2", "fine", 90.25, 0.2923, 0.0053),
    (40, "SGD 0.2", "late", 88.73, 0.3421, 0.0076),
    (40, "Muon 0.02", "", 92.40, 0.2268, 0.0117),
    (40, "Muon 0.02", "the paper's", 92.71, 0.2184, 0.0094),
    (40, "Muon 0.02", "late", 92.44, 0.2248, 0.0149),
    (40, "Muon 0.05", "", 92.85, 0.2109, 0.0102),
    (30, "Muon 0.05", "", 92.19, 0.2279, 0.0091),
    (30, "Muon 0.05", "the paper's", 92.52, 0.2234, 0.0106),
    (30, "Muon 0.05", "fine", 92.39, 0.2173, 0.0105),
    (30, "Muon 0.1", "", 92.65, 0.2194, 0.0105),
    (30, "Muon 0.1", "fine", 93.02, 0.2100, 0.0090),
    (30, "Muon 0.05, end to end", "", 92.09, 0.2392, 0.0074),
    (30, "Muon 0.05, end to end", "fine", 92.78, 0.2176, 0.0108),
)


def figures(rows: Sequence[Row], log_probs: Sequence[Tensor], labels: Tensor) -> dict[str, Any]:
    """The scores of one model over seeds, and its ECE at the temperature that was fitted on validation."""
    found: dict[str, Any] = {"macs_ratio": rows[0].macs_ratio, "params_ratio": rows[0].params_ratio}
    each = {name: [getattr(row, name) for row in rows] for name in ("acc", "nll", "brier", "ece", "cnll")}
    each["calibrated_ece"] = [
        eb.metrics.ece((values / (row.temperature or 1)).log_softmax(-1), labels)
        for row, values in zip(rows, log_probs, strict=True)
    ]
    for name, values in each.items():
        found[name] = {"mean": mean(values), "sd": stdev(values) if len(values) > 1 else None, "each": values}
    return found


def row_names() -> dict[tuple[str, str], str]:
    """What a row is called, by its method and what follows the seed in the models' names.

    >>> names = row_names()
    >>> names["distilled", " + coarse"], names["self", " + coarse"], names["wider", ""]
    ('+ coarse bridge', 'control + coarse bridge', 'wider student')
    """
    return {
        (method, suffix): bridges if method == "distilled" and bridges else f"{name} {bridges}".strip()
        for method, name in METHODS.items()
        for suffix, bridges in SUFFIXES.items()
    }


def measured(
    folder: Path, part: str, labels: Tensor
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[int, Tensor]]]:
    """Each model's row, and its NLL of each image by seed."""
    rows = {row.model: row for row in eb.evaluation.read_scores(folder / f"{part}.json").rows}
    with np.load(folder / f"{part}.npz") as arrays:
        log_probs = {name: torch.from_numpy(arrays[name]).float() for name in rows}
    groups = {name: {0: name} for name, row in rows.items() if row.method == "DE"}
    for (method, suffix), model in row_names().items():
        names = {seed: f"{method} {seed}{suffix}" for seed in SEEDS}
        names = {seed: name for seed, name in names.items() if name in rows}
        if names:
            groups[model] = names
    documents, nlls = {}, {}
    for model, names in groups.items():
        of_model = [rows[name] for name in names.values()]
        predicted = [log_probs[name] for name in names.values()]
        seed: int | list[int] = 0 if of_model[0].method == "DE" else list(names)
        trained = provenance("cifar10", of_model[0].method, of_model[0].members, seed, EPOCHS)
        nlls[model] = {
            number: eb.metrics.nll_per_image(each, labels)
            for number, each in zip(names, predicted, strict=True)
        }
        scored = figures(of_model, predicted, labels)
        se = eb.metrics.standard_error(torch.stack([*nlls[model].values()]).mean(0))
        documents[model] = {"part": part, "model": model, **trained, **scored, "nll_se": se}
    return documents, nlls


def difference(
    model: dict[str, Any], than: dict[str, Any], nlls: dict[str, dict[int, Tensor]]
) -> dict[str, Any]:
    """By how much the NLL of one row is above another's, with standard errors over seeds and over images.

    Seeds share their first weights and batches, so that they are compared one by one; an ensemble is one for
    all of them. Images are compared for the seeds of which both models' predictions are at hand.
    """
    each = [row["nll"]["each"] for row in (model, than)]
    count = max(map(len, each))
    each = [values * (count if len(values) == 1 else 1) for values in each]
    above = [one - other for one, other in zip(*each, strict=True)]
    pair = [nlls.get(row["model"], {}) for row in (model, than)]
    pair = [
        dict.fromkeys(SEEDS, of_seed[0]) if row["method"] == "DE" and of_seed else of_seed
        for row, of_seed in zip((model, than), pair, strict=True)
    ]
    seeds = [seed for seed in SEEDS if all(seed in of_seed for of_seed in pair)]
    images = None
    if seeds:
        by_image = torch.stack([pair[0][seed] - pair[1][seed] for seed in seeds]).mean(0)
        images = eb.metrics.standard_error(by_image)
    return {
        "part": model["part"],
        "of": model["model"],
        "than": than["model"],
        "nll": mean(above),
        "se": images,
        "se_seeds": stdev(above) / count**0.5 if count > 1 else None,
        "image_seeds": len(seeds),
    }


def main() -> None:
    """Write the JSON."""
    data, folders = eb.data.open_splits(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]]
    kept = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {"rows": [], "differences": []}
    rows, differences = [], []
    for part, held in (("validation", data.val), ("test", data.test)):
        assert held.labels is not None
        nlls: dict[str, dict[int, Tensor]] = {}
        of_part = {row["model"]: row for row in kept["rows"] if row["part"] == part}
        for folder in folders:
            if (folder / f"{part}.json").exists():
                found, losses = measured(folder, part, held.labels)
                for model, row in found.items():
                    if model not in of_part or len(row["nll"]["each"]) > len(of_part[model]["nll"]["each"]):
                        of_part[model] = row
                nlls |= losses
        rows += of_part.values()
        before = {(row["of"], row["than"]): row for row in kept["differences"] if row["part"] == part}
        for model, than in DIFFERENCES:
            if model in of_part and than in of_part:
                new, old = difference(of_part[model], of_part[than], nlls), before.get((model, than))
                if old and old["se"] is not None and new["image_seeds"] < old.get("image_seeds", len(SEEDS)):
                    new |= {"se": old["se"], "image_seeds": old.get("image_seeds", len(SEEDS))}
                differences.append(new)
    tried = [
        provenance("cifar10", "DBN" if bridge else "ED", 3, 0, epochs)
        | {"model": optimizer, "bridge": bridge, "acc": acc, "nll": nll, "ece": ece}
        for epochs, optimizer, bridge, acc, nll, ece in TRIED
    ]
    document = {"commands": COMMANDS, "rows": rows, "differences": differences, "tried": tried}
    OUT.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
