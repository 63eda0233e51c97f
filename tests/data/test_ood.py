"""Images of no class: decided by their generator, within their range, and as structured as they claim."""

from __future__ import annotations

import pytest
import torch

import _tiny
from ensbridge.data import OOD_SETS, ood_images

SHAPE = (3, 32, 32)


@pytest.mark.parametrize("name", OOD_SETS)
def test_a_set_is_decided_by_its_generator(name: str) -> None:
    one, again, other = (ood_images(name, 12, SHAPE, generator=_tiny.generator(seed)) for seed in (0, 0, 1))
    assert one.images.equal(again.images)
    assert not one.images.equal(other.images)
    assert one.labels is None
    assert one.images.dtype == torch.float32
    assert len(one.images.flatten(1).unique(dim=0)) == 12  # no image twice
    assert (one.images.amin() >= 0) & (one.images.amax() <= 1)
    assert one.images.flatten(1).std(1).min() > 0.003  # none is plain


@pytest.mark.parametrize("name", OOD_SETS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 12), (4, 64, 64), (1, 1, 1)])
def test_images_have_the_shape_that_is_asked_for(name: str, shape: tuple[int, ...]) -> None:
    assert ood_images(name, 5, shape, generator=_tiny.generator()).images.shape == (5, *shape)


def neighbours(name: str) -> float:
    """The correlation of pixels beside each other."""
    images = ood_images(name, 200, SHAPE, generator=_tiny.generator()).images.mean(1)
    pairs = torch.stack([images[:, :, 1:].flatten(), images[:, :, :-1].flatten()])
    return torch.corrcoef(pairs)[0, 1].item()


def test_noise_has_no_structure_and_the_others_have() -> None:
    for name in ("uniform", "gaussian"):
        assert abs(neighbours(name)) < 0.02
    for name in ("digits", "bands", "checkers", "blobs", "clouds", "textures"):
        assert neighbours(name) > 0.7


def test_noise_has_its_moments() -> None:
    uniform, gaussian = (
        ood_images(name, 200, SHAPE, generator=_tiny.generator()).images for name in ("uniform", "gaussian")
    )
    assert (uniform.mean().item(), uniform.var().item()) == pytest.approx((1 / 2, 1 / 12), abs=2e-3)
    assert gaussian.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert ((gaussian - 0.5).abs() < 0.25).float().mean().item() == pytest.approx(0.6827, abs=3e-3)


def test_digits_are_scikit_learns_each_at_most_once() -> None:
    from sklearn.datasets import load_digits

    images = ood_images("digits", 1797, (2, 8, 8), generator=_tiny.generator()).images
    assert images[:, 0].equal(images[:, 1])
    known = torch.from_numpy(load_digits().images).float() / 16  # type: ignore[union-attr]
    assert images[:, 0].flatten(1).unique(dim=0).equal(known.flatten(1).unique(dim=0))
    wide = ood_images("digits", 1797, (1, 15, 15), generator=_tiny.generator()).images
    torch.testing.assert_close(wide[:, :, ::2, ::2], images[:, :1])  # corners stay where they are


def test_textures_are_the_four_in_turn() -> None:
    images = ood_images("textures", 10, SHAPE, generator=_tiny.generator()).images
    generator = _tiny.generator()
    parts = [ood_images(name, 3, SHAPE, generator=generator).images for name in ("bands", "checkers")]
    assert images[0].equal(parts[0][0])
    assert images[5].equal(parts[1][1])
    colours = images[1].flatten(1).unique(dim=1)
    assert colours.shape[1] <= 3  # a checkerboard has two colours, and the mean of them on its lines


@pytest.mark.parametrize(
    ("name", "count", "shape", "named"),
    [
        ("svhn", 5, SHAPE, "'svhn'.*digits, uniform"),
        ("digits", 1798, SHAPE, "1798.*1797"),
        ("uniform", 0, SHAPE, "0 images"),
        ("uniform", 5, (32, 32), r"\(32, 32\)"),
    ],
)
def test_what_cannot_be_made_is_named(name: str, count: int, shape: tuple[int, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ood_images(name, count, shape, generator=_tiny.generator())
