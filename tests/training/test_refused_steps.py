"""A step whose loss or gradient is not finite changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import _runs
from ensbridge.methods import DeepEnsemble, JointTraining
from ensbridge.training import FitConfig, fit
from ensbridge.training.optimizers import Average

KINDS = _runs.KINDS
Run = _runs.Run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The weights and the folder of each kind's run that nothing interrupted."""
    return {kind: _runs.whole(kind, tmp_path_factory.mktemp(kind) / "run") for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("how", "words"), [("nan", "nan"), ("inf", "inf"), ("gradient", "gradient")])
def test_a_step_that_is_not_finite_changes_nothing(
    kind: str, how: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Run]
) -> None:
    seen: dict[str, Any] = {}
    optimizers: list[torch.optim.Optimizer] = []

    def remember(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
        def make(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
            optimizers.append(kind(*args, **kwargs))
            return optimizers[-1]

        return make

    for optimizer in (torch.optim.SGD, torch.optim.Adam):
        monkeypatch.setattr(torch.optim, optimizer.__name__, remember(optimizer))
    init = Average.__init__
    monkeypatch.setattr(Average, "__init__", lambda self, *a: init(seen.setdefault("average", self), *a))

    def snapshot() -> dict[str, Tensor]:
        # Running statistics move in the forward pass; they are put back where the loss shows that it failed.
        weights = (
            method.student.named_parameters() if how == "gradient" else method.student.state_dict().items()
        )
        taken = {name: each.detach().clone() for name, each in weights}
        for number, optimizer in enumerate(optimizers):
            for index, memory in optimizer.state_dict()["state"].items():
                taken |= {f"{number}/{index}/{key}": value.clone() for key, value in memory.items()}
        if kind != "members":
            taken |= {f"average/{name}": each.clone() for name, each in seen["average"].tensors.items()}
        return taken

    def progress(step: int, total: int, loss: float) -> None:
        if step == 6:
            seen["before"] = snapshot()
            seen["files"] = _runs.contents(tmp_path)

    method = _runs.method(kind)
    if isinstance(method, JointTraining):  # one of three goes wrong, and none may take the step
        method.methods["end2"] = _runs.Spoilt(method.methods["end2"], at=7, how=how)
        words = words if how == "gradient" else f"end2.*{words}"
    else:
        method = _runs.Spoilt(method, at=7, how=how)
    with pytest.raises(FloatingPointError, match=rf"{words}.*step 7"):
        fit(method, _runs.data(), _runs.config(kind), tmp_path, progress)
    assert len(optimizers) == (3 if kind == "together" else 1)
    assert len(seen["before"]) > len(list(method.student.parameters())) + 2 * len(optimizers)
    assert _runs.same(snapshot(), seen["before"])
    assert _runs.contents(tmp_path) == seen["files"]
    monkeypatch.undo()
    assert _runs.finish(kind, tmp_path, whole).resumed_from == 4
    assert (tmp_path / "log.jsonl").read_bytes() == (whole[kind][1] / "log.jsonl").read_bytes()


def test_a_refused_step_leaves_running_statistics_as_they_were() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(192, 3), torch.nn.BatchNorm1d(3)
            )

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.net(images) * math.nan

    net = Broken()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(FloatingPointError, match="nan at step 1"):
        fit(DeepEnsemble([net]), (torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])), FitConfig(1, 4, 0.1))
    assert all(tensor.equal(before[name]) for name, tensor in net.state_dict().items())
