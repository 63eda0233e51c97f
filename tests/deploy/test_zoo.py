"""What ships: models that load by name, of the size and the figures that their cards say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ensbridge as eb
from ensbridge.deploy.saving.folder import find_model, zoo_names
from ensbridge.metrics.cost import count_params

ANATOMY = {  # bridges, members, parameters
    "cifar10": (1, 5, 2_274_212),
    "cifar10-2": (2, 5, 2_676_398),
    "cifar10-distilled": (0, 5, 1_860_986),
}


@pytest.mark.parametrize("name", ANATOMY)
def test_a_model_of_the_zoo_is_whole(name: str) -> None:
    fast = eb.load(f"zoo:{name}")
    assert (len(fast.bridges), fast.members, count_params(fast)) == ANATOMY[name]
    assert 1 < fast.temperature < 1.2  # fitted on validation images: a little over-confident without
    assert fast.image_shape == (3, 32, 32)
    assert fast.class_names == eb.data.CIFAR10_CLASSES
    with torch.no_grad():
        logits = fast(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()
    folder = find_model(f"zoo:{name}")
    assert (folder / "model.safetensors").stat().st_size < 12_000_000
    card = (folder / "README.md").read_text()
    assert "fitted on validation" in card
    assert ("how much of the gain is due to the ensemble is not known" in card) == (len(fast.bridges) > 0)


def test_all_have_the_same_source_and_the_first_bridge() -> None:
    one, two, alone = (eb.load(f"zoo:{name}") for name in ANATOMY)
    pairs = (one.source, two.source), (one.source, alone.source), (one.bridges[0], two.bridges[0])
    for mine, theirs in pairs:
        other = theirs.state_dict()
        assert all(tensor.equal(other[name]) for name, tensor in mine.state_dict().items())


def test_the_zoo_is_what_is_tested_here_and_other_names_are_refused() -> None:
    assert zoo_names() == sorted(ANATOMY)
    with pytest.raises(ValueError, match=r"zoo:cifar9.*zoo:cifar10, zoo:"):
        eb.load("zoo:cifar9")
    with pytest.raises(ValueError, match=r"zoo:\.\./saving"):
        eb.load("zoo:../saving")
    assert find_model(Path("zoo:cifar10")) == Path("zoo:cifar10")  # a path is a path
