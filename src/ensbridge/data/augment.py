"""Augmentation of whole batches, on their device.

What is mixed is each example with its neighbour, the one before it in the batch, and `share` (B,) is what it
keeps of itself: of mixed images i the label is that of i for `share[i]`, and that of i - 1 for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ensbridge.utils.inputs import Inputs, map_inputs, tensors_of


@dataclass(frozen=True)
class Augment:
    """The augmentation of a batch of training images: crop, flip, noise, mixup or cutmix, in this order.

    `crop` pads by so many zeros on each side and crops at random to the original size; `flip` mirrors half of
    the images; `noise` adds Gaussian noise of that standard deviation; `mixup` mixes each image with another
    of the batch, λ ~ Beta(mixup, mixup) drawn for each image; `cutmix` pastes a rectangle of another into
    each, with an area drawn likewise; with both, each image is mixed in one of the two ways. The target of a
    mixed image is a teacher's prediction on it, or the labels of both images (`Batch.label_probs`).

    >>> images = torch.rand(4, 3, 8, 8)
    >>> Augment()(images) is images
    True
    >>> Augment(crop=2, flip=True, mixup=0.4)(images, torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3, 8, 8])
    """

    crop: int = 0
    flip: bool = False
    noise: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name in ("crop", "noise", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 (off) or more")

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Augment images (B, C, H, W)."""
        return self.with_share(images, generator)[0]

    def with_share(
        self, images: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Augmented images, and the share (B,) that each has kept of itself; None where nothing is mixed."""
        if self.crop:
            images = random_crop(images, self.crop, generator)
        if self.flip:
            mirrored = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device) < 0.5
            images = torch.where(mirrored, images.flip(3), images)
        if self.noise:
            images = images + self.noise * torch.randn(
                images.shape, generator=generator, device=images.device
            )
        if self.mixup and self.cutmix:
            blended, shares = mixup(images, self.mixup, generator)
            pasted, areas = cutmix(images, self.cutmix, generator)
            coin = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device) < 0.5
            return torch.where(coin, blended, pasted), torch.where(coin.flatten(), shares, areas)
        if self.mixup:
            return mixup(images, self.mixup, generator)
        if self.cutmix:
            return cutmix(images, self.cutmix, generator)
        return images, None


def augment_inputs(
    augment: Augment, inputs: Inputs, generator: torch.Generator | None = None
) -> tuple[Inputs, Tensor | None]:
    """Augment the inputs of classifiers, images fully, other inputs only by mixup; with each one's share.

    Where all inputs are floats, such as rows of a table or several images, each example is mixed with
    another, with one λ for all of its tensors. Integers, such as tokens, cannot be mixed: where there are
    any, the inputs are returned unchanged.

    >>> tokens = {"input_ids": torch.arange(8).view(2, 4)}
    >>> augment_inputs(Augment(mixup=0.4), tokens)[0] is tokens
    True
    """
    if isinstance(inputs, Tensor) and inputs.ndim == 4:
        return augment.with_share(inputs, generator)
    tensors = tensors_of(inputs)
    if not augment.mixup or not all(tensor.is_floating_point() for tensor in tensors):
        return inputs, None
    share = _beta(tensors[0], augment.mixup, generator).flatten()

    def mixed(tensor: Tensor) -> Tensor:
        weight = share.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))
        return weight * tensor + (1 - weight) * tensor.roll(1, 0)

    return map_inputs(mixed, inputs), share


def random_crop(images: Tensor, pad: int, generator: torch.Generator | None = None) -> Tensor:
    """Zero-pad by `pad` on each side and crop each image to its original size at a random offset."""
    count, _, height, width = images.shape
    device = images.device
    shifts = torch.randint(0, 2 * pad + 1, (2, count, 1), generator=generator, device=device)
    rows = shifts[0] + torch.arange(height, device=device)  # (B, H)
    columns = shifts[1] + torch.arange(width, device=device)  # (B, W)
    padded = F.pad(images, (pad, pad, pad, pad))
    batch = torch.arange(count, device=device)[:, None, None]
    # Advanced indices around the channel slice come first: (B, H, W, C).
    return padded[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def mixup(images: Tensor, alpha: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """λ·x + (1 - λ)·x' with x' another image of the batch and λ ~ Beta(alpha, alpha) for each; and the λ."""
    share = _beta(images, alpha, generator)
    # A batch is in random order already, so the neighbour is a random partner.
    return share * images + (1 - share) * images.roll(1, 0), share.flatten()


def cutmix(images: Tensor, alpha: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Each image with a rectangle of another pasted in, of an area ~ Beta(alpha, alpha); and what is left."""
    count, _, height, width = images.shape
    side = _beta(images, alpha, generator).sqrt()  # of the rectangle, in sides of the image
    corner = torch.rand(2, count, 1, 1, 1, generator=generator, device=images.device) * (1 - side)
    rows = ((torch.arange(height, device=images.device) + 0.5) / height)[:, None]
    columns = (torch.arange(width, device=images.device) + 0.5) / width
    inside = (rows >= corner[0]) & (rows < corner[0] + side)
    inside = inside & (columns >= corner[1]) & (columns < corner[1] + side)
    return torch.where(inside, images.roll(1, 0), images), 1 - inside.to(images.dtype).mean((1, 2, 3))


def _beta(images: Tensor, alpha: float, generator: torch.Generator | None) -> Tensor:
    """A share ~ Beta(alpha, alpha) for each image: (B, 1, 1, 1)."""
    shape = torch.full((2, len(images), 1, 1, 1), float(alpha), device=images.device)
    # From two gammas, since torch's Beta takes no generator; in double, as a small alpha underflows.
    gammas = torch._standard_gamma(shape.double(), generator=generator)  # pyright: ignore[reportPrivateImportUsage]
    gammas = gammas.clamp_min(1e-300)
    return (gammas[0] / gammas.sum(0)).to(images.dtype)
