"""Members and data by name, as the command line has them: compressed, compared, measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ensbridge._compress import compress
from ensbridge.data import DATASETS, class_folders, class_names, open_splits
from ensbridge.data.arrays import read_images
from ensbridge.data.digits import Splits
from ensbridge.data.image_parts import ImagePart, open_parts
from ensbridge.data.loader import ImageSet, collect
from ensbridge.data.reading import layout_of
from ensbridge.data.stream import MEMORY, parse_memory
from ensbridge.deploy.batch import Pixels, decode_image
from ensbridge.deploy.members import Member, Overrides, check_source, open_member, open_members
from ensbridge.deploy.saving import load
from ensbridge.deploy.saving.card import check_origin, is_hub_name, is_licence
from ensbridge.deploy.saving.folder import check_target
from ensbridge.evaluation.evaluate import Evaluator, environment, evaluate, infer_info
from ensbridge.evaluation.fidelity import Fidelity
from ensbridge.evaluation.predict import predict
from ensbridge.evaluation.scores import Scores
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.named import ImageInput, NamedNetwork, input_of
from ensbridge.training.candidates import Say
from ensbridge.utils.devices import auto_device
from ensbridge.utils.files import opened_folder
from ensbridge.utils.progress import Stage, silent

ALL, TRAIN, VAL, TEST = "all", "train", "val", "test"


def compress_named(
    names: Sequence[str],
    data: str,
    out: Path | str,
    overrides: Overrides | None = None,
    *,
    val: str | None = None,
    test: str | None = None,
    root: Path | None = None,
    license: str | None = None,
    memory: str | float = MEMORY,
    say: Say = lambda _: None,
    writes: bool = True,
    **options: object,
) -> tuple[FastEnsemble, Fidelity | None]:
    """Compress members that are named, and save the model; `options` are those of `compress`.

    Images are where `data`, `val` and `test` say, each a known set's name or a path. Beside the model it
    returns what `fidelity` found on the test images, None without any. Of several processes that train
    together one `writes`.
    """
    if len(names) < 2:
        raise ValueError(f"{len(names)} member was named; give two or more, the source first")
    with opened_folder(out):  # which does not stay behind, empty, where a name is wrong
        check_target(out)
        check_origin(license)
        members = open_members(names, overrides)
        for member in members:
            say(f"{member.name}: {member.words}")
        check_source(members[0])
        source = members[0].net
        assert isinstance(source, NamedNetwork)
        train_part, val_part, test_part = _training_parts(data, val, test, root, members, say)
        nets = [member.net for member in members]
        fast = compress(
            nets,
            train_part.in_memory(parse_memory(memory)).data,
            None if val_part is None else val_part.data,
            memory=memory,
            **options,  # type: ignore[arg-type]
        )
        fast.class_names = _class_names(members, val_part or train_part, source.classes)
        if not writes:
            return fast, None
        fidelity = None if test_part is None else fast.fidelity(test_part.data, members=nets)
        fast.save(
            out,
            scores=fidelity,
            license=license or _licence(members),
            base_models=_base_models(members),
            dataset=_title(test or val or data),
        )
        return fast, fidelity


def fidelity_named(
    model: FastEnsemble,
    names: Sequence[str],
    data: str,
    root: Path | None = None,
    overrides: Overrides | None = None,
    device: torch.device | str = "cpu",
) -> Fidelity:
    """How near a saved model is to the ensemble of members that are named, on the test images of `data`."""
    members = open_members(names, overrides)
    parts = _opened(data, root, input_of(model.source), model.image_shape)
    part = _choose(parts, data, TEST).in_order_of(_known_names(members) or model.class_names)
    test = collect(part.data, "test").to(device)
    return model.to(device).fidelity(test, members=[member.net.to(device) for member in members])


def needs_names(models: Sequence[str], data: str) -> bool:
    """Whether what is to be measured is more than saved models on a set in its three parts."""
    others = any(name.startswith(("timm:", "torchvision:", "hf:")) or ".pt2" in name for name in models)
    path = Path(data)
    if others or data in DATASETS or not path.exists():
        return others
    if path.suffix == ".npz":
        return read_images(path) is not None
    return not path.is_dir() or (layout_of(path) is None and not (path / TRAIN).is_dir())


def evaluate_named(
    names: Sequence[str],
    data: str,
    root: Path | None = None,
    device: torch.device | str = "cpu",
    allow: Collection[str] = (),
) -> Scores:
    """The scores of classifiers that are named, and of saved models, on the test images of `data`.

    The first is what the others are compared with: its cost is the unit, and it is DE-1 of DEE. Images are
    brought to the size that it takes; the temperature of the calibrated NLL comes from validation images,
    where the set has some. Classes are numbered as the first one that knows their names has them.
    """
    members = [open_member(name, allow=allow) for name in names]
    first, takes, shape = members[0], members[0].takes, None
    if isinstance(first.net, FastEnsemble):
        takes, shape = input_of(first.net.source), first.net.image_shape
    class_names = _known_names(members)
    parts = _opened(data, root, takes, shape)
    test, val = _choose(parts, data, TEST).in_order_of(class_names), parts.get(VAL)
    if test.labels is None:
        raise ValueError(f"{data} has no labels, without which nothing is measured; give a set with labels")
    nets = {member.name: member.net.to(device) for member in members}
    images = collect(test.data, "test").to(device)
    if class_names is None:
        _check_count(test, predict(nets[first.name], images.first(1)).shape[1], first)
    held = None if val is None else collect(val.in_order_of(class_names).data, "val").to(device)
    reference = Ensemble([nets[first.name]])
    return evaluate(nets, images, held, reference=reference, dataset=_title(data))


def evaluate_saved(
    model: str,
    data: str,
    root: Path | str | None = None,
    progress: Stage = silent,
    device: str = "auto",
    allow: Collection[str] = (),
) -> Scores:
    """The scores of a saved model and of its source alone on the test images of a data set.

    `model` and `allow` are what `load` takes, `data` what `open_splits` does; temperatures of the calibrated
    NLL are fitted on validation images. Without other members, DEE only says whether one is beaten.
    """
    fast = load(model, allow=allow)
    Pixels.of(fast, None, None)  # refuses a model of pixels that are not from 0 to 1, as data sets are read
    splits = open_splits(data, root)
    _check_data(fast, splits, model, data)
    where = auto_device(device)
    fast, splits = fast.to(where), splits.to(where)
    source = Ensemble([fast.source])
    advance = progress("evaluate", 2 * (len(splits.test) + len(splits.val)), "images")
    evaluator = Evaluator(source, splits.test, splits.val, batch_size=500, advance=advance)
    rows = evaluator.measure({"DE-1": source, model: fast}, {model: infer_info(fast)})
    names = fast.class_names or tuple(map(str, range(evaluator.classes)))
    return Scores(data, 0, names, environment(where), rows, target=1)


def _check_data(fast: FastEnsemble, splits: Splits, model: str, data: str) -> None:
    """Refuse images of another shape, or of other classes, than the model's."""
    ours, theirs = fast.class_names, None
    if data in DATASETS:
        theirs = class_names(data)
    elif Path(data).is_dir():
        theirs = class_folders(data)
    if ours is not None and theirs and tuple(ours) != tuple(theirs):
        pairs = enumerate(zip(ours, theirs, strict=False))
        other = next((f"{label} is {a!r} there and {b!r} here" for label, (a, b) in pairs if a != b), None)
        which = other or f"there are {len(ours)} there and {len(theirs)} here"
        raise ValueError(
            f"{model} and {data} differ in their classes ({which}); give a set of the same classes"
        )
    shape = tuple(splits.test.images.shape[1:])
    if fast.image_shape is not None and tuple(fast.image_shape) != shape:
        raise ValueError(f"{model} takes images {fast.image_shape}, those of {data} are {shape}; give others")


def _opened(
    data: str,
    root: Path | None,
    takes: ImageInput | None,
    shape: Sequence[int] | None,
) -> dict[str, ImagePart]:
    """The parts of a set as images of a shape, or of what a network takes."""
    if shape is None and takes is not None:
        shape = (takes.channels, *takes.size)
    if shape is None:
        raise ValueError("the first model does not say what images it takes; put one first that does")
    parts = open_parts(data, partial(decode_image, shape=tuple(shape), takes=takes), root)
    return {name: _in_colour(part, shape[0]) for name, part in parts.items()}


def _choose(parts: dict[str, ImagePart], data: str, *wanted: str) -> ImagePart:
    """The first part of these that a set has, or all of a set that has none."""
    for name in (*wanted, ALL):
        if name in parts:
            return parts[name]
    if len(parts) == 1:
        return next(iter(parts.values()))
    raise ValueError(
        f"{data} has {', '.join(parts)} but no {' or '.join(wanted)}; give the path of one of them"
    )


def _training_parts(
    data: str,
    val_data: str | None,
    test_data: str | None,
    root: Path | None,
    members: Sequence[Member],
    say: Say,
) -> tuple[ImagePart, ImagePart | None, ImagePart | None]:
    """Images for training, for validation and for the test, where there are such."""
    names, source = _known_names(members), members[0].net
    assert isinstance(source, NamedNetwork)
    opened = partial(_opened, root=root, takes=source.takes, shape=None)
    parts = opened(data)
    train, val = _choose(parts, data, TRAIN).in_order_of(names), parts.get(VAL)
    _check_classes(train, source, names)
    if val_data is not None:
        val = _choose(opened(val_data), val_data, VAL, TEST)
    elif val is None and train.labels is not None:
        train, val = train.hold_out()
        say("there is no --val, so every tenth training image is held out for validation")
    test = None if test_data is None else _choose(opened(test_data), test_data, TEST, VAL)
    val, test = (None if part is None else part.in_order_of(names) for part in (val, test))
    if test is not None and test.labels is None:
        say(f"{test_data} has no labels, so that the verdict on it goes by the members' predictions")
    for part in (val, test):
        _check_classes(part, source, names)
    val, test = (None if part is None else part.shuffled() for part in (val, test))
    for name, part in (("train", train), ("val", val), ("test", test)):
        if part is not None:
            say(f"{name}: {len(part):,} images{'' if part.labels is not None else ' without labels'}")
    _check_size(train, source, say)
    return train, val, test


def _check_classes(part: ImagePart | None, source: NamedNetwork, names: Sequence[str] | None) -> None:
    """Refuse labels of which nobody knows what the members call them."""
    if part is None or part.labels is None or part.class_names is None:
        return
    if len(part.class_names) != source.classes and part.class_names != names:
        raise ValueError(
            f"the data has {len(part.class_names)} classes ({', '.join(part.class_names[:3])}, …), the "
            f"members {source.classes}; give data of the members' classes"
        )


def _check_count(part: ImagePart, outputs: int, first: Member) -> None:
    """Refuse more classes than a model has outputs, where no names tell which is which."""
    count = len(part.class_names) if part.class_names else max(part.labels or (0,)) + 1
    if count > outputs:
        raise ValueError(
            f"the data has {count} classes and {first.name} {outputs} outputs, which have no names; give "
            "data of the model's classes"
        )


def _check_size(part: ImagePart, source: NamedNetwork, say: Say) -> None:
    """Say it where images in memory are of another size than the source is known to take."""
    if isinstance(part.images, ImageSet):
        size = tuple(part.images.images.shape[-2:])
        if size != source.takes.size:
            given, taken = ("×".join(map(str, sides)) for sides in (size, source.takes.size))
            say(
                f"the images are {given} and {source.title} takes {taken}, to which they are resized; if it "
                f"was trained on {given}, give --size {size[0]}"
            )


def _in_colour(part: ImagePart, channels: int) -> ImagePart:
    """A part in memory whose grey images have the channels that are wanted."""
    if isinstance(part.images, ImageSet) and part.images.images.shape[1] == 1 and channels > 1:
        images = part.images.images.repeat(1, channels, 1, 1)
        return replace(part, images=ImageSet(images, part.images.labels))
    return part


def _known_names(members: Sequence[Member]) -> tuple[str, ...] | None:
    """The names of the classes by the first member that has them; no other may have them in another order."""
    known = [member for member in members if member.class_names]
    for member in known[1:]:
        names, others = (member.class_names or (), known[0].class_names or ())
        if names != others and sorted(names) == sorted(others):
            raise ValueError(
                f"{member.name} and {known[0].name} have the same classes in different orders; measure them "
                "one by one"
            )
    return known[0].class_names if known else None


def _class_names(members: Sequence[Member], part: ImagePart, classes: int) -> tuple[str, ...] | None:
    for names in (*(member.class_names for member in members), part.class_names):
        if names is not None and len(names) == classes:
            return tuple(names)
    return None


def _licence(members: Sequence[Member]) -> str | None:
    """The licence of all members, where it is known, the same, and one that a card can state."""
    licences = {member.license for member in members}
    licence = licences.pop() if len(licences) == 1 else None
    return licence if licence is not None and is_licence(licence) else None


def _base_models(members: Sequence[Member]) -> list[str]:
    """The members that are on the hub; a folder of this machine is not."""
    names = [(member.base_model or "").partition("@")[0] for member in members]
    return [name for name in names if is_hub_name(name) and not Path(name).is_dir()]


def _title(data: str) -> str:
    """A data set's name: of a path, its last parts without those that say which part it is."""
    parts = [part for part in Path(data).parts if part not in ("/", ".", "..")]
    while len(parts) > 1 and parts[-1] in ("train", "val", "validation", "test", "data"):
        parts.pop()
    return Path(parts[-1]).stem if parts else "images"
