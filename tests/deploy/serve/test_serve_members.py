"""The true ensemble beside a served model, of members by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import _serving
import ensbridge as eb
from _named import CLASSES, TIMM, hugging_face, network, pixels, png, weights
from _serving import serving, upload
from ensbridge.deploy.members import open_member
from ensbridge.deploy.serve.served import ServedModel, parse_specs
from ensbridge.utils.extras import missing

pytestmark = pytest.mark.skipif(
    bool(missing("timm", "transformers")), reason=missing("timm", "transformers") or ""
)
IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose source is a network of timm, and other members beside it."""
    place = tmp_path_factory.mktemp("members")
    source = open_member(f"timm:{TIMM}@{weights(place / 'a.safetensors')},size=32,mean=0.5,std=0.25").net
    fast = eb.FastEnsemble(source, [], feature=None, class_names=CLASSES)
    fast.save(place / "model", image_shape=(3, 32, 32))
    weights(place / "b.safetensors", 1)
    weights(place / "five.safetensors", 1, classes=5)
    hugging_face(place / "vit")
    hugging_face(place / "other", labels=("bee", "ant", "cat"))
    net = network("timm", TIMM, 2)
    free = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(net, (IMAGES[:2],), dynamic_shapes=free), place / "c.pt2")
    return place


@torch.no_grad()
def test_members_by_name_are_the_true_ensemble(folder: Path) -> None:
    names = (f"timm:{TIMM}@{folder}/b.safetensors", f"hf:{folder}/vit", f"{folder}/c.pt2")
    models = _serving.registry(folder / "model", members=names)
    served: ServedModel = models.find()
    source = eb.load(folder / "model").source
    nets = [open_member(name).net for name in (f"{names[0]},size=32,mean=0.5,std=0.25", *names[1:])]
    expected = eb.Ensemble([source, *nets])(IMAGES)
    assert served.members is not None
    torch.testing.assert_close(served.members(IMAGES), expected)
    with serving(models) as base:
        answer = upload(base, ("x.png", png(0)), query="?ensemble=true&top=3").json()
    (prediction,) = answer["predictions"]
    image = torch.from_numpy(pixels(0)).permute(2, 0, 1)[None] / 255
    truth = eb.Ensemble([source, *nets])(image)[0].softmax(-1)
    shown = {entry["class_index"]: entry["probability"] for entry in prediction["ensemble"]["probabilities"]}
    torch.testing.assert_close(torch.tensor([shown[0], shown[1], shown[2]]), truth)


@pytest.mark.parametrize(
    ("member", "settings", "named"),
    [
        ("timm:nothing@b.safetensors", {}, "nothing"),
        (f"timm:{TIMM}@absent.pt", {}, "absent.pt"),
        (f"timm:{TIMM}@a.safetensors", {}, "a.safetensors"),  # the source again
        (f"timm:{TIMM}@five.safetensors", {}, "5 classes"),
        (f"timm:{TIMM}@b.safetensors", {"mean": (0.5,)}, "--mean"),
        ("hf:other", {}, "other"),
        ("absent.pt2", {}, "absent.pt2"),
        ("nonsense", {}, "nonsense"),
    ],
)
def test_a_wrong_member_is_named(
    folder: Path, member: str, settings: dict[str, object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=named):
        _serving.registry("model", members=(member,), **settings)


def test_what_stands_behind_a_name_is_no_name_of_a_model() -> None:
    (spec,) = parse_specs(["m=a"], [f"m=timm:{TIMM}@b.pt,size=32", "c.pt2,size=32"])
    assert spec.members == (f"timm:{TIMM}@b.pt,size=32", "c.pt2,size=32")
