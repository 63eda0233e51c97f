"""What is known so far of the best model for the cost, as JSON and one page: no torch, no GPU.

    python results/make_best.py
    python results/make_best.py --keep OUT --data cifar10.npz

--keep first takes over what levers_cifar10.py left in OUT. Writes cifar10/levers.json and
best-for-the-cost.md beside this file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
ROWS = HERE / "cifar10" / "levers.json"
PAGE = HERE / "best-for-the-cost.md"
COSTS = {"plain": 1.151, "half": 1.078, "two halves": 1.156, "two": 1.315, "T": 1.158}
INPUTS = {"mixup0.4-cutmix0": "α = 0.4", "mixup1-cutmix0": "α = 1", "mixup1-cutmix0-joint": "α = 1"}
LEVERS = (  # what is compared: (inputs, model) with (inputs, model), and what changes between them
    ("five teachers in place of three", ("α = 0.4", "ed5"), ("α = 0.4", "ed3")),
    ("mixup α = 1 in place of 0.4, the distilled network", ("α = 1", "ed5"), ("α = 0.4", "ed5")),
    ("mixup α = 1 in place of 0.4, with its bridge", ("α = 1", "ed5 + T2"), ("α = 0.4", "ed5 + T2")),
    ("a bridge at T = 2 beside the distilled network", ("α = 1", "ed5 + T2"), ("α = 1", "ed5")),
    ("T = ∞ in place of 2", ("α = 1", "ed5 + Tinf"), ("α = 1", "ed5 + T2")),
    (
        "averaged with the source's prediction, α = 0.4",
        ("α = 0.4", "ed5 + T2, mean with ed5"),
        ("α = 0.4", "ed5 + T2"),
    ),
    (
        "averaged with the source's prediction, α = 1",
        ("α = 1", "ed5 + T2, mean with ed5"),
        ("α = 1", "ed5 + T2"),
    ),
    (
        "two bridges of half the cost in place of one, α = 0.4",
        ("α = 0.4", "ed5 + two halves"),
        ("α = 0.4", "ed5 + T2"),
    ),
    (
        "two bridges of half the cost in place of one, α = 1",
        ("α = 1", "ed5 + two halves"),
        ("α = 1", "ed5 + T2"),
    ),
    (
        "plain residual blocks in place of inverted ones",
        ("α = 1", "ed5 + plain"),
        ("α = 1", "ed5 + T2"),
    ),
    ("source and bridge trained jointly, α = 0.4", ("α = 0.4", "joint + T2"), ("α = 0.4", "ed5 + T2")),
    ("source and bridge trained jointly, α = 1", ("α = 1", "joint + T2"), ("α = 1", "ed5 + T2")),
    ("joint, T = 1 in place of 2", ("α = 1", "joint-T1 + T1"), ("α = 1", "joint + T2")),
    ("joint, T = 4 in place of 2", ("α = 1", "joint-T4 + T4"), ("α = 1", "joint + T2")),
    ("joint, two bridges in place of one", ("α = 1", "joint-two + two"), ("α = 1", "joint + T2")),
)


def keep(out: Path, data: Path) -> None:
    """Write the metrics of every model, and the paired differences of the levers."""
    with np.load(data) as arrays:
        labels = arrays["train_labels"][40_960:]
    rows: list[dict[str, Any]] = []
    nlls: dict[tuple[str, str], np.ndarray] = {}
    for path in sorted(out.glob("*-validation.npz")):
        name = path.name.removesuffix("-validation.npz")
        with np.load(path) as arrays:
            for model in arrays.files:
                log_probs = arrays[model].astype(np.float64)
                nll = -log_probs[np.arange(len(labels)), labels]
                inputs = INPUTS.get(name, "")
                nlls[inputs, model] = nll
                rows.append(
                    {
                        "dataset": "cifar10",
                        "part": "validation",
                        "inputs": inputs,
                        "model": model,
                        "macs_ratio": _cost(model),
                        "epochs": 100,
                        "seed": 0,
                        "acc": float((log_probs.argmax(1) == labels).mean()),
                        "nll": float(nll.mean()),
                        "ece": _ece(log_probs, labels),
                    }
                )
    levers = []
    for lever, new, old in LEVERS:
        difference = nlls[new] - nlls[old]
        error = difference.std(ddof=1) / len(difference) ** 0.5
        levers.append({"lever": lever, "nll_change": float(difference.mean()), "se": float(error)})
    ROWS.write_text(json.dumps({"rows": rows, "levers": levers}, indent=1, ensure_ascii=False) + "\n")


def _cost(model: str) -> float:
    if model.startswith("DE-"):
        return float(model[3:])
    _, _, bridge = model.split(",")[0].partition(" + ")
    return next((cost for start, cost in COSTS.items() if bridge.startswith(start)), 1.0)


def _ece(log_probs: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    confidence, right = np.exp(log_probs.max(1)), log_probs.argmax(1) == labels
    which = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = [abs(np.sum(confidence[which == each]) - np.sum(right[which == each])) for each in range(bins)]
    return float(sum(gaps) / len(labels))


def page() -> str:
    """The whole page."""
    kept = json.loads(ROWS.read_text())
    table = "\n".join(
        f"| {row['inputs'] or 'members'} | {row['model']} | {row['macs_ratio']:.3f} | {100 * row['acc']:.2f} "
        f"| {row['nll']:.4f} | {row['ece']:.4f} |"
        for row in kept["rows"]
    )
    levers = "\n".join(
        f"| {row['lever']} | {row['nll_change']:+.4f} ± {row['se']:.4f} |".replace("-", "−")
        for row in kept["levers"]
    )
    return TEXT.format(levers=levers, table=table)


TEXT = """# The best model for the cost

Generated by `python results/make_best.py` from [cifar10/levers.json](cifar10/levers.json). So far this is a
first comparison of design choices, **on CIFAR-10's 9,040 validation images, one seed, 100 epochs**; the
test images were not used, and nothing here is a final result. Short runs rank large differences only:
the bridge at T = 4 beside a frozen source needed 320 epochs to show what it can do.

One H200, torch 2.11, 22 GPU minutes: batch 512, crop, flip and mixup, no labels, targets are the five
members' prediction on the augmented image; networks by SGD (rate 0.2, weight decay 5e-4, 200 steps of
warm-up), bridges by Adam (rate 2e-3), cosine to 0, EMA 0.9995. Everything of one line of inputs is trained
at the same time on the same batches, bridges beside a network that is still being trained:

```console
python results/levers_cifar10.py cifar10.npz OUT --weights W --run RUN --inputs 0.4,0 1,0
python results/levers_cifar10.py cifar10.npz OUT --weights W --run RUN --inputs 1,0 --joint
```

## One change at a time

Change of the validation NLL, image by image, with its standard error over images (below 0 is better). Seeds
add to that error considerably: the two bridges of `joint-two`, which differ in their initialisation alone,
have 0.2130 and 0.2034.

| change | NLL |
|---|---|
{levers}

What this says, as far as 100 epochs of one seed can:

- **Distillation and bridge add up**, whether the bridge is trained beside the network or jointly with it: a
  bridge lowers the distilled network's NLL by more than all else tried. Training both at the same time
  costs no more passes than the network alone, and 100 such passes already reach the validation NLL of three
  members and of the shipped model (0.2058), whose bridge had 320 passes and three teachers beside a frozen
  source.
- **Mixup with α = 1** helps the pair of network and bridge; the network alone gains less than its error.
- **T = 2** is right beside a distilled network; T = 1 is within its error, T = 4 and T = ∞ are worse.
- At α = 0.4 the average of the source's and the bridge's predictions is better than the bridge's; at α = 1
  it is not.
- Two bridges of half the cost are no better than one. Plain residual blocks of the same cost, trained with
  the same rate and without weight decay, are far worse than inverted ones, and overconfident (ECE 0.05).
- Whether joint training is better than a bridge that sends no gradient back is open: 0.0021 ± 0.0034 at α =
  1.
- Five teachers in place of three: 0.0030 ± 0.0050, which this run cannot tell from nothing.

## Every model of these runs

`T2`, `Tinf`, `T1`, `T4`: a bridge at that temperature; `plain`: of plain residual blocks; `half-a`,
`half-b`: of half the cost.

| mixup | model | MACs × | ACC | NLL | ECE |
|---|---|---|---|---|---|
{table}

## Not run yet, in the order of their value

1. The pair of network and bridge at mixup α = 1, joint and not, for 320 epochs on three seeds, and its test
   scores: about 9 GPU minutes a seed.
2. ED at its best (α, rate, length) and a wider student of the bridge's cost, three seeds: about 9 minutes
   for both a seed.
3. Two bridges on the distilled network, three seeds.
4. Controls: members trained with mixup, cross-entropy on mixed labels, T = ∞, targets of 1, 2, 3 and 5
   members, an entropy-matched source; a second and a third set of members.
5. CIFAR-100; members 6 to 9 as teachers; labels beside the KL; features from two depths; cutmix (its run
   was cut off before it ended).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--keep", type=Path, help="the folder that levers_cifar10.py wrote")
    parser.add_argument("--data", type=Path, help="the npz of the data, for the labels")
    options = parser.parse_args()
    if options.keep:
        if options.data is None:
            parser.error("--keep needs --data")
        keep(options.keep, options.data)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
