"""`ensbridge predict`: what a model says of image files, checked against the model itself."""

from __future__ import annotations

import importlib
import json
import math
import re
import struct
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from scipy.stats import entropy

import ensbridge as eb
from _named import run
from _saving import change, foreign, put, small
from ensbridge.deploy import batch
from ensbridge.deploy.batch import Pixels, open_image, predict_entries, predict_images
from ensbridge.methods import Bridge, BridgeConfig
from ensbridge.models import TokenScore
from ensbridge.models.fast_ensemble import FastEnsemble

NAMES = ("cat", "dog", "bird")


def pixels(seed: int = 0, size: tuple[int, ...] = (8, 8, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict") / "model"
    small(BridgeConfig(), BridgeConfig()).save(folder, image_shape=(3, 8, 8), class_names=NAMES)
    return folder


def test_each_image_is_one_line_of_what_the_model_and_its_source_say(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = [pixels(seed) for seed in range(3)]
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for file, array in zip(files, arrays, strict=True):
        Image.fromarray(array).save(file)
    assert run(monkeypatch, "predict", saved, *files) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [json.loads(line) for line in captured.out.splitlines()]
    fast = eb.load(saved)
    images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        ours, theirs = fast(images).double().softmax(-1), fast.source(images).double().softmax(-1)
    for line, file, p, q in zip(lines, files, ours, theirs, strict=True):
        best = int(p.argmax())
        assert (line["image"], line["label"], line["class_index"]) == (str(file), NAMES[best], best)
        assert line["probability"] == pytest.approx(p[best].item(), abs=1e-6)
        assert line["source_probability"] == pytest.approx(q[best].item(), abs=1e-6)
        assert line["source_label"] == NAMES[int(q.argmax())]
        assert line["entropy"] == pytest.approx(entropy(p), abs=1e-6)
        assert line["disagreement"] == pytest.approx((p - q).abs().sum().item() / 2, abs=1e-6)


def test_sure_predictions_have_no_entropy_and_opposite_ones_disagree_wholly() -> None:
    class Sure(torch.nn.Module):
        class_names = None

        def with_source(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([[0.0, -2000.0]]), torch.tensor([[-2000.0, 0.0]])

    (found,) = predict_images(Sure(), torch.rand(1, 3, 8, 8))  # type: ignore[arg-type]
    assert (found.label, found.source_label, found.probability, found.source_probability) == ("0", "1", 1, 0)
    assert (found.entropy, found.disagreement) == (0, 1)


def test_a_bad_file_is_named_and_the_others_are_still_predicted(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(pixels()).save("good.png")
    Path("text.png").write_text("no image")
    Path("cut.png").write_bytes(Path("good.png").read_bytes()[:60])
    Path("float.pfm").write_bytes(b"Pf\n8 8\n-1.0\n" + np.full(64, 40_000, "<f4").tobytes())
    Path("folder").mkdir()
    files = ["text.png", "good.png", "cut.png", "float.pfm", "none.png", "folder"]
    assert run(monkeypatch, "predict", saved, *files) == 2
    captured = capsys.readouterr()
    assert [json.loads(line)["image"] for line in captured.out.splitlines()] == ["good.png"]
    problems = captured.err.splitlines()
    expected = (
        r"text\.png cannot be read \(it is not one of PNG, JPEG, BMP, WEBP, PPM\); give a whole PNG or JPEG",
        r"cut\.png ",
        r"float\.pfm .*pixels",
        r"none\.png .*not exist",
        r"folder .*folder",
    )
    assert len(problems) == len(expected)
    for line, named in zip(problems, expected, strict=True):
        assert re.match(f"ensbridge: {named}", line)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), struct.error("odd"), EOFError(), IndexError(), TypeError("odd"), RecursionError()],
)
def test_a_decoder_that_fails_in_any_way_leaves_the_others_alone(
    error: Exception,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = PngImagePlugin.PngImageFile.load

    def fail(self: PngImagePlugin.PngImageFile) -> Any:
        if self.size == (9, 9):
            raise error
        return load(self)

    monkeypatch.chdir(tmp_path)
    Image.fromarray(pixels()).save("good.png")
    Image.fromarray(pixels(size=(9, 9, 3))).save("bad.png")
    Image.fromarray(pixels()).save("odd.dds")
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", fail)
    assert run(monkeypatch, "predict", saved, "bad.png", "odd.dds", "good.png") == 2
    captured = capsys.readouterr()
    assert [json.loads(line)["image"] for line in captured.out.splitlines()] == ["good.png"]
    first, second = captured.err.splitlines()
    assert re.match(rf"ensbridge: bad\.png .*\({str(error) or type(error).__name__}\)", first)
    assert re.match(r"ensbridge: odd\.dds .*PNG,", second)


LOUD = """
from torch import nn

class Loud(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 3))
        nn.init.constant_(self[1].weight, 3e38)  # finite, and too large for a bright image
"""


def loud() -> FastEnsemble:
    """A model of finite weights whose logits are finite for black images alone."""
    source = importlib.import_module("loud_nets").Loud()
    return FastEnsemble(source, [Bridge(TokenScore(3, 192, 8)).one_step()], "0").eval()


@pytest.fixture
def loud_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "loud_nets.py").write_text(LOUD)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("loud_nets", None)


@pytest.mark.usefixtures("loud_nets")
def test_an_image_without_a_finite_prediction_is_named_and_the_others_are_still_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loud().save("model", build="loud_nets:Loud", image_shape=(3, 8, 8))
    for name, value in (("one", 0), ("bright", 255), ("two", 0)):
        Image.fromarray(np.full((8, 8, 3), value, dtype=np.uint8)).save(f"{name}.png")
    assert (
        run(monkeypatch, "predict", "model", "one.png", "bright.png", "two.png", "--allow", "loud_nets") == 2
    )
    captured = capsys.readouterr()
    assert [json.loads(line)["image"] for line in captured.out.splitlines()] == ["one.png", "two.png"]
    (problem,) = captured.err.splitlines()
    assert re.search(r"finite.* bright\.png;", problem)


@pytest.mark.usefixtures("loud_nets")
def test_images_without_a_finite_prediction_are_named_by_their_index() -> None:
    images = torch.zeros(4, 3, 8, 8)
    assert len(predict_images(loud(), images)) == 4
    images[1], images[3] = 1, torch.nan
    with pytest.raises(ValueError, match=r"finite.* images\[1\], images\[3\];"):
        predict_images(loud(), images)


def test_a_class_that_is_ruled_out_is_no_failure() -> None:
    class Masking(torch.nn.Module):
        class_names = None

        def with_source(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.0, -torch.inf]])

    (found,) = predict_images(Masking(), torch.rand(1, 3, 8, 8))  # type: ignore[arg-type]
    assert (found.probability, found.entropy, found.disagreement) == (1, 0, 0)


def test_a_line_of_what_is_no_number_is_never_written() -> None:
    (found,) = predict_images(small(BridgeConfig()), torch.rand(1, 3, 8, 8))
    with pytest.raises(ValueError, match="JSON"):
        replace(found, probability=math.nan).to_json("a.png")


def test_large_images_are_predicted_a_few_at_a_time(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, sizes = eb.load(saved), []
    fast.source.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    files = [tmp_path / f"{number}.png" for number in range(5)]
    for number, file in enumerate(files):
        Image.fromarray(pixels(number)).save(file)
    entries = [(str(file), file) for file in files]
    together = [found for _, found in predict_entries(fast, entries, (3, 8, 8), Pixels())]
    monkeypatch.setattr(batch, "LARGEST_IMAGE", 2 * 3 * 8 * 8)
    apart = [found for _, found in predict_entries(fast, entries, (3, 8, 8), Pixels())]
    assert sizes == [5, 2, 2, 1]
    assert [each.label for each in apart] == [each.label for each in together]  # type: ignore[union-attr]


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_become_8(channels: int, tmp_path: Path) -> None:
    array = pixels(size=(8, 8))
    Image.fromarray(array.astype(np.uint16) * 256 + 37).save(tmp_path / "deep.png")
    image = open_image(tmp_path / "deep.png", (channels, 8, 8))
    for channel in image:
        assert channel.mul(255).round().numpy().astype(np.uint8).tolist() == array.tolist()


def test_a_palette_with_transparency_needs_no_remark(tmp_path: Path) -> None:
    Image.fromarray(pixels()).convert("P").save(tmp_path / "a.png", transparency=bytes([0, 128] * 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = open_image(tmp_path / "a.png", (3, 8, 8))
    plain = np.asarray(Image.open(tmp_path / "a.png").convert("RGBA"))[..., :3]
    assert image.mul(255).round().permute(1, 2, 0).numpy().astype(np.uint8).tolist() == plain.tolist()


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("P", 3), ("RGBA", 3), ("RGBA", 4)])
def test_files_of_every_mode_become_the_models_channels(mode: str, channels: int, tmp_path: Path) -> None:
    Image.fromarray(pixels()).convert(mode).save(tmp_path / "a.png")
    image = open_image(tmp_path / "a.png", (channels, 8, 8))
    assert (image.shape, image.dtype) == ((channels, 8, 8), torch.float32)
    expected = Image.open(tmp_path / "a.png").convert({1: "L", 3: "RGB", 4: "RGBA"}[channels])
    array = np.asarray(expected).reshape(8, 8, channels)
    assert image.mul(255).round().permute(1, 2, 0).numpy().astype(np.uint8).tolist() == array.tolist()


def test_an_image_of_another_size_is_cropped_around_its_middle(tmp_path: Path) -> None:
    array = np.zeros((16, 48, 3), dtype=np.uint8)
    array[:, 16:32] = (10, 200, 30)  # the middle third is all of one colour
    Image.fromarray(array).save(tmp_path / "wide.png")
    image = open_image(tmp_path / "wide.png", (3, 8, 8))
    middle = image[:, :, 2:-2].mul(255).round()
    assert middle.flatten(1).amin(1).tolist() == middle.flatten(1).amax(1).tolist() == [10, 200, 30]


def test_pixels_are_normalised_as_the_user_says_and_never_by_guess() -> None:
    fast = small(BridgeConfig())
    assert Pixels.of(fast, None, None) == Pixels()
    fast.pixel_range = (0.0, 1.005)
    assert Pixels.of(fast, None, None) == Pixels()
    for own, remedy in (
        ((-2.1, 2.6), r"-2\.1 to 2\.6,.*--mean.*--std.*0\.485,"),
        ((-1.0, 1.0), r"-1 to 1,.*--mean 0\.5 --std 0\.5"),
        ((0.0, 255.0), r"0 to 255,.*--std 0\.003921569"),
    ):
        fast.pixel_range = own
        with pytest.raises(ValueError, match=remedy):
            Pixels.of(fast, None, None)
    white = torch.ones(1, 3, 2, 2)
    assert Pixels.of(fast, None, [0.003921569])(white).sub(255).abs().max() < 1e-4  # what was advised
    assert Pixels.of(fast, [0.5], [0.5])(torch.stack([0 * white, white])).aminmax() == (-1, 1)
    images = torch.rand(2, 3, 4, 4)
    found = Pixels.of(fast, [0.5, 0.4, 0.3], [0.1, 0.2, 0.3])(images)
    for channel, (mean, std) in enumerate([(0.5, 0.1), (0.4, 0.2), (0.3, 0.3)]):
        torch.testing.assert_close(found[:, channel], (images[:, channel] - mean) / std)
    with pytest.raises(ValueError, match=r"mean.*\b2\b.*\b3\b"):
        Pixels((0.5, 0.5))(images)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nothing", "a.png"], "nothing.*not exist"),
        (["plain", "a.png"], "plain.*--image-shape"),
        (["plain", "a.png", "a.png", "--image-shape", "2,8,8"], r"\(2, 8, 8\).*1, 3 or 4 channels"),
        (["other", "a.png", "--image-shape", "1,8,8"], r"\(1, 8, 8\)"),
        (["model", "a.png", "--std", "1,2"], r"std.*\b2\b.*\b3\b"),
        (["model", "a.png", "--std", "0"], r"std.*\(0\.0,\)"),
        (["model", "a.png", "--mean", "0.5,x"], "mean.*'0.5,x'"),
        (["model", "a.png", "--device", "tpu"], "device.*'tpu'"),
        (["named", "a.png"], "3 classes and 2 class_names"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], named: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    small(BridgeConfig()).save(tmp_path / "plain")
    small(BridgeConfig()).save(tmp_path / "named", image_shape=(3, 8, 8))
    change(tmp_path / "named", put("facts.class_names", list(NAMES[:2])))
    foreign().save(tmp_path / "other", build="_tiny:batch_norm_member")
    (tmp_path / "model").symlink_to(saved)
    Image.fromarray(pixels()).save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "predict", *words, "--allow", "_tiny:batch_norm_member") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert re.search(named, line)


def test_entropy_is_in_nats(saved: Path) -> None:
    fast = eb.load(saved)
    fast.temperature = 1e9  # all classes alike
    (found,) = predict_images(fast, torch.rand(1, 3, 8, 8))
    assert found.entropy == pytest.approx(math.log(3))


@pytest.mark.parametrize("shape", [(3, 32), (2, 8, 8), (3, 1, 8, 8)])
def test_shapes_that_no_file_can_have_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(str(shape))}.*1, 3 or 4 channels"):
        open_image(Path("any.png"), shape)


def test_an_address_is_no_file() -> None:
    with pytest.raises(ValueError, match=r"https://x\.org/cat\.png"):
        open_image(Path("https://x.org/cat.png"), (3, 8, 8))
