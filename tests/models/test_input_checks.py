"""Inputs that a model cannot take are named in one sentence; what it can take is never refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _tiny
import ensbridge as eb
from ensbridge.bridge import Bridge
from ensbridge.models import MapScore, TokenScore
from ensbridge.utils.inputs import pack, unpack

IMAGES = _tiny.images(4)


def model(shape: tuple[int, ...] | None = (3, 8, 8)) -> eb.FastEnsemble:
    with _tiny.seeded(1):
        layers = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
        bridge = Bridge(MapScore(3, 8, 8, 8, deep=False)).one_step()
    return eb.FastEnsemble(nn.Sequential(*layers), [bridge], "1", image_shape=shape).eval()


@torch.no_grad()
def test_uint8_images_are_those_from_0_to_1() -> None:
    fast = model()
    pixels = (255 * IMAGES).round().clamp(0, 255).to(torch.uint8)
    assert fast(pixels).equal(fast(pixels.float() / 255))
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    assert compiled(pixels).allclose(fast(pixels), atol=1e-5)


@pytest.mark.parametrize(
    ("images", "named"),
    [
        (IMAGES[:, :1], r"\(4, 1, 8, 8\).*\(B, 3, 8, 8\)"),
        (IMAGES[0], r"\(3, 8, 8\).*\[None\]"),
        (IMAGES.permute(0, 2, 3, 1), r"\(4, 8, 8, 3\).*permute"),
        (IMAGES.flatten(1), r"\(4, 192\)"),
        (IMAGES.double(), r"torch\.float64.*\.float\(\)"),
        (IMAGES.half(), r"torch\.float16.*\.float\(\)"),
        ((255 * IMAGES).long(), r"torch\.int64.*uint8"),
        (IMAGES.to("meta"), r"on cpu.*\.to\('cpu'\)"),
    ],
)
def test_images_of_another_shape_type_or_device_are_named(images: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        model()(images)


@pytest.mark.parametrize(
    ("images", "named"), [(IMAGES.numpy(), "ndarray"), (IMAGES.tolist(), "list"), (None, "NoneType")]
)
def test_what_is_no_tensor_is_named(images: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        model()(images)


@pytest.mark.parametrize(
    ("images", "named"),
    [(IMAGES[:, :1], "takes 3 channels.*1"), (IMAGES.permute(0, 2, 3, 1), "permute")],
)
def test_they_are_named_where_no_shape_is_known(images: Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        model(None)(images)


class Recurrent(nn.Module):
    """A classifier of sequences (B, T, 5) of any length T."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.head = nn.GRU(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, sequences: Tensor) -> Tensor:
        return self.head(self.steps(sequences)[0].mean(1))


def test_sequences_of_another_length_are_the_networks_to_judge() -> None:
    with _tiny.seeded(0):
        source, score = Recurrent(), TokenScore(3, 8, 8)
    fast = eb.FastEnsemble(source, [Bridge(score).one_step()], "steps", image_shape=(6, 5)).eval()
    free = eb.FastEnsemble(source, list(fast.each_bridge()), "steps").eval()
    sequences = torch.rand(2, 9, 5, generator=_tiny.generator(0))
    assert fast(sequences).equal(free(sequences))
    for wrong, named in (
        (sequences[..., 1:], r"\(2, 9, 4\).*\(B, 6, 5\)"),
        (sequences[0], r"\(9, 5\).*\(B, 6, 5\)"),
    ):
        with pytest.raises(ValueError, match=named):
            fast(wrong)


def test_images_too_small_for_the_network_are_named() -> None:
    flat = eb.FastEnsemble(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), image_shape=(3, 8, 8))
    with pytest.raises(ValueError, match=r"\(4, 3, 4, 4\).*\(B, 3, 8, 8\)"):
        flat(IMAGES[..., :4, :4])


def test_larger_images_and_other_errors_pass() -> None:
    fast = model()
    assert fast(_tiny.images(2).repeat(1, 1, 2, 2)).shape == (2, 3)

    def broken(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    fast.source.register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        fast(IMAGES)


def test_calls_are_packed_and_unpacked() -> None:
    for arguments, named in (((1,), {}), ((1, 2), {}), ((), {"a": 1})):
        assert unpack(pack(arguments, named)) == (arguments, named)  # type: ignore[arg-type]
    for arguments, named in (((), {}), ((1,), {"a": 1})):
        with pytest.raises(ValueError, match=r"without inputs|by name"):
            pack(arguments, named)  # type: ignore[arg-type]


def test_a_network_without_weights_runs_where_its_inputs_are() -> None:
    from ensbridge.utils.inputs import to_network

    assert to_network(IMAGES.to("meta"), nn.Flatten()).device.type == "meta"  # type: ignore[union-attr]
