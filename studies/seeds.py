"""KL bridges towards groups of members, and their controls, from several seeds, on shared teachers.

    python studies/seeds.py cifar10 OUT --temperature 4 --seeds 1 2
    python studies/seeds.py cifar10 OUT --temperature 2 --targets 1,2,3 1 --held-out 4520

All see the same images in the same order, so that seeds differ in their first weights alone. --held-out adds
the first validation images, without labels and --times over, to what is trained on, and measures on the rest.
One seed, its baselines and the paper's loss are `ensbridge train cifar10`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import ensbridge as eb
from common import Group, at_temperature, begin, bridge_spec, fit_config, parser
from ensbridge.experiments import Experiment, Job, TableModel


def table_model(group: Group, seed: int, temperature: float) -> TableModel:
    """The source with one bridge, or its control."""
    info = eb.evaluation.ModelInfo("DBN", len(group), 1, 1, "kl", temperature, control=group == (0,))
    words = "control" if info.control else "bridge to " + ", ".join(str(index + 1) for index in group)
    model = eb.experiments.bridge_model(info, "bridges", [name_of(group, seed)])
    return replace(model, name=f"{words}, seed {seed}")


def name_of(group: Group, seed: int) -> str:
    """A bridge's name in folders."""
    return f"{eb.experiments.slug(group)}-seed-{seed}"


def with_held_out(data: eb.data.Splits, count: int, times: int) -> eb.data.Splits:
    """Training images and, `times` over, the first of validation, on the rest of which is measured."""
    images = torch.cat([data.train.images, *[data.val.images[:count]] * times])
    return data._replace(
        train=eb.data.ImageSet(images), val=data.val.subset(torch.arange(count, len(data.val)))
    )


def main() -> None:
    """Train and measure."""
    asked = parser(__doc__, epochs=320)
    asked.add_argument("--temperature", type=float, default=4.0)
    asked.add_argument("--targets", nargs="+", default=["1,2,3", "1"], help="members of each bridge")
    asked.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked.add_argument("--held-out", type=int, default=0, help="validation images to train on")
    asked.add_argument("--times", type=int, default=3, help="how often each of them is there")
    options, recipe, data, members = begin(asked)
    if options.held_out:
        data = with_held_out(data, options.held_out, options.times)
    config, fit = at_temperature(options.temperature), fit_config(options, options.seeds[0])
    groups = [tuple(int(number) - 1 for number in text.split(",")) for text in options.targets]
    pairs = [(group, seed) for seed in options.seeds for group in groups]
    specs = {
        name_of(group, seed): bridge_spec(recipe, config, fit, target=group, start=(seed, "score", *group))
        for group, seed in pairs
    }
    models = tuple(table_model(group, seed, options.temperature) for group, seed in pairs)
    experiment = Experiment((Job("bridges", "bridges", specs),), models, {})
    result = eb.experiments.run_study(experiment, recipe, data, options.out, members, final=options.final)
    for part, scores in result.scores.items():
        print(f"{part}\n{scores.table()}", flush=True)


if __name__ == "__main__":
    main()
