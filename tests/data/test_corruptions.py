"""The corruptions of CIFAR-10-C against slow direct versions, what is true of them, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import _corruptions as slow
import ensbridge
from ensbridge.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from ensbridge.data.corruptions.apply import CONSTANTS, corruption, generator
from ensbridge.data.corruptions.frost_texture import TEXTURES, frost_texture
from ensbridge.data.corruptions.spatter import edges, relief


def grey(count: int = 4, level: int = 128) -> np.ndarray:
    return np.full((count, 32, 32, 3), level, np.uint8)


def error(name: str, severity: int, images: np.ndarray) -> float:
    """Root of the mean squared change, in levels."""
    changed = corrupt(images, name, severity).astype(float)
    return float(((changed - images) ** 2).mean() ** 0.5)


# ------------------------------------------------------------------------------ against slow versions


def test_there_are_nineteen_with_five_constants_each() -> None:
    assert len(CORRUPTIONS) == 19
    assert {len(constants) for constants in CONSTANTS.values()} == {5}
    assert CORRUPTIONS[:3] == ("gaussian_noise", "shot_noise", "impulse_noise")


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name != "jpeg_compression"])
def test_each_is_its_slow_direct_version(name: str) -> None:
    images = slow.pictures(2)
    for severity in SEVERITIES:
        fast = corrupt(images, name, severity, seed=3, first=5)
        assert fast.dtype == np.uint8
        assert fast.shape == images.shape
        for place, image in enumerate(images):
            rng = generator(3, name, severity, 5 + place)
            direct = slow.bytes_of(getattr(slow, name)(image / 255, CONSTANTS[name][severity - 1], rng))
            differs = np.abs(fast[place].astype(int) - direct)
            # Sums in another order may fall on the other side of a level.
            assert differs.max() <= 1, severity
            assert (differs > 0).mean() < 0.001, severity


@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_is_the_slow_codec_but_for_its_integer_cosines(severity: int) -> None:
    images = slow.pictures(3)
    quality = CONSTANTS["jpeg_compression"][severity - 1]
    fast = corrupt(images, "jpeg_compression", severity).astype(float)
    direct = np.stack([slow.jpeg_compression(image / 255, quality, None) * 255 for image in images])  # type: ignore[arg-type]
    assert np.abs(fast - np.clip(direct, 0, 255)).mean() < 1
    assert np.abs(fast - images).mean() > 5


# ------------------------------------------------------------------------------ truths


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noises_have_the_mean_and_deviation_of_their_constants(severity: int) -> None:
    level = 128 / 255
    for name, deviation in (
        ("gaussian_noise", CONSTANTS["gaussian_noise"][severity - 1]),
        ("speckle_noise", level * CONSTANTS["speckle_noise"][severity - 1]),
        ("shot_noise", (level / CONSTANTS["shot_noise"][severity - 1]) ** 0.5),
    ):
        noisy = corrupt(grey(), name, severity).astype(float)
        assert noisy.mean() + 0.5 == pytest.approx(128, abs=0.03 * 255 * deviation + 0.5), name
        assert noisy.std() == pytest.approx(255 * deviation, rel=0.04), name


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulses_hit_their_share_of_values_half_of_them_white(severity: int) -> None:
    noisy = corrupt(grey(8), "impulse_noise", severity)
    hit, share = noisy != 128, CONSTANTS["impulse_noise"][severity - 1]
    assert set(np.unique(noisy)) == {0, 128, 255}
    assert hit.mean() == pytest.approx(share, abs=5 * (share / hit.size) ** 0.5)
    assert (noisy[hit] == 255).mean() == pytest.approx(0.5, abs=2.5 / hit.sum() ** 0.5)
    assert (hit.any(3) & ~hit.all(3)).any()  # each colour for itself


# Whose constants grow harsher step by step; of the others below.
GROWING = set(CORRUPTIONS) - {"glass_blur", "pixelate", "saturate", "frost", "elastic_transform"}


@pytest.mark.parametrize("name", sorted(GROWING))
def test_the_error_grows_with_severity(name: str) -> None:
    found = [error(name, severity, slow.pictures(8)) for severity in SEVERITIES]
    assert all(earlier < later for earlier, later in pairwise(found)), found


def test_what_the_constants_make_uneven_grows_as_they_do() -> None:
    images = slow.pictures(8)
    glass, pixels, colour = (
        [error(name, severity, images) for severity in SEVERITIES]
        for name in ("glass_blur", "pixelate", "saturate")
    )
    assert max(glass[:3]) < min(glass[3:])  # once, then twice
    assert pixels[0] < min(pixels[1:4])
    assert max(pixels[:4]) < pixels[4]
    assert colour[0] < colour[1]  # less colour
    assert colour[2] < colour[3] < colour[4]  # more colour


def test_frost_hides_more_of_the_image_with_severity() -> None:
    images = slow.pictures(24)
    explained = [
        np.corrcoef(corrupt(images, "frost", severity).ravel(), images.ravel())[0, 1]
        for severity in SEVERITIES
    ]
    assert explained[0] > 0.95
    assert explained == sorted(explained, reverse=True)


def test_elastic_distortion_beyond_the_affine_part_grows_with_severity() -> None:
    rows, columns = np.mgrid[:32, :32] / 31
    ramps = np.stack([rows, columns, rows], -1)  # whose values tell where a pixel was taken from
    inner = np.s_[8:24, 8:24]
    grid = np.stack([rows[inner].ravel(), columns[inner].ravel(), np.ones(256)], -1)
    function = corruption("elastic_transform")
    left_over = []
    for severity in SEVERITIES:
        rng = generator(0, "elastic_transform", severity, 0)
        moved = function(ramps, CONSTANTS["elastic_transform"][severity - 1], rng)[inner].reshape(-1, 3)
        fitted = grid @ np.linalg.lstsq(grid, moved, rcond=None)[0]
        left_over.append(float(np.abs(moved - fitted).mean()))
    assert left_over[0] < 1e-12
    assert all(earlier < later for earlier, later in pairwise(left_over))


@pytest.mark.parametrize(
    "name", [n for n in CORRUPTIONS if n.endswith("blur") or n in ("contrast", "pixelate")]
)
def test_a_plain_image_stays_as_it_is(name: str) -> None:
    for level in (0, 77, 201, 255):
        assert (corrupt(grey(1, level), name, 5) == level).all()


def test_grey_and_black_have_the_hue_of_red() -> None:
    assert corrupt(grey(1, 200), "saturate", 5)[0, 0, 0].tolist() == [200, 160, 160]
    assert corrupt(grey(1, 0), "saturate", 5).max() == 0
    assert (corrupt(grey(1, 0), "brightness", 5) == int(0.3 * 255)).all()


def test_fog_and_snow_of_other_images_are_other_layers() -> None:
    for name in ("fog", "snow", "frost", "spatter", "motion_blur", "elastic_transform", "glass_blur"):
        twice = corrupt(np.repeat(slow.pictures(1), 2, axis=0), name, 3)
        assert (twice[0] != twice[1]).any(), name


def test_water_without_an_edge_has_none() -> None:
    assert not edges(np.zeros((32, 32))).any()
    assert (relief(np.zeros((32, 32))) == 20).all()


def test_weak_edges_count_where_they_touch_strong_ones() -> None:
    layer = np.zeros((32, 32))
    layer[4:28, 8:20] = np.linspace(14, 80, 24)[:, None]  # fades along its sides, and begins too weak
    found = {(int(y), int(x)) for y, x in np.argwhere(edges(layer))}
    assert found == slow.canny(layer)
    assert min(y for y, _ in found) < 8
    layer[8:] = 0  # the weak part alone
    assert not edges(layer).any()


def test_textures_of_frost_differ_and_are_within_bounds() -> None:
    found = [frost_texture(number) for number in range(TEXTURES)]
    for texture in found:
        assert 0 <= texture.min() < 0.3 < 0.9 < texture.max() <= 1
    assert len({texture.tobytes() for texture in found}) == TEXTURES


# ------------------------------------------------------------------------------ the seed


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_does_not_depend_on_the_others(name: str) -> None:
    images = slow.pictures(4)
    whole = corrupt(images, name, 4, seed=1, first=10)
    parts = [corrupt(images[:1], name, 4, seed=1, first=10), corrupt(images[1:], name, 4, seed=1, first=11)]
    assert (np.concatenate(parts) == whole).all()


def test_seed_severity_and_name_change_the_draws() -> None:
    images = slow.pictures(1)
    first = corrupt(images, "gaussian_noise", 1)
    assert (corrupt(images, "gaussian_noise", 1) == first).all()
    assert (corrupt(images, "gaussian_noise", 1, seed=1) != first).any()
    draws = [
        generator(0, *each).random() for each in (("fog", 1, 0), ("fog", 2, 0), ("fog", 1, 1), ("snow", 1, 0))
    ]
    assert len(set(draws)) == 4


def test_images_are_left_as_they_are() -> None:
    images = slow.pictures(1)
    before = images.copy()
    for name in CORRUPTIONS:
        corrupt(images, name, 5)
    assert (images == before).all()


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": "rain"}, r"'rain'.*gaussian_noise, shot_noise"),
        ({"severity": 0}, r"severity.*\b0\b"),
        ({"severity": 6}, r"severity.*\b6\b"),
        ({"severity": True}, r"severity.*True"),
        ({"severity": "1"}, r"severity.*'1'"),
        ({"seed": -1}, r"seed.*-1"),
        ({"seed": 0.5}, r"seed.*0\.5"),
        ({"first": -3}, r"first.*-3"),
        ({"images": grey() / 255}, r"images.*float64.*uint8"),
        ({"images": [1, 2]}, r"images.*list.*uint8"),
        ({"images": grey()[0]}, r"images.*\(32, 32, 3\)"),
        ({"images": grey().transpose(0, 3, 1, 2)}, r"images.*\(4, 3, 32, 32\)"),
        ({"images": grey(0)}, r"images.*\(0, 32, 32, 3\)"),
    ],
)
def test_what_is_wrong_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        corrupt(**{"images": grey(1), "name": "fog", "severity": 1, **arguments})


def fresh(code: str) -> str:
    """What a new process prints that has the corruptions without the rest of their room."""
    folder = Path(ensbridge.__file__).parent
    begin = (
        f"import sys, types; sys.path.insert(0, {str(folder.parent)!r}); room = types.ModuleType('data'); "
    )
    begin += f"room.__path__ = [{str(folder / 'data')!r}]; sys.modules['ensbridge.data'] = room\n"
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_corruption_needs_torch() -> None:
    code = "from ensbridge.data.corruptions import apply, write\napply.corruption('fog')\n"
    assert fresh(code + "print('torch' in sys.modules, 'scipy' in sys.modules)") == "False True"


@pytest.mark.parametrize("missing", ["scipy"])
def test_a_missing_package_is_named_with_its_remedy(missing: str) -> None:
    code = f"sys.modules['{missing}'] = None\nfrom ensbridge.data.corruptions import apply\n"
    code += "try:\n    apply.corruption('fog')\nexcept ValueError as error:\n    print(error)"
    said = fresh(code)
    assert said.startswith(f"{missing} ")
    assert said.endswith("pip install 'ensbridge[corruptions]'")
