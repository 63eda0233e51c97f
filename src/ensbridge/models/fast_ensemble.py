"""FastEnsemble: the source and its bridges, if any, as one network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ensbridge.bridge.bridge import AbstractBridge
from ensbridge.bridge.sampler import Features
from ensbridge.metrics.predictions import calibrated
from ensbridge.models.ensemble import Ensemble, Forward, at_least_float32, ensemble_logit
from ensbridge.models.features import feature_names, forward_with_features, joined, uncompiled
from ensbridge.models.preprocessed import Preprocess
from ensbridge.utils.input_specs import InputSpec
from ensbridge.utils.inputs import Inputs, checked_inputs, pack, refusal
from ensbridge.utils.text import one_line

if TYPE_CHECKING:
    from ensbridge.data.loader import Data
    from ensbridge.evaluation.choices import Choice
    from ensbridge.evaluation.fidelity import Fidelity
    from ensbridge.evaluation.scores import Scores


# Wider than any that is fitted; beyond them logits overflow, or drown in rounding.
TEMPERATURES = (1e-3, 1e3)
MAX_SOURCE_LOGIT_WEIGHT = 1e6


class TrainedBridge(Protocol):
    """A bridge and what it was trained for: what the methods that train bridges have."""

    source: nn.Module  # that the bridge runs beside
    feature: str
    average_source: bool  # whether the source's own prediction is part of the mean

    @property
    def bridge(self) -> AbstractBridge:
        """The bridge."""
        ...

    def stands_for(self) -> Sequence[nn.Module]:
        """The networks whose mean it learns."""
        ...


def call_bridge(bridge: nn.Module, h: Features, source_logits: Tensor) -> Tensor:
    """Run a bridge."""
    return bridge(h, source_logits)


class AbstractFastEnsemble(nn.Module, ABC):
    """The one forward pass of a source with bridges, whatever its bridges were made into.

    Without bridges it is the source's, calibrated, and `features` is empty.
    """

    source: nn.Module
    bridges: nn.ModuleList
    features: tuple[str, ...]  # what is read of the source beside its logits: what bridges read
    temperature: float
    source_logit_weight: float
    average_source: bool
    image_shape: tuple[int, ...] | None = None  # of one example, where it is one tensor of floats and known
    input_specs: tuple[InputSpec, ...] | None = None  # of what it is called with otherwise

    @abstractmethod
    def mean(self, logits: Sequence[Tensor]) -> Tensor:
        """The centred logits (B, K) of the mean of several predictions' softmax, or of one."""

    def forward(self, *inputs: Any, **named: Tensor) -> Tensor:
        """Logits (B, K), for what the source is called with: `fast(images)`, `fast(input_ids=…, …)`."""
        return self.with_source(pack(inputs, named))[0]

    def with_source(
        self,
        inputs: Inputs,
        run: Forward = forward_with_features,
        call: Callable[[nn.Module, Features, Tensor], Tensor] = call_bridge,
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, K) and, from the same pass, the source's own.

        Several inputs come as one tuple or mapping. `run` and `call` run the source and a bridge, for whoever
        shares these between models.
        """
        inputs = checked_inputs(inputs, self.image_shape)
        try:
            source_logits, *read = run(self.source, inputs, *self.features)
            source_logits = at_least_float32(source_logits)
            logits = [call(bridge, joined(read), source_logits) for bridge in self.bridges]
        except (RuntimeError, TypeError, ValueError, AssertionError, IndexError) as error:
            sentence = refusal(inputs, self.source, self.image_shape)
            if sentence is None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"{sentence} ({one_line(error)})") from error
        mean = self.mean([source_logits, *logits] if self.average_source or not logits else logits)
        return calibrated(mean, source_logits, self.temperature, self.source_logit_weight), source_logits


class FastEnsemble(AbstractFastEnsemble):
    """One network in place of an ensemble: the source runs once, each bridge reads its feature and logits.

    `feature` names the module of the source whose output bridges read, or several modules for bridges that
    take as many maps (`PyramidScore`).

    Called on images it returns logits (B, K), whose softmax is the mean of the bridges' predictions, unless
    it was calibrated: `source_logit_weight` times the source's own logits are added, and all is divided by
    `temperature`. Where members were partitioned among several bridges, the source, part of each bridge's
    target, weighs more than another: 1/3 against 1/6 each for five members and two bridges. With
    `average_source` the source's own prediction is part of the mean, as bridge networks (BN) have it. With no
    bridges it is the source alone and its temperature. `source_distilled` says that the source is no member
    itself but was distilled from the members.

    >>> from ensbridge.bridge import Bridge
    >>> from ensbridge.models import ResNet, ScoreNet
    >>> source = ResNet((1,), (8,), 3, stem=8)
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> fast = FastEnsemble(source, [Bridge(score).one_step()], feature="stages.0.0").eval()
    >>> fast(torch.rand(2, 3, 8, 8)).shape, fast.source is source, fast.temperature
    (torch.Size([2, 3]), True, 1.0)
    >>> FastEnsemble(source, temperature=2.0)(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        source: nn.Module,
        bridges: Sequence[AbstractBridge] = (),
        feature: str | Sequence[str] | None = None,
        *,
        temperature: float = 1.0,
        source_logit_weight: float = 0.0,
        members: int | None = None,
        average_source: bool = False,
        source_distilled: bool = False,
        image_shape: Sequence[int] | None = None,
        input_specs: Sequence[InputSpec] | None = None,
        pixel_range: tuple[float, float] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        low, high = TEMPERATURES
        if not low <= temperature <= high:
            raise ValueError(f"temperature is {temperature}; it must be from {low:g} to {high:g}")
        most = MAX_SOURCE_LOGIT_WEIGHT
        if not abs(source_logit_weight) <= most:
            raise ValueError(
                f"source_logit_weight is {source_logit_weight}; it must be from {-most:g} to {most:g}"
            )
        source = uncompiled(source)
        self.features = feature_names(source, feature or "") if bridges else ()
        self.source = source
        self.bridges = nn.ModuleList(bridges)
        self.temperature, self.source_logit_weight = float(temperature), float(source_logit_weight)
        self.average_source, self.source_distilled = average_source, source_distilled
        # How many members the bridges stand for, the source included: at least one other for each bridge.
        self.members = 1 + len(bridges) if members is None else members
        # What it takes and what its classes are called, where that is known: for whoever runs it later.
        self.image_shape = None if image_shape is None else tuple(image_shape)
        self.input_specs = None if input_specs is None else tuple(input_specs)
        self.pixel_range = pixel_range
        self.class_names = None if class_names is None else tuple(class_names)
        # What compress tried beside it, where it had a choice; no part of what is saved.
        self.choices: Sequence[Choice] = ()

    @classmethod
    def of(cls, *methods: TrainedBridge) -> FastEnsemble:
        """The network that trained bridges, all of one kind, make with the source they share."""
        if not methods:
            raise ValueError("FastEnsemble.of was given 0 bridges; it needs at least 1")
        shared = {(method.source, method.feature, method.average_source) for method in methods}
        if len(shared) > 1:
            raise ValueError(
                "these bridges do not share their kind, source and feature; train them on the same"
            )
        ((source, feature, average_source),) = shared
        others = {network for method in methods for network in method.stands_for()} - {source}
        bridges = [method.bridge for method in methods]
        return cls(source, bridges, feature, members=1 + len(others), average_source=average_source)

    @property
    def feature(self) -> str:
        """What bridges read of the source, the first where it is several; "" without bridges."""
        return self.features[0] if self.features else ""

    def each_bridge(self) -> list[AbstractBridge]:
        """The bridges, with their type."""
        return [bridge for bridge in self.bridges if isinstance(bridge, AbstractBridge)]

    def mean(self, logits: Sequence[Tensor]) -> Tensor:
        """The ensemble's logit, of one prediction too."""
        return ensemble_logit(torch.stack(list(logits)))

    def fidelity(
        self,
        test: Data,
        *,
        members: Iterable[nn.Module] | Ensemble,
        preprocess: Sequence[Preprocess | None] | None = None,
        control: FastEnsemble | None = None,
    ) -> Fidelity:
        """How near this comes to the real ensemble of `members` on test images, what it costs, and a verdict.

        Printed, it is a few lines of text. Data is brought to where the model is.

        Args:
            test: Test images. Labels are not needed; with them the verdict is by NLL.
            members: The members that `compress` had, in their order.
            preprocess: As `compress` had it.
            control: A model that `compress` made of the first member and a copy of it, which tells how much
                of the gain is due to the ensemble.
        """
        from ensbridge.evaluation.fidelity import measure_fidelity

        return measure_fidelity(self, test, members, preprocess, control)

    def save(
        self,
        folder: Path | str,
        *,
        build: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        image_shape: Sequence[int] | None = None,
        class_names: Sequence[str] | None = None,
        scores: Scores | Fidelity | Mapping[str, Any] | None = None,
        license: str | None = None,
        base_models: Sequence[str] = (),
        dataset: str | None = None,
    ) -> None:
        """Write the model into a folder that `ensbridge.load` reads; a model there is replaced as a whole.

        `model.safetensors` holds weights and buffers, `config.json` what they belong to, and `README.md` is
        a model card. A `model.onnx` or `model.pt2` of the model that is replaced is removed. While one
        process saves into a folder, another is refused; an empty `.lock` that this takes stays behind, and
        is no part of the model.

        Args:
            folder: Where to save.
            build: The class or function that builds the source, as "package.models:make_net". With it a
                source that is not ensbridge's own can be loaded without being passed again.
            arguments: What `build` is called with, in JSON's types.
            image_shape: The shape of one image, such as (3, 32, 32), for the cost on the card; by default
                the model's.
            class_names: By default the model's.
            scores: Figures for the card: what `fidelity` or `evaluate` returned, or the mapping of a
                `scores.json`.
            license: An identifier for the card, such as "apache-2.0".
            base_models: The members' names on the Hugging Face hub, for the card.
            dataset: What the scores are of, for the card.

        >>> import tempfile
        >>> from ensbridge.bridge import Bridge
        >>> from ensbridge.models import ResNet, ScoreNet
        >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
        >>> fast = FastEnsemble(ResNet((1,), (8,), 3, stem=8), [Bridge(score)], feature="stages.0.0")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fast.save(folder, image_shape=(3, 8, 8))
        ...     sorted(path.name for path in Path(folder).glob("[!.]*"))
        ['README.md', 'config.json', 'model.safetensors']
        """
        from ensbridge.deploy.saving import save

        save(
            self,
            folder,
            build=build,
            arguments=arguments,
            image_shape=image_shape,
            class_names=class_names,
            scores=scores,
            license=license,
            base_models=base_models,
            dataset=dataset,
        )
