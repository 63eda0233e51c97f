"""The zoo's models from trained weights, with the figures that were measured of them.

    python results/make_zoo.py FOLDER

FOLDER holds member-1, bridge-kl-a and bridge-kl-b as safetensors. zoo:cifar10 is the source with one bridge,
zoo:cifar10-2 with two, all of the first seed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

import ensbridge as eb
from ensbridge.methods import Bridge, BridgeConfig

HERE = Path(__file__).parent / "cifar10"
ZOO = Path(eb.__file__).parent / "zoo"
MODELS = {"cifar10": (["bridge-kl-a"], 3), "cifar10-2": (["bridge-kl-a", "bridge-kl-b"], 5)}  # and members


def bridge(path: Path) -> Bridge:
    made = Bridge(eb.nets.ScoreNet.cifar10(z_input="none"), BridgeConfig(ema=0.9995)).one_step()
    made.load_state_dict(load_file(path))
    return made


def main() -> None:
    weights = Path(sys.argv[1])
    for name, (bridges, members) in MODELS.items():
        source = eb.nets.ResNet.resnet32x2(10)
        source.load_state_dict(load_file(weights / "member-1.safetensors"))
        fast = eb.FastEnsemble(
            source,
            [bridge(weights / f"{each}.safetensors") for each in bridges],
            "stages.0.0",
            members=members,
            image_shape=(3, 32, 32),
            pixel_range=(0.0, 1.0),
            class_names=eb.data.CIFAR10_CLASSES,
        )
        fast.eval().save(ZOO / name, scores=json.loads((HERE / "seed0-test.json").read_text()))
        size = (ZOO / name / "model.safetensors").stat().st_size
        print(f"zoo:{name}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
