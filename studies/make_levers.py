"""One change at a time, image by image, from what levers.py left in its folder: results/cifar10/levers.json.

python studies/make_levers.py OUT DATA
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ensbridge as eb
from provenance import RESULTS, provenance, write_json

INPUTS = {"mixup0.4-cutmix0": "α = 0.4", "mixup1-cutmix0": "α = 1", "mixup1-cutmix0-joint": "α = 1"}
LEVERS = (  # what changes, and the two that are compared: inputs, then the model
    ("five teachers in place of three", "α = 0.4 ed5", "α = 0.4 ed3"),
    ("mixup α = 1 in place of 0.4, the distilled network", "α = 1 ed5", "α = 0.4 ed5"),
    ("mixup α = 1 in place of 0.4, with its bridge", "α = 1 ed5 + T2", "α = 0.4 ed5 + T2"),
    ("a bridge at T = 2 beside the distilled network", "α = 1 ed5 + T2", "α = 1 ed5"),
    ("T = ∞ in place of 2", "α = 1 ed5 + Tinf", "α = 1 ed5 + T2"),
    *(
        (f"averaged with the source's prediction, {a}", f"{a} ed5 + T2, mean with ed5", f"{a} ed5 + T2")
        for a in ("α = 0.4", "α = 1")
    ),
    *(
        (f"two bridges of half the cost in place of one, {a}", f"{a} ed5 + two halves", f"{a} ed5 + T2")
        for a in ("α = 0.4", "α = 1")
    ),
    ("plain residual blocks in place of inverted ones", "α = 1 ed5 + plain", "α = 1 ed5 + T2"),
    *(
        (f"source and bridge trained jointly, {a}", f"{a} joint + T2", f"{a} ed5 + T2")
        for a in ("α = 0.4", "α = 1")
    ),
    ("joint, T = 1 in place of 2", "α = 1 joint-T1 + T1", "α = 1 joint + T2"),
    ("joint, T = 4 in place of 2", "α = 1 joint-T4 + T4", "α = 1 joint + T2"),
    ("joint, two bridges in place of one", "α = 1 joint-two + two", "α = 1 joint + T2"),
)


def main() -> None:
    """Write every model's scores, and the paired differences."""
    out, data = sys.argv[1:]
    labels = eb.data.open_splits(data).val.labels
    assert labels is not None
    rows: list[dict[str, Any]] = []
    nlls: dict[str, torch.Tensor] = {}
    for name, inputs in INPUTS.items():
        if not (folder := Path(out) / name).exists():
            continue
        scores = eb.evaluation.read_scores(folder / "validation.json")
        with np.load(folder / "validation.npz") as arrays:
            log_probs = {model: torch.from_numpy(arrays[model]).float() for model in arrays.files}
        for row in scores.rows:
            of_inputs = "" if row.method == "DE" else inputs
            if (key := f"{of_inputs} {row.model}") not in nlls:
                nlls[key] = eb.metrics.nll_per_image(log_probs[row.model], labels)
                figures = {"macs_ratio": row.macs_ratio, "acc": row.acc / 100, "nll": row.nll, "ece": row.ece}
                where = {"part": "validation", "inputs": of_inputs, "model": row.model}
                method = "DE" if row.method == "DE" else row.model
                trained = provenance("cifar10", method, row.members, scores.seed, epochs=100)
                rows.append(trained | where | figures)
    levers = []
    for lever, new, old in LEVERS:
        if {new, old} <= {*nlls}:
            change = nlls[new] - nlls[old]
            error = eb.metrics.standard_error(change)
            levers.append({"lever": lever, "nll_change": change.mean().item(), "se": error})
    document = {"command": "python studies/make_levers.py OUT DATA", "rows": rows, "levers": levers}
    write_json(RESULTS / "cifar10" / "levers.json", document)


if __name__ == "__main__":
    main()
