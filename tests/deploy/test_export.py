"""Exports give the model's own logits for any batch, or there is no file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _tiny
import ensbridge as eb
import ensbridge.deploy.export as room
from _saving import contents, runner, small
from ensbridge.bridge.bridge import FeatureBridge
from ensbridge.deploy import tracing
from ensbridge.deploy.export import Target, export, inputs, trace
from ensbridge.deploy.tracing import difference
from ensbridge.methods import Bridge, BridgeConfig
from ensbridge.models import MapScore, TokenScore
from ensbridge.models.fast_ensemble import FastEnsemble

ONE_STEP, TWO_STEPS = (0.0, 1.0), (0.0, 0.4, 1.0)
IMAGES = _tiny.images(4)


class Tokens(nn.Module):
    """A frozen transformer in evaluation mode, which eager torch runs through fused layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.block = nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(16, 3)
        self.requires_grad_(False)

    def forward(self, images: Tensor) -> Any:
        tokens = self.block(self.patch(images).flatten(2).transpose(1, 2))
        return SimpleNamespace(logits=self.head(tokens.mean(1)))


class Strange(nn.Module):
    """A classifier of the mean colour with a part of the test's choosing."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.part = nn.Linear(3, 3), part

    def forward(self, images: Tensor) -> Tensor:
        return self.part(self.head(images.mean((2, 3))))


def vectors(part: Callable[[Tensor], Tensor] = torch.sin) -> FastEnsemble:
    """The cheapest model to trace."""
    with _tiny.seeded(3):
        return FastEnsemble(Strange(part), [Bridge(TokenScore(3, 3, 8, 1), times=ONE_STEP)], "head").eval()


def perceptron() -> FastEnsemble:
    with _tiny.seeded(1):
        net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
        bridges = [Bridge(TokenScore(3, 8, 8, 1), times=times) for times in (ONE_STEP, TWO_STEPS)]
        return FastEnsemble(net, bridges, "1", temperature=0.6, source_logit_weight=-0.4)


def transformer() -> FastEnsemble:
    with _tiny.seeded(2):
        return FastEnsemble(Tokens(), [Bridge(TokenScore(3, 16, 8, 1), times=ONE_STEP)], "block")


def maps() -> FastEnsemble:
    with _tiny.seeded(4):
        score = MapScore(3, _tiny.CHANNELS, 8, size=8, deep=False)
    return FastEnsemble(_tiny.batch_norm_member(4), [Bridge(score, times=ONE_STEP)], "1", temperature=2.5)


def averaged() -> FastEnsemble:
    source = _tiny.member(5)
    return FastEnsemble(source, [FeatureBridge(_tiny.tail(source))], _tiny.FEATURE, average_source=True)


def compressed() -> FastEnsemble:
    with _tiny.seeded(6):
        nets = [nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 3)) for _ in "ab"]
    images = _tiny.images(32)
    return eb.compress(
        nets, images, (images, torch.arange(32) % 3), feature="2", budget=20, epochs=1, quiet=True
    )


# ------------------------------------------------------------------------------ the same logits


@pytest.mark.parametrize(
    ("to", "build"),
    [
        ("pt2", averaged),
        ("pt2", compressed),
        ("pt2", maps),
        ("onnx", perceptron),
        ("onnx", transformer),
    ],
    ids=["BN", "compress", "maps", "MLP-onnx", "ViT-onnx"],
)
def test_an_export_gives_the_models_logits(
    to: Target, build: Callable[[], FastEnsemble], tmp_path: Path
) -> None:
    fast = build().eval()
    done = export(fast, tmp_path / f"model.{to}", to, IMAGES)
    assert list(tmp_path.iterdir()) == [done.path]
    assert done.path.stat().st_size == done.size
    assert done.difference <= 1e-5  # far inside of what is allowed, on whatever processor
    for place in (__file__, room.__file__, torch.__file__, str(tmp_path)):  # paths of this machine
        assert str(Path(place).parent).encode() not in done.path.read_bytes()
    again = runner(done.path)
    for count in (1, 2, 5, 17, 64):
        images = 3 * _tiny.images(count, seed=9) - 1
        with torch.no_grad():
            torch.testing.assert_close(again(images), fast(images), rtol=1e-5, atol=1e-5)


def test_the_source_is_in_the_graph_once_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    fast = small(BridgeConfig(), BridgeConfig()).train()
    before = _tiny.state(fast)
    program = trace(fast.eval(), IMAGES)
    weights = [node for node in program.graph.nodes if node.name.startswith("p_source_")]
    assert len(weights) == len(list(fast.source.parameters()))
    assert {len(node.users) for node in weights} == {1}
    vector = vectors().train()
    export(vector, tmp_path / "model.pt2", "pt2", IMAGES)
    assert vector.training
    assert all(not module._forward_hooks for module in (*fast.modules(), *vector.modules()))
    assert _tiny.same(before, _tiny.state(fast))


def test_the_example_is_not_kept_in_the_file(tmp_path: Path) -> None:
    secret = torch.full((4, 3, 8, 8), 0.123456789)
    content = export(vectors(), tmp_path / "model.pt2", "pt2", secret).path.read_bytes()
    assert secret.numpy().tobytes()[:32] not in content


@pytest.mark.parametrize(("to", "tolerance"), [("pt2", 1e-9), ("onnx", 1e-6)])
def test_float64_is_kept_and_compared_more_closely(to: Target, tolerance: float, tmp_path: Path) -> None:
    done = export(vectors().double(), tmp_path / f"model.{to}", to, IMAGES.double())
    assert done.difference <= done.tolerance == tolerance
    assert runner(done.path)(IMAGES.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("dtype", "to", "allowed"),
    [(torch.float16, "pt2", 2e-2), (torch.float16, "onnx", 2e-2), (torch.float64, "pt2", 1e-4)],
)
def test_a_source_of_another_type_than_its_bridges_is_exported(
    dtype: torch.dtype, to: Target, allowed: float, tmp_path: Path
) -> None:
    fast = maps().eval()
    fast.source.to(dtype)
    done = export(fast, tmp_path / f"model.{to}", to, IMAGES.to(dtype))
    assert done.difference <= done.tolerance == allowed
    assert difference(fast(IMAGES.to(dtype)).detach(), runner(done.path)(IMAGES.to(dtype))) <= allowed


class ChannelsLast(nn.Module):
    """A source whose map is (B, H, W, C), with H = C for these images."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 3)
        self.block = nn.Linear(8, 8)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.block(self.patch(images).movedim(1, -1)).mean((1, 2)))


def test_maps_with_channels_last_are_exported(tmp_path: Path) -> None:
    with _tiny.seeded(7):
        score = MapScore(3, 8, 8, size=8, deep=False, channels_last=True)
        fast = FastEnsemble(ChannelsLast(), [Bridge(score, times=ONE_STEP)], "block").eval()
    assert export(fast, tmp_path / "model.pt2", "pt2", IMAGES).difference < 1e-5


def test_an_array_is_an_example_as_a_tensor_is(tmp_path: Path) -> None:
    done = export(vectors(), tmp_path / "model.pt2", "pt2", IMAGES.numpy())
    assert runner(done.path)(IMAGES).shape == (4, 3)


# ------------------------------------------------------------------------------ the check


def test_the_inputs_are_random_and_extreme_in_every_batch_size() -> None:
    example, *rest = inputs(_tiny.images(40))
    assert len(example) == 17
    for count in (1, 3, 17):
        sized = [each for each in rest if len(each) == count]
        assert any(bool((each == 0).all()) for each in sized)
        assert any(bool((each == 1).all()) for each in sized)
        assert any(bool((each <= 0).all()) and bool((each < 0).any()) for each in sized)
        assert max(each.max().item() for each in sized) > 900
        assert min(each.min().item() for each in sized) < -900


@pytest.mark.parametrize(
    ("expected", "found", "gap"),
    [
        ([[0.5, -0.5]], [[0.5, -0.25]], 0.25),  # small logits are not enlarged
        ([[1000.0, 0.0], [1.0, 0.0]], [[1000.0, 0.0], [1.5, 0.0]], 0.5),  # nor hidden by another row's
        ([[torch.inf, 0.0]], [[torch.inf, 0.0]], 0.0),
        ([[torch.inf, 0.0]], [[-torch.inf, 0.0]], torch.inf),
        ([[torch.nan, 8.0]], [[torch.nan, 8.0]], 0.0),
        ([[torch.nan, 8.0]], [[3.4e38, 8.0]], torch.inf),
        ([[1.0, 0.0]], [[torch.nan, 0.0]], torch.inf),
        ([[1.0, 0.0]], [[1.0, torch.inf]], torch.inf),
        ([[1.0, 0.0]], [[1.0]], torch.inf),
    ],
)
def test_differences(expected: list[list[float]], found: list[list[float]], gap: float) -> None:
    assert difference(torch.tensor(expected), torch.tensor(found)) == gap


def failing(*_: object) -> float:
    raise RuntimeError("no kernel\nfor this")


@pytest.fixture(scope="module")
def program() -> Any:
    """A graph that is traced once for the tests of what comes after."""
    return trace(vectors(), IMAGES)


@pytest.mark.parametrize(
    ("name", "replacement", "error", "named"),
    [
        ("ensbridge.deploy.export.difference", lambda *_: 0.5, FloatingPointError, r"differs.*5\.0e-01"),
        ("ensbridge.deploy.export.difference", lambda *_: float("nan"), FloatingPointError, "differs"),
        ("ensbridge.deploy.export._open_pt2", lambda _: failing, ValueError, r"4 images.*no kernel for this"),
        ("ensbridge.deploy.export._open_pt2", failing, ValueError, "opened.*no kernel for this"),
        ("torch.export.save", failing, ValueError, "written as pt2.*no kernel for this"),
    ],
)
def test_an_export_that_fails_its_check_leaves_the_earlier_one(
    name: str,
    replacement: Any,
    error: type[Exception],
    named: str,
    program: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model.pt2").write_bytes(b"earlier")
    monkeypatch.setattr(room, "trace", lambda *_, **__: program)
    monkeypatch.setattr(name, replacement)
    with pytest.raises(error, match=named):
        export(vectors(), tmp_path / "model.pt2", "pt2", IMAGES)
    assert contents(tmp_path) == {"model.pt2": b"earlier"}


def coarse(x: Tensor) -> Tensor:
    """Most of the digits go: float32 has a thousandth left."""
    return (x + 1e4) - 1e4


@pytest.mark.parametrize(
    ("part", "off", "is_rounding"),
    [
        (coarse, 0.0, True),
        (coarse, 5e-4, True),
        (coarse, 5e-2, False),
        (torch.sin, 5e-4, False),
        (lambda x: coarse(x) + 1e-3 * torch.rand_like(x), 5e-4, False),  # is never the same twice
        (lambda x: coarse(x.float() @ torch.eye(3)) + x.new_zeros(3, dtype=torch.float32), 0.0, True),
        (lambda x: coarse(x @ torch.eye(3)), 0.0, False),  # cannot run in double
    ],
)
def test_an_export_may_be_as_far_off_as_the_models_own_rounding(
    part: Callable[[Tensor], Tensor], off: float, is_rounding: bool
) -> None:
    model = vectors(part).requires_grad_(False)
    expected = model(IMAGES)
    assert room._is_rounding(model, model, IMAGES, expected, expected + off) == is_rounding


@pytest.mark.parametrize(("off", "refused"), [(0.0, False), (5e-2, True)])
def test_where_float32_cannot_tell_an_export_is_compared_in_double(
    off: float, refused: bool, program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vectors(coarse).requires_grad_(False)
    monkeypatch.setattr(room, "trace", lambda *_, **__: program)
    exact = vectors(coarse).requires_grad_(False).double()  # better than the model itself
    monkeypatch.setattr(room, "_open_pt2", lambda _: lambda images: exact(images.double()).float() + off)
    if refused:
        with pytest.raises(FloatingPointError, match="differs"):
            export(model, tmp_path / "model.pt2", "pt2", IMAGES)
    else:
        done = export(model, tmp_path / "model.pt2", "pt2", IMAGES)
        assert 0 < done.coarse <= done.batches
        assert done.difference <= done.tolerance
        assert re.search(rf"\b{done.coarse}\b.*rounded", str(done))


def drop(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5, training=True)


def fixed(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 10 else x


def counted(x: Tensor) -> Tensor:
    return x.reshape(len(x), 3)


def whole(x: Tensor) -> Tensor:
    return x.reshape(int(x.shape[0]), 3)


def peek(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("part", "error", "named"),
    [
        (drop, FloatingPointError, "differs"),
        (fixed, ValueError, "any batch size"),
        (counted, ValueError, r"number of images.*images\.shape\[0\]"),
        (whole, ValueError, r"number of images.*images\.shape\[0\]"),
        (peek, ValueError, "any batch size"),
        (lambda x: x / 0, ValueError, "not finite"),
    ],
)
def test_a_source_that_no_graph_can_hold_is_refused(
    part: Callable[[Tensor], Tensor], error: type[Exception], named: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=named) as caught:
        export(vectors(part), tmp_path / "model.pt2", "pt2", IMAGES)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (BridgeConfig.preset("released"), "noise"),
        (BridgeConfig.preset("paper"), "temperature"),
    ],
)
def test_bridges_that_draw_are_refused(config: BridgeConfig, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        export(small(BridgeConfig(), config), tmp_path / "model.pt2", "pt2", IMAGES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "to", "example", "named"),
    [
        ("model.onnx", "tflite", IMAGES, "'tflite'.*'onnx' or 'pt2'"),
        ("model.safetensors", "pt2", IMAGES, r"model\.pt2"),
        ("model.pt2", "pt2", IMAGES[0, 0, 0], "batch of images"),
        ("model.pt2", "pt2", IMAGES[:0], "batch of images"),
        ("model.pt2", "pt2", IMAGES.byte(), "batch of images"),
        ("model.pt2", "pt2", IMAGES[:, :1], r"\(1, 8, 8\)"),
        ("model.pt2", "pt2", IMAGES.double(), r"\(3, 8, 8\).*float64"),
        ("model.pt2", "pt2", "cat.png", "example.*str"),
    ],
)
def test_bad_requests_are_refused(name: str, to: Any, example: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        export(vectors(), tmp_path / name, to, example)
    assert list(tmp_path.iterdir()) == []


def test_a_plain_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Strange.*FastEnsemble"):
        export(vectors().source, tmp_path / "model.pt2", "pt2", IMAGES)  # type: ignore[arg-type]


def test_missing_packages_are_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=r"onnxscript.*'ensbridge\[export\]'"):
        export(vectors(), tmp_path / "model.onnx", "onnx", IMAGES)
    assert export(vectors(), tmp_path / "model.pt2", "pt2", IMAGES).opset is None


def test_the_sources_own_preprocessing_is_inside(tmp_path: Path) -> None:
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    bare = vectors()
    source = eb.nets.Preprocessed(bare.source, lambda images: (images - mean) / std)
    fast = FastEnsemble(source, bare.each_bridge(), "net.head").eval()
    done = export(fast, tmp_path / "model.onnx", "onnx", IMAGES)
    torch.testing.assert_close(
        runner(done.path)(IMAGES), bare((IMAGES - mean) / std).detach(), rtol=1e-5, atol=1e-5
    )


class Normalize(nn.Module):
    """As torchvision's: it looks at its values, which no graph can hold."""

    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.mean, self.std, self.inplace = mean, std, False

    def forward(self, images: Tensor) -> Tensor:
        std = torch.as_tensor(self.std)
        if (std == 0).any():
            raise ValueError("a deviation is 0")
        return (images - torch.as_tensor(self.mean).view(3, 1, 1)) / std.view(3, 1, 1)


def test_a_normalisation_as_torchvisions_is_exported_with_its_numbers(tmp_path: Path) -> None:
    normalise, bare = Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]), vectors()
    source = eb.nets.Preprocessed(bare.source, normalise)
    fast = FastEnsemble(source, bare.each_bridge(), "net.head").eval()
    expected = bare(normalise(IMAGES)).detach()
    torch.testing.assert_close(fast(IMAGES).detach(), expected)
    done = export(fast, tmp_path / "model.pt2", "pt2", IMAGES)
    torch.testing.assert_close(runner(done.path)(IMAGES), expected)
    assert not any(name.startswith("source.preprocess") for name in fast.state_dict())


def test_large_images_are_compared_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {len(batch) for batch in inputs(IMAGES[:1])} == {1, 3, 17}
    monkeypatch.setattr(tracing, "LARGEST_BATCH", 16 * IMAGES[0].numel())
    assert {len(batch) for batch in inputs(IMAGES[:1])} == {1, 3}
    monkeypatch.setattr(tracing, "LARGEST_BATCH", 0)
    assert {len(batch) for batch in inputs(IMAGES[:1])} == {1}
