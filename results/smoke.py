"""A recipe of the paper from end to end on made-up images of its size: that it runs, not how good it is.

    python results/smoke.py tiny-imagenet OUT [--steps 2] [--images 8]

Three members, the bridge with its distillation and control, and every rival, a few steps each; then a table.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from ensbridge.data import ImageSet, Splits
from ensbridge.data.dataset_info import DATASETS
from ensbridge.experiments import evaluate_run, train_recipe
from ensbridge.experiments.plan import RECIPES
from ensbridge.training.config import FitConfig


def made_up(name: str, images: int) -> Splits:
    known, draws = DATASETS[name], torch.Generator().manual_seed(0)
    parts = []
    for _ in range(3):
        pixels = torch.randint(0, 256, (images, *known.shape), generator=draws, dtype=torch.uint8)
        parts.append(ImageSet(pixels, torch.randint(0, known.classes, (images,), generator=draws)))
    return Splits(*parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=[name for name in RECIPES if name != "digits"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--images", type=int, default=8)
    options = parser.parse_args()
    recipe = RECIPES[options.recipe]("default")
    batch = options.images // 2
    fits = {
        name: replace(fit, batch_size=batch, epochs=options.steps * batch / options.images, warmup_steps=0)
        for name, fit in vars(recipe).items()
        if isinstance(fit, FitConfig)
    }
    data = made_up(options.recipe, options.images)
    small = {"members": 3, "rivals_of": (), "figure_members": 0, "level_rivals": False, "train_images": 0}
    recipe = replace(recipe, load=lambda: data, **fits, **small)
    begun = time.time()
    train_recipe(recipe, options.out, 0, ("members", "distill", "rivals"))
    scores, missing = evaluate_run(options.out, recipe)
    print(scores.table())
    print(f"{options.recipe} in {time.time() - begun:.0f} s; not trained: {', '.join(missing)}")


if __name__ == "__main__":
    main()
