"""What a share of the source's own logits adds to a temperature: fitted on validation, measured on test.

    python results/source_logit_weight.py RUN...                 # folders of `ensbridge quickstart`
    python results/source_logit_weight.py --cifar10 DATA.npz     # the models of the zoo
    python results/source_logit_weight.py --cifar10 DATA.npz --corrupted CIFAR-10-C [--images 1000]

For each bridge of one step: accuracy and NLL as trained, with a temperature, and with temperature and share,
the last one's gain in NLL image by image, and both numbers. Corrupted, the first so many images are taken,
scores are means over the 19 corruptions, and both numbers are still those of clean images.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from cifar import DEVICE, load
from ensbridge.experiments.experiment import Experiment, make_members
from ensbridge.experiments.stages import make_bridges
from torch import Tensor, nn

from ensbridge.data import ImageSet
from ensbridge.data.cifar import read_corrupted
from ensbridge.data.corruptions import CORRUPTIONS
from ensbridge.deploy.saving import load as load_model
from ensbridge.evaluation.predict import predict_each
from ensbridge.experiments import Plan
from ensbridge.experiments.threads import Silent
from ensbridge.metrics import (
    accuracy,
    fit_source_logit_weight,
    fit_temperature,
    nll,
    nll_per_image,
    standard_error,
)
from ensbridge.models.calibration import calibrated
from ensbridge.utils.files import read_json

# What lines say of it, the images, and how many times each of them is there.
Test = tuple[str, ImageSet, int]


def show(models: Mapping[str, nn.Module], source: nn.Module, val: ImageSet, tests: Iterable[Test]) -> None:
    """Lines of the table: bridges of one source on each of the test sets."""
    everything = {**models, "source": source}
    held = predict_each(everything, val, 500)
    assert val.labels is not None
    settings = {
        name: (
            (1.0, 0.0),
            (fit_temperature(held[name], val.labels), 0.0),
            fit_source_logit_weight(held[name], held["source"], val.labels),
        )
        for name in models
    }
    for what, test, times in tests:
        seen = predict_each(everything, test, 500)
        assert test.labels is not None
        for name in models:
            found = [calibrated(seen[name], seen["source"], *each).log_softmax(-1) for each in settings[name]]
            print(line(f"{name}{what}", found, test.labels, times, settings[name][-1]), flush=True)


def line(name: str, found: list[Tensor], labels: Tensor, times: int, fitted: tuple[float, float]) -> str:
    """Scores of the three, and the gain of the last over the second with its error over images."""
    scores = [f"{100 * accuracy(each, labels):.2f} / {nll(each, labels):.4f}" for each in found]
    gains = nll_per_image(found[1], labels) - nll_per_image(found[2], labels)
    gain = gains.view(times, -1).mean(0)  # an image under several corruptions is one image
    words = f"{gain.mean():.4f} ± {standard_error(gain):.4f}", f"{fitted[0]:.3f}, {fitted[1]:+.3f}"
    return "| " + " | ".join([name, *scores, *words]) + " |"


def corrupted(folder: Path, images: int) -> Iterable[Test]:
    """The first images under every corruption, by severity."""
    for severity in (1, 3, 5):
        parts = [read_corrupted(folder, each, severity) for each in CORRUPTIONS]
        labels = [part.labels[:images] for part in parts if part.labels is not None]
        together = ImageSet(torch.cat([part.images[:images] for part in parts]), torch.cat(labels))
        yield f", severity {severity}", together.to(DEVICE), len(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--cifar10", type=Path)
    parser.add_argument("--corrupted", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    options = parser.parse_args()
    print("| test | as trained | temperature | and share | gain in NLL | T, share |\n" + "|---" * 6 + "|")
    for folder in options.runs:
        plan, seed = Plan.from_config(read_json(folder / "config.json"), folder)
        recipe = plan.recipe()
        run = Experiment(recipe, folder, seed, recipe.load(), Silent(), train=False)
        ensemble = make_members(run)
        bridges = {
            f"{folder} {name}": model
            for name, (model, _) in make_bridges(run, ensemble).items()
            if "steps" not in name
        }
        show(bridges, ensemble.source, run.data.val, [("", run.data.test, 1)])
    if options.cifar10:
        data = load(options.cifar10, None)
        one, two = (load_model(name).to(DEVICE) for name in ("zoo:cifar10", "zoo:cifar10-2"))
        two.source = one.source  # the same weights, to run once
        tests = corrupted(options.corrupted, options.images) if options.corrupted else [("", data.test, 1)]
        show({"`zoo:cifar10`": one, "`zoo:cifar10-2`": two}, one.source, data.val, tests)


if __name__ == "__main__":
    with torch.no_grad():
        main()
