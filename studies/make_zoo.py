"""The zoo's models, from the first seed of the best models for the cost (best_for_cost.py).

    python studies/make_zoo.py OUT/distilled-0-1-2 cifar10 [--zoo FOLDER]

zoo:cifar10-distilled is the distilled network alone, zoo:cifar10 the same with the bridge that validation
prefers within ×1.17, zoo:cifar10-2 with both bridges. As `compress` does it, each is calibrated by a
temperature that is fitted on the validation images; each is saved with its scores on the test images, beside
the members that taught it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import ensbridge as eb
from best_for_cost import bridges_of
from common import members_of

ZOO: dict[str, tuple[str, ...]] = {
    "cifar10-distilled": (),
    "cifar10": ("coarse",),
    "cifar10-2": ("coarse", "fine"),
}
HERE = Path(__file__).parent.parent / "src" / "ensbridge" / "zoo"


def calibrated(whole: eb.FastEnsemble, chosen: tuple[str, ...], val: eb.data.ImageSet) -> eb.FastEnsemble:
    """The network with some of its bridges, at the temperature that is best on validation images."""
    bridges = dict(zip(bridges_of("distilled"), whole.each_bridge(), strict=True))
    fast = eb.FastEnsemble(
        whole.source,
        [bridges[label] for label in chosen],
        whole.features,
        members=whole.members,
        source_distilled=True,
        image_shape=(3, 32, 32),
        pixel_range=(0.0, 1.0),
        class_names=eb.data.CIFAR10_CLASSES,
    ).eval()
    assert val.labels is not None
    log_probs = eb.evaluation.predict_each({"fast": fast}, val)["fast"]
    fast.temperature = eb.metrics.fit_temperature(log_probs, val.labels)
    return fast


def main() -> None:
    """Calibrate, measure and save each model."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("study", type=Path, help="what best_for_cost.py has left")
    asked.add_argument("data", help="an npz, a folder, or cifar10")
    asked.add_argument("--weights", type=Path, help="folder of the members; results/cifar10 unless given")
    asked.add_argument("--zoo", type=Path, default=HERE, help="where models are saved")
    asked.add_argument("--limit", type=int, help="only so many images of each part, to rehearse")
    options = asked.parse_args()
    data = eb.experiments.limit_images(eb.data.open_splits(options.data), options.limit)
    whole = eb.load(options.study / "models" / "distilled-0")
    models = {
        " + ".join(("distilled network", *(f"{label} bridge" for label in chosen))): (
            name,
            calibrated(whole, chosen, data.val),
        )
        for name, chosen in ZOO.items()
    }
    members = members_of(options.weights, eb.experiments.cifar10())
    ensembles = {f"DE-{size}": members.first(size) for size in range(1, len(members) + 1)}
    measured = {model: fast for model, (_, fast) in models.items()}
    scores = eb.evaluate(
        {**ensembles, **measured},
        data.test,
        data.val,
        reference=members,
        dataset="cifar10",
        class_names=eb.data.CIFAR10_CLASSES,
    )
    for model, (name, fast) in models.items():
        rows = tuple(row for row in scores.rows if row.model in (model, *ensembles))
        fast.save(options.zoo / name, scores=replace(scores, rows=rows), dataset="cifar10")
        print(f"{name}: temperature {fast.temperature:.4f}, NLL {rows[-1].nll:.4f}, ECE {rows[-1].ece:.4f}")


if __name__ == "__main__":
    main()
