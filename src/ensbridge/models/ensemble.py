"""Many members, one call: the deep ensemble that the bridge learns to stand in for.

Shapes: M members, S samples, B images, K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import accumulate, pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ensbridge.models.features import find_module, forward_with_features, read_logits, uncompiled
from ensbridge.models.stored_network import Build, StoredNetwork, load_weights
from ensbridge.utils.inputs import (
    NO_VALUES,
    Inputs,
    call_network,
    count_rows,
    kind_of,
    pack,
    remedy_for,
    shapes_of,
    to_network,
)
from ensbridge.utils.text import one_line

# A network, inputs and names of its modules in; its logits, then these modules' outputs, out.
Forward: TypeAlias = Callable[..., tuple[Tensor, ...]]


def ensemble_logit(logits: Tensor) -> Tensor:
    """The ensemble's logit of members' logits (M, B, K): log of the mean softmax, centred over K.

    Its softmax is the members' mean softmax, also where logits are huge.

    >>> logits = torch.tensor([[[0.0, 1000.0]], [[1000.0, 0.0]]])
    >>> ensemble_logit(logits).softmax(-1).tolist()
    [[0.5, 0.5]]
    """
    if logits.ndim != 3 or logits.shape[0] == 0:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; they must be (members, images, classes)")
    # log p̄ by log-sum-exp, so that no probability is ever rounded to zero on the way.
    return centred(logits.log_softmax(-1).logsumexp(0))


def random_member(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """For each image the centred logits of one member, drawn from (M, B, K).

    >>> logits = torch.tensor([[[1.0, 3.0]], [[5.0, 5.0]]])
    >>> random_member(logits, torch.Generator().manual_seed(0)).shape
    torch.Size([1, 2])
    """
    members, images = logits.shape[:2]
    index = torch.randint(members, (images,), generator=generator, device=logits.device)
    return centred(logits[index, torch.arange(images, device=logits.device)])


def centred(logits: Tensor) -> Tensor:
    """Logits whose mean over classes is 0."""
    return logits - logits.mean(-1, keepdim=True)


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in float32, or in float64 where they are that already."""
    return logits if logits.dtype == torch.float64 else logits.float()


def member_groups(members: int, bridges: int) -> list[tuple[int, ...]]:
    """Deal members to bridges that share the first as their source, in order and as evenly as possible.

    Each group names members by index; the source is in all of them, another member in one.

    >>> member_groups(5, 2), member_groups(6, 2)
    ([(0, 1, 2), (0, 3, 4)], [(0, 1, 2, 3), (0, 4, 5)])
    """
    if members < 2:
        raise ValueError(f"{members} members were given to bridges; they need at least 2")
    if not 1 <= bridges <= members - 1:
        raise ValueError(
            f"{bridges} bridges were asked for {members} members; each needs a member beside the source, "
            f"so give 1 to {members - 1}"
        )
    size, more = divmod(members - 1, bridges)
    sizes = [size + (index < more) for index in range(bridges)]
    ends = list(accumulate(sizes, initial=1))
    return [(0, *range(start, stop)) for start, stop in pairwise(ends)]


class Ensemble(nn.Module):
    """A deep ensemble of any classifiers with the same classes; the first is the source.

    Called on images it returns the ensemble's logits (B, K), whose softmax is the members' mean softmax.

    >>> members = [nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2)]
    >>> ensemble = Ensemble(members)
    >>> images = torch.rand(5, 1, 2, 2)
    >>> mean = torch.stack([member(images).softmax(-1) for member in members]).mean(0)
    >>> ensemble(images).softmax(-1).allclose(mean)
    True
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if len(members) == 0:
            raise ValueError("an ensemble was given 0 members; it needs at least 1")
        self.members = nn.ModuleList(members)

    @classmethod
    def from_files(cls, paths: Sequence[Path | str], build: Build | Sequence[Build]) -> Ensemble:
        """The ensemble of networks in files of weights, of which only the source stays in memory.

        The others are read anew at each call, one after the other. `build` makes an untrained network, the
        same for all files or one for each. Files are safetensors, or state dictionaries that torch saved,
        alone or under "state_dict" or "model" as trainers save them.
        """
        if isinstance(paths, str | Path):
            raise ValueError(f"paths is {str(paths)!r}; give a list of files, one for each member")
        paths = list(paths)
        for path in paths:
            if not isinstance(path, str | PathLike):
                raise ValueError(f"paths holds a {type(path).__name__}; give files of weights")
        if len(paths) == 0:
            raise ValueError("an ensemble was given 0 files; it needs at least 1")
        builds = list(build) if isinstance(build, Sequence) else [build] * len(paths)
        for builder in builds:
            if isinstance(builder, nn.Module) or not callable(builder):
                raise ValueError(
                    f"build is a {type(builder).__name__}; give a function that builds it, such as lambda: "
                    "Net()"
                )
        if len(builds) != len(paths):
            raise ValueError(
                f"there are {len(builds)} functions for {len(paths)} files; give one, or one each"
            )
        source = load_weights(builds[0](), Path(paths[0]))
        others = [StoredNetwork(path, builder) for path, builder in zip(paths[1:], builds[1:], strict=True)]
        return cls([source, *others])

    def __len__(self) -> int:
        return len(self.members)

    @property
    def source(self) -> nn.Module:
        """The first member, the one that a bridge keeps."""
        return self.members[0]

    def first(self, count: int) -> Ensemble:
        """DE-k: the ensemble of members 1..count, sharing their weights."""
        if not 1 <= count <= len(self):
            raise ValueError(f"the first {count} members were asked for; this ensemble has {len(self)}")
        return Ensemble(list(self.members)[:count])

    def by_size(self) -> dict[str, Ensemble]:
        """DE-1, DE-2, … up to all of it, by these names.

        >>> list(Ensemble([nn.Linear(2, 3), nn.Linear(2, 3)]).by_size())
        ['DE-1', 'DE-2']
        """
        return {f"DE-{size}": self.first(size) for size in range(1, len(self) + 1)}

    def member_logits(self, inputs: Inputs, run: Forward = forward_with_features) -> Tensor:
        """Every member's logits, (M, B, K); `run` runs a member, for whoever shares it between models."""
        return stack_logits([run(member, inputs)[0] for member in self.members])

    def forward(self, *inputs: Any, **named: Tensor) -> Tensor:
        """The ensemble's logits (B, K) for what each member is called with."""
        return ensemble_logit(self.member_logits(pack(inputs, named)))


def checked_members(members: Iterable[nn.Module] | Ensemble, receiver: str) -> list[nn.Module]:
    """The members, which are several networks; `receiver` is what they were given to.

    >>> checked_members(nn.Linear(2, 2), "compress")
    Traceback (most recent call last):
    ValueError: members is one network, a Linear; give a list of at least 2
    """
    kind = type(members).__name__
    if isinstance(members, Mapping | Set | nn.ModuleDict):
        raise ValueError(f"members is a {kind}; give a list, with the network that is to be kept first")
    if isinstance(members, nn.Module) and not isinstance(members, Ensemble | nn.ModuleList):
        raise ValueError(f"members is one network, a {kind}; give a list of at least 2")
    if isinstance(members, str) or not isinstance(members, Iterable | Ensemble):
        raise ValueError(f"members is a {kind}; give a list of networks")
    nets = [uncompiled(net) for net in (members.members if isinstance(members, Ensemble) else members)]
    if len(nets) < 2:
        raise ValueError(f"{len(nets)} members were given to {receiver}; an ensemble needs at least 2")
    for number, net in enumerate(nets, 1):
        if not isinstance(net, nn.Module):
            raise ValueError(f"member {number} is a {type(net).__name__}; give networks, nn.Module")
    if len(set(nets)) < len(nets):
        raise ValueError(f"the same network was given twice to {receiver}; give members that differ")
    return nets


def try_members(ensemble: Ensemble, inputs: Inputs) -> None:
    """Run a few examples through each member, so that what cannot work is named before anything begins."""
    classes = 0
    for number, member in enumerate(ensemble.members, 1):
        remedy = "give the function that prepares them for it in preprocess="
        count = try_network(member, inputs, f"member {number}", remedy)
        classes = classes or count
        if count != classes:
            raise ValueError(
                f"member {number} has {count} classes, the first {classes}; all must have the same"
            )


@torch.no_grad()
def try_network(net: nn.Module, inputs: Inputs, name: str, remedy: str) -> int:
    """The number of a network's classes; one that cannot take the inputs, or returns no logits, is refused.

    Inputs are brought to the network's device.
    """
    try:
        output = call_network(net, to_network(inputs, net))
    except Exception as error:  # whatever a network makes of an image that is not for it
        reason = one_line(error.__cause__ or error)  # a FastEnsemble's own sentence would say it twice
        raise ValueError(
            f"{name} cannot take {kind_of(inputs)} of {shapes_of(inputs)} ({reason}); "
            f"{remedy_for(inputs, net) or remedy}"
        ) from error
    try:
        logits = read_logits(output)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if logits.is_meta:
        raise ValueError(f"{name} {NO_VALUES}")
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"{name} returns {tuple(logits.shape)} for {count_rows(inputs)} {kind_of(inputs)}; it must "
            f"return logits of shape ({kind_of(inputs)}, classes), of 2 classes or more"
        )
    if not logits.isfinite().all():
        raise ValueError(f"{name} returns logits that are not finite; check its weights")
    sums = logits.double().sum(-1)
    if logits.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        raise ValueError(f"{name} returns probabilities; give it without its softmax")
    return logits.shape[1]


def weights_digest(net: nn.Module) -> str:
    """A short digest of a network's weights and buffers.

    >>> net = nn.Linear(2, 2)
    >>> before = weights_digest(net)
    >>> _ = nn.init.constant_(net.weight, 7.0)
    >>> weights_digest(net) == before
    False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def stack_logits(logits: Sequence[Tensor]) -> Tensor:
    """Members' logits as one tensor (M, B, K) of at least float32; what cannot be averaged is refused."""
    if any(output.shape != logits[0].shape for output in logits):
        counts = ", ".join(
            f"member {number}: {tuple(output.shape)}" for number, output in enumerate(logits, 1)
        )
        raise ValueError(
            f"members give logits of different shapes ({counts}); all must have the same classes"
        )
    if logits[0].ndim != 2:
        raise ValueError(
            f"members give outputs of shape {tuple(logits[0].shape)}; logits must be (images, classes)"
        )
    device = logits[0].device  # members may lie on several
    return at_least_float32(torch.stack([output.to(device) for output in logits]))


class Sampler(Protocol):
    """What draws members' logits from the source's feature and logits; a module, too."""

    def draw(self, h: Tensor, source_logits: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Draws (S, B, K) of a member's logits."""
        ...


class SampledEnsemble(nn.Module):
    """A source that runs once and a sampler that draws `samples` members' logits from what it computed.

    Its prediction is the mean of the samples' softmax, as a deep ensemble's is of its members'. Draws come
    from `seed` anew at each call, so that a call can be repeated.

    >>> from ensbridge.bridge import Bridge
    >>> from ensbridge.models import ResNet, ScoreNet
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> model = SampledEnsemble(ResNet((1,), (8,), 3, stem=8), Bridge(score), "stages.0.0", samples=4).eval()
    >>> images = torch.rand(2, 3, 8, 8)
    >>> model.member_logits(images).shape, model(images).shape
    (torch.Size([4, 2, 3]), torch.Size([2, 3]))
    """

    def __init__(
        self, source: nn.Module, sampler: Sampler, feature: str, samples: int = 8, seed: int = 0
    ) -> None:
        super().__init__()
        if samples < 1:
            raise ValueError(f"samples is {samples}; it must be at least 1")
        find_module(source, feature)
        self.source, self.sampler = uncompiled(source), sampler
        self.feature, self.samples, self.seed = feature, samples, seed

    def member_logits(self, inputs: Inputs, run: Forward = forward_with_features) -> Tensor:
        """The samples' logits (S, B, K); `run` runs the source, for whoever shares it between models."""
        logits, h = run(self.source, inputs, self.feature)
        logits = at_least_float32(logits)
        generator = torch.Generator(logits.device).manual_seed(self.seed)
        return self.sampler.draw(h, logits, self.samples, generator)

    def forward(self, *inputs: Any, **named: Tensor) -> Tensor:
        """The logits (B, K) of the samples' mean prediction."""
        return ensemble_logit(self.member_logits(pack(inputs, named)))
