"""CIFAR-10: what each network predicts for test images and for others, for make_uncertainty.py.

    python studies/uncertainty.py cifar10 cifar100 OUT

The networks are the five members, the two bridges beside the frozen source (KL, T = 4), the control, and the
zoo's: the distilled network and its two bridges. All predict at temperature 1, as members have none of their
own. Nothing is trained or chosen. The images are 5,000 of CIFAR-10's test images, 2,000 of its validation
images, 2,000 of CIFAR-100's test images (near OOD), and digits, noise and textures (far OOD). OUT gets the
predictions in parts of 500 images, so that a killed run resumes; on one core it takes about half an hour.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import ensbridge as eb
from common import frozen_with, members_of

REAL = {"test": 5000, "val": 2000, "cifar100": 2000}
FAR = {"digits": 1797, "uniform": 2000, "gaussian": 2000, "textures": 2000}
PART = 500


def networks() -> dict[str, torch.nn.Module]:
    """What is run: the members, each bridge beside the first of them, and the zoo's."""
    members = members_of(None, eb.experiments.cifar10())
    nets = {f"member {number}": net for number, net in enumerate(members.members, 1)}
    nets |= one_by_one(frozen_with("1", "2", "control"), members.source, "bridge 1", "bridge 2", "control")
    shipped = eb.load("zoo:cifar10-2")
    nets["distilled"] = eb.FastEnsemble(shipped.source)
    return nets | one_by_one(shipped, shipped.source, "coarse bridge", "fine bridge")


def one_by_one(fast: eb.FastEnsemble, source: torch.nn.Module, *names: str) -> dict[str, torch.nn.Module]:
    """Each bridge alone beside the source, which they share, at temperature 1."""
    bridges = zip(names, fast.each_bridge(), strict=True)
    return {
        name: eb.FastEnsemble(source, [bridge], fast.features, temperature=1.0) for name, bridge in bridges
    }


def image_sets(data: str, near: str) -> dict[str, eb.data.ImageSet]:
    """The images by the name of their set."""
    cifar10, generator = eb.data.open_splits(data), torch.Generator().manual_seed(0)
    real = {"test": cifar10.test, "val": cifar10.val, "cifar100": eb.data.open_splits(near).test}
    sets = {name: fixed_subset(images, REAL[name]) for name, images in real.items()}
    return sets | {name: eb.data.ood_images(name, count, generator=generator) for name, count in FAR.items()}


def fixed_subset(images: eb.data.ImageSet, count: int) -> eb.data.ImageSet:
    """So many images, the same in any order of the set: those whose pixels have the smallest digests."""
    digests = [hashlib.sha256(image.numpy().tobytes()).digest() for image in images.images]
    return images.subset(torch.tensor(sorted(range(len(digests)), key=digests.__getitem__)[:count]))


def main() -> None:
    """Predict what has not been predicted yet."""
    data, near, out = sys.argv[1:]
    nets, folder = networks(), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, images in image_sets(data, near).items():
        for start in range(0, len(images), PART):
            path, written = folder / f"{name}-{start}.safetensors", folder / "part.tmp"
            if not path.exists():
                some = images.subset(torch.arange(start, min(start + PART, len(images))))
                labels = {} if some.labels is None else {"labels": some.labels}
                save_file(eb.evaluation.predict_each(nets, some, 250) | labels, written)
                written.rename(path)
        print(name, flush=True)


if __name__ == "__main__":
    main()
