"""Images in memory: what is refused, what a batch is, and augmentation against slow direct versions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

import _tiny
from ensbridge.data import Augment, ImageSet, as_image_set, load_digits
from ensbridge.data.augment import cutmix, mixup, random_crop
from ensbridge.data.digits import NOISE

# Images in memory


@pytest.mark.parametrize(
    ("images", "labels", "named"),
    [
        (torch.zeros(4, 8, 8), None, r"\(4, 8, 8\)"),
        (torch.zeros(0, 3, 8, 8), None, r"\(0, 3, 8, 8\)"),
        (torch.zeros(4, 3, 8, 8, dtype=torch.int64), None, "torch.int64"),
        (torch.full((4, 3, 8, 8), math.nan), None, "NaN"),
        (torch.full((4, 3, 8, 8), math.inf), None, "infinite"),
        (torch.zeros(4, 3, 8, 8), torch.zeros(3, dtype=torch.long), r"\(3,\).*\(4,\)"),
        (torch.zeros(4, 3, 8, 8), torch.zeros(4, 3, dtype=torch.long), r"\(4, 3\).*\(4,\)"),
        (torch.zeros(4, 3, 8, 8), torch.zeros(4), r"labels.*float32"),
    ],
)
def test_bad_images_and_labels_are_refused_with_what_is_wrong(
    images: Tensor, labels: Tensor | None, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        ImageSet(images, labels)


def test_bytes_become_floats_in_the_unit_interval_a_batch_at_a_time() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8)
    data = ImageSet(images)
    floats, labels = data.batch(torch.tensor([3, 0]))
    assert labels is None
    assert floats.dtype == torch.float32
    np.testing.assert_allclose(floats.numpy(), images[[3, 0]].numpy() / 255, rtol=1e-6)
    assert data.images.dtype == torch.uint8


def test_floats_stay_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64):
        data = ImageSet(_tiny.images().to(dtype))
        assert data.batch(torch.tensor([2]))[0].equal(data.images[2:3])


@pytest.mark.parametrize("size", [1, 5, 24, 100])
def test_batches_cover_every_image_once_in_order(size: int) -> None:
    data = _tiny.data(24)
    parts = list(data.batches(size))
    assert [len(images) for images, _ in parts] == [min(size, 24 - start) for start in range(0, 24, size)]
    assert torch.cat([images for images, _ in parts]).equal(data.images)
    assert torch.cat([labels for _, labels in parts if labels is not None]).equal(data.labels)


def test_a_subset_keeps_images_and_labels_in_step() -> None:
    data, chosen = _tiny.data(), torch.tensor([7, 2, 2])
    part = data.subset(chosen)
    assert len(part) == 3
    assert part.images.equal(data.images[chosen])
    assert part.labels.equal(data.labels[chosen])
    assert data.without_labels().labels is None
    assert data.without_labels().subset(chosen).labels is None


def test_a_fingerprint_knows_the_same_data_and_every_change() -> None:
    data = _tiny.data()
    images, labels = data.images, data.labels
    assert ImageSet(images.clone(), labels.clone()).fingerprint() == data.fingerprint()
    pixel, label = images.clone(), labels.clone()
    pixel[5, 1, 3, 3] += 1e-6
    label[5] = (label[5] + 1) % 3
    others = [
        ImageSet(pixel, labels),
        ImageSet(images, label),
        ImageSet(images),
        ImageSet(images.double(), labels),
        ImageSet(images.flatten(2).view(24, 3, 4, 16), labels),
        ImageSet(images.flip(0), labels),
        data.subset(torch.arange(23)),
    ]
    assert len({data.fingerprint(), *(other.fingerprint() for other in others)}) == 8


def test_data_comes_in_three_forms_and_no_other() -> None:
    data = _tiny.data()
    assert as_image_set(data) is data
    assert as_image_set(data.images).labels is None
    assert as_image_set((data.images, data.labels)).labels is data.labels
    for bad in ([data.images], (data.images,), (data.images, None), "digits"):
        with pytest.raises(ValueError, match=type(bad).__name__):
            as_image_set(bad)  # type: ignore[arg-type]


# Augmentation


def test_a_crop_is_a_window_of_the_padded_image() -> None:
    images, pad = _tiny.images(40)[:, :, :, :6], 2  # 8 rows, 6 columns
    found = random_crop(images, pad, _tiny.generator())
    assert found.shape == images.shape
    places = set()
    for before, after in zip(images, found, strict=True):
        padded = np.zeros((3, 8 + 2 * pad, 6 + 2 * pad), dtype=np.float32)
        padded[:, pad:-pad, pad:-pad] = before.numpy()
        windows = {(i, j): padded[:, i : i + 8, j : j + 6] for i in range(5) for j in range(5)}
        fitting = [place for place, window in windows.items() if np.array_equal(window, after.numpy())]
        assert len(fitting) == 1
        places.update(fitting)
    assert len({i for i, _ in places}) == len({j for _, j in places}) == 5  # every shift occurs
    assert len(places) > 12  # and rows and columns shift apart from each other


def test_crops_are_even_over_their_places() -> None:
    image = torch.arange(1.0, 10.0).view(1, 1, 3, 3).expand(4000, 1, 3, 3)
    centres = random_crop(image, 1, _tiny.generator())[:, 0, 1, 1].long()
    assert scipy.stats.chisquare(centres.bincount(minlength=10)[1:].numpy()).pvalue > 0.001


def test_flipping_mirrors_about_half_of_the_images_left_to_right() -> None:
    images = _tiny.images(2000)[:, :, :2, :4]
    found = Augment(flip=True)(images, _tiny.generator())
    mirrored = (found == images.flip(3)).flatten(1).all(1)
    kept = (found == images).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert abs(mirrored.sum().item() - 1000) < 4.5 * math.sqrt(500)


def test_noise_is_gaussian_of_its_deviation_and_fresh() -> None:
    images, draws = _tiny.images(60), _tiny.generator()
    augment = Augment(noise=0.2)
    first, second = augment(images, draws) - images, augment(images, draws) - images
    assert scipy.stats.kstest(first.flatten().numpy() / 0.2, "norm").pvalue > 0.01
    assert abs(np.corrcoef(first.flatten(), second.flatten())[0, 1]) < 4.5 / math.sqrt(first.numel())


@pytest.mark.parametrize("alpha", [0.4, 1.0, 3.0])
def test_mixup_mixes_two_images_by_a_beta_share(alpha: float) -> None:
    count = 3000
    images = torch.zeros(count, 1, 1, 2, dtype=torch.float64)
    images[:, 0, 0, 0] = torch.arange(count) % 2  # neighbours differ: each one's share shows here,
    images[:, 0, 0, 1] = torch.arange(count)  # and its partner here
    found, given = mixup(images, alpha, _tiny.generator())
    share = torch.where(images[:, 0, 0, 0] == 1, found[:, 0, 0, 0], 1 - found[:, 0, 0, 0])
    assert given.allclose(share, atol=1e-6)
    assert scipy.stats.kstest(share.numpy(), scipy.stats.beta(alpha, alpha).cdf).pvalue > 0.01
    # The same share mixes every pixel: the second is λ·i + (1 - λ)·(partner of i).
    partner = (found[:, 0, 0, 1] - share * images[:, 0, 0, 1]) / (1 - share).clamp_min(1e-9)
    sure = share < 0.99
    torch.testing.assert_close(partner[sure], images.roll(1, 0)[sure, 0, 0, 1], rtol=1e-6, atol=1e-6)


def test_a_small_alpha_mixes_few_images_at_all() -> None:
    """Where floats underflow, two vanished gammas would make an even mixture of every sixth pair."""
    count, law = 2000, scipy.stats.beta(0.01, 0.01)
    images = (torch.arange(count, dtype=torch.float32) % 2).view(count, 1, 1, 1)
    found, _ = mixup(images, 0.01, _tiny.generator())
    expected = law.cdf(0.9) - law.cdf(0.1)
    mixed = ((found > 0.1) & (found < 0.9)).double().mean().item()
    assert abs(mixed - expected) < 4.5 * math.sqrt(expected / count)


def test_mixup_stays_between_its_two_images_even_for_a_tiny_alpha() -> None:
    images = _tiny.images(50)
    for alpha in (1e-4, 0.4):
        found, _ = mixup(images, alpha, _tiny.generator())
        other = images.roll(1, 0)
        assert found.isfinite().all()
        assert (found >= torch.minimum(images, other) - 1e-6).all()
        assert (found <= torch.maximum(images, other) + 1e-6).all()
    assert found.dtype == images.dtype


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_cutmix_pastes_one_rectangle_of_the_neighbour_of_a_beta_share(alpha: float) -> None:
    count, (height, width) = 1000, (40, 60)
    images = torch.arange(count, dtype=torch.float32).view(count, 1, 1, 1).expand(count, 1, height, width)
    found, left = cutmix(images, alpha, _tiny.generator())
    pasted = found != images
    assert torch.allclose(left, 1 - pasted.float().mean((1, 2, 3)))
    assert torch.where(pasted, images.roll(1, 0), images).equal(found)
    rows, columns = pasted[:, 0].any(2), pasted[:, 0].any(1)
    assert (rows[:, :, None] & columns[:, None, :]).equal(pasted[:, 0])  # a product of rows and columns,
    for lines in (rows, columns):  # each without a gap
        assert (lines.int().diff(dim=1).abs().sum(1) + lines[:, 0] + lines[:, -1] <= 2).all()
    # A side is right to a pixel: so is its share, whose square is the area's.
    side = rows.double().mean(1)
    assert (side - columns.double().mean(1)).abs().max() < 1 / height + 1 / width
    law = scipy.stats.beta(alpha, alpha)
    for share in (0.1, 0.5, 0.9):
        expected = law.cdf(share**2)
        assert abs((side < share).double().mean().item() - expected) < 4.5 * math.sqrt(0.25 / count)


def test_with_mixup_and_cutmix_each_image_is_mixed_in_one_way() -> None:
    images = torch.rand(400, 1, 6, 6, generator=_tiny.generator(1))
    other = images.roll(1, 0)
    found = Augment(mixup=3.0, cutmix=3.0)(images, _tiny.generator())
    pasted = ((found == images) | (found == other)).flatten(1).all(1)
    share = (found - other) / (images - other)
    blended = (share - share.flatten(1).median(1).values.view(-1, 1, 1, 1)).abs().flatten(1).amax(1) < 1e-2
    assert (pasted | blended).all()
    assert abs(pasted.double().mean().item() - 0.5) < 4.5 * 0.5 / 20


def test_augmentation_is_repeated_by_its_generator_and_does_nothing_by_default() -> None:
    images = _tiny.images()
    before = images.clone()
    assert Augment()(images) is images
    for augment in (
        Augment(crop=2),
        Augment(flip=True),
        Augment(noise=0.1),
        Augment(mixup=0.4),
        Augment(cutmix=1.0),
        Augment(mixup=0.4, cutmix=1.0),
    ):
        results = [augment(images, _tiny.generator(seed)) for seed in (1, 1, 2)]
        assert results[0].equal(results[1])
        assert not results[0].equal(results[2])
        assert results[0].shape == images.shape
    assert images.equal(before)


def test_augmentations_are_applied_in_their_order() -> None:
    images, draws = _tiny.images(), _tiny.generator(4)
    expected = random_crop(images, 2, draws)
    expected = Augment(flip=True)(expected, draws)
    expected = Augment(noise=0.1)(expected, draws)
    expected, _ = mixup(expected, 0.4, draws)
    found = Augment(crop=2, flip=True, noise=0.1, mixup=0.4)(images, _tiny.generator(4))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("arguments", [{"crop": -1}, {"noise": -0.5}, {"mixup": -0.4}, {"cutmix": -1.0}])
def test_a_bad_augmentation_is_refused_with_its_value(arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=rf"{name}.*{value}"):
        Augment(**arguments)


# Digits


def test_the_digits_are_split_without_overlap_and_the_same_every_time() -> None:
    pytest.importorskip("sklearn")
    parts, again = load_digits(), load_digits()
    assert [len(part) for part in parts] == [600, 200, 997]
    assert [part.fingerprint() for part in parts] == [part.fingerprint() for part in again]
    everything = torch.cat([part.images for part in parts]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797  # the noise makes every image its own
    for part in parts:
        assert part.labels.unique().tolist() == list(range(10))
        assert part.images.shape[1:] == (1, 8, 8)


def test_the_digits_are_scikit_learns_behind_their_noise() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    bunch = sklearn.load_digits()
    clean, noisy = load_digits(noise=0.0), load_digits()
    images = torch.cat([part.images for part in clean])[:, 0].numpy()
    labels = torch.cat([part.labels for part in clean]).numpy()
    whole = sorted((image.tobytes(), label) for image, label in zip(images, labels, strict=True))
    theirs = (bunch.images / 16).astype(np.float32)
    expected = sorted((image.tobytes(), label) for image, label in zip(theirs, bunch.target, strict=True))
    assert whole == expected
    for quiet, loud in zip(clean, noisy, strict=True):
        assert quiet.labels.equal(loud.labels)
        assert (loud.images - quiet.images).std().item() == pytest.approx(NOISE, rel=0.02)
