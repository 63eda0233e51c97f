"""The zoo's models, from the first seed of the best models for the cost (best_for_cost.py).

    python studies/make_zoo.py OUT/distilled-0-1-2 [--zoo FOLDER]

zoo:cifar10-distilled is the distilled network alone, zoo:cifar10 the same with the bridge that validation
prefers within ×1.17, zoo:cifar10-2 with both bridges. Each is saved with its scores.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import ensbridge as eb
from best_for_cost import bridges_of

ZOO: dict[str, tuple[str, ...]] = {
    "cifar10-distilled": (),
    "cifar10": ("coarse",),
    "cifar10-2": ("coarse", "fine"),
}
HERE = Path(__file__).parent.parent / "src" / "ensbridge" / "zoo"


def main() -> None:
    """Save each model."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("study", type=Path, help="what best_for_cost.py has left")
    asked.add_argument("--zoo", type=Path, default=HERE, help="where models are saved")
    options = asked.parse_args()
    tests = options.study / "test.json"
    scores = eb.evaluation.read_scores(tests if tests.exists() else options.study / "validation.json")
    whole = eb.load(options.study / "models" / "distilled-0")
    bridges = dict(zip(bridges_of("distilled"), whole.each_bridge(), strict=True))
    classes = eb.data.CIFAR10_CLASSES
    for name, chosen in ZOO.items():
        fast = eb.FastEnsemble(
            whole.source,
            [bridges[label] for label in chosen],
            whole.features,
            members=whole.members,
            source_distilled=True,
            image_shape=(3, 32, 32),
            pixel_range=(0.0, 1.0),
            class_names=classes,
        )
        measured = {" + ".join(("distilled 0", *some)) for some in (chosen, chosen[::-1])}
        own = " + ".join(("distilled network", *(f"{label} bridge" for label in chosen)))
        rows = tuple(
            replace(row, model=own) if row.model in measured else row
            for row in scores.rows
            if row.method == "DE" or row.model in measured
        )
        fast.eval().save(options.zoo / name, scores=replace(scores, rows=rows), dataset="cifar10")


if __name__ == "__main__":
    main()
