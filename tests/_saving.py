"""Tiny fast ensembles for the tests of saving, and edits of what was saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import _tiny
from ensbridge.bridge.bridge import FeatureBridge
from ensbridge.methods import Bridge, BridgeConfig
from ensbridge.models import ResNet, ScoreNet
from ensbridge.models.fast_ensemble import FastEnsemble

FILES = ["README.md", "config.json", "model.safetensors"]


def bridge(
    seed: int = 0, config: BridgeConfig | None = None, times: tuple[float, ...] | None = None
) -> Bridge:
    config = config or BridgeConfig()
    return Bridge(_tiny.score(config.z_input, seed), config, times)


def model(
    *bridges: Bridge | FeatureBridge, source: nn.Module | None = None, **arguments: Any
) -> FastEnsemble:
    """A fast ensemble of tiny networks whose every weight and buffer is random."""
    fast = FastEnsemble(source or _tiny.member(), bridges or [bridge()], _tiny.FEATURE, **arguments)
    draws = _tiny.generator(5)
    for name, tensor in fast.state_dict().items():
        if tensor.is_floating_point():
            tensor.add_(0.1 * torch.rand(tensor.shape, generator=draws))
        else:
            tensor.fill_(len(name))
    return fast.eval()


def small(*configs: BridgeConfig) -> FastEnsemble:
    """Our own networks at their smallest, with a bridge of one step for each configuration."""
    with _tiny.seeded(7):
        scores = [ScoreNet(3, 8, [(1, 8, 1, 1)], last=8, z_input=each.z_input) for each in configs]
        bridges = [Bridge(score, each, (0.0, 1.0)) for score, each in zip(scores, configs, strict=True)]
        source = ResNet((1,), (8,), 3, stem=8)
        return FastEnsemble(source, bridges, "stages.0.0", temperature=1.7).eval()


def foreign(seed: int = 0) -> FastEnsemble:
    """One whose source is no network of ours."""
    source = _tiny.batch_norm_member(seed)
    return FastEnsemble(source, [bridge(seed)], "0").eval()


@torch.no_grad()
def outputs(fast: nn.Module) -> Tensor:
    """Logits of random images and of extreme ones."""
    images = _tiny.images()
    every = torch.cat([scale * images for scale in (1.0, 0.0, 1e-30, 1e4, -1e4, torch.inf, torch.nan)])
    return fast(every.to(next(fast.parameters()).dtype))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(outputs(one), outputs(other), rtol=0, atol=0, equal_nan=True)


def contents(path: Path) -> dict[str, bytes]:
    """Each file's content but that of the lock, which has none."""
    return {each.name: each.read_bytes() for each in path.iterdir() if each.name != ".lock"}


def change(place: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((place / "config.json").read_text())
    edit(config)
    (place / "config.json").write_text(json.dumps(config))


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit that sets the value at a path such as `bridges.0.times`."""

    def edit(config: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        where: Any = config
        for each in parents:
            where = where[int(each) if isinstance(where, list) else each]
        where[int(last) if isinstance(where, list) else last] = value

    return edit


def runner(path: Path) -> Callable[[Tensor], Tensor]:
    """The exported file in its runtime, without our code."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
