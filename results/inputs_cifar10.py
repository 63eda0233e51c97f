"""On which inputs CIFAR-10's members say more than the source, and what the bridge has learnt of it.

    python results/inputs_cifar10.py DATA.npz --weights FOLDER [--count 1500]

For each kind of input, in nats an image: KL from DE-3's prediction to that of the source, the bridge and its
control (trained towards the source alone). Training and validation images only.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from cifar import CONTROL, CROP, DEVICE, load, load_control, load_members

from ensbridge.data import Augment, ImageSet
from ensbridge.deploy.saving import load as load_model
from ensbridge.evaluation.predict import predict
from ensbridge.metrics import kl_per_image, standard_error

KINDS: dict[str, tuple[str, Augment]] = {
    "training images, cropped and flipped": ("train", CROP),
    "… with mixup 0.4, as the bridges were trained": ("train", replace(CROP, mixup=0.4)),
    "… with mixup 1": ("train", replace(CROP, mixup=1.0)),
    "… with cutmix 1": ("train", replace(CROP, cutmix=1.0)),
    "… with noise of 0.05": ("train", replace(CROP, noise=0.05)),
    "validation images": ("val", Augment()),
    "… with mixup 0.4": ("val", Augment(mixup=0.4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--weights", type=Path, required=True, help="the folder of members and control")
    parser.add_argument("--count", type=int, default=1500, help="images of each kind")
    options = parser.parse_args()
    data, ensemble = load(options.data, None), load_members(options.weights).first(3)
    models = {
        "source": ensemble.first(1),
        "control": load_control(options.weights / CONTROL),
        "bridge": load_model("zoo:cifar10").to(DEVICE),
    }
    print("| inputs | source | control | bridge | control − bridge | DE-3's entropy |")
    print("|---" * 6 + "|")
    for name, (part, augment) in KINDS.items():
        generator = torch.Generator(DEVICE).manual_seed(0)
        images = getattr(data, part).images
        chosen = torch.randperm(len(images), generator=generator, device=DEVICE)[: options.count]
        seen = ImageSet(augment(images[chosen].float() / 255, generator))
        truth = predict(ensemble, seen, 250)
        found = {model: kl_per_image(truth, predict(net.eval(), seen, 250)) for model, net in models.items()}
        own = found["control"] - found["bridge"]
        figures = [f"{each.mean():.4f}" for each in found.values()]
        figures.append(f"{own.mean():.4f} ± {standard_error(own):.4f}")
        figures.append(f"{-(truth.exp() * truth).sum(1).mean():.3f}")
        print(f"| {name} | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
