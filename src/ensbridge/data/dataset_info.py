"""The known data sets: their sizes, archives, checksums and class names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ensbridge.data.checks import checksum
from ensbridge.data.digits import Splits
from ensbridge.utils.text import command


@dataclass(frozen=True)
class DatasetInfo:
    """A public set; `checksum` is of its pixels and labels in any order, `ordered` in the official one."""

    name: str
    title: str
    folder: str  # of its official layout
    counts: tuple[int, int, int]  # training, validation, test
    shape: tuple[int, int, int]  # of one image
    classes: int
    url: str = ""  # of the official archive; empty where it is not freely available
    sha256: str = ""  # of the official archive, verified before it is read
    size: int = 0  # of the official archive, in bytes
    checksum: str = ""
    ordered: str = ""
    by_hand: str = ""  # how to get it where there is no archive

    @property
    def archive(self) -> str:
        """The name of the official archive."""
        return self.url.rsplit("/", 1)[-1]

    def remedy(self, root: Path) -> str:
        """How to get the set into `root`."""
        if self.url:
            return f"to get it: {command(f'data get {self.name} --root', root)}"
        return f"{self.by_hand}, into its folder {self.folder}"

    def check(self, splits: Splits, where: Path | str) -> None:
        """Raise ValueError unless the numbers of images, their shape and the labels are this set's."""
        counts = tuple(len(part) for part in splits)
        if counts != self.counts:
            raise ValueError(f"{where} has {_sum(counts)} images; {self.title} has {_sum(self.counts)}")
        for part in splits:
            if tuple(part.images.shape[1:]) != self.shape:
                shape = tuple(part.images.shape[1:])
                raise ValueError(f"{where} has images of {shape}; those of {self.title} are {self.shape}")
            if part.labels is None or int(part.labels.max()) >= self.classes:
                raise ValueError(f"{where} has labels beyond the {self.classes} classes of {self.title}")
        assert splits.train.labels is not None
        if (classes := len(splits.train.labels.unique())) != self.classes:
            raise ValueError(
                f"{where} has images of {classes} classes; {self.title} has {self.classes}, so move it away"
            )

    def verify(self, splits: Splits, where: Path | str, in_order: bool = False) -> None:
        """Raise ValueError unless all pixels and labels are this set's and, if `in_order`, their order."""
        self.check(splits, where)
        if self.checksum and checksum(splits) != self.checksum:
            raise ValueError(
                f"{where} does not hold the pixels and labels of {self.title}: its checksum differs"
            )
        if in_order and self.ordered and checksum(splits, in_order=True) != self.ordered:
            raise ValueError(f"{where} does not hold {self.title} in its official order")


def _sum(counts: tuple[int, ...]) -> str:
    return " + ".join(f"{count:,}" for count in counts)


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_CIFAR = (40_960, 9_040, 10_000)
DATASETS = {
    info.name: info
    for info in (
        DatasetInfo(
            "cifar10",
            "CIFAR-10",
            "cifar-10-batches-py",
            _CIFAR,
            (3, 32, 32),
            10,
            f"{_TORONTO}/cifar-10-python.tar.gz",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            170_498_071,
            "e9a2e39f3d653f9662844cc7b8b8d7bc35b2f2f9480038978ed9a6c47cca8131",
            "466a633d4657afd556ed0f777ece6e25705e73629fb3464a387a156cf3555444",
        ),
        DatasetInfo(
            "cifar100",
            "CIFAR-100",
            "cifar-100-python",
            _CIFAR,
            (3, 32, 32),
            100,
            f"{_TORONTO}/cifar-100-python.tar.gz",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            169_001_437,
            "b1356ffe4ee7bf3c03f32ee698d2214bced467a2d80d7986b3389ceb1197c7ba",
        ),
        DatasetInfo(
            "tiny-imagenet",
            "Tiny ImageNet",
            "tiny-imagenet-200",
            (90_000, 10_000, 10_000),
            (3, 64, 64),
            200,
            "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            248_100_043,
        ),
        DatasetInfo(
            "imagenet64",
            "ImageNet64",
            "imagenet64",
            (1_231_167, 50_000, 50_000),
            (3, 64, 64),
            1000,
            by_hand="unpack train_data_batch_1 to _10 and val_data, from image-net.org for registered users",
        ),
        DatasetInfo(
            "svhn",
            "SVHN",
            "svhn",
            (60_012, 13_245, 26_032),
            (3, 32, 32),
            10,
            by_hand="put train_32x32.mat and test_32x32.mat, from ufldl.stanford.edu/housenumbers",
        ),
    )
}


def find_dataset(name: str) -> DatasetInfo:
    """The set of that name.

    >>> find_dataset("cifar10").counts
    (40960, 9040, 10000)
    >>> find_dataset("cifar11")
    Traceback (most recent call last):
    ValueError: 'cifar11' is not a known set; there are: cifar10, cifar100, tiny-imagenet, imagenet64,
    svhn
    """
    if name not in DATASETS:
        raise ValueError(f"{name!r} is not a known set; there are: {', '.join(DATASETS)}")
    return DATASETS[name]


def default_root() -> Path:
    """The folder of the sets: that of the variable ENSBRIDGE_DATA, or data/ in the working directory."""
    return Path(os.environ.get("ENSBRIDGE_DATA") or "data")


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(_CIFAR100.split())


def class_names(name: str) -> tuple[str, ...]:
    """The names of a known set's classes in the order of their labels; numbers where it has no names.

    >>> class_names("cifar10")[:3], class_names("tiny-imagenet")[:3]
    (('airplane', 'automobile', 'bird'), ('0', '1', '2'))
    """
    known = find_dataset(name)
    given = {"cifar10": CIFAR10_CLASSES, "cifar100": CIFAR100_CLASSES}
    return given.get(name) or tuple(map(str, range(known.classes)))
