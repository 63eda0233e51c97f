"""On which inputs CIFAR-10's members say more than the source, and what the bridge has learnt of it.

    python studies/inputs.py cifar10 [--count 1500]

For each kind of input, in nats an image: KL from DE-3's prediction to that of the source, of a bridge
(KL, T = 4) and of its control (trained towards the source alone). Training and validation images only.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import ensbridge as eb
from common import CROP, DEVICE, frozen_with, members_of
from provenance import plain_parser

PLAIN = eb.data.Augment()
KINDS = {
    "training images, cropped and flipped": ("train", CROP),
    "… with mixup 0.4, as the bridges were trained": ("train", replace(CROP, mixup=0.4)),
    "… with mixup 1": ("train", replace(CROP, mixup=1.0)),
    "… with cutmix 1": ("train", replace(CROP, cutmix=1.0)),
    "… with noise of 0.05": ("train", replace(CROP, noise=0.05)),
    "validation images": ("val", PLAIN),
    "… with mixup 0.4": ("val", replace(PLAIN, mixup=0.4)),
}


def main() -> None:
    """Print one row of a table for each kind of input."""
    asked = plain_parser(__doc__)
    asked.add_argument("data", help="an npz, a folder, or cifar10")
    asked.add_argument("--count", type=int, default=1500, help="images of each kind")
    options = asked.parse_args()
    data = eb.data.open_splits(options.data)
    ensemble = members_of(None, eb.experiments.cifar10()).first(3)
    control, bridge = frozen_with("control"), frozen_with("1")
    models = {"DE-3": ensemble, "source": ensemble.source, "control": control, "bridge": bridge}
    print("| inputs | source | control | bridge | control − bridge | DE-3's entropy |\n" + "|---" * 6 + "|")
    for name, (part, augment) in KINDS.items():
        generator = torch.Generator(DEVICE).manual_seed(0)
        images = getattr(data, part).images.to(DEVICE)
        chosen = torch.randperm(len(images), generator=generator, device=DEVICE)[: options.count]
        seen = eb.data.ImageSet(augment(images[chosen].float() / 255, generator))
        truth, *others = eb.evaluation.predict_each(models, seen, 250).values()
        source, control_kl, bridge_kl = (eb.metrics.kl_per_image(truth, values) for values in others)
        gain = control_kl - bridge_kl
        figures = [f"{values.mean():.4f}" for values in (source, control_kl, bridge_kl)]
        figures.append(f"{gain.mean():.4f} ± {eb.metrics.standard_error(gain):.4f}")
        figures.append(f"{-(truth.exp() * truth).sum(1).mean():.3f}")
        print(f"| {name} | " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
