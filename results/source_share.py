"""What a share of the source's own logits adds to a temperature: fitted on validation, measured on test.

    python results/source_share.py RUN...                 # folders of `ensbridge quickstart`
    python results/source_share.py --cifar10 DATA.npz     # the models of the zoo

For each bridge of one step: accuracy and NLL as trained, with a temperature, and with temperature and share,
the last one's gain in NLL image by image, and both numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from run_cifar import DEVICE, load
from torch import Tensor, nn

from ensbridge.answers import predict
from ensbridge.calibration import calibrated
from ensbridge.data import ImageSet
from ensbridge.files import read_json
from ensbridge.metrics import accuracy, fit_share, fit_temperature, nll, nll_per_image, standard_error
from ensbridge.recipes import Plan
from ensbridge.recipes.experiment import Experiment, make_members
from ensbridge.recipes.stages import make_bridges
from ensbridge.recipes.threads import Silent
from ensbridge.saving import load as load_model


def show(name: str, model: nn.Module, source: nn.Module, val: ImageSet, test: ImageSet) -> None:
    """A line of the table."""
    (own, theirs), (seen, source_seen) = (
        [predict(net, part, 500) for net in (model, source)] for part in (val, test)
    )
    assert val.labels is not None
    assert test.labels is not None
    settings = (1.0, 0.0), (fit_temperature(own, val.labels), 0.0), fit_share(own, theirs, val.labels)
    found: list[Tensor] = [calibrated(seen, source_seen, *setting).log_softmax(-1) for setting in settings]
    scores = [f"{100 * accuracy(each, test.labels):.2f} / {nll(each, test.labels):.4f}" for each in found]
    gain = nll_per_image(found[1], test.labels) - nll_per_image(found[2], test.labels)
    words = f"{gain.mean():.4f} ± {standard_error(gain):.4f}", f"{settings[2][0]:.3f}, {settings[2][1]:+.3f}"
    print("| " + " | ".join([name, *scores, *words]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--cifar10", type=Path)
    options = parser.parse_args()
    print("| test | as trained | temperature | and share | gain in NLL | T, share |\n" + "|---" * 6 + "|")
    for folder in options.runs:
        plan, seed = Plan.from_config(read_json(folder / "config.json"), folder)
        recipe = plan.recipe()
        run = Experiment(recipe, folder, seed, recipe.load(), Silent(), train=False)
        ensemble = make_members(run)
        for name, (model, _) in make_bridges(run, ensemble).items():
            if "steps" not in name:
                show(f"{folder} {name}", model, ensemble.source, run.data.val, run.data.test)
    if options.cifar10:
        data = load(options.cifar10, None)
        for name in ("zoo:cifar10", "zoo:cifar10-2"):
            model = load_model(name).to(DEVICE)
            show(name, model, model.source, data.val, data.test)


if __name__ == "__main__":
    with torch.no_grad():
        main()
