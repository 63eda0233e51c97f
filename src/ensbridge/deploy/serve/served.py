"""A loaded model and what it needs to be served, and all models of a server by name."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ensbridge.bridge.bridge import Bridge
from ensbridge.bridge.sampler import Features
from ensbridge.deploy.batch import MODES, Pixels, class_names_of
from ensbridge.deploy.export import cannot_take, image_like
from ensbridge.deploy.members import WEIGHTS, Overrides, open_member
from ensbridge.deploy.saving import load
from ensbridge.deploy.saving.folder import CARD, find_model
from ensbridge.deploy.serve.backends import Backend, Run, build_backend, check_backend, is_random
from ensbridge.deploy.serve.batching import Batcher, Outputs, Worker
from ensbridge.deploy.serve.limits import Limits, Refused
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble, call_bridge
from ensbridge.models.named import NamedNetwork
from ensbridge.models.stored_network import load_weights
from ensbridge.utils.files import MOST_JSON, read_file

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class ModelSpec:
    """Which model a server has under a name, and the members of the true ensemble, where they are shown."""

    name: str
    path: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """How models are loaded and run, the same for all of a server."""

    backend: Backend = "eager"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    limits: Limits = field(default_factory=Limits)
    image_shape: tuple[int, ...] | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    allow: Collection[str] = ()


class ServedModel:
    """A model in its backend, with the queues before it. Built outside of the event loop, used inside."""

    def __init__(
        self, spec: ModelSpec, settings: Settings, worker: Worker, observe: Callable[[str, int], None]
    ) -> None:
        check_backend(settings.backend, settings.device)
        self.name, self.settings = spec.name, settings
        fast = load(spec.path, allow=settings.allow)
        example = image_like(fast, spec.path, settings.image_shape).to(settings.device)
        self.fast = fast.to(settings.device).requires_grad_(False)
        self.shape, self.dtype = tuple(example.shape[1:]), example.dtype
        self.classes = _classes(self.fast, example)
        self.class_names = class_names_of(fast, self.classes)
        self.pixels = Pixels.of(fast, settings.mean, settings.std)
        self.takes_files = len(self.shape) == 3 and self.shape[0] in MODES
        if self.takes_files:
            self.pixels(example)  # a mean or std of another number of channels is refused now
        card = find_model(spec.path) / CARD
        self.card = read_file(card, MOST_JSON).decode(errors="replace") if card.is_file() else ""
        self.members = _members(spec, self.fast, example, self.classes, settings)
        self._run_backend: Run = build_backend(settings.backend, self.fast, example, settings.limits.batch)
        nets = {"source": self.fast.source, "model": self.fast}
        if self.members is not None:
            nets["ensemble"] = self.members
        # What one image costs: multiply-accumulates and parameters.
        self.costs = {name: (count_macs(net, example), count_params(net)) for name, net in nets.items()}
        queue = partial(
            Batcher,
            worker=worker,
            limits=settings.limits,
            merge=not is_random(self.fast),
            observe=partial(observe, self.name),
        )
        self.predict, self.explain = queue(self._predict), queue(self._explain)

    @property
    def waiting(self) -> int:
        """Images in the model's queues."""
        return self.predict.waiting + self.explain.waiting

    async def drain(self) -> None:
        """Answer what was accepted, then end."""
        await asyncio.gather(self.predict.drain(), self.explain.drain())

    def _predict(self, images: Tensor) -> Outputs:
        both = self._run_backend(images.to(self.settings.device)).cpu()
        return {"logits": both[:, : self.classes], "source_logits": both[:, self.classes :]}

    @torch.inference_mode()
    def _explain(self, images: Tensor) -> Outputs:
        """In eager torch: also the states along each bridge, (B, states, K), and the ensemble's logits."""
        images = images.to(self.settings.device)
        paths: dict[str, Tensor] = {}

        def call(bridge: nn.Module, h: Features, source_logits: Tensor) -> Tensor:
            if not isinstance(bridge, Bridge):
                return call_bridge(bridge, h, source_logits)
            states = bridge.path(h, source_logits)
            paths[f"path{len(paths)}"] = torch.stack(states, 1)
            return states[-1]

        logits, source_logits = self.fast.with_source(images, call=call)
        outputs = {"logits": logits, "source_logits": source_logits, **paths}
        if self.members is not None:
            outputs["ensemble_logits"] = self.members(images)
        return {name: rows.cpu() for name, rows in outputs.items()}

    def path_times(self) -> list[list[float]]:
        """The times of each path of `explain`, from 1 down to 0."""
        return [list(bridge.times[::-1]) for bridge in self.fast.each_bridge() if isinstance(bridge, Bridge)]


def parse_specs(models: Sequence[str], members: Sequence[str] = ()) -> list[ModelSpec]:
    """Models as they are typed, `path` or `name=path`, each with the members that are given to its name.

    >>> parse_specs(["zoo:cifar10", "b=other/model"], ["b=weights.safetensors"])[1]
    ModelSpec(name='b', path='other/model', members=('weights.safetensors',))
    """
    if not models:
        raise ValueError("no model was given; give a folder that FastEnsemble.save wrote, or zoo:cifar10")
    paths: dict[str, str] = {}
    for text in models:
        name, path = _split(text)
        name = (
            name or re.split(r"[:/\\]", path.rstrip("/\\").partition("@")[0])[-1] or Path(path).resolve().name
        )
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is no name for a model; give one of letters, digits, '.', '_' and '-', as in "
                f"name={path}"
            )
        if name in paths:
            raise ValueError(f"two models are called {name!r}; give one another name, as in name={path}")
        paths[name] = path
    given: dict[str, list[str]] = {name: [] for name in paths}
    for text in members:
        name, path = _split(text)
        if name and name not in paths:
            raise ValueError(f"--members {text} is for {name!r}; the models are {', '.join(paths)}")
        given[name or next(iter(paths))].append(path)
    return [ModelSpec(name, path, tuple(given[name])) for name, path in paths.items()]


def _split(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    # Another "=" is in a path, or behind a member's name, as in timm:resnet18@a.pt,size=32.
    return (name, path) if separator and not re.search("[/:,@]", name) else ("", text)


def _classes(net: nn.Module, example: Tensor) -> int:
    try:
        with torch.inference_mode():
            return net(example).shape[1]
    except (RuntimeError, ValueError) as error:
        raise ValueError(cannot_take(example, error)) from error


def _members(
    spec: ModelSpec, fast: FastEnsemble, example: Tensor, classes: int, settings: Settings
) -> Ensemble | None:
    """The true ensemble: the source, unless it was distilled, and the members that are given."""
    if not spec.members:
        return None
    nets = [] if fast.source_distilled else [fast.source]
    nets += [_member(text, fast, settings) for text in spec.members]
    states = [net.state_dict() for net in nets]
    for number, text in enumerate(spec.members, start=len(nets) - len(spec.members)):
        if any(_same(states[number], other) for other in states[:number]):
            raise ValueError(f"the member {text} has the weights of another or of the source; give each once")
        if (count := _classes(Ensemble([nets[number]]).to(settings.device).eval(), example)) != classes:
            raise ValueError(
                f"the member {text} has {count} classes and the model {classes}; give the model's members"
            )
    return Ensemble(nets).to(settings.device).eval().requires_grad_(False)


def _member(text: str, fast: FastEnsemble, settings: Settings) -> nn.Module:
    """A member by its name, a saved model's source, or weights for the architecture of the source."""
    path = Path(text)
    if path.suffix in WEIGHTS and ":" not in text:
        return load_weights(copy.deepcopy(fast.source).cpu(), path)
    member = open_member(text, _input_of_source(text, fast.source), settings.allow)
    if isinstance(member.net, FastEnsemble):
        return member.net.source
    if member.takes is not None and (settings.mean is not None or settings.std is not None):
        raise ValueError(
            f"the member {text} normalises pixels itself, which --mean and --std have changed by then; give "
            "a file of its weights, or leave them out"
        )
    if member.class_names and fast.class_names and tuple(fast.class_names) != member.class_names:
        raise ValueError(
            f"the member {text} and the model differ in the names of their classes or in their order; give "
            "members of the same classes"
        )
    return member.net


def _input_of_source(text: str, source: nn.Module) -> Overrides | None:
    """What a member of the source's architecture takes unless its name says more: what the source takes."""
    if not isinstance(source, NamedNetwork) or not text.startswith(f"{source.library}:{source.name}@"):
        return None
    return Overrides(source.takes.size, source.takes.mean, source.takes.std, source.takes.crop)


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and one[name].cpu().equal(other[name].cpu()) for name in one
    )


class Registry:
    """The models of a server by name; one is replaced in one moment, and the old one finishes its work."""

    def __init__(self, specs: Sequence[ModelSpec], settings: Settings) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.settings, self.limits = settings, settings.limits
        self.worker, self._loader = Worker(), Worker("load")
        self.observe: Callable[[str, int], None] = lambda name, images: None
        self.reloaded: Callable[[str, bool], None] = lambda name, success: None
        self.models = {spec.name: self._load(spec) for spec in specs}
        self._retired: set[asyncio.Task[None]] = set()

    def _load(self, spec: ModelSpec) -> ServedModel:
        return ServedModel(spec, self.settings, self.worker, lambda *batch: self.observe(*batch))

    def find(self, name: str | None = None) -> ServedModel:
        """The model of that name, the first without one; `Refused` with 404."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise Refused(404, f"there is no model {name[:64]!r}; there are: {', '.join(self.models)}")
        return self.models[name]

    async def reload(self, name: str) -> None:
        """Load a model again from its folder; requests go to the old one until the new one is ready.

        ValueError where it cannot be loaded: the old one stays.
        """
        try:
            new = await self._loader.run(self._load, self.specs[name])
        except Exception:
            self.reloaded(name, False)
            raise
        old, self.models[name] = self.models[name], new
        task = asyncio.create_task(old.drain())
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)
        self.reloaded(name, True)

    async def drain(self) -> None:
        """Answer what was accepted."""
        await asyncio.gather(*(model.drain() for model in self.models.values()), *self._retired)
