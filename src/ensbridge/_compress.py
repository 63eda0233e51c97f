"""`compress`: the classifiers a user already has, in; the best one network for a cost, out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn

from ensbridge.data.augment import Augment
from ensbridge.data.loader import Data, collect
from ensbridge.evaluation.choices import Candidate, choose
from ensbridge.models.ensemble import Ensemble, checked_members, member_groups, try_members
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.feature_choice import choose_feature
from ensbridge.models.preprocessed import Preprocess
from ensbridge.training.compress_inputs import (
    check_numbers,
    check_source,
    checked_config,
    pixel_range,
    preprocessed,
    student_of,
    training_device,
    try_validation,
)
from ensbridge.training.config import Precision
from ensbridge.training.phases import DISTIL_SHARE, BridgePlan, Phases, Say
from ensbridge.utils.devices import brought_to, device_of, random_state_kept

Source = Literal["frozen", "distilled", "auto"]

MINUTES = 1.5  # how long it trains unless the user says; with the rest, about two
# How far the source may be trusted, a member or distilled; labelled validation images choose.
TEMPERATURES, DISTILLED_TEMPERATURES = (2.0, 4.0), (2.0, 1.0, 1.5, 3.0)
DISTIL_LR, FRESH_LR = 0.05, 0.1  # from the source's weights, and from new ones
WEIGHT_DECAY = 5e-4  # of the distillation
TRIED = 8  # images


@random_state_kept()
@torch.inference_mode(False)
@torch.enable_grad()
def compress(
    members: Iterable[nn.Module] | Ensemble,
    train: Data,
    val: Data | None = None,
    *,
    feature: str | None = None,
    preprocess: Sequence[Preprocess | None] | None = None,
    budget: float = 1.2,
    source: Source = "frozen",
    factory: Callable[[], nn.Module] | None = None,
    bridges: int = 1,
    max_minutes: float | None = None,
    epochs: float | None = None,
    batch_size: int = 128,
    lr: float = 2e-3,
    distil_lr: float | None = None,
    augment: Augment | None = None,
    calibrate: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "auto",
    seed: int = 0,
    run_dir: Path | str | None = None,
    quiet: bool = False,
) -> FastEnsemble:
    """The best one network that several classifiers give for `budget` times the cost of the first of them.

    With `source="frozen"` that is the first network, the source, as it is, and bridges beside it that carry
    its logits to where all of them are. With "distilled" the source is a copy of it, first distilled towards
    the members' mean prediction, for half of the training; or a new network that `factory` builds, of the
    same architecture. "auto" tries the source alone, both kinds of bridges and the distilled source alone,
    each trained for the given epochs, which takes two runs of such a length, and keeps what has the lowest
    NLL on labelled validation images; `choices` of the result has the figures. `budget=1.0` leaves no room
    for bridges. Your networks are never changed.

    `train` is images without need of labels; `val` with labels chooses how far the source is trusted and
    calibrates, by a temperature and, where that gains, a share of the source's logits. `feature` names the
    source's module that bridges read; unless given, the earliest is taken whose bridges keep the whole within
    `budget` times the source's MACs. `preprocess` has a function for each member that sees images in a way of
    its own, None for the others. `epochs`, or `max_minutes`, 1.5 unless given, says how long to train: a few
    steps are timed, and as many epochs taken as fit into the minutes, which are for all that is trained.
    Should it be slower in the end, training is over a tenth later than that, with the model as trained so
    far. `lr` is the bridges' rate, of Adam, `distil_lr` the distillation's, of SGD: 0.05, or 0.1 with
    `factory`. `augment` is what may be done to an image without changing its class, mixup aside. With
    `run_dir` the training resumes when the call is repeated, after a kill or when time was up: the epochs
    stay those of the first call, and each call trains for its minutes until they are done. It trains on a GPU
    where there is one, or on `device`, with bfloat16 where that is as good, or in the `precision` that is
    asked for; afterwards all networks are where they were and in the mode that they were in, but for a first
    one that is part of what is returned, which is in evaluation mode. The global random state is left as it
    was.

    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)) for _ in range(3)]
    >>> images = torch.rand(64, 1, 4, 4)
    >>> fast = compress(nets, images, feature="1", budget=20, epochs=1, quiet=True)
    >>> fast(images[:5]).shape
    torch.Size([5, 3])
    >>> compress(nets, images, budget=1.0, source="distilled", epochs=1, quiet=True).bridges
    ModuleList()
    """
    config = checked_config(epochs, max_minutes, batch_size, lr, augment, precision, seed)
    _check_choices(source, factory, calibrate)
    check_numbers(budget=budget, bridges=bridges)
    budget, bridges = float(budget), int(bridges)
    rate = distil_lr if distil_lr is not None else DISTIL_LR if factory is None else FRESH_LR
    check_numbers(distil_lr=rate)
    say: Say = (lambda _: None) if quiet else (lambda text: print(f"ensbridge: {text}", file=sys.stderr))
    nets = checked_members(members, "compress")
    check_source(nets[0], feature)
    groups = member_groups(len(nets), bridges)
    place, home = training_device(nets, device), device_of(nets[0])
    wrapped = preprocessed(nets, preprocess)
    if feature is not None and wrapped[0] is not nets[0]:
        feature = f"net.{feature}"
    train_set = collect(train, "train").without_labels()
    val_set = None if val is None else collect(val, "val")
    labelled = val_set is not None and val_set.labels is not None
    if source == "auto" and not labelled:
        raise ValueError(
            "source is 'auto', and val has no labels to choose by; give some, or source='distilled'"
        )
    with brought_to(place, wrapped):  # with what prepares their images
        train_set, val_set = train_set.to(place), None if val_set is None else val_set.to(place)
        ensemble = Ensemble(wrapped).eval()
        image = train_set.batch(torch.zeros(1, dtype=torch.long, device=place))[0]
        try_members(ensemble, next(train_set.batches(TRIED))[0])
        try_validation(ensemble.source, train_set, val_set)
        plan = None
        if budget > 1:
            plan = BridgePlan(choose_feature(ensemble.source, image, feature, budget, bridges), groups)
            say(plan.site.words)
        config = replace(config, batch_size=min(config.batch_size, len(train_set)))
        distil = replace(config, lr=float(rate), optimizer="sgd", weight_decay=WEIGHT_DECAY)
        minutes = None if epochs is not None else max_minutes or MINUTES
        folder = None if run_dir is None else Path(run_dir)
        phases = Phases(ensemble, train_set, config, distil, minutes, folder, int(seed), quiet, say)

        def student() -> nn.Module:
            own = None if preprocess is None else preprocess[0]
            return student_of(wrapped[0], factory, own, int(seed), place)

        candidates = _candidates(source, phases, plan, student, labelled)
        fast = choose(candidates, val_set, calibrate, say).to(home)
    fast.image_shape = tuple(image.shape[1:])
    fast.pixel_range = pixel_range(train_set)
    return fast.eval()


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


def _candidates(
    source: Source,
    phases: Phases,
    plan: BridgePlan | None,
    student: Callable[[], nn.Module],
    labelled: bool,
) -> list[Candidate]:
    """Train what was asked for; with "auto" everything that there is within the budget."""
    temperatures = TEMPERATURES if labelled else TEMPERATURES[:1]
    if source == "frozen":
        alone = FastEnsemble(phases.ensemble.source)
        return [Candidate("frozen", [alone] if plan is None else phases.bridges(plan, temperatures))]
    if source == "distilled":
        if plan is None:
            return [Candidate("distilled", [phases.distilled(student())])]
        return [_distilled_and_bridged(phases, plan, student(), labelled)]
    tried = [Candidate("source", [FastEnsemble(phases.ensemble.source)])]
    if plan is None:
        return [*tried, Candidate("distilled", [phases.distilled(student())])]
    half = phases.within(0.5)
    bridged, distilled = half.bridges_and_distilled(plan, temperatures, student())
    tried += [Candidate("source + bridges", bridged), Candidate("distilled", [distilled])]
    return [*tried, _distilled_and_bridged(half, plan, student(), labelled)]


def _distilled_and_bridged(phases: Phases, plan: BridgePlan, student: nn.Module, labelled: bool) -> Candidate:
    """Bridges beside a distilled source, trained one after the other for as long as one of them alone."""
    first, then = phases.split(DISTIL_SHARE)
    network = first.distilled(student).source
    temperatures = DISTILLED_TEMPERATURES if labelled else DISTILLED_TEMPERATURES[:1]
    return Candidate("distilled + bridges", then.bridges_beside(network, plan, temperatures))
