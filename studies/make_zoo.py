"""The zoo's models: bridges towards CIFAR-10's first three members at T = 4, of two seeds, with controls.

    python studies/make_zoo.py cifar10 OUT --final [--zoo FOLDER]

zoo:cifar10 is the source with the bridge of seed 0, zoo:cifar10-2 with both, which see the images in two
different orders. Each is saved with its measured scores in FOLDER, by default OUT/zoo.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ensbridge as eb
from common import at_temperature, begin, bridge_spec, fit_config, parser
from ensbridge.experiments import Experiment, Job, TableModel, bridge_model

ZOO = {1: "cifar10", 2: "cifar10-2"}  # by the number of bridges
INFO = eb.evaluation.ModelInfo("DBN", 3, 1, 1, "kl", 4.0)


def several(folders: list[str], name: str) -> TableModel:
    """The source with the bridges of this name of several jobs."""
    info = replace(INFO if name == "bridge" else INFO.as_control(), bridges=len(folders))
    if len(folders) == 1:
        return bridge_model(info, folders[0], [name])

    def make(run: eb.experiments.Run) -> eb.FastEnsemble:
        methods = [run.methods(folder)[name] for folder in folders]
        return eb.FastEnsemble.of(
            *(method for method in methods if isinstance(method, eb.methods.DiffusionBridge))
        )

    return TableModel(info, tuple(folders), make)


def main() -> None:
    """Train, measure, save."""
    asked = parser(__doc__, epochs=320)
    asked.add_argument("--zoo", type=Path, help="where models are saved")
    options, recipe, data, members = begin(asked)
    jobs = []
    for seed in (0, 1):
        fit = fit_config(options, seed)
        targets = {"bridge": (0, 1, 2), "control": (0,)}
        specs = {
            name: bridge_spec(recipe, at_temperature(4.0), fit, target=target, start=(seed, "score"))
            for name, target in targets.items()
        }
        jobs.append(Job(f"seed-{seed}", "bridges", specs))
    folders = [job.folder for job in jobs]
    models = tuple(several(folders[:count], name) for count in ZOO for name in ("bridge", "control"))
    experiment = Experiment(tuple(jobs), models, {})
    result = eb.experiments.run_study(experiment, recipe, data, options.out, members, final=options.final)
    scores = [*result.scores.values()][-1]
    print(scores.table())
    for count, name in ZOO.items():
        fast = several(folders[:count], "bridge").build(result.run)
        assert isinstance(fast, eb.FastEnsemble)
        fast.class_names, fast.image_shape, fast.pixel_range = recipe.class_names, (3, 32, 32), (0.0, 1.0)
        rows = tuple(row for row in scores.rows if row.method == "DE" or row.bridges == count)
        fast.cpu().eval().save((options.zoo or options.out / "zoo") / name, scores=replace(scores, rows=rows))


if __name__ == "__main__":
    main()
