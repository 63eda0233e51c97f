"""Muon beside torch's own, Adam for what is no matrix, and runs with it that are refused or resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import _runs
import _tiny
from ensbridge.methods import DeepEnsemble
from ensbridge.training import FitConfig
from ensbridge.training import muon as muon_module
from ensbridge.training.muon import ADAM_SHARE, Muon, is_matrix, orthogonalised
from ensbridge.training.optimizers import Optimizers

Run = _runs.Run
LR = 0.05


class Words(nn.Module):
    """A classifier of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(40, 16), nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.table(ids).mean(1)).relu())


def test_layers_are_orthogonalised_and_tables_biases_and_small_matrices_are_not() -> None:
    config = FitConfig(epochs=1, batch_size=4, lr=0.1, optimizer="muon")
    net = Words()
    optimizers = Optimizers(DeepEnsemble([net]), config, total=1)
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


def weight(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=_tiny.generator(seed)))


def step(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], seed: int) -> None:
    """One step on random gradients, which are a function of the seed and of each weight's place."""
    for index, each in enumerate(weights):
        draws = _tiny.generator(100 * seed + index)
        each.grad = torch.randn(each.shape, generator=draws)
    optimizer.step()


def run(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], steps: int = 5) -> list[Tensor]:
    for seed in range(steps):
        step(optimizer, weights, seed)
    return [each.detach().clone() for each in weights]


def in_bf16(matrices: Tensor) -> Tensor:
    """Our iterations in the type that torch's own run in."""
    return orthogonalised(matrices.bfloat16()).to(matrices.dtype)


# ------------------------------------------------------------------------------ matrices


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (64, 20)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_matrices_move_as_with_torchs_muon(
    shape: tuple[int, int], decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon_module, "orthogonalised", in_bf16)
    ours, theirs = [weight(*shape)], [weight(*shape)]
    # Its rate is multiplied by max(1, rows / columns)**0.5 by default ("original").
    torchs = torch.optim.Muon(theirs, lr=LR, weight_decay=decay, momentum=0.95, ns_steps=5)
    found, expected = run(Muon(ours, LR, decay), ours), run(torchs, theirs)
    # bfloat16 has 8 bits, and orders of operations differ.
    moved = (expected[0] - weight(*shape)).norm()
    assert (found[0] - expected[0]).norm() < 0.02 * moved
    assert moved > LR * min(shape) ** 0.5  # an update has all singular values near LR


@pytest.mark.parametrize("shape", [(16, 16), (3, 24, 64), (2, 64, 24)])
def test_singular_values_are_driven_towards_one_and_the_directions_stay(shape: tuple[int, ...]) -> None:
    given = torch.randn(shape, generator=_tiny.generator(), dtype=torch.float64).reshape(-1, *shape[-2:])
    u, s, vh = torch.linalg.svd(given, full_matrices=False)
    found = orthogonalised(given)
    values = (u.mT @ found @ vh.mT).diagonal(dim1=-2, dim2=-1)  # U diag(values) V^T, with the same U and V
    torch.testing.assert_close(u @ values.diag_embed() @ vh, found, rtol=0, atol=1e-9)
    # What the quintic makes of the singular values of x / ‖x‖, computed for numbers.
    x = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    torch.testing.assert_close(values, x, rtol=1e-6, atol=1e-6)
    well = s / s.norm(dim=-1, keepdim=True) > 0.01  # the iterations multiply smaller ones by 3.4445**5 = 485
    assert values[well].min() > 0.6
    assert values.max() < 1.25
    torch.testing.assert_close(orthogonalised(given.mT), found.mT)
    torch.testing.assert_close(orthogonalised(1e3 * given), found)  # no scale is left


def test_matrices_of_one_shape_move_as_each_alone() -> None:
    together = [weight(16, 24, seed=seed) for seed in range(3)] + [weight(24, 16), weight(16)]
    found = run(Muon(together, LR, 0.1), together, 3)
    alone = [weight(16, 24, seed=seed) for seed in range(3)] + [weight(24, 16), weight(16)]
    optimizers = [Muon([each], LR, 0.1) for each in alone]
    for seed in range(3):
        for index, each in enumerate(alone):
            each.grad = torch.randn(each.shape, generator=_tiny.generator(100 * seed + index))
            optimizers[index].step()
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)


def test_a_filter_is_a_matrix_of_outputs_by_all_that_an_output_reads_in_any_layout() -> None:
    plain, last = [weight(16, 8, 3, 3)], [weight(16, 8, 3, 3)]
    last[0].data = last[0].data.contiguous(memory_format=torch.channels_last)
    flat = [nn.Parameter(plain[0].detach().flatten(1).clone())]
    expected = run(Muon(flat, LR, 0.1), flat, 1)[0].view(16, 8, 3, 3)
    for weights in (plain, last):
        (found,) = run(Muon(weights, LR, 0.1), weights, 1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert last[0].is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(run(Muon(plain, LR), plain), run(Muon(last, LR), last), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------ all other weights


def others() -> list[nn.Parameter]:
    """A bias, a head of few classes, a depthwise filter, a filter of few channels, and a scale."""
    return [weight(16), weight(10, 64), weight(32, 1, 3, 3), weight(8, 8, 3, 3), weight()]


def test_what_is_no_matrix_moves_as_with_adam_at_a_tenth_of_the_rate() -> None:
    ours, theirs = others(), others()
    assert not any(map(is_matrix, ours))
    assert all(map(is_matrix, (weight(16, 16), weight(16, 2, 3, 3), weight(64, 16, 1, 1))))
    found = run(Muon(ours, LR, weight_decay=0.1), ours)  # which is for matrices alone
    expected = run(torch.optim.Adam(theirs, lr=LR * 0.1), theirs)
    assert ADAM_SHARE == 0.1
    for one, other, start in zip(found, expected, others(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert (one - start).abs().max() > LR * ADAM_SHARE


def test_a_weight_without_a_gradient_stays_and_a_rate_on_the_device_is_the_number() -> None:
    one, other, still = weight(16, 16), weight(16, 16), weight(16, 16)
    run(Muon([one, still], LR, 0.1), [one])
    run(Muon([other], torch.tensor(LR), 0.1), [other])
    assert still.equal(weight(16, 16))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
    one.grad = other.grad = None
    Muon([one], LR).step()


# ------------------------------------------------------------------------------ refused steps


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_refused_step_changes_neither_weights_nor_memory(before: int, wrong: float) -> None:
    weights = [weight(16, 24), weight(16, 8, 3, 3), weight(16)]
    optimizer = Muon(weights, LR, 0.1)
    optimizer.found_inf = torch.zeros(())
    run(optimizer, weights, before)
    kept = [each.detach().clone() for each in weights]
    memory = {
        (index, key): value.clone()
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    for each in weights:
        each.grad = torch.full_like(each, wrong)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(each.equal(old) for each, old in zip(weights, kept, strict=True))
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert value.equal(memory.get((index, key), torch.zeros_like(value)))
    # Steps that follow are those of a run that knows of no refused one.
    optimizer.found_inf = torch.zeros(())
    step(optimizer, weights, before)
    never = [weight(16, 24), weight(16, 8, 3, 3), weight(16)]
    for found, expected in zip(weights, run(Muon(never, LR, 0.1), never, before + 1), strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The weights and the folder of a run with Muon that nothing interrupted."""
    return {"muon": _runs.whole("muon", tmp_path_factory.mktemp("muon") / "run")}


def test_the_tests_run_trains_matrices_and_other_weights(whole: dict[str, Run]) -> None:
    student = _runs.method("muon").student
    fresh = _runs.state(student)
    assert {is_matrix(each) for each in student.parameters()} == {True, False}
    assert not any(torch.equal(fresh[name], each) for name, each in whole["muon"][0].items())


@pytest.mark.parametrize(
    ("where", "when", "resumed_from"),
    [("after-step", 3, 0), ("before-rename", 8, 4), ("after-step", 11, 8), ("after-step", 12, 12)],
)
def test_killed_anywhere_it_ends_the_same(
    where: str, when: int, resumed_from: int, tmp_path: Path, whole: dict[str, Run]
) -> None:
    _runs.killed("muon", tmp_path, where, when)
    assert _runs.finish("muon", tmp_path, whole).resumed_from == resumed_from
    assert (tmp_path / "log.jsonl").read_bytes() == (whole["muon"][1] / "log.jsonl").read_bytes()


def optimizers(kind: str = "muon") -> Optimizers:
    """One matrix (weight 0) and one bias (weight 1), after two steps."""
    with _tiny.seeded(0):
        method = DeepEnsemble([nn.Linear(16, 16)])
    made = Optimizers(method, FitConfig(epochs=1, batch_size=1, lr=LR, optimizer=kind), total=9)  # type: ignore[arg-type]
    optimizer, _ = made.parts[""]
    run(optimizer, list(method.student.parameters()), 2)
    return made


def test_its_memory_is_taken_back() -> None:
    saved = {name: each.clone() for name, each in optimizers().tensors().items()}
    assert saved.keys() == {"/0/momentum_buffer", "/1/step", "/1/exp_avg", "/1/exp_avg_sq"}
    again = optimizers()
    again.check(saved, 2)
    run(again.parts[""][0], again.parts[""][0].param_groups[0]["params"], 1)
    again.load(saved)
    assert _tiny.same(again.tensors(), saved)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_the_memory_of_another_optimiser_is_refused(kind: str) -> None:
    foreign = optimizers(kind).tensors()
    with pytest.raises(ValueError, match="optimizer/"):
        optimizers().check(foreign, 2)
    with pytest.raises(ValueError, match="optimizer/"):
        optimizers(kind).check(optimizers().tensors(), 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("/0/momentum_buffer", torch.zeros(16)),
        ("/0/momentum_buffer", torch.zeros(16, 16, dtype=torch.float64)),
        ("/0/step", torch.zeros(())),
        ("/1/momentum_buffer", torch.zeros(16)),
        ("/1/step", torch.tensor(3.0)),
        ("/1/step", torch.tensor(-1.0)),
        ("/1/exp_avg", torch.zeros(16, 16)),
        ("/2/momentum_buffer", torch.zeros(16, 16)),
    ],
)
def test_memory_that_cannot_be_its_own_is_refused(name: str, value: Tensor) -> None:
    tensors = {**optimizers().tensors(), name: value}
    with pytest.raises(ValueError, match=f"optimizer{name[:2]}"):
        optimizers().check(tensors, 2)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(16, 32, 3), nn.Linear(144, 32)),
        (nn.Linear(144, 32), nn.Conv2d(16, 32, 3)),
        (nn.Conv2d(16, 16, (1, 3)), nn.Conv2d(16, 16, (3, 1))),
        (nn.Conv2d(1, 16, 4), nn.Linear(16, 16)),  # as a vision transformer has them
    ],
    ids=["filter, layer", "layer, filter", "filters", "patches"],
)
def test_matrices_alike_in_size_alone_move_as_each_alone(layers: tuple[nn.Module, nn.Module]) -> None:
    weights = [nn.Parameter(weight_of(layer)) for layer in layers]
    together = [nn.Parameter(weight.detach().clone()) for weight in weights]
    step(Muon(together, LR), together, seed=3)
    for index, (alone, moved) in enumerate(zip(weights, together, strict=True)):
        alone.grad = torch.randn(alone.shape, generator=_tiny.generator(300 + index))
        Muon([alone], LR).step()
        torch.testing.assert_close(alone, moved)


def weight_of(layer: nn.Module) -> Tensor:
    assert isinstance(layer.weight, Tensor)
    return layer.weight.detach().clone()
