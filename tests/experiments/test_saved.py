"""A saved model measured again: the scores are those of `evaluate` on the same images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import _recipe
import ensbridge as eb
from ensbridge.bridge import Bridge
from ensbridge.data import ImageSet, Splits, open_splits, write_npz
from ensbridge.experiments import evaluate_saved


@pytest.fixture
def model(tmp_path: Path) -> Path:
    fast = eb.FastEnsemble(_recipe.member(), [Bridge(_recipe.score("none")).one_step()], "stages.0.0")
    fast.save(tmp_path / "model", image_shape=(1, 8, 8), class_names=["a", "b", "c"])
    return tmp_path / "model"


def data(folder: Path, side: int = 8) -> Path:
    """A data set of random pixels as an .npz."""
    draws = torch.Generator().manual_seed(0)
    parts = []
    for count in (12, 10, 20):
        pixels = torch.randint(0, 256, (count, 1, side, side), generator=draws, dtype=torch.uint8)
        parts.append(ImageSet(pixels, torch.randint(0, 3, (count,), generator=draws)))
    write_npz(folder / "set.npz", Splits(*parts))
    return folder / "set.npz"


def test_the_scores_are_those_of_evaluate(model: Path, tmp_path: Path) -> None:
    place = data(tmp_path)
    scores, splits, recorded = (
        evaluate_saved(str(model), str(place)),
        open_splits(place),
        _recipe.RecordedProgress(),
    )
    fast = eb.load(model)
    source = eb.Ensemble([fast.source])
    expected = eb.evaluate({"DE-1": source, str(model): fast}, splits.test, splits.val, reference=source)
    assert scores.rows == expected.rows
    evaluate_saved(str(model), str(place), progress=recorded)
    total, done = recorded.stages["evaluate"]
    assert sum(done) == total == 2 * (len(splits.test) + len(splits.val))


def test_images_of_another_shape_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(1, 8, 8\).*\(1, 4, 4\)"):
        evaluate_saved(str(model), str(data(tmp_path, side=4)))


def image_folder(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(12):
            Image.new("L", (8, 8), number).save(folder / name / f"{number}.png")
    return folder


def test_classes_of_other_names_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 is 'b' there and 'z' here"):
        evaluate_saved(str(model), str(image_folder(tmp_path / "set", "a", "z")))


def test_a_model_of_other_pixels_is_refused(model: Path, tmp_path: Path) -> None:
    fast = eb.load(model)
    fast.pixel_range = (-1.0, 1.0)
    fast.save(model)
    with pytest.raises(ValueError, match="from -1 to 1"):
        evaluate_saved(str(model), str(data(tmp_path)))
