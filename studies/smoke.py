"""A recipe of the paper from end to end on made-up images of its size: that it runs, not how good it is.

    python studies/smoke.py tiny-imagenet OUT [--steps 2] [--images 8]

Three members, the bridges with their distillation and controls, and every baseline, a few steps each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import ensbridge as eb
from provenance import plain_parser


def made_up(name: str, images: int) -> eb.data.Splits:
    """Random images of a set's shape, with random labels."""
    known, draws = eb.data.DATASETS[name], torch.Generator().manual_seed(0)
    parts = []
    for _ in range(3):
        pixels = torch.randint(0, 256, (images, *known.shape), generator=draws, dtype=torch.uint8)
        parts.append(eb.data.ImageSet(pixels, torch.randint(0, known.classes, (images,), generator=draws)))
    return eb.data.Splits(*parts)


def main() -> None:
    """Train and measure."""
    asked = plain_parser(__doc__)
    asked.add_argument("recipe", choices=[name for name in eb.experiments.RECIPES if name != "digits"])
    asked.add_argument("out", type=Path)
    asked.add_argument("--steps", type=int, default=2)
    asked.add_argument("--images", type=int, default=8)
    options = asked.parse_args()
    recipe = eb.experiments.RECIPES[options.recipe]("default", "paper")
    batch = options.images // 2
    fits = {
        name: replace(fit, batch_size=batch, epochs=options.steps * batch / options.images, warmup_steps=0)
        for name, fit in vars(recipe).items()
        if isinstance(fit, eb.FitConfig)
    }
    data = made_up(options.recipe, options.images)
    small = {"members": 3, "baselines_for": (), "figure_members": 0, "match_compute": False}
    recipe = replace(recipe, load=lambda: data, train_images=0, **fits, **small)
    eb.experiments.train_recipe(recipe, options.out)
    scores, missing = eb.experiments.evaluate_run(options.out, recipe)
    print(scores.table())
    print(f"not trained: {', '.join(missing)}")


if __name__ == "__main__":
    main()
