"""`config.json`: what a fast ensemble is, without its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import nn

from ensbridge._aliases import upgrade_model
from ensbridge.bridge.bridge import Bridge, BridgeConfig, FeatureBridge
from ensbridge.bridge.schedule import MOST_STEPS
from ensbridge.deploy.saving.architecture import OURS, READER, REMEDY, Architecture, Build
from ensbridge.models.fast_ensemble import MAX_SOURCE_LOGIT_WEIGHT, TEMPERATURES, FastEnsemble
from ensbridge.utils.files import read_json
from ensbridge.utils.input_specs import InputSpec
from ensbridge.utils.text import short
from ensbridge.utils.typed_json import Range

FORMAT, VERSION = "ensbridge.FastEnsemble", 1
LARGEST_CONFIG = 2**20  # bytes of config.json; those of real models have a few thousand
LARGEST_IMAGE = 2**24  # numbers in one image: 2048 × 2048 pixels of four channels
LARGEST_BATCH = 2**27  # numbers in a batch of such images, where its size is ours to choose
MOST_SIZES = 8  # of an image's shape
MOST_INPUTS = 64  # tensors that a network is called with
MOST_MEMBERS, MOST_BRIDGES, MOST_FEATURES = 1000, 64, 64  # a file that asks for more would never be done
LEAST_STEP = 1e-6  # of time; float32 tells smaller ones badly apart
BETAS = (1e-9, 1e3)


@dataclass(frozen=True)
class BridgeDescription:
    """A bridge: a diffusion bridge with its times, or a network from the feature to logits."""

    kind: Literal["diffusion", "feature"]
    network: Architecture
    times: tuple[float, ...] | None = None
    config: BridgeConfig | None = None

    def __post_init__(self) -> None:
        samples = self.kind == "diffusion"
        if samples != (self.times is not None) or samples != (self.config is not None):
            raise ValueError("times and config belong to a diffusion bridge, and to no other")
        if self.times is not None and len(self.times) > MOST_STEPS + 1:
            raise ValueError(f"times are {len(self.times)}, expected at most {MOST_STEPS + 1}")
        if self.times is not None and not all(b - a >= LEAST_STEP for a, b in pairwise(self.times)):
            raise ValueError(
                f"times are {short(self.times)}, expected to grow from 0 to 1 in steps of at least "
                f"{LEAST_STEP:g}"
            )
        if self.config is not None:
            law = self.config.temperature
            _within("config.beta", self.config.beta, BETAS)
            _within("config.temperature.base", law.base, TEMPERATURES)
            _within("config.temperature.spread", law.spread, (0, TEMPERATURES[1]))
            _within("config.temperature.concentration", law.concentration, TEMPERATURES)

    @classmethod
    def of(cls, bridge: Bridge | FeatureBridge, number: int) -> BridgeDescription:
        """Describe a bridge of a model; its network must be one that can be built again."""
        samples = isinstance(bridge, Bridge)
        network = Architecture.of(bridge.score if samples else bridge.net)
        if network.build is None:
            raise ValueError(
                f"the network of bridge {number} is of class {network.name}, which a file cannot describe; "
                "bridges are saved with a ScoreNet or a Tail as it was built"
            )
        return cls("diffusion", network, bridge.times, bridge.config) if samples else cls("feature", network)

    def assemble(self, net: nn.Module) -> Bridge | FeatureBridge:
        """The bridge around its network."""
        return FeatureBridge(net) if self.kind == "feature" else Bridge(net, self.config, self.times)


@dataclass(frozen=True)
class Facts:
    """What whoever runs a model must know of its images and classes; None where nobody said."""

    image_shape: tuple[int, ...] | None = None  # of one image
    pixel_range: tuple[float, float] | None = None  # of the images that it was trained with
    class_names: tuple[str, ...] | None = None
    input_specs: tuple[InputSpec, ...] | None = None  # where it is called with other than one image

    def __post_init__(self) -> None:
        shape, pixels = self.image_shape, self.pixel_range
        if self.input_specs is not None:
            _check_specs(self.input_specs)
        if shape is not None and not (
            0 < len(shape) <= MOST_SIZES and min(shape) > 0 and math.prod(shape) <= LARGEST_IMAGE
        ):
            raise ValueError(
                f"image_shape is {short(shape)}, expected 1 to {MOST_SIZES} sizes, each at least 1 and their "
                f"product at most {LARGEST_IMAGE}, such as (3, 32, 32)"
            )
        if pixels is not None and not -math.inf < pixels[0] <= pixels[1] < math.inf:
            raise ValueError(f"pixel_range is {pixels}, expected the least and the greatest value of a pixel")

    @classmethod
    def of(
        cls, fast: FastEnsemble, image_shape: Sequence[int] | None, class_names: Sequence[str] | None
    ) -> Facts:
        """A model's own facts, but for those that are given."""
        shape = fast.image_shape if image_shape is None else image_shape
        names = fast.class_names if class_names is None else class_names
        if shape is not None and not all(type(size) is int for size in shape):
            raise ValueError(f"image_shape is {shape}; give that of one image, such as (3, 32, 32)")
        score = getattr(next(iter(fast.each_bridge()), None), "score", None)
        classes = getattr(score, "classes", None)
        if names is not None and classes is not None and not isinstance(names, str) and len(names) != classes:
            raise ValueError(f"class_names are {len(names)} for {classes} classes; give one each")
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise ValueError(f"class_names are {short(names)}; give a list with a name for each class")
        return cls(
            None if shape is None else tuple(shape),
            fast.pixel_range,
            None if names is None else tuple(names),
            None if shape is not None else _recordable(fast.input_specs),
        )


@dataclass(frozen=True)
class Description:
    """All of `config.json`."""

    format: Literal["ensbridge.FastEnsemble"]
    version: Literal[1]
    feature: str | tuple[str, ...]  # the modules of the source that bridges read
    temperature: Annotated[float, Range(*TEMPERATURES)]
    members: Annotated[int, Range(1, MOST_MEMBERS)]
    average_source: bool
    source: Architecture
    bridges: tuple[BridgeDescription, ...]
    sha256: str  # of the weights' file that belongs to this description
    tied: dict[str, str] = field(default_factory=dict)  # tensors that lie in the file under another's name
    facts: Facts = Facts()
    source_logit_weight: Annotated[float, Range(-MAX_SOURCE_LOGIT_WEIGHT, MAX_SOURCE_LOGIT_WEIGHT)] = 0.0
    source_distilled: bool = False

    def __post_init__(self) -> None:
        names = self.feature
        if not isinstance(names, str) and not 1 < len(set(names)) == len(names) <= MOST_FEATURES:
            raise ValueError(
                f"feature is {short(names)}, expected the name of a module, or 2 to {MOST_FEATURES} "
                "different names"
            )
        if len(self.bridges) > MOST_BRIDGES:
            raise ValueError(f"bridges are {len(self.bridges)}, expected at most {MOST_BRIDGES}")
        steps = sum(len(bridge.times) - 1 for bridge in self.bridges if bridge.times)
        if steps > MOST_STEPS:
            raise ValueError(f"bridges have {steps} steps together, expected at most {MOST_STEPS}")

    @classmethod
    def of(
        cls, fast: FastEnsemble, source: Architecture, sha256: str, tied: Mapping[str, str], facts: Facts
    ) -> Description:
        """Describe a model; what could not be read again is refused here, before anything is written."""
        bridges = [bridge for bridge in fast.bridges if isinstance(bridge, Bridge | FeatureBridge)]
        if len(bridges) != len(fast.bridges):
            raise ValueError("a bridge of this model is neither a Bridge nor a FeatureBridge; give such ones")
        raw = cls(
            format=FORMAT,
            version=VERSION,
            feature=fast.feature if len(fast.features) < 2 else fast.features,
            temperature=fast.temperature,
            members=fast.members,
            average_source=fast.average_source,
            source=source,
            bridges=tuple(BridgeDescription.of(bridge, number) for number, bridge in enumerate(bridges, 1)),
            sha256=sha256,
            tied=dict(tied),
            facts=facts,
            source_logit_weight=fast.source_logit_weight,
            source_distilled=fast.source_distilled,
        )
        try:
            text = raw.to_json()
        except ValueError as error:
            raise ValueError(
                f"this model holds a setting that is no finite number ({error}); set it"
            ) from error
        return READER.read(cls, json.loads(text), "this model")

    def to_json(self) -> str:
        """The text of `config.json`."""
        return json.dumps(_without_none(asdict(self)), indent=2, allow_nan=False) + "\n"

    def networks(self, source: nn.Module | None, allow: Collection[str], where: Path) -> list[Build]:
        """What builds the source and the bridges' networks; forbidden or impossible ones are refused."""
        if source is not None:
            builds: list[Build] = [lambda: source]
        elif self.source.build is None:
            raise ValueError(
                f"{where.parent} was saved with a source of class {self.source.name}, which a file cannot "
                "describe; in Python pass an instance of it, load(folder, source=net), or save it with "
                "build='package.module:function' and allow that"
            )
        else:
            builds = [self.source.builder(allow, f"{where}: source")]
        for number, bridge in enumerate(self.bridges):
            path, build = f"{where}: bridges[{number}].network", bridge.network.build
            if build is None:
                raise ValueError(f"{path} has no 'build'; {REMEDY}")
            if build not in OURS:  # what the caller allows is for the source
                raise ValueError(f"{path} is built by {short(build)}, which is not allowed there; {REMEDY}")
            builds.append(bridge.network.builder((), path))
        return builds

    def assemble(self, source: nn.Module, networks: list[nn.Module], where: Path) -> FastEnsemble:
        """The model around its networks."""
        try:
            return FastEnsemble(
                source,
                [bridge.assemble(net) for bridge, net in zip(self.bridges, networks, strict=True)],
                self.feature,
                temperature=self.temperature,
                source_logit_weight=self.source_logit_weight,
                members=self.members,
                average_source=self.average_source,
                source_distilled=self.source_distilled,
                **vars(self.facts),
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def read_description(path: Path) -> Description:
    """Read and check a `config.json`."""
    try:
        size = path.stat().st_size
        if size > LARGEST_CONFIG:
            raise ValueError(f"{path} has {size} bytes, a model's has under {LARGEST_CONFIG}; {REMEDY}")
        raw = read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if not is_ours(raw):
        raise ValueError(f"{path} describes no FastEnsemble; give a folder that FastEnsemble.save wrote")
    version = raw.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path} is of version {short(version)}, this ensbridge reads {VERSION}; upgrade ensbridge"
        )
    return READER.read(Description, upgrade_model(raw), str(path))


def is_ours(raw: object) -> bool:
    """Whether decoded JSON claims to describe a FastEnsemble."""
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def _recordable(specs: tuple[InputSpec, ...] | None) -> tuple[InputSpec, ...] | None:
    """What a file may say of a model's inputs; nothing of those beyond its limits."""
    try:
        _check_specs(specs or ())
    except ValueError:
        return None
    return specs


def _check_specs(specs: Sequence[InputSpec]) -> None:
    """Refuse inputs that no network is called with, or that would take all memory."""
    named = {spec.name for spec in specs if spec.name is not None}
    if not 0 < len(specs) <= MOST_INPUTS or len(named) not in (0, len(specs)):
        raise ValueError(
            f"input_specs are {len(specs)} with {len(named)} names, expected 1 to {MOST_INPUTS}, all by name "
            "or none"
        )
    for spec in specs:
        if len(spec.shape) > MOST_SIZES or min(spec.shape, default=1) < 1 or spec.low > spec.high:
            raise ValueError(
                f"an input is {short(str(spec))} from {spec.low} to {spec.high}, expected at most "
                f"{MOST_SIZES} sizes, each at least 1, and a range of whole numbers"
            )
    if (numbers := sum(math.prod(spec.shape) for spec in specs)) > LARGEST_IMAGE:
        raise ValueError(f"an example has {numbers:,} numbers, expected at most {LARGEST_IMAGE:,}")


def _within(name: str, value: float, limits: tuple[float, float]) -> None:
    """Refuse a number that no model has and that would overflow, or never be done."""
    low, high = limits
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, expected {low:g} to {high:g}")


def _without_none(value: Any) -> Any:
    """Leave out what a description does not have; inside a user's arguments None is a value."""
    if isinstance(value, dict):
        return {
            key: item if key == "arguments" else _without_none(item)
            for key, item in value.items()
            if item is not None
        }
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
