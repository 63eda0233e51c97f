"""A classifier of a known library behind its own preprocessing, which a file can describe and build again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional

from ensbridge.models.libraries import Library, build_network
from ensbridge.models.preprocessed import Normalised

Interpolation = Literal["nearest", "bilinear", "bicubic"]
LARGEST_INPUT = 2**24  # numbers in one image, as a saved model's may have


@dataclass(frozen=True)
class ImageInput:
    """What a network takes: images of one size, made from files in a certain way, and normalised.

    A file's image is resized so that the middle `crop` of it, of the network's proportions, has the size;
    with `squash` the whole of it is, whatever its proportions.

    >>> ImageInput((224, 224), crop=0.875).words
    '224×224 (the middle 0.875, bicubic), mean 0.485,0.456,0.406, std 0.229,0.224,0.225'
    """

    size: tuple[int, int]  # height and width
    channels: int = 3
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: Interpolation = "bicubic"
    crop: float = 1.0
    squash: bool = False

    def __post_init__(self) -> None:
        if (
            min(self.size) < 1
            or not 1 <= self.channels <= 4
            or self.channels * math.prod(self.size) > LARGEST_INPUT
        ):
            raise ValueError(f"the input is {self.channels}×{self.size}; give the shape of an image")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels) or not all(math.isfinite(value) for value in values):
                raise ValueError(
                    f"{name} is {values} for {self.channels} channels; give one finite number, or one each"
                )
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}; it must be above 0 in each channel")
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop is {self.crop}; it must be above 0 and at most 1")

    @property
    def words(self) -> str:
        """What it is, in a line."""
        way = "squashed" if self.squash else "the middle" if self.crop == 1 else f"the middle {self.crop:.3g}"
        numbers = [",".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std)]
        size = "×".join(map(str, self.size))
        return f"{size} ({way}, {self.interpolation}), mean {numbers[0]}, std {numbers[1]}"


class Normalise(nn.Module):
    """Images from 0 to 1 of any size as a network takes them: resized where they have another, normalised.

    >>> import torch
    >>> net = Normalise(ImageInput((4, 4), 1, (0.5,), (0.5,)))
    >>> net(torch.ones(2, 1, 8, 8)).shape, net(torch.ones(1, 1, 4, 4)).unique().tolist()
    (torch.Size([2, 1, 4, 4]), [1.0])
    """

    def __init__(self, takes: ImageInput) -> None:
        super().__init__()
        self.takes, self.normalised = takes, Normalised(takes.mean, takes.std)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W)."""
        if tuple(images.shape[-2:]) != self.takes.size:
            smooth = self.takes.interpolation != "nearest"
            images = functional.interpolate(
                images,
                self.takes.size,
                mode=self.takes.interpolation,
                align_corners=False if smooth else None,
                antialias=smooth,
            )
        return self.normalised(images)

    def extra_repr(self) -> str:
        """What two of them differ in."""
        return self.takes.words


class NamedNetwork(nn.Module):
    """A network of timm, torchvision or transformers that takes plain pixels, from 0 to 1.

    It knows the arguments that build it, so that a saved model of which it is the source is loaded without
    being allowed anything. `settings` are those of a configuration of transformers, whose kind is `name`.

    >>> import torch
    >>> net = NamedNetwork("torchvision", "squeezenet1_1", 3, size=(32, 32)).eval()
    >>> net(torch.rand(2, 3, 40, 40)).shape, net.arguments["name"]
    (torch.Size([2, 3]), 'squeezenet1_1')
    """

    def __init__(
        self,
        library: Library,
        name: str,
        classes: int,
        *,
        size: tuple[int, int],
        channels: int = 3,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        interpolation: Interpolation = "bicubic",
        crop: float = 1.0,
        squash: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= classes <= 2**20:
            raise ValueError(f"classes are {classes}; give how many there are")
        height, width = size
        self.takes = ImageInput(
            (height, width), channels, tuple(mean), tuple(std), interpolation, crop, squash
        )
        self.library, self.name, self.classes = library, name, classes
        self.settings = dict(settings or {})
        self.preprocess = Normalise(self.takes)
        self.net = build_network(library, name, classes, channels, self.takes.size, self.settings)

    @classmethod
    def of(
        cls,
        library: Library,
        name: str,
        classes: int,
        takes: ImageInput,
        settings: Mapping[str, Any] | None = None,
    ) -> NamedNetwork:
        """The network with an input that is described as a whole."""
        return cls(library, name, classes, settings=settings, **asdict(takes))

    @property
    def arguments(self) -> dict[str, Any]:
        """What builds it again, in JSON's types."""
        named = {"library": self.library, "name": self.name, "classes": self.classes}
        pairs = asdict(self.takes).items()
        takes = {name: list(value) if isinstance(value, tuple) else value for name, value in pairs}
        return named | takes | ({"settings": self.settings} if self.settings else {})

    @property
    def title(self) -> str:
        """Its name for people, such as "timm's resnet18"."""
        return f"{self.library}'s {self.name}"

    def forward(self, images: Tensor) -> object:
        """What the network returns for images from 0 to 1."""
        return self.net(self.preprocess(images))


def input_of(net: nn.Module) -> ImageInput | None:
    """What a network is known to take of image files, None where nobody said."""
    return net.takes if isinstance(net, NamedNetwork) else None
