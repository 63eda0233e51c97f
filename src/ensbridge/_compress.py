"""`compress`: the classifiers a user already has, in; the best one network for a cost, out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from ensbridge.data.augment import Augment
from ensbridge.data.examples import ExampleSet, ImageSet
from ensbridge.data.loader import Data
from ensbridge.data.stream import MEMORY, Stream, collect_within, load_or_stream, parse_memory
from ensbridge.evaluation.choices import choose
from ensbridge.methods.base import check_label_weight
from ensbridge.models.ensemble import Ensemble, checked_members, try_members
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.feature_choice import FeatureChoice, NoBridgeFits, choose_feature
from ensbridge.models.preprocessed import Preprocess, with_preprocessing
from ensbridge.training.candidates import (
    DISTIL_LR,
    FRESH_LR,
    CandidateTraining,
    Say,
    Source,
    distil_config,
)
from ensbridge.training.compress_inputs import (
    check_numbers,
    check_source,
    checked_config,
    copy_of,
    pixel_range,
    student_of,
    training_device,
    try_labels,
    try_validation,
)
from ensbridge.training.config import FitConfig, Precision
from ensbridge.training.distributed import errors_shared, join
from ensbridge.training.output_cache import check_fixed_views, length_of
from ensbridge.utils.devices import brought_to, device_of, random_state_kept
from ensbridge.utils.input_specs import specs_of
from ensbridge.utils.inputs import Inputs, as_floats, map_inputs

MINUTES = 3.0  # how long it trains unless the user says
TRIED = 8  # images


@errors_shared()
@random_state_kept()
@torch.inference_mode(False)
@torch.enable_grad()
def compress(
    members: Iterable[nn.Module] | Ensemble,
    train: Data | Stream,
    val: Data | Stream | None = None,
    *,
    feature: str | None = None,
    preprocess: Sequence[Preprocess | None] | None = None,
    budget: float = 1.2,
    source: Source = "auto",
    factory: Callable[[], nn.Module] | None = None,
    bridges: int = 1,
    max_minutes: float | None = None,
    epochs: float | None = None,
    batch_size: int = 128,
    lr: float = 2e-3,
    distil_lr: float | None = None,
    augment: Augment | None = None,
    label_weight: float = 0.0,
    calibrate: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "auto",
    seed: int = 0,
    run_dir: Path | str | None = None,
    memory: str | float = MEMORY,
    cache: Path | str | None = None,
    quiet: bool = False,
) -> FastEnsemble:
    """Compress classifiers into the best single network for `budget` times the cost of the first of them.

    The first network is the source; bridges beside it carry its logits to where all of them are. With
    `source="frozen"` the source is that network as it is, with "distilled" a copy of it, or a new network of
    the same architecture that `factory` builds, which is distilled towards the members' mean prediction while
    its bridges are trained. "auto" trains both side by side on the same batches, and keeps the one of them,
    of the source alone and of the distilled source alone that has the lowest NLL on labelled validation
    images; `choices` of the result has the figures. `budget=1.0` leaves no room for bridges. Where no bridge
    fits, or the source cannot be distilled, "auto" says so and does without. Your networks are never changed.

    Inputs need not be images. They are a tensor, such as rows of a table (N, D), or a tuple or mapping of
    tensors, such as tokens and their mask: networks and the result are called as `net(x)`, `net(*batch)` or
    `net(**batch)`, labels aside. Several processes that torchrun started train one model together, and each
    returns it.

    Args:
        members: The classifiers, the source first.
        train: What to train on; labels are needed for `label_weight` alone. A DataLoader, a Dataset or
            another iterable that can be read again is kept in memory where its size is known and fits into
            `memory` and its images are the same at every reading; otherwise it is streamed, an epoch being
            one pass, with its augmentation.
        val: Validation data. With labels it chooses among the candidates and how far the source is trusted,
            and calibrates the result. As much of it is read as fits into `memory`.
        feature: The module of the source whose output bridges read. By default the earliest one whose
            bridges keep the whole within `budget`.
        preprocess: A function for each member that sees images in a way of its own, None for the others.
        budget: What the result may cost, as a multiple of the source's MACs.
        source: "auto", "frozen" or "distilled", as above.
        factory: Builds a new network of the source's architecture, which is distilled in place of a copy.
        bridges: How many bridges share the budget.
        max_minutes: How long to train everything, 3 unless `epochs` is given: a few steps are timed, and as
            many epochs taken as fit. Where it turns out slower, training ends a tenth later than that, with
            the model as trained so far.
        epochs: Passes over `train`, in place of `max_minutes`.
        batch_size: Images per step, of all processes together.
        lr: Learning rate of the bridges (Adam).
        distil_lr: Learning rate of the distillation (Muon); by default 0.05, less in proportion in a
            training of fewer than 600 steps, or 0.1 with `factory`.
        augment: What may be done to an image without changing its class, in addition to mixup.
        label_weight: The weight w of the labels of `train`, from 0 to 1: every loss is (1 - w) times the KL
            from the members plus w times the cross-entropy with the labels. A mixed image has the labels of
            both its images. With 0.5 or so the result can be more accurate than the members, and is not as
            near to them.
        calibrate: Whether to fit a temperature and, where that gains, a multiple of the source's logits to
            add, on labelled `val`.
        device: Where to train; by default a GPU if there is one. Networks return to where they were.
        precision: Of training; by default bfloat16 on a GPU where that is as good, float32 otherwise.
        seed: Of all random draws; the global random state is left as it was.
        run_dir: A folder for checkpoints. The same call resumes there, after a kill or when time was up: the
            epochs stay those of the first call, and each call trains for its minutes until they are done.
        memory: Bytes of data that are kept in memory at most.
        cache: A folder for the members' outputs, which are then computed once and read in training; images
            are seen as they are, without mixup.
        quiet: Print nothing.

    Returns:
        The model, in evaluation mode. It has a copy of the first network, so that changing one leaves the
        other as it is.

    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)) for _ in range(3)]
    >>> images = torch.rand(64, 1, 4, 4)
    >>> fast = compress(nets, images, feature="1", budget=20, epochs=1, quiet=True)
    >>> fast(images[:5]).shape
    torch.Size([5, 3])
    >>> compress(nets, images, budget=1.0, source="distilled", epochs=1, quiet=True).bridges
    ModuleList()
    """
    config = checked_config(epochs, max_minutes, batch_size, lr, augment, precision, seed)
    parse_memory(memory)
    _check_choices(source, factory, calibrate)
    check_numbers(budget=budget, bridges=bridges)
    budget, bridges = float(budget), int(bridges)
    rate = distil_lr if distil_lr is not None else DISTIL_LR if factory is None else FRESH_LR
    check_numbers(distil_lr=rate)
    engine = join()
    quiet = quiet or (engine is not None and not engine.first)
    say: Say = (lambda _: None) if quiet else (lambda text: print(f"ensbridge: {text}", file=sys.stderr))
    nets = checked_members(members, "compress")
    check_source(nets[0], feature)
    device, home = training_device(nets, device), device_of(nets[0])
    device = engine.start(device) if engine else device
    wrapped = with_preprocessing(nets, preprocess)
    if feature is not None and wrapped[0] is not nets[0]:
        feature = f"net.{feature}"
    label_weight = check_label_weight(label_weight)
    train_set = load_or_stream(train, memory, "train", say, labelled=label_weight > 0)
    if not isinstance(train_set, Stream):
        train_set = train_set if label_weight else train_set.without_labels()
    elif engine:
        train_set = engine.with_length(train_set)
    length = length_of(train_set)
    config = replace(config, batch_size=min(config.batch_size, length or config.batch_size))
    val_set = None if val is None else collect_within(val, memory, "val", say)
    if cache is not None:
        config = _without_views(config, train_set, augment, engine, say)
    labelled = val_set is not None and val_set.labels is not None
    with brought_to(device, wrapped):  # with what prepares their images
        train_set, val_set = train_set.to(device), None if val_set is None else val_set.to(device)
        ensemble = Ensemble(wrapped).eval()
        sample = train_set.sample(config.batch_size) if isinstance(train_set, Stream) else train_set
        image = next(sample.batches(1))[0]
        try_members(ensemble, next(sample.batches(TRIED))[0])
        try_validation(ensemble.source, sample, val_set)
        if label_weight:
            if sample.labels is None:
                raise ValueError(
                    "label_weight was given and train has no labels; give (images, labels), or leave it out"
                )
            try_labels(ensemble.source, sample, sample.labels, "train")
        plan = None
        if budget > 1:
            optional = source == "auto" and feature is None
            plan = _plan_bridges(ensemble.source, image, feature, budget, bridges, optional, say)
        if source == "auto" and not labelled:
            source = "distilled" if plan is None else "frozen"
            say(f"there are no labelled validation images to choose by, so source={source!r} is taken")

        def student() -> nn.Module:
            own = None if preprocess is None else preprocess[0]
            return student_of(wrapped[0], factory, own, int(seed), device)

        training = CandidateTraining(
            ensemble,
            train_set,
            plan,
            bridges,
            config,
            distil_config(config, float(rate)),
            lower_rate=distil_lr is None and factory is None,
            minutes=None if epochs is not None else max_minutes or MINUTES,
            run_dir=None if run_dir is None else Path(run_dir),
            seed=int(seed),
            labelled=labelled,
            label_weight=label_weight,
            quiet=quiet,
            say=say,
            cache=None if cache is None else Path(cache),
            engine=engine,
        )
        candidates = training.run(source, student)
        if source == "distilled":
            candidates = candidates[-1:]  # with bridges, where there are some
        fast = choose(candidates, val_set, calibrate, say, engine)
        if fast.source is ensemble.source:
            fast.source = copy_of(fast.source, say)
        fast = fast.to(home)
        if isinstance(image, torch.Tensor) and image.is_floating_point():
            fast.image_shape = tuple(image.shape[1:])
        else:
            specs = specs_of(map_inputs(as_floats, sample.inputs))
            fast.input_specs = engine.broadcast(lambda: specs) if engine else specs
        if isinstance(sample, ImageSet):
            low_high = pixel_range(sample)
            fast.pixel_range = engine.broadcast(lambda: low_high) if engine else low_high
    return fast.eval()


def _plan_bridges(
    source: nn.Module,
    image: Inputs,
    feature: str | None,
    budget: float,
    bridges: int,
    optional: bool,
    say: Say,
) -> FeatureChoice | None:
    """What bridges read; None where none fits and they are `optional`."""
    try:
        choice = choose_feature(source, image, feature, budget, bridges)
    except NoBridgeFits as error:
        if not optional:
            raise
        say(f"{error.reason}, so that there is no bridge among the choices")
        return None
    say(choice.summary)
    return choice


def _without_views(
    config: FitConfig, train: ExampleSet | Stream, augment: Augment | None, engine: object, say: Say
) -> FitConfig:
    """The configuration for images that are seen as they are, which alone can have outputs kept for them."""
    if engine is not None:
        raise ValueError("cache= was given to several processes; fill it with one, or leave it out")
    check_fixed_views(train, augment or Augment())
    say("the members' outputs are cached, so images are seen as they are, without mixup")
    return replace(config, augment=Augment())


def _check_choices(source: str, factory: object, calibrate: object) -> None:
    if source not in get_args(Source):
        raise ValueError(f"source is {source!r}; it must be 'frozen', 'distilled' or 'auto'")
    if factory is not None and (isinstance(factory, nn.Module) or not callable(factory)):
        raise ValueError(f"factory is a {type(factory).__name__}; give a function that builds a network")
    if factory is not None and source == "frozen":
        raise ValueError(
            "factory was given and source is 'frozen', which trains no network anew; leave one out"
        )
    if not isinstance(calibrate, bool):
        raise ValueError(f"calibrate is {calibrate!r}; give True or False")
