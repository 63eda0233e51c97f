"""Costs against hand-computed counts; counting leaves no trace on the module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ensbridge.metrics.cost import count_macs, count_params


class Residual(nn.Module):
    """Strided, grouped, depthwise and transposed convolutions and a linear layer, known by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)  # 16×16 → 8×8
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 12, 1, groups=4)
        self.up = nn.ConvTranspose2d(12, 4, 2, stride=2)  # 8×8 → 16×16
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.depthwise(self.norm(self.stem(images)).relu())
        return self.head(self.drop(self.up(self.grouped(hidden)).mean((2, 3))))


RESIDUAL_CONVS = 8 * 8 * (8 * 3 * 9) + 8 * 8 * (8 * 9) + 8 * 8 * (12 * 2) + 8 * 8 * (12 * 4 * 4)
RESIDUAL_PARAMS = 8 * 3 * 9 + 2 * 8 + (8 * 9 + 8) + (12 * 2 + 12) + (12 * 4 * 4 + 4) + (4 * 10 + 10)


@pytest.mark.parametrize("batch", [1, 3])
def test_macs_of_a_convolutional_net_match_the_hand_count(batch: int) -> None:
    images = torch.rand(batch, 3, 16, 16)
    assert count_macs(Residual(), images) == batch * (RESIDUAL_CONVS + 4 * 10)
    assert count_macs(Residual(), images, convs_only=True) == batch * RESIDUAL_CONVS


def test_params_match_the_hand_count() -> None:
    assert count_params(Residual()) == RESIDUAL_PARAMS


def test_frozen_parameters_count_and_shared_ones_count_once() -> None:
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    first.requires_grad_(False)
    assert count_params(nn.Sequential(first, second, first)) == 25 + 5 + 5


def test_a_layer_used_twice_costs_twice() -> None:
    layer = nn.Linear(5, 5)
    assert count_macs(nn.Sequential(layer, layer), torch.rand(1, 5)) == 2 * 25


LENGTH, WIDTH = 5, 8
PROJECTIONS = 4 * LENGTH * WIDTH * WIDTH
ATTENTION = 2 * LENGTH * LENGTH * WIDTH  # queries·keys and weights·values, over all heads


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attention(tokens, tokens, tokens, need_weights=self.need_weights)[0]


class FusedAttention(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_counts_its_hidden_products(need_weights: bool) -> None:
    tokens = torch.rand(1, LENGTH, WIDTH)
    assert count_macs(SelfAttention(need_weights), tokens) == PROJECTIONS + ATTENTION
    assert count_macs(SelfAttention(need_weights), tokens, convs_only=True) == 0


def test_fused_attention_counts() -> None:
    assert count_macs(FusedAttention(), torch.rand(1, 2, LENGTH, WIDTH // 2)) == ATTENTION


def test_transformer_layer_counts_attention_and_feed_forward() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=16, batch_first=True)
    expected = PROJECTIONS + ATTENTION + 2 * LENGTH * WIDTH * 16
    assert count_macs(layer, torch.rand(1, LENGTH, WIDTH)) == expected


@pytest.mark.parametrize("enabled", [False, True])
def test_the_attention_fast_path_is_left_as_it_was(enabled: bool) -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        count_macs(SelfAttention(False), torch.rand(1, LENGTH, WIDTH))
        assert torch.backends.mha.get_fastpath_enabled() == enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, steps: Tensor) -> Tensor:
        return self.layer(steps)[0]


I, H, P = 5, 7, 3  # the widths of inputs, of the hidden state and of its projection


@pytest.mark.parametrize(
    ("layer", "per_step"),
    [
        (nn.LSTM(I, H, batch_first=True), 4 * H * (I + H)),
        (nn.LSTM(I, H, batch_first=True, proj_size=P), 4 * H * (I + P) + H * P),
        (nn.LSTM(I, H, 2, batch_first=True, bidirectional=True), 2 * 4 * H * (I + H + 2 * H + H)),
        (nn.GRU(I, H, batch_first=True), 3 * H * (I + H)),
        (nn.RNN(I, H, batch_first=True), H * (I + H)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_recurrent_layers_count_each_step(layer: nn.RNNBase, per_step: int) -> None:
    mkldnn = torch.backends.mkldnn.enabled
    assert count_macs(Recurrent(layer), torch.rand(2, LENGTH, I)) == 2 * LENGTH * per_step
    assert torch.backends.mkldnn.enabled == mkldnn


class Product(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *tensors: Tensor) -> Tensor:
        return getattr(torch, self.name)(*tensors)


@pytest.mark.parametrize(
    ("name", "shapes", "macs"),
    [
        ("dot", [(7,), (7,)], 7),
        ("mv", [(3, 7), (7,)], 21),
        ("addmv", [(3,), (3, 7), (7,)], 21),
        ("mm", [(3, 7), (7, 2)], 42),
        ("bmm", [(4, 3, 7), (4, 7, 2)], 168),
        ("addbmm", [(3, 2), (4, 3, 7), (4, 7, 2)], 168),
        ("baddbmm", [(4, 3, 2), (4, 3, 7), (4, 7, 2)], 168),
    ],
)
def test_every_kind_of_matrix_product_counts(name: str, shapes: list[tuple[int, ...]], macs: int) -> None:
    assert count_macs(Product(name), *(torch.rand(shape) for shape in shapes)) == macs


def test_training_flags_return_one_by_one() -> None:
    net = Residual().train()
    net.norm.eval()
    net.drop.eval()
    before = {name: each.training for name, each in net.named_modules()}
    count_macs(net, torch.rand(2, 3, 16, 16))
    assert {name: each.training for name, each in net.named_modules()} == before
    assert before[""]
    assert not before["norm"]


def test_training_flags_return_after_an_error() -> None:
    net = Residual().train()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError):
        count_macs(net, torch.rand(1, 5, 16, 16))
    assert all(each.training for each in net.modules())
    assert torch.backends.mha.get_fastpath_enabled() == fastpath


class KeepsTraining(nn.Module):
    """Overrides train(), as a frozen part does, so that eval() alone would change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> KeepsTraining:
        return super().train(True)

    def forward(self, rows: Tensor) -> Tensor:
        assert not self.training
        assert not self.norm.training
        return self.norm(rows)


def test_eval_mode_holds_even_where_train_is_overridden() -> None:
    net = KeepsTraining()
    assert count_macs(net, torch.rand(1, 4)) == 0
    assert net.training
    assert net.norm.training


class Counts(nn.Module):
    """A buffer that every call changes, in eval mode too, by both ways of changing one."""

    calls: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("total", torch.zeros(1), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        self.total = self.total + rows.sum()
        return rows + torch.rand(1)


def test_buffers_and_batch_statistics_stay() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Counts()).train()
    buffers = dict(net.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    count_macs(net, torch.rand(2, 3, 8, 8))
    for name, buffer in net.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, values[name])


def test_the_random_state_stays() -> None:
    before = torch.get_rng_state()
    rows = torch.ones(1, 2)
    count_macs(Counts(), rows)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_gradient_is_recorded() -> None:
    seen: list[bool] = []
    net = nn.Linear(2, 2)
    net.register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad))
    count_macs(net, torch.rand(1, 2))
    assert seen == [False]
