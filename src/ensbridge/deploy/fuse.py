"""A fast ensemble that is only run, never trained again: the same logits from fewer, larger operations.

Small operations cost more time than their arithmetic: beside a bridge's thirty convolutions stand sixty that
only move or shift numbers. What is constant for a bridge of one step is worked out here once, and lands in
the weights of the convolutions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ensbridge.bridge.bridge import Bridge
from ensbridge.bridge.sampler import Features
from ensbridge.models import MapScore, PyramidScore, ScoreNet
from ensbridge.models.ensemble import ensemble_logit
from ensbridge.models.fast_ensemble import AbstractFastEnsemble, FastEnsemble
from ensbridge.models.score_net import InvertedResidual, time_embedding

# Runtimes lay channels out in blocks, of 16 with AVX-512. The paper's 33 channels are no such blocks, and its
# depthwise convolution then runs more than twice as long as one of 48 (109 and 46 µs).
BLOCK = 16


class InferenceModel(AbstractFastEnsemble):
    """A fast ensemble for inference only; `prepare_for_inference` builds it.

    Images in, logits (B, K) out, as from the `FastEnsemble` to float32's rounding.
    """

    def __init__(self, fast: FastEnsemble) -> None:
        super().__init__()
        fast = copy.deepcopy(fast).eval().requires_grad_(False)
        self.source, self.features = fast.source, fast.features
        self.temperature, self.source_logit_weight = fast.temperature, fast.source_logit_weight
        self.average_source = fast.average_source
        self.bridges = nn.ModuleList(_prepare(bridge) for bridge in fast.bridges)

    def mean(self, logits: Sequence[Tensor]) -> Tensor:
        """The ensemble's logit; that of one prediction is its own, centred, in fewer operations."""
        if len(logits) == 1:
            return logits[0] - logits[0].mean(-1, keepdim=True)
        return ensemble_logit(torch.stack(list(logits)))


class OneStep(nn.Module):
    """A bridge of one step whose score network sees the feature alone: Z_0 = Z_1 - ε(h)."""

    def __init__(self, bridge: Bridge, score: nn.Module) -> None:
        super().__init__()
        self.temperature, self.centre = bridge.config.temperature.mean, bridge.config.centre
        self.score = score

    def forward(self, h: Features, source_logits: Tensor) -> Tensor:
        """Z_0 (B, K). At t = 1 the step's sigma_t·ε is the network's own output."""
        z1 = source_logits / self.temperature
        z1 = z1 - z1.mean(-1, keepdim=True) if self.centre else z1
        return z1 - self.score(h, None, None).to(z1.dtype)


class FoldedScore(nn.Module):
    """A `ScoreNet` at one time as convolutions with biases: no normalisation, time or state is left in it.

    It is called as the `ScoreNet` is, so that it can take its place in a `MapScore`.
    """

    def __init__(self, score: ScoreNet, state: Tensor, t: float) -> None:
        super().__init__()
        dtype = score.head.weight.dtype
        folded = copy.deepcopy(score).double()  # so that every weight is rounded once
        fold_batch_norm(folded)
        time = folded.time(
            time_embedding(torch.tensor([t], device=state.device), folded.channels // 4).double()
        )
        shifts = [shift(time)[0] for shift in folded.time_shifts]
        stages = [cast(nn.Sequential, stage) for stage in folded.stages]
        # What a block ends with is linear: the shift of the next stage is part of its bias.
        for stage, shift in zip(stages, shifts[1:], strict=False):
            last = cast(InvertedResidual, stage[-1])
            _conv(last.body[-1]).bias.data += shift  # pyright: ignore[reportOptionalMemberAccess]
        shift = shifts[0] + torch.cat([shifts[0].new_zeros(folded.channels), state.double()])
        entry = _enter(cast(InvertedResidual, stages[0][0]), folded.channels, shift)
        self.body = nn.Sequential(folded.stem, *entry, *stages, folded.tail, MeanPool())
        self.head = folded.head
        self.to(dtype).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, h: Tensor, z_t: Tensor | None = None, t: Tensor | None = None) -> Tensor:
        """ε of shape (B, classes), from h (B, channels, H, W) alone."""
        return self.head(self.body(h.contiguous(memory_format=torch.channels_last)).flatten(1))


class MeanPool(nn.Module):
    """The mean of each channel as a pooling, which onnxruntime does in the blocked layout of convolutions.

    >>> MeanPool()(torch.ones(2, 3, 4, 5)).shape
    torch.Size([2, 3, 1, 1])
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, 1, 1) of (B, C, H, W)."""
        return nn.functional.avg_pool2d(x, x.shape[-2:])


def prepare_for_inference(fast: FastEnsemble) -> InferenceModel:
    """A copy of a model that gives the same logits faster, in any runtime; it can no more be trained.

    Bridges of one step that see nothing of Z_t, the default, become plain convolutions; of others the batch
    normalisation is folded. The source stays as it is.

    >>> source = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> fast = FastEnsemble(source, [Bridge(score).one_step()], feature="1").eval()
    >>> images = torch.rand(2, 1, 4, 4)
    >>> torch.allclose(prepare_for_inference(fast)(images), fast(images), atol=1e-5)
    True
    """
    with torch.no_grad():
        return InferenceModel(fast).eval()


def fold_batch_norm(net: nn.Module) -> None:
    """Fold each batch normalisation that directly follows a convolution of its `Sequential` into it."""
    for name, child in net.named_children():
        fold_batch_norm(child)
        if not isinstance(child, nn.Sequential) or len(child) < 2:
            continue
        conv, norm, *rest = child
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(net, name, nn.Sequential(fuse_conv_bn_eval(conv, norm), *rest))


def draws(bridge: nn.Module) -> bool:
    """Whether a bridge draws a temperature or noise for each image."""
    return isinstance(bridge, Bridge) and (
        bridge.config.test_temperature == "drawn" or bridge.schedule.variance == "released"
    )


def _prepare(bridge: nn.Module) -> nn.Module:
    if isinstance(bridge, Bridge) and not draws(bridge) and bridge.times == (0.0, 1.0):
        score = _folded(bridge.score)
        if score is not None:
            return OneStep(bridge, score)
    fold_batch_norm(bridge)
    return bridge


def _folded(score: nn.Module) -> nn.Module | None:
    """The score network at t = 1 for one that sees the feature alone, or None."""
    if isinstance(score, MapScore):
        inner = _folded(score.score)
        if inner is None:
            return None
        # What comes before, the feature's layout, its type and the entry, stays the MapScore's own.
        score.score = inner  # type: ignore[assignment]
        fold_batch_norm(score)
        return score
    if isinstance(score, PyramidScore):
        fold_batch_norm(score)
        score.tail.append(MeanPool())  # its own mean is then one of a single number
        return score
    if not isinstance(score, ScoreNet):
        return None
    if score.z_input == "none":
        return FoldedScore(score, score.head.weight.new_zeros(1), 1.0)
    last = score.z_embedding.mlp[-1] if score.z_input == "dead" else None  # type: ignore[index]
    if isinstance(last, nn.Linear) and not last.weight.any():  # as it starts, and stays
        return FoldedScore(score, last.bias.data, 1.0)
    return None


def _enter(block: InvertedResidual, channels: int, shift: Tensor) -> list[nn.Module]:
    """Let a block take `channels` as if more of zeros were behind them and `shift` were added to all.

    What comes back runs before the block: nothing, where its own first convolution can hold the shift. A
    depthwise one cannot, since the border of zeros around the map is not shifted.
    """
    *expand, depthwise, project = (_conv(layers) for layers in block.body)
    if block.residual:
        return [_identity(channels, shift)]
    before = expand[0] if expand else _identity(channels, shift)
    if expand:
        bias = cast(Tensor, before.bias) + before.weight[:, :, 0, 0] @ shift
        _set(before, before.weight[:, :channels], bias)
    _widen(before, depthwise, project)
    return [] if expand else [before]


def _identity(channels: int, shift: Tensor) -> nn.Conv2d:
    """A 1×1 convolution that adds `shift` to `channels` and to the zeros behind them."""
    # Without drawing weights that are replaced at once.
    made = nn.utils.skip_init(nn.Conv2d, channels, len(shift), 1, device=shift.device, dtype=shift.dtype)
    conv = cast(nn.Conv2d, made)
    _set(conv, torch.eye(len(shift), channels).to(shift)[:, :, None, None], shift)
    return conv


def _widen(before: nn.Conv2d, depthwise: nn.Conv2d, project: nn.Conv2d) -> None:
    """Fill the channels of a depthwise convolution up to whole blocks, with zeros that change nothing."""
    pad, more = nn.functional.pad, -before.out_channels % BLOCK
    for conv in (before, depthwise):
        bias = pad(cast(Tensor, conv.bias), (0, more))
        weight = pad(conv.weight, (0, 0, 0, 0, 0, 0, 0, more))
        conv.groups = 1 if conv is before else len(weight)
        _set(conv, weight, bias)
    _set(project, pad(project.weight, (0, 0, 0, 0, 0, more)), cast(Tensor, project.bias))


def _set(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
    conv.weight, conv.bias = (
        nn.Parameter(values.detach().contiguous(), requires_grad=False) for values in (weight, bias)
    )
    conv.out_channels, conv.in_channels = weight.shape[0], weight.shape[1] * conv.groups


def _conv(layers: nn.Module) -> nn.Conv2d:
    return cast(nn.Conv2d, cast(nn.Sequential, layers)[0])
