"""Classifiers by name: what is built, what they take, and that a file can say so safely."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from PIL import Image

import ensbridge as eb
from _named import CLASSES, TIMM, VIT, hugging_face, network, pixels, png, weights
from _saving import change, put
from ensbridge.deploy.batch import decode_image, open_image
from ensbridge.deploy.members import Overrides, check_source, open_member, open_members
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.models.libraries import TRANSFORMERS, build_network
from ensbridge.models.named import ImageInput, NamedNetwork
from ensbridge.utils.extras import missing

pytestmark = pytest.mark.skipif(
    bool(missing("timm", "torchvision", "transformers")),
    reason=missing("timm", "torchvision", "transformers"),
)

IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_weights_of_timm_are_read_with_their_classes_channels_and_preprocessing(tmp_path: Path) -> None:
    for number, (file, channels) in enumerate({"a.safetensors": 3, "b.pt": 3, "grey.pth": 1}.items()):
        path = weights(tmp_path / file, number, channels=channels)
        member = open_member(f"timm:{TIMM}@{path},size=32")
        assert isinstance(member.net, NamedNetwork)
        assert (member.net.classes, member.net.takes.channels, member.takes) == (
            3,
            channels,
            member.net.takes,
        )
        if channels == 3:
            mean, std = (
                torch.tensor(values).view(-1, 1, 1) for values in (member.takes.mean, member.takes.std)
            )
            expected = network("timm", TIMM, number)((IMAGES - mean) / std)
            torch.testing.assert_close(member.net(IMAGES), expected)


@torch.no_grad()
def test_weights_of_torchvision_take_the_sizes_of_its_own_weights(tmp_path: Path) -> None:
    path = weights(tmp_path / "c.pth", library="torchvision", name="squeezenet1_1")
    member = open_member(f"torchvision:squeezenet1_1@{path}")
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert member.takes == ImageInput((224, 224), 3, *imagenet, "bilinear", crop=224 / 256)
    small = open_member(f"torchvision:squeezenet1_1@{path},size=32,mean=0.5,std=0.25")
    expected = network("torchvision", "squeezenet1_1")((IMAGES - 0.5) / 0.25)
    torch.testing.assert_close(small.net(IMAGES), expected)


@torch.no_grad()
def test_a_folder_of_transformers_brings_its_preprocessing_names_and_licence(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "vit")
    for name in (f"hf:{folder}", str(folder)):
        member = open_member(name)
        assert (member.class_names, member.license, member.base_model) == (CLASSES, "mit", None)
        assert member.takes == ImageInput(
            (32, 32), 3, (0.5, 0.4, 0.3), (0.5, 0.5, 0.25), "bilinear", squash=True
        )
        inputs = (IMAGES - torch.tensor([0.5, 0.4, 0.3]).view(-1, 1, 1)) / torch.tensor(
            [0.5, 0.5, 0.25]
        ).view(-1, 1, 1)
        expected = network("transformers", "vit", settings=VIT)(inputs).logits
        torch.testing.assert_close(member.net(IMAGES).logits, expected)  # type: ignore[attr-defined]


def test_a_folder_of_timm_says_what_it_is(tmp_path: Path) -> None:
    weights(tmp_path / "model.safetensors")
    config = {"mean": [0.1] * 3, "std": [0.2] * 3, "input_size": [3, 48, 48], "crop_pct": 0.9}
    described = {"architecture": TIMM, "num_classes": 3, "pretrained_cfg": config}
    (tmp_path / "config.json").write_text(json.dumps(described))
    for name in (f"hf:{tmp_path}", f"timm:{TIMM}@{tmp_path}"):
        assert open_member(name).takes == ImageInput((48, 48), 3, (0.1,) * 3, (0.2,) * 3, crop=0.9)


@torch.no_grad()
def test_an_exported_program_and_a_saved_model_are_teachers_and_no_sources(tmp_path: Path) -> None:
    net = network("timm", TIMM)
    free = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(net, (IMAGES[:2],), dynamic_shapes=free), tmp_path / "c.pt2")
    member = open_member(str(tmp_path / "c.pt2"))
    torch.testing.assert_close(member.net(IMAGES), net(IMAGES))
    normalised = open_member(f"{tmp_path / 'c.pt2'},size=32,mean=0.5,std=0.5", Overrides(mean=(9.0,)))
    torch.testing.assert_close(normalised.net(IMAGES), net(IMAGES * 2 - 1))
    saved = open_member("zoo:cifar10")
    assert isinstance(saved.net, FastEnsemble)
    for teacher in (member, saved):
        with pytest.raises(ValueError, match="comes first"):
            check_source(teacher)
    torch.export.save(torch.export.export(net, (IMAGES[:2],)), tmp_path / "fixed.pt2")
    with pytest.raises(ValueError, match="free batch size"):
        open_member(str(tmp_path / "fixed.pt2")).net(IMAGES)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("timm:nothing@a.pt", "nothing"),
        ("timm:hf-hub:user/model@a.pt", "hf-hub"),
        ("torchvision:fasterrcnn_resnet50_fpn@a.pt", "fasterrcnn"),
        ("torchvision:resnet18@WEIGHTS", "WEIGHTS"),
        (f"timm:{TIMM}@absent.pt", "absent.pt"),
        (f"timm:{TIMM}@a.pt,size=big", "big"),
        (f"timm:{TIMM}@a.pt,std=0", "std"),
        ("a.pt", "timm:NAME@a.pt"),
        ("absent.pt2", "absent.pt2"),
        ("nonsense", "nonsense"),
        ("hf:.", "config.json"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(
    name: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights(Path("a.pt"))
    with pytest.raises(ValueError, match=named):
        open_member(name)


def test_members_of_other_classes_are_refused(tmp_path: Path) -> None:
    one, other = hugging_face(tmp_path / "one"), hugging_face(tmp_path / "two", labels=("bee", "ant", "cat"))
    with pytest.raises(ValueError, match=r"two.*one"):
        open_members([f"hf:{one}", f"hf:{other}"])


def test_files_are_cropped_and_squashed_as_the_network_says() -> None:
    content = png(0, (40, 80))
    array = torch.from_numpy(pixels(0, (40, 80))).permute(2, 0, 1)
    whole = decode_image(content, (3, 40, 40))
    assert whole.equal(array[:, :, 20:60])  # the middle, unscaled
    half = decode_image(content, (3, 20, 20), ImageInput((20, 20), interpolation="nearest", crop=0.5))
    assert half.equal(array[:, 10:30, 30:50])
    squashed = decode_image(content, (3, 40, 40), ImageInput((40, 40), interpolation="nearest", squash=True))
    assert squashed.equal(array[:, :, 1::2])


# ------------------------------------------------------------------------------ saved and loaded


def named(kind: str) -> NamedNetwork:
    size, settings = (32, 32), VIT if kind == "transformers" else None
    name = {"timm": TIMM, "torchvision": "squeezenet1_1", "transformers": "vit"}[kind]
    return NamedNetwork(kind, name, 3, size=size, mean=(0.5,), std=(0.5,), crop=0.9, settings=settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["timm", "torchvision", "transformers"])
def test_a_named_source_is_loaded_bit_for_bit_without_being_allowed(kind: str, tmp_path: Path) -> None:
    fast = FastEnsemble(named(kind), image_shape=(3, 32, 32), class_names=CLASSES).eval()
    fast.save(tmp_path)
    state = torch.get_rng_state()
    again = eb.load(tmp_path)
    assert torch.get_rng_state().equal(state)
    assert isinstance(again.source, NamedNetwork)
    assert again.source.takes == fast.source.takes  # type: ignore[union-attr]
    with torch.no_grad():
        assert again(IMAGES).equal(fast(IMAGES))
    assert "allow" not in (tmp_path / "README.md").read_text()
    Image.fromarray(pixels(0, (40, 80))).save(tmp_path / "image.png")
    expected = decode_image(png(0, (40, 80)), (3, 32, 32), again.source.takes)
    assert open_image(tmp_path / "image.png", (3, 32, 32), again.source.takes).mul(255).byte().equal(expected)


HOSTILE = {
    "arguments.name": [
        "hf-hub:user/model",
        "hf_hub:user/model",
        "local-dir:/tmp",
        "../x",
        "vit_gigantic_x",
        "a" * 999,
    ],
    "arguments.library": ["os", "timm.models", "", None, 3],
    "arguments.classes": [0, -1, 2**40, "3", 1e9],
    "arguments.size": [[0, 32], [32], [10**6, 10**6], "32"],
    "arguments.channels": [0, 1, 99],
    "arguments.std": [[0.0], [], [1.0] * 9, ["a"]],
    "arguments.settings": [
        {"auto_map": {"AutoModel": "x.y"}},
        {"_attn_implementation": "user/kernel"},
        {"img_size": 64},
    ],
    "arguments.pretrained": [True],
    "arguments.checkpoint_path": ["/etc/passwd"],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in HOSTILE.items() for value in values]
)
def test_what_a_file_may_not_ask_of_timm_is_refused_without_a_connection(
    path: str, value: object, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile"
    if not folder.exists():
        FastEnsemble(named("timm")).save(folder)
    before = (folder / "config.json").read_text()
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was made"))
    try:
        change(folder, put(f"source.{path}", value))
        with pytest.raises(ValueError, match=r"config\.json|model\.safetensors"):
            eb.load(folder)
    finally:
        (folder / "config.json").write_text(before)


SETTINGS = [
    {"auto_map": {"AutoModelForImageClassification": "modeling.Net"}},
    {"_attn_implementation": "user/kernel"},
    {"attn_implementation": "flash_attention_2"},
    {"quantization_config": {"load_in_4bit": True}},
    {"backbone": "resnet18", "use_timm_backbone": True},
    {"torchscript": True},
    {"hidden_size": {"a": 1}},
    {"num_labels": 3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_settings_that_could_choose_code_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"settings have .*{next(iter(settings))}"):
        build_network("transformers", "vit", 3, 3, (32, 32), {**VIT, **settings})
    with pytest.raises(ValueError, match="timm_wrapper"):
        build_network("transformers", "timm_wrapper", 3, 3, (32, 32), {"architecture": "hf-hub:user/model"})


def test_a_file_cannot_ask_for_endless_layers(tmp_path: Path) -> None:
    FastEnsemble(named("transformers")).save(tmp_path)
    change(tmp_path, put("source.arguments.settings.num_hidden_layers", 2**15))
    with pytest.raises(ValueError, match="far more tensors"):
        eb.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("beit", {"num_hidden_layers": 30_000_000}),
        ("vit", {"image_size": 2**15 + 1}),
        ("vit", {"layer_norm_eps": float("nan")}),
        ("swin", {"depths": [2**15] * 3}),
        ("swin", {"depths": [1] * 101}),
        ("swin", {"depths": [[1] * 100] * 2}),
    ],
)
def test_settings_beyond_any_real_network_are_refused(kind: str, settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"settings have .*{next(iter(settings))}.* up to 32768"):
        build_network("transformers", kind, 3, 3, (32, 32), settings)


def test_levit_which_is_quadratic_in_its_size_is_not_built() -> None:
    with pytest.raises(ValueError, match="levit"):
        build_network("transformers", "levit", 3, 3, (32, 32), {"image_size": 3200})


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "vit", "num_channels": "3"},
        {"model_type": "vit", "num_channels": 10**12},
        {"model_type": "vit", "image_size": "32"},
        {"model_type": "vit", "hidden_size": "wide"},
        {"model_type": "vit", "num_hidden_layers": 10**9},
        {"model_type": ["vit"]},
        {"model_type": {"vit": 1}},
        {"architecture": "resnet10t", "num_classes": 3, "pretrained_cfg": "x"},
        {"architecture": "resnet10t", "num_classes": 3, "pretrained_cfg": {"input_size": 5}},
        {"architecture": "resnet10t", "num_classes": 3, "pretrained_cfg": {"mean": ["a"]}},
    ],
    ids=json.dumps,
)
def test_a_folder_whose_description_is_wrong_is_named(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json describes no classifier \(.*\); download it again"):
        open_member(f"hf:{tmp_path}")


def test_every_kind_of_transformers_is_one_of_its_classifiers() -> None:
    from transformers.models.auto import modeling_auto

    known = modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    for kind, name in TRANSFORMERS.items():
        assert name in ([known[kind]] if isinstance(known[kind], str) else known[kind])
