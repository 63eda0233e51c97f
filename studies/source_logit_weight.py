"""What a share of the source's own logits adds to a temperature: fitted on validation, measured on test.

    python studies/source_logit_weight.py runs/seed0 runs/seed1       # folders of `ensbridge quickstart`
    python studies/source_logit_weight.py --cifar10 cifar10           # those with KL at T = 4 there
    python studies/source_logit_weight.py --cifar10 cifar10 --corrupted CIFAR-10-C [--images 1000]

For each bridge of one step: accuracy and NLL as trained, with a temperature, and with temperature and share,
the last one's gain in NLL image by image, and both numbers. Corrupted, the first so many images are taken,
scores are means over the 19 corruptions, and both numbers are still those of clean images.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import ensbridge as eb
from common import DEVICE, frozen_with
from ensbridge.data import ImageSet
from provenance import plain_parser

# What lines say of it, the images, and how many times each of them is there.
Test = tuple[str, ImageSet, int]


def show(models: Mapping[str, nn.Module], source: nn.Module, val: ImageSet, tests: Iterable[Test]) -> None:
    """Lines of the table: bridges of one source on each of the test sets."""
    everything = {**models, "source": source}
    held, labels = eb.evaluation.predict_each(everything, val, 500), val.labels
    assert labels is not None
    settings = {
        name: (
            (1.0, 0.0),
            (eb.metrics.fit_temperature(held[name], labels), 0.0),
            eb.metrics.fit_source_logit_weight(held[name], held["source"], labels),
        )
        for name in models
    }
    for what, test, times in tests:
        seen = eb.evaluation.predict_each(everything, test, 500)
        assert test.labels is not None
        for name in models:
            predictions = [
                eb.models.calibrated(seen[name], seen["source"], *fitted).log_softmax(-1)
                for fitted in settings[name]
            ]
            print(line(f"{name}{what}", predictions, test.labels, times, settings[name][-1]), flush=True)


def line(
    name: str, predictions: list[Tensor], labels: Tensor, times: int, fitted: tuple[float, float]
) -> str:
    """Scores of the three, and the gain of the last over the second with its error over images."""
    scores = [
        f"{100 * eb.metrics.accuracy(log_probs, labels):.2f} / {eb.metrics.nll(log_probs, labels):.4f}"
        for log_probs in predictions
    ]
    _, before, after = (eb.metrics.nll_per_image(log_probs, labels) for log_probs in predictions)
    gain = (before - after).view(times, -1).mean(0)  # an image under several corruptions is one image
    words = f"{gain.mean():.4f} ± {eb.metrics.standard_error(gain):.4f}", f"{fitted[0]:.3f}, {fitted[1]:+.3f}"
    return "| " + " | ".join([name, *scores, *words]) + " |"


def corrupted(folder: Path, images: int) -> Iterable[Test]:
    """The first images under every corruption, by severity."""
    for severity in (1, 3, 5):
        parts = [eb.data.read_corrupted(folder, name, severity) for name in eb.data.CORRUPTIONS]
        labels = [part.labels[:images] for part in parts if part.labels is not None]
        together = ImageSet(torch.cat([part.images[:images] for part in parts]), torch.cat(labels))
        yield f", severity {severity}", together.to(DEVICE), len(parts)


def main() -> None:
    """Print the table."""
    asked = plain_parser(__doc__)
    asked.add_argument("runs", type=Path, nargs="*")
    asked.add_argument("--cifar10", help="an npz, a folder, or cifar10")
    asked.add_argument("--corrupted", type=Path)
    asked.add_argument("--images", type=int, default=1000)
    options = asked.parse_args()
    print("| test | as trained | temperature | and share | gain in NLL | T, share |\n" + "|---" * 6 + "|")
    for folder in options.runs:
        run, recipe = eb.experiments.open_run(folder)
        chosen = [
            model
            for model in run.experiment.models
            if (model.table, model.info.method, model.info.steps) == ("rows", "DBN", 1)
            and not run.missing(model.needs)
        ]
        names = eb.evaluation.name_rows([model.info for model in chosen], recipe.target)
        bridges = {f"{folder} {name}": model.build(run) for name, model in zip(names, chosen, strict=True)}
        source = eb.experiments.trained_ensemble(run, recipe, 1).source
        show(bridges, source, run.data.val, [("", run.data.test, 1)])
    if options.cifar10:
        data = eb.data.open_splits(options.cifar10)
        one, two = frozen_with("1"), frozen_with("1", "2")
        two.source = one.source  # the same weights, to run once
        tests = (
            corrupted(options.corrupted, options.images)
            if options.corrupted
            else [("", data.test.to(DEVICE), 1)]
        )
        show({"one bridge": one, "two bridges": two}, one.source, data.val.to(DEVICE), tests)


if __name__ == "__main__":
    main()
