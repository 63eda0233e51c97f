"""`compress`: the classifiers a user already has, in; one network and its bridges, out."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ensbridge.bridge.bridge import BridgeConfig
from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.data.augment import Augment
from ensbridge.data.loader import Data, ImageSet, collect
from ensbridge.evaluation.predict import predict_each
from ensbridge.methods.base import JointTraining
from ensbridge.methods.diffusion_bridge import DiffusionBridge
from ensbridge.metrics import fit_temperature, nll
from ensbridge.models.calibration import calibrated, fit_calibration
from ensbridge.models.ensemble import Ensemble, checked_members, member_groups, try_members
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.feature_choice import FeatureChoice, choose_feature
from ensbridge.models.features import find_module, read_logits
from ensbridge.models.preprocessed import Preprocess, with_preprocessing
from ensbridge.training.config import FitConfig, Precision, derive_seed
from ensbridge.training.fit import TimeBudgetExceeded, fit
from ensbridge.training.forecast import epochs_within
from ensbridge.utils.devices import brought_to, device_of, find_device, random_state_kept
from ensbridge.utils.files import read_json
from ensbridge.utils.progress import count_steps, progress_bars

Say = Callable[[str], None]

MINUTES = 1.5  # how long it trains unless the user says; with the rest, about two
TEMPERATURES = (2.0, 4.0)  # how far the source may be trusted; labelled validation images choose
SLACK = 1.1  # by how much training may take longer than that
EMA = 0.995
TRIED, MIN_TO_CALIBRATE = 8, 20  # images


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
    bridges: int = 1,
    max_minutes: float | None = None,
    epochs: float | None = None,
    batch_size: int = 128,
    lr: float = 2e-3,
    augment: Augment | None = None,
    calibrate: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "auto",
    seed: int = 0,
    run_dir: Path | str | None = None,
    quiet: bool = False,
) -> FastEnsemble:
    """Train bridges beside the first of several classifiers that carry its logits to where all of them are.

    `train` is images without need of labels; `val` with labels chooses how far the source is trusted and
    calibrates, by a temperature and, where that gains, a share of the source's logits. `feature` names the
    source's module that bridges read; unless given, the earliest is taken whose bridges keep the whole within
    `budget` times the source's MACs. `preprocess` has a function for each member that sees images in a way of
    its own, None for the others. `epochs`, or `max_minutes`, 1.5 unless given, says how long to train: a few
    steps are timed, and as many epochs taken as fit into the minutes. Should it be slower in the end,
    training is over a tenth later than that, with the model as trained so far. `augment` is what may be done
    to an image without changing its class, mixup aside. With `run_dir` the training resumes when the call is
    repeated, after a kill or when time was up: the epochs stay those of the first call, and each call trains
    for its minutes until they are done. It trains on a GPU where there is one, or on `device`, with bfloat16
    where that is as good, or in the `precision` that is asked for; afterwards all networks are where they
    were and in the mode that they were in, but for the first: it is part of what is returned, which is in
    evaluation mode. The global random state is left as it was.

    >>> nets = [nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)) for _ in range(3)]
    >>> images = torch.rand(64, 1, 4, 4)
    >>> fast = compress(nets, images, feature="1", budget=20, epochs=1, quiet=True)
    >>> fast(images[:5]).shape
    torch.Size([5, 3])
    """
    config = _checked_config(epochs, max_minutes, batch_size, lr, augment, precision, seed)
    if not isinstance(calibrate, bool):
        raise ValueError(f"calibrate is {calibrate!r}; give True or False")
    _check_numbers(budget=budget, bridges=bridges)
    budget, bridges = float(budget), int(bridges)
    say: Say = (lambda _: None) if quiet else (lambda text: print(f"ensbridge: {text}", file=sys.stderr))
    nets = checked_members(members, "compress")
    _check_source(nets[0], feature)
    groups = member_groups(len(nets), bridges)
    place, home = _training_device(nets, device), device_of(nets[0])
    wrapped = _preprocessed(nets, preprocess)
    if feature is not None and wrapped[0] is not nets[0]:
        feature = f"net.{feature}"
    train_set = collect(train, "train").without_labels()
    val_set = None if val is None else collect(val, "val")
    with brought_to(place, wrapped):  # with what prepares their images
        train_set, val_set = train_set.to(place), None if val_set is None else val_set.to(place)
        ensemble = Ensemble(wrapped).eval()
        image = train_set.batch(torch.zeros(1, dtype=torch.long, device=place))[0]
        try_members(ensemble, next(train_set.batches(TRIED))[0])
        _try_validation(ensemble.source, train_set, val_set)
        site = choose_feature(ensemble.source, image, feature, budget, bridges)
        say(site.words)
        labelled = val_set is not None and val_set.labels is not None
        options = TEMPERATURES if labelled else TEMPERATURES[:1]
        methods = {
            f"T{base:g}-{number}": _bridge(ensemble, site, group, base, derive_seed(seed, "score", number))
            for base in options
            for number, group in enumerate(groups)
        }
        config = replace(config, batch_size=min(config.batch_size, len(train_set)))
        minutes = None if epochs is not None else max_minutes or MINUTES
        _train(methods, train_set, config, minutes, run_dir, quiet, say)
        found = [
            FastEnsemble.of(*(methods[f"T{base:g}-{number}"] for number in range(len(groups))))
            for base in options
        ]
        fast = _selected(found, options, val_set, calibrate, say).to(home)
    fast.image_shape = tuple(image.shape[1:])
    fast.pixel_range = _pixel_range(train_set)
    return fast.eval()


def _checked_config(
    epochs: float | None,
    max_minutes: float | None,
    batch_size: int,
    lr: float,
    augment: Augment | None,
    precision: Precision,
    seed: int,
) -> FitConfig:
    """How to train, with one epoch where minutes are to decide."""
    lengths = {"epochs": epochs, "max_minutes": max_minutes}
    _check_numbers(**{name: value for name, value in lengths.items() if value is not None})
    _check_numbers(batch_size=batch_size, lr=lr)
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"seed is {seed!r}; it must be a whole number, 0 or above")
    if epochs is not None and max_minutes is not None:
        raise ValueError("epochs and max_minutes were both given; give one, since each decides the length")
    if augment is not None and not isinstance(augment, Augment):
        raise ValueError(f"augment is a {type(augment).__name__}; give an ensbridge.data.Augment")
    mixed = replace(augment or Augment(), mixup=0.4)
    length = 1.0 if epochs is None else float(epochs)
    return FitConfig(length, int(batch_size), float(lr), augment=mixed, seed=int(seed), precision=precision)


def _check_numbers(**numbers: Any) -> None:
    """Refuse what is no number, or too small a one.

    >>> _check_numbers(bridges="2")
    Traceback (most recent call last):
    ValueError: bridges is '2'; it must be a whole number above 0
    """
    for name, value in numbers.items():
        least, whole = int(name == "budget"), name in ("bridges", "batch_size")
        known = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        if not least < (float(value) if known else math.nan) < math.inf:
            kind = "whole" if whole else "finite"
            raise ValueError(f"{name} is {value!r}; it must be a {kind} number above {least}")


def _check_source(source: nn.Module, feature: str | None) -> None:
    """Refuse a feature that is not there, and scripted modules, whose outputs cannot be read."""
    read = source.modules() if feature is None else (source, find_module(source, feature))
    if any(isinstance(module, torch.jit.ScriptModule) for module in read):
        raise ValueError(
            "the first member is scripted by torch.jit, so that bridges cannot read its features; give the "
            "network that was scripted, or put another member first"
        )


def _preprocessed(
    nets: Sequence[nn.Module], preprocess: Sequence[Preprocess | None] | None
) -> list[nn.Module]:
    """The members behind their preprocessing, which is a list of functions."""
    if callable(preprocess):
        raise ValueError("preprocess is one function; give a list, with a function or None for each member")
    wrapped = with_preprocessing(nets, preprocess)
    for number, own in enumerate(preprocess or (), 1):
        if own is not None and not callable(own):
            raise ValueError(
                f"preprocess has {own!r} for member {number}; give a function of images, or None"
            )
    return wrapped


def _try_validation(source: nn.Module, train: ImageSet, val: ImageSet | None) -> None:
    """Refuse validation images that are not like those for training, and labels of no class, now."""
    if val is None:
        return
    if val.images.shape[1:] != train.images.shape[1:]:
        shapes = [tuple(each.images.shape[1:]) for each in (val, train)]
        raise ValueError(f"val has images of shape {shapes[0]}, train of {shapes[1]}; give them alike")
    (low, high), (least, most) = _pixel_range(train), _pixel_range(val)
    if not 0.02 <= (most - least + 1e-6) / (high - low + 1e-6) <= 50:  # such as 0 to 255 beside 0 to 1
        ranges = f"val has pixels from {least:.3g} to {most:.3g}, train from {low:.3g} to {high:.3g}"
        raise ValueError(f"{ranges}; give them alike")
    if val.labels is not None:
        image = val.batch(torch.zeros(1, dtype=torch.long, device=val.images.device))[0]
        with torch.no_grad():
            classes = read_logits(source(image)).shape[-1]
        low, high = int(val.labels.min()), int(val.labels.max())
        if low < 0 or high >= classes:
            raise ValueError(f"val has labels from {low} to {high}; the members' are 0 to {classes - 1}")


def _training_device(nets: Sequence[nn.Module], device: torch.device | str | None) -> torch.device:
    """The device that is asked for, or a GPU, or else where the first of the networks is."""
    for number, net in enumerate(nets, 1):
        if any(weight.is_meta for weight in (*net.parameters(), *net.buffers())):
            raise ValueError(
                f"member {number} has weights on the device 'meta', which hold no values; load them first"
            )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else device_of(nets[0])
    return find_device(device)


def _pixel_range(data: ImageSet) -> tuple[float, float]:
    """The smallest and the largest pixel, as the networks see them."""
    low, high = data.images.aminmax()
    scale = 255 if data.images.dtype == torch.uint8 else 1
    return float(low) / scale, float(high) / scale


def _epochs_begun(run_dir: Path | str | None) -> float | None:
    """The length of a run that was begun in a folder, so that it can resume; None where there is none."""
    config = None if run_dir is None else Path(run_dir) / "config.json"
    if config is None or not config.exists():
        return None
    try:
        return float(read_json(config)["fit"]["epochs"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{config} is not of a run of compress; choose another folder") from error


def _bridge(
    ensemble: Ensemble, site: FeatureChoice, group: tuple[int, ...], base: float, seed: int
) -> DiffusionBridge:
    """An untrained bridge towards a group of members, whose weights depend on the seed alone."""
    score = copy.deepcopy(site.score)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in score.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
    config = BridgeConfig(temperature=TemperatureLaw(base=base), ema=EMA)
    score = score.to(device_of(ensemble.source))
    return DiffusionBridge(ensemble, score, site.feature, loss="kl", target=group, config=config)


def _train(
    methods: Mapping[str, DiffusionBridge],
    data: ImageSet,
    config: FitConfig,
    minutes: float | None,
    run_dir: Path | str | None,
    quiet: bool,
    say: Say,
) -> None:
    """Train bridges; where there are `minutes`, these decide the epochs and how long it may take at most."""
    deadline = None
    if minutes is not None:
        begun = _epochs_begun(run_dir)
        config = replace(config, epochs=begun or epochs_within(minutes, methods, data, config))
        length = f"{config.epochs:g} epochs on the {data.images.device}"
        allowed = f"{minutes:g} minute{'' if minutes == 1 else 's'}"
        if begun is None:
            say(f"training for {length}, about {allowed}")
        else:
            say(f"resuming a training of {length}, for {allowed} at most")
        deadline = time.monotonic() + 60 * SLACK * minutes
    with progress_bars(quiet) as bars:
        progress = count_steps(bars.stage("bridges", config.total_steps(len(data))))
        try:
            fit(JointTraining(methods), data, config, run_dir, progress, deadline=deadline)
        except TimeBudgetExceeded as late:
            remedy = "give more max_minutes" if run_dir is None else "repeat the call to resume"
            say(f"time is up and {late}, so that the model is as trained so far; {remedy}")


def _selected(
    found: Sequence[FastEnsemble],
    temperatures: Sequence[float],
    val: ImageSet | None,
    calibrate: bool,
    say: Say,
) -> FastEnsemble:
    """The best on labelled validation images, calibrated there; the first where there are none."""
    if val is None or val.labels is None:
        say("there are no labelled validation images, so nothing was chosen or calibrated on any")
        return found[0]
    several: dict[str, nn.Module] = {str(number): fast for number, fast in enumerate(found)}
    *log_probs, source = predict_each({**several, "source": found[0].source}, val).values()
    losses = [nll(each, val.labels) for each in log_probs]
    best = min(range(len(found)), key=losses.__getitem__)
    fast = found[best]
    tried = ", ".join(f"{t:g} (NLL {loss:.4f})" for t, loss in zip(temperatures, losses, strict=True))
    say(f"validation chose T = {temperatures[best]:g} of {tried}")
    fitted = fit_temperature(log_probs[best], val.labels)
    if calibrate and (len(val) < MIN_TO_CALIBRATE or not 0.02 < fitted < 50):
        say(f"not calibrated: {len(val)} validation images gave a temperature of {fitted:.3g}; give more")
    elif calibrate:
        fast.temperature, fast.source_logit_weight = fit_calibration(log_probs[best], source, val.labels)
        own = calibrated(log_probs[best], source, fast.temperature, fast.source_logit_weight)
        after = nll(own.log_softmax(-1), val.labels)
        share = (
            f" and {fast.source_logit_weight:+.3f} of the source's logits" if fast.source_logit_weight else ""
        )
        change = f"validation NLL {losses[best]:.4f} before, {after:.4f} after"
        say(f"calibrated by a temperature of {fast.temperature:.3f}{share}: {change}")
    return fast
