"""`distill_steps`: from a bridge of many steps to one of a single step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from ensbridge.data.loader import ImageSet
from ensbridge.methods.base import JointTraining
from ensbridge.methods.diffusion_bridge import DiffusionBridge
from ensbridge.methods.step_distillation import StepDistillation, halved
from ensbridge.training.config import FitConfig
from ensbridge.training.fit import fit
from ensbridge.utils.progress import StepCallback

Train = ImageSet | Tensor | tuple[Tensor, Tensor]
Mode = Literal["direct", "progressive"]


def distill_steps(
    bridge: DiffusionBridge,
    train: Train,
    config: FitConfig,
    run_dir: Path | str | None = None,
    *,
    mode: Mode | None = None,
    weight: float = 0.5,
    progress: StepCallback | None = None,
) -> DiffusionBridge:
    """Distil a trained bridge to one step; the teacher is left as it is.

    mode="direct" goes there at once, with `weight` on the teacher's sample and the rest on the true
    ensemble; mode="progressive" halves the steps stage by stage (5 → 3 → 2 → 1), each stage trained by
    `config` and started from the last. Without `mode` the bridge's own configuration decides. With
    `run_dir` each stage has a folder of its own in it, and a killed run resumes.

    >>> import torch
    >>> from ensbridge import Ensemble
    >>> from ensbridge.models import ResNet, ScoreNet
    >>> members = Ensemble([ResNet((1,), (8,), 3, stem=8) for _ in range(2)])
    >>> score = ScoreNet(classes=3, channels=8, stages=[(1, 8, 1, 1)], last=8, z_input="none")
    >>> bridge = DiffusionBridge(members, score)
    >>> one = distill_steps(bridge, torch.rand(8, 3, 8, 8), FitConfig(epochs=1, batch_size=4, lr=1e-4))
    >>> bridge.bridge.steps, one.bridge.steps
    (5, 1)
    """
    named = {"bridge": bridge}
    return distill_together(named, train, config, run_dir, mode, weight, progress)["bridge"]


def distill_together(
    bridges: Mapping[str, DiffusionBridge],
    train: Train,
    config: FitConfig,
    run_dir: Path | str | None = None,
    mode: Mode | None = None,
    weight: float = 0.5,
    progress: StepCallback | None = None,
) -> dict[str, DiffusionBridge]:
    """`distill_steps` for several bridges side by side, whose teachers' passes are shared."""
    current = dict(bridges)
    if not current:
        raise ValueError("there are 0 bridges to distil; give at least 1")
    first = next(iter(current.values())).bridge
    chosen = mode or first.config.distillation
    if len({bridge.bridge.times for bridge in current.values()}) != 1:
        raise ValueError(f"bridges distilled together must have the same times; {', '.join(current)} do not")
    steps = first.steps
    for times in distillation_grids(first.times, chosen):
        stages = {
            name: StepDistillation(bridge, times, mode=chosen, weight=weight)
            for name, bridge in current.items()
        }
        folder = None if run_dir is None else Path(run_dir) / stage_name(steps, times)
        fit(JointTraining(stages), train, config, folder, progress)
        steps = len(times) - 1
        current = {name: stage.distilled for name, stage in stages.items()}
    return current


def distillation_grids(times: Sequence[float], mode: Mode) -> list[tuple[float, ...]]:
    """The time grids that bridges on `times` are distilled to, one after the other.

    >>> distillation_grids((0, 0.2, 0.4, 0.6, 0.8, 1), "progressive")
    [(0, 0.2, 0.6, 1), (0, 0.2, 1), (0, 1)]
    """
    grids: list[tuple[float, ...]] = []
    while len(times) > 2:
        times = (0.0, 1.0) if mode == "direct" else halved(times)
        grids.append(times)
    return grids


def stage_name(steps: int, times: Sequence[float]) -> str:
    """The folder of one stage, such as "5-to-1"."""
    return f"{steps}-to-{len(times) - 1}"
