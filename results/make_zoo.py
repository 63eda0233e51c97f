"""The zoo's models from trained weights, with the figures that were measured of them.

    python results/make_zoo.py FOLDER

FOLDER holds member-1 and two bridges towards members 1 to 3 as safetensors. zoo:cifar10 is the source with
the first of them, zoo:cifar10-2 with both: bridge-kl-t4 is that of `run_cifar.py bridges --temperatures 4`
(the first seed, named bridges-1-dbn-kl-t-4 there), bridge-kl-t4-1 that of `run_cifar.py long --base 4 --seeds
1 2 --name T4` (the second, T4-1-2-3-seed-1).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file

import ensbridge as eb
from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.evaluation.scores import read_scores
from ensbridge.methods import Bridge, BridgeConfig

HERE = Path(__file__).parent / "cifar10"
ZOO = Path(eb.__file__).parent / "zoo"
CONTROLS = {1: "control (KL, T = 4)", 2: "+2 control (KL, T = 4)"}  # by the number of bridges


class Model(NamedTuple):
    """What a model of the zoo is made of, and its row in the scores."""

    bridges: list[str]
    row: str


MODELS = {
    "cifar10": Model(["bridge-kl-t4"], "+1 DBN (KL, T = 4)"),
    "cifar10-2": Model(["bridge-kl-t4", "bridge-kl-t4-1"], "+2 DBN (KL, T = 4)"),
}


def bridge(weights: Path, name: str) -> Bridge:
    config = BridgeConfig(temperature=TemperatureLaw(base=4.0), ema=0.9995)
    made = Bridge(eb.nets.ScoreNet.cifar10(z_input="none"), config).one_step()
    made.load_state_dict(load_file(weights / f"{name}.safetensors"))
    return made


def main() -> None:
    weights = Path(sys.argv[1])
    scores = read_scores(HERE / "seed0-more-test.json")
    for name, model in MODELS.items():
        source = eb.nets.ResNet.resnet32x2(10)
        source.load_state_dict(load_file(weights / "member-1.safetensors"))
        fast = eb.FastEnsemble(
            source,
            [bridge(weights, each) for each in model.bridges],
            "stages.0.0",
            members=3,
            image_shape=(3, 32, 32),
            pixel_range=(0.0, 1.0),
            class_names=eb.data.CIFAR10_CLASSES,
        )
        rows = [
            row
            for row in scores.rows
            if row.method == "DE" or row.model in (model.row, CONTROLS[len(model.bridges)])
        ]
        fast.eval().save(ZOO / name, scores=replace(scores, rows=tuple(rows)))
        size = (ZOO / name / "model.safetensors").stat().st_size
        print(f"zoo:{name}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
