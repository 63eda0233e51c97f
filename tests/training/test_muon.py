"""Muon in a run: which weights it orthogonalises, what it keeps of them, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import _runs
import _tiny
import ensbridge as eb
from ensbridge.training.muon import Muon
from ensbridge.training.optimizers import Optimizers


class Words(nn.Module):
    """A classifier of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(40, 16), nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.table(ids).mean(1)).relu())


def test_layers_are_orthogonalised_and_tables_biases_and_small_matrices_are_not() -> None:
    config = eb.FitConfig(epochs=1, batch_size=4, lr=0.1, optimizer="muon")
    net = Words()
    optimizers = Optimizers(eb.methods.DeepEnsemble([net]), config, total=1)
    net(torch.arange(8).reshape(2, 4)).square().sum().backward()
    optimizers.step()
    kept = {path.rsplit("/", 1)[-1]: 0 for path in optimizers.tensors()}
    for path in optimizers.tensors():
        kept[path.rsplit("/", 1)[-1]] += 1
    assert kept == {"momentum_buffer": 1, "step": 4, "exp_avg": 4, "exp_avg_sq": 4}
    (optimizer, _), *_ = optimizers.parts.values()
    assert isinstance(optimizer, Muon)
    assert [name for name, weight in net.named_parameters() if optimizer.orthogonalises(weight)] == [
        "layer.weight"
    ]


@pytest.mark.parametrize("rows", [16, 48])
def test_an_update_is_as_large_as_the_rate_says_whatever_the_gradient(rows: int) -> None:
    for scale in (1e-4, 1e4):
        net = nn.Linear(32, rows, bias=False)
        before = net.weight.detach().clone()
        net.weight.grad = scale * torch.randn(rows, 32, generator=_tiny.generator())
        Muon(net.parameters(), lr=0.1).step()
        values = torch.linalg.svdvals(net.weight.detach() - before) / max(1, rows / 32) ** 0.5
        assert values.min() > 0.05
        assert values.max() < 0.13


def test_nothing_changes_in_a_step_that_is_refused() -> None:
    net = Words()
    optimizer = Muon(net.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.found_inf = torch.ones(())
    before = _tiny.state(net)
    for weight in net.parameters():
        weight.grad = torch.full_like(weight, torch.inf)
    optimizer.step()
    assert _tiny.same(_tiny.state(net), before)
    assert all(not tensor.any() for memory in optimizer.state.values() for tensor in memory.values())


def test_a_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    tokens = torch.randint(0, 40, (48, 5), generator=_tiny.generator())
    data = tokens, tokens[:, 0] % 3
    config = eb.FitConfig(
        epochs=2, batch_size=8, lr=0.05, optimizer="muon", weight_decay=0.01, checkpoint_every=4
    )

    def method() -> eb.methods.DeepEnsemble:
        with _tiny.seeded(0):
            return eb.methods.DeepEnsemble([Words()])

    whole, again = method(), method()
    eb.fit(whole, data, config)
    with pytest.raises(_runs.Stopped):
        eb.fit(method(), data, config, tmp_path, _runs.stop_at(9))
    assert eb.fit(again, data, config, tmp_path).resumed_from == 8
    assert _tiny.same(_tiny.state(again.student), _tiny.state(whole.student))
    with pytest.raises(ValueError, match="optimizer"):
        eb.fit(method(), data, replace(config, optimizer="adam"), tmp_path)
