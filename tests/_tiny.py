"""Networks and data so small that a test with them takes milliseconds; used as `import _tiny`.

Everything is a function of its seed: the global random state is neither read nor changed. Images are
(B, 3, 8, 8) in [0, 1], classes are 3, and `FEATURE` names what the bridges read: 8 channels of 8×8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ensbridge.bridge.bridge import ZInput
from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.data import ImageSet
from ensbridge.methods import (
    AbstractMethod,
    Batch,
    BezierCurve,
    Bridge,
    BridgeConfig,
    BridgeNetwork,
    DeepEnsemble,
    DiffusionBridge,
    EnsembleDistillation,
    ProxyEnD2,
    StepDistillation,
)
from ensbridge.methods.base import TeacherOutputs
from ensbridge.models import PyramidScore, ResNet, ScoreNet
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.tail import Tail
from ensbridge.training import FitConfig

CLASSES, CHANNELS, SIZE = 3, 8, 8
FEATURE = "stages.0.0"
FEATURES = FEATURE, "stages.1.0", "stem"  # of 8, 16 and 8 channels, of which the second's are of 4×4
CONSTANT = TemperatureLaw(2.0, spread=0.0)  # nothing random about the temperature
FEW_STEPS = FitConfig(epochs=1, batch_size=6, lr=1e-2)  # 4 steps on data()


def generator(seed: int = 0) -> torch.Generator:
    """A generator on the CPU."""
    return torch.Generator().manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Networks built inside start from `seed`; the global random state returns on leaving."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def member(seed: int = 0, classes: int = CLASSES) -> ResNet:
    """A ResNet of two stages with 5,291 parameters."""
    with seeded(seed):
        return ResNet((1, 1), (CHANNELS, 16), classes, stem=CHANNELS).eval()


def batch_norm_member(seed: int = 0, classes: int = CLASSES) -> nn.Module:
    """Another kind of classifier, one whose buffers change when it runs in training mode."""
    with seeded(seed):
        conv = nn.Conv2d(3, CHANNELS, 3, padding=1)
        head = nn.Linear(CHANNELS, classes)
        return nn.Sequential(
            conv, nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head
        ).eval()


def ensemble(count: int = 3, seed: int = 0) -> Ensemble:
    """An ensemble of tiny ResNets, each from a seed of its own."""
    return Ensemble([member(seed + index) for index in range(count)]).eval()


def score(z_input: ZInput = "none", seed: int = 0, classes: int = CLASSES) -> ScoreNet:
    """A score network of two stages that reads `FEATURE` of a tiny member."""
    with seeded(seed):
        return ScoreNet(classes, CHANNELS, [(1, 8, 1, 1), (2, 8, 2, 2)], last=16, z_input=z_input).eval()


def pyramid(seed: int = 0) -> PyramidScore:
    """A score network that reads `FEATURES` of a tiny member."""
    with seeded(seed):
        stages = [(1, 8, 1, 1), (2, 16, 1, 2)]
        return PyramidScore(CLASSES, [CHANNELS, 16, CHANNELS], stages, joins=[1, 0], stem=8, last=16).eval()


def pyramids(bridges: int = 1, source: nn.Module | None = None, **arguments: Any) -> FastEnsemble:
    """A fast ensemble whose bridges read several maps; every weight and statistic of it is random."""
    scores = [pyramid(seed) for seed in range(bridges)]
    fast = FastEnsemble(
        source or member(), [Bridge(net).one_step() for net in scores], FEATURES, **arguments
    ).eval()
    draws = generator(5)
    for tensor in fast.bridges.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.1 * torch.rand(tensor.shape, generator=draws))
    return fast


def images(count: int = 6, seed: int = 0) -> Tensor:
    """Random images (count, 3, 8, 8)."""
    return torch.rand(count, 3, SIZE, SIZE, generator=generator(seed))


def data(count: int = 24, seed: int = 0) -> ImageSet:
    """Random images with random labels; every class occurs."""
    labels = torch.arange(count)[torch.randperm(count, generator=generator(seed + 1))] % CLASSES
    return ImageSet(images(count, seed), labels)


def logits(count: int = 6, seed: int = 0, members: int | None = None, scale: float = 3.0) -> Tensor:
    """Random logits (count, 3), or (members, count, 3), in float64."""
    shape = (count, CLASSES) if members is None else (members, count, CLASSES)
    return scale * torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def batch(seed: int = 0, labels: Tensor | None = None) -> Batch:
    """The random images with the randomness of a step."""
    return Batch(images(), labels, generator(seed))


def bridge_to(ensemble: Ensemble, seed: int = 0, **arguments: Any) -> DiffusionBridge:
    """A bridge with a tiny score network of its own."""
    config = arguments.get("config", BridgeConfig())
    return DiffusionBridge(ensemble, score(config.z_input, seed), FEATURE, **arguments)


def teacher_outputs(
    ensemble: Ensemble, feature: str = FEATURE, given: Tensor | None = None
) -> TeacherOutputs:
    """What an ensemble says of the random images, or of given ones."""
    return Batch(images() if given is None else given, None).teacher_outputs(ensemble, feature)


@torch.no_grad()
def predict(method: AbstractMethod, given: Tensor) -> Tensor:
    """Log-probabilities by a method's model."""
    return method.model()(given).log_softmax(-1)


def pooled(seed: int = 0) -> nn.Module:
    """A classifier of 8 channels that reads their means, light enough for any feature."""
    with seeded(seed):
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES))


def tail(source: nn.Module, seed: int = 0, width: float = 1.0) -> Tail:
    """The source's last block and head with new weights."""
    assert isinstance(source, ResNet)
    with seeded(seed):
        return Tail(source, FEATURE, width)


def bridge_network(
    source: nn.Module, centres: Sequence[nn.Module], seed: int = 0, width: float = 1.0
) -> BridgeNetwork:
    """A bridge network behind `FEATURE`."""
    return BridgeNetwork(source, centres, tail(source, seed, width), FEATURE)


METHODS = ("members", "bridge", "kl", "direct", "progressive", "ed", "end2", "end2-exact", "bezier", "bn")


def method(kind: str, teachers: Ensemble) -> AbstractMethod:
    """An untrained method of each kind, with `teachers` where it has any."""
    source, other, *_ = teachers.members
    bridge = bridge_to(teachers, 30, loss="kl" if kind == "kl" else "bridge")
    return {
        "members": lambda: DeepEnsemble([member(31), member(32)]),
        "bridge": lambda: bridge,
        "kl": lambda: bridge,
        "direct": lambda: StepDistillation(bridge),
        "progressive": lambda: StepDistillation(bridge, (0.0, 0.2, 1.0), mode="progressive"),
        "ed": lambda: EnsembleDistillation(teachers, member(33)),
        "end2": lambda: ProxyEnD2(teachers, member(34)),
        "end2-exact": lambda: ProxyEnD2(teachers, member(35), predict="softmax", divisor="s"),
        "bezier": lambda: BezierCurve(source, other),
        "bn": lambda: bridge_network(source, [other], 36),
    }[kind]()


def state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def hooks_of(net: nn.Module) -> int:
    """How many forward hooks there are on a network's modules."""
    return sum(len(module._forward_hooks) for module in net.modules())


def count_runs(networks: Ensemble | Sequence[nn.Module]) -> Counter[int]:
    """How often each network has run since this call, by its index."""
    calls: Counter[int] = Counter()
    members = networks.members if isinstance(networks, Ensemble) else networks
    for index, network in enumerate(members):
        network.register_forward_hook(lambda *_, index=index: calls.update([index]))
    return calls


def predictions(
    count: int = 157, classes: int = 7, seed: int = 0, sharpness: float = 3.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, K) that are right more often than chance, and too sure of it; and labels."""
    draws = generator(seed)
    labels = torch.randint(classes, (count,), generator=draws)
    found = torch.randn(count, classes, generator=draws, dtype=torch.float64)
    found[torch.arange(count), labels] += 1.0
    return (sharpness * found).log_softmax(-1), labels
