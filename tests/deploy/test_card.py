"""The model card's metadata, as the Hugging Face hub's own library reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from _saving import small
from ensbridge.deploy.saving.card import Results, write_head
from ensbridge.evaluation.choices import Choice
from ensbridge.methods import BridgeConfig

hub = pytest.importorskip("huggingface_hub")


def test_metadata_make_the_round_trip_through_the_hubs_library(tmp_path: Path) -> None:
    figures = [("accuracy", "accuracy", 0.915), ("nll", "NLL", 1e-7), ("ece", "calibration", 0.0)]
    results = Results("my: photos", "test", figures)
    bases = ["timm/resnet18.a1_in1k", "user/model", "user/model"]
    (tmp_path / "README.md").write_text(
        write_head('One "network"', "apache-2.0", bases, results) + "\n# Card\n"
    )
    data = hub.ModelCard.load(tmp_path / "README.md").data
    assert (data.library_name, data.license, data.pipeline_tag) == (
        "ensbridge",
        "apache-2.0",
        "image-classification",
    )
    assert (data.base_model, data.model_name) == (bases[:2], 'One "network"')
    assert "ensbridge" in data.tags
    read = [
        (r.dataset_name, r.dataset_split, r.metric_type, r.metric_name, r.metric_value)
        for r in data.eval_results
    ]
    assert read == [("my: photos", "test", *figure) for figure in figures]
    assert all(isinstance(result.metric_value, float) for result in data.eval_results)
    again = hub.ModelCardData(**data.to_dict() | {"model-index": data.to_dict()["model-index"]})
    assert again.to_dict() == data.to_dict()


def test_a_saved_model_says_what_validation_chose_and_what_it_comes_from(tmp_path: Path) -> None:
    fast = small(BridgeConfig())
    fast.choices = (Choice("source", 1.0, 0.6, 0.01, False), Choice("source + bridges", 1.2, 0.5, 0.01, True))
    fast.save(tmp_path, license="mit", base_models=["user/a"], dataset="photos")
    card = hub.ModelCard.load(tmp_path / "README.md")
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("nll", 0.5, "validation")
    assert (card.data.license, card.data.base_model, result.dataset_name) == ("mit", ["user/a"], "photos")
    assert "source + bridges (chosen)" in card.content
    fast.save(tmp_path)  # over a card of ours


@pytest.mark.parametrize(
    "wrong", [{"license": "my\nlicence"}, {"base_models": ["a/b/c"]}, {"base_models": ["x\ny"]}]
)
def test_metadata_that_no_hub_would_take_are_refused(wrong: dict, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        small(BridgeConfig()).save(tmp_path / "model", **wrong)
    assert not (tmp_path / "model").exists()
