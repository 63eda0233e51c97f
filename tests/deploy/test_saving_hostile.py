"""Folders that a stranger made, or a disk damaged: refused in one sentence, before memory is taken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as unpack
from safetensors.torch import save as pack
from torch import Tensor

import ensbridge as eb
from _saving import change, contents, model, put
from ensbridge.deploy.saving import folder, weights
from ensbridge.deploy.saving.weights import digest

# ------------------------------------------------------------------------------ hostile descriptions


NETWORK, BLOCKS = "bridges.0.network", [1] * 100_000
HOSTILE: list[tuple[str, Any, str]] = [
    ("format", "pickle", "describes no FastEnsemble"),
    ("version", 2, "is of version 2, this ensbridge reads 1; upgrade ensbridge"),
    ("version", True, "is of version true"),
    ("version", "1", "is of version"),
    ("colour", "red", 'has an unknown key "colour"'),
    ("colour\x1b[2J", 1, r'unknown key "colour\\u001b\[2J"'),
    ("source.colour", "red", "source has an unknown key"),
    ("bridges.0.config.colour", "red", "config has an unknown key"),
    ("bridges.0.config.temperature.colour", "red", "temperature has an unknown key"),
    ("feature", "layer9", "config.json: feature 'layer9' is not a module"),
    ("feature", "", "feature '' is not a module"),
    ("feature", ["stem"], r'feature is \["stem"\], expected one line of text'),
    ("feature", "x" * 5000, "expected one line"),
    ("temperature", 0, "temperature is 0, expected .* 0.001 to 1000"),
    ("temperature", -1, "temperature is -1, expected .* 0.001 to 1000"),
    ("temperature", 1e-320, "temperature is 1e-320, expected .* 0.001 to 1000"),
    ("temperature", 9e-4, "temperature is 0.0009, expected"),
    ("temperature", 1001, "temperature is 1001, expected"),
    ("temperature", 1e300, r"temperature is 1e\+300, expected"),
    ("source_logit_weight", -1e7, r"source_logit_weight is -10000000.0, expected .* -1e\+06 to 1e\+06"),
    ("temperature", "1", 'temperature is "1", expected a finite number'),
    ("temperature", float("nan"), "finite number|NaN"),
    ("source_logit_weight", float("inf"), "finite number|Infinity"),
    ("temperature", float("inf"), "finite number|Infinity"),
    ("temperature", 10**400, "expected a finite number"),
    ("temperature", None, "temperature is null"),
    ("members", 0, "members is 0, expected .* 1 to 1000"),
    ("members", 10**9, "members is 1000000000, expected .* 1 to 1000"),
    ("members", 10**20, "members is 10{20}, expected"),
    ("members", 2.0, "expected a whole number"),
    ("average_source", 1, "expected true or false"),
    ("source", None, "source is null, expected an object"),
    ("source", "ensbridge.nets:ResNet", "expected an object"),
    ("source.arguments", None, "build and arguments go together"),
    ("source.build", None, "build and arguments go together"),
    ("source.build", "os:system", "source is built by os:system, which is not allowed"),
    ("source.build", "ensbridge.nets:ResNet.resnet34", "expected such as"),
    ("source.build", "ensbridge.deploy.saving.folder:load", "not allowed"),
    ("source.build", "ensbridge.models.resnet:BasicBlock", "not allowed"),
    ("source.build", "ensbridge.nets:ScoreNet", 'argument "blocks" that ScoreNet has not'),
    ("source.build", "../../evil:net", "expected such as"),
    ("source.build", "evil", "expected such as"),
    ("source.name", 3, "expected one line of text"),
    ("source.arguments.self", 3, 'argument "self" that ResNet has not'),
    ("source.arguments.return", 3, "has not"),
    ("source.arguments.blocks", [10**9, 1], "far more tensors than there are weights"),
    ("source.arguments.blocks", [2**41, 1], r"blocks\[0\] is 2199023255552, expected"),
    ("source.arguments.blocks", BLOCKS, "each stage needs one of each"),
    ("source.arguments.blocks", "11", "expected a list"),
    ("source.arguments.blocks", [True, 1], "expected a whole number"),
    ("source.arguments.blocks", [], "each stage needs one"),
    ("source.arguments.blocks", [2, 1], "model.safetensors has no"),
    ("source.arguments.blocks", [0, 1], "has a number below 1"),
    ("source.arguments.widths", [8, 10**6], "shape"),
    ("source.arguments.widths", [2**40, 2**40], "cannot be built"),
    ("source.arguments.widths", [-8, 16], "cannot be built"),
    ("source.arguments.widths", [8, 17], r"source.stages.1.0.conv1.weight.* the model as float32 of shape"),
    ("source.arguments.classes", 2**39, r"the model as float32 of shape \(549755813888, 16\)"),
    ("source.arguments.classes", 1, "a classifier needs at least 2"),
    ("source.arguments.classes", "3", "expected a whole number"),
    ("source.arguments.bias", "no", "expected true or false"),
    ("source.arguments.bias", False, "which the model has not"),
    ("source.arguments.mean", [0.5], "mean has 1 channels and std 3"),
    ("source.arguments.mean", ["a", 0, 0], "expected a finite number"),
    ("source.arguments.strides", [0, 1], "cannot be built"),
    ("bridges", [], "which the model has not"),
    ("bridges", {}, "expected a list"),
    ("bridges.0", 1, r"bridges\[0\] is 1, expected an object"),
    ("bridges.0.kind", "pickle", 'expected one of "diffusion", "feature"'),
    ("bridges.0.kind", "feature", "times and config belong to a diffusion bridge"),
    ("bridges.0.times", [1.0, 0.0], "expected to grow from 0 to 1"),
    ("bridges.0.times", [0.0, 0.5], "must rise from 0 to 1"),
    ("bridges.0.times", [0.0, 0.5, 0.5, 1.0], "expected to grow"),
    ("bridges.0.times", [], "must rise from 0 to 1"),
    ("bridges.0.times", None, "times and config belong"),
    ("bridges.0.times", ["0", "1"], "expected a finite number"),
    ("bridges.0.times", [0, 1e-320, 1], "expected to grow from 0 to 1 in steps of at least 1e-06"),
    ("bridges.0.times", [each / 100_000 for each in range(100_001)], "times are 100001, expected at most"),
    ("bridges.0.config.beta", -1, "beta is -1.0; it must be a positive number"),
    ("bridges.0.config.beta", 1e-320, "beta is 1e-320, expected 1e-09 to 1000"),
    ("bridges.0.config.beta", 1e300, r"beta is 1e\+300, expected 1e-09 to 1000"),
    ("bridges.0.config.num_steps", 0, "num_steps is 0"),
    ("bridges.0.config.num_steps", 300_000_000, "num_steps is 300000000"),
    ("bridges.0.config.num_steps", 10**30, "num_steps is 10{30}, expected"),
    ("bridges.0.config.z_input", "all", 'expected one of "paper"'),
    ("bridges.0.config.variance", ["exact"], "expected one of"),
    ("bridges.0.config.temperature", 2.0, "expected an object"),
    ("bridges.0.config.temperature.base", -2, "must be a positive number"),
    ("bridges.0.config.temperature.base", 1e-320, "temperature.base is 1e-320, expected 0.001 to 1000"),
    ("bridges.0.config.temperature.base", 1e300, "temperature.base is .*, expected 0.001 to 1000"),
    ("bridges.0.config.temperature.spread", 1e300, "temperature.spread is .*, expected 0 to 1000"),
    ("bridges.0.config.temperature.concentration", 1e-320, "temperature.concentration is .*, expected"),
    ("bridges.0.config.centre", "yes", "expected true or false"),
    (f"{NETWORK}.build", "torch.nn:Linear", "not allowed"),
    (f"{NETWORK}.build", None, "build and arguments go together"),
    (f"{NETWORK}.arguments.stages", [[1, 8, 1]], "expected a list of 4"),
    (f"{NETWORK}.arguments.stages", [[1, 8, 10**9, 1]], "far more tensors"),
    (f"{NETWORK}.arguments.stages", [[10**6, 8, 1, 1], [2, 8, 2, 2]], "shape|has no"),
    (f"{NETWORK}.arguments.channels", 9, "needs a multiple of 8"),
    (f"{NETWORK}.arguments.z_input", "informative", "has no"),
    (f"{NETWORK}.arguments.last", 10**9, "shape"),
    (NETWORK, {"name": "ScoreNet"}, r"bridges\[0\].network has no 'build'"),
    (
        NETWORK,
        {
            "name": "Tail",
            "build": "ensbridge.nets:Tail",
            "arguments": {
                "source": {"blocks": [1, 1], "widths": [10**6, 10**6], "classes": 3},
                "feature": "stages.0.0",
                "width": 1e-9,
            },
        },
        r"model.safetensors has no .bridges.0.score.blocks",
    ),
    (
        NETWORK,
        {"name": "Tail", "build": "ensbridge.nets:Tail", "arguments": {"source": [], "feature": "a"}},
        "source is .*, expected an object",
    ),
    (
        NETWORK,
        {
            "name": "Tail",
            "build": "ensbridge.nets:Tail",
            "arguments": {"source": {"blocks": "x"}, "feature": "a"},
        },
        r"arguments.source.blocks is \"x\", expected a list",
    ),
    ("sha256", "0" * 64, "model.safetensors is not the file that config.json was written with"),
    ("sha256", "../other", "is not the file"),
    ("sha256", 5, "expected one line of text"),
    ("tied", {"source.head.weight": "source.head.weight"}, "cannot be the tensor"),
    ("tied", {"source.more": "source.head.weight"}, "cannot be the tensor"),
    ("tied", {"source.head.weight": 1}, "expected one line of text"),
    ("tied", [], "expected an object"),
    ("facts.image_shape", [3, 4096, 5461], r"image_shape is \[3, 4096, 5461\], expected"),
    ("facts.image_shape", [2**12, 2**12, 2], "product at most 16777216"),
    ("facts.image_shape", [2**40] * 3, "product at most 16777216"),
    ("facts.image_shape", [1] * 9, "expected 1 to 8 sizes"),
    ("facts.image_shape", [], "expected 1 to 8 sizes"),
    ("facts.image_shape", [3, 0, 32], r"image_shape is \[3, -?\d+, -?32\], expected"),
    ("facts.image_shape", [3, -32, -32], r"image_shape is \[3, -?\d+, -?32\], expected"),
    ("facts.pixel_range", [1.0, 0.0], r"pixel_range is \(1.0, 0.0\)"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "model"
    model().save(place)
    return place


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    """A folder of one's own with a saved model."""
    for name, content in contents(saved).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def refused(place: Path, words: str, **arguments: Any) -> None:
    """Loading is refused in one printable sentence, before memory is taken for weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "on_cpu", lambda build: pytest.fail("memory was taken before all was checked"))
        with pytest.raises(ValueError, match=words) as caught:
            eb.load(place, **arguments)
    assert torch.is_grad_enabled()  # a construction that was stopped half-way leaves nothing behind
    assert str(place) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(("path", "value", "words"), HOSTILE)
def test_a_hostile_description_is_refused(path: str, value: Any, words: str, place: Path) -> None:
    change(place, put(path, value))
    refused(place, words)


@pytest.mark.parametrize("key", ["version", "feature", "members", "source", "bridges", "sha256"])
def test_a_description_with_a_hole_is_refused(key: str, place: Path) -> None:
    change(place, lambda config: config.pop(key))
    refused(place, "is of version null" if key == "version" else f"has no '{key}'")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"format": ' + b"9" * 10_000 + b"}", "is not JSON|digits"),
        (b"\xff\xfe\x00", "is not (JSON|UTF-8)"),
        (b"[1]", "describes no FastEnsemble"),
        (b'{"beta": 1}', "describes no FastEnsemble"),
        (b" " * (2**20 + 1), "a model's has under"),
    ],
)
def test_what_is_no_description_is_refused(text: bytes, words: str, place: Path) -> None:
    (place / "config.json").write_bytes(text)
    refused(place, words)


def test_values_that_are_other_numbers_of_the_same_kind_are_let_through(place: Path) -> None:
    change(place, put("temperature", 2))
    change(place, put("bridges.0.config.beta", 1))
    assert eb.load(place).temperature == 2.0


@pytest.mark.parametrize("shape", [(3, 224, 224), (4, 1024, 1024), (3, 2048, 2048), (2**24,)])
def test_images_of_every_real_size_are_let_through(shape: tuple[int, ...], place: Path) -> None:
    change(place, put("facts.image_shape", list(shape)))
    assert eb.load(place).image_shape == shape


def test_bridges_without_number_are_refused(place: Path) -> None:
    change(place, lambda config: config.update(bridges=config["bridges"] * 65))
    refused(place, "bridges are 65, expected at most 64")


def test_the_steps_of_all_bridges_are_counted_together(place: Path) -> None:
    times = [each / 400 for each in range(401)]
    change(place, put("bridges.0.times", times))
    change(place, lambda config: config.update(bridges=config["bridges"] * 3))
    refused(place, "bridges have 1200 steps together, expected at most 1000")


# ------------------------------------------------------------------------------ hostile weights


def reweigh(place: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change tensors and let the description vouch for the file."""
    tensors = unpack((place / "model.safetensors").read_bytes())
    edit(tensors)
    vouch(place, pack(tensors))


def vouch(place: Path, content: bytes) -> None:
    (place / "model.safetensors").write_bytes(content)
    change(place, put("sha256", digest(place / "model.safetensors")))


HEAD = "source.head.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(HEAD), f'model.safetensors has no "{HEAD}", which the model has'),
        (lambda tensors: tensors.clear(), "far more tensors|has no"),
        (lambda tensors: tensors.update(more=torch.ones(1)), 'has "more", which the model has not'),
        (lambda tensors: tensors.update({"\x1b[2J": torch.ones(1)}), r'has "\\u001b\[2J"'),
        (
            lambda tensors: tensors.update({HEAD: torch.ones(16, 3)}),
            r"as float32 of shape \(16, 3\), the model as float32 of shape \(3, 16\)",
        ),
        (lambda tensors: tensors.update({HEAD: torch.ones(0)}), r"of shape \(0,\)"),
        (lambda tensors: tensors.update({HEAD: torch.ones(3, 16).int()}), "as int32 of shape"),
        (lambda tensors: tensors.update({HEAD: torch.ones(3, 16) > 0}), "as bool of shape"),
        (lambda tensors: tensors.update({HEAD: torch.ones(3, 16).to(torch.float8_e5m2)}), "an unknown type"),
        (
            lambda tensors: tensors.update({"bridges.0.score.stem.1.num_batches_tracked": torch.tensor(1.0)}),
            "as float32 of shape .*, the model as int64",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(edit: Callable[..., Any], words: str, place: Path) -> None:
    reweigh(place, edit)
    refused(place, words)


MEAN = "bridges.0.score.stem.1.running_mean"


@pytest.mark.parametrize(
    ("name", "value"), [(HEAD, torch.nan), (HEAD, torch.inf), (HEAD, -torch.inf), (MEAN, torch.nan)]
)
def test_weights_that_are_no_numbers_are_refused(name: str, value: float, place: Path) -> None:
    reweigh(place, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    with pytest.raises(ValueError, match=f'model.safetensors: "{name}" holds') as caught:
        eb.load(place)
    assert str(value) in str(caught.value)


def test_tensors_cannot_be_tied_to_what_is_none_of_their_kind(place: Path) -> None:
    norm = "bridges.0.score.stem.1"
    reweigh(place, lambda tensors: tensors.pop(f"{norm}.weight"))
    change(place, put("tied", {f"{norm}.weight": f"{norm}.running_mean"}))
    with pytest.raises(ValueError, match="one is a weight, one a buffer"):
        eb.load(place)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a pickle", b"\xff" * 100, b"\x08" + b"\0" * 7 + b"{}"])
def test_what_is_no_safetensors_file_is_refused(content: bytes, place: Path) -> None:
    vouch(place, content)
    refused(place, "model.safetensors (is no whole safetensors file|has no)")


def header(**tensors: Any) -> bytes:
    """A safetensors file of eight bytes under a header."""
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


PLAIN = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        header(**{"\x1b[2J": PLAIN | {"data_offsets": [4, 12]}}),
        header(a=PLAIN | {"dtype": "\x1b[2J"}),
        header(a=PLAIN | {"shape": [2**63, 4]}),
        header(a=PLAIN | {"shape": [-2]}),
        header(a=PLAIN | {"shape": "2"}),
        header(a=PLAIN | {"dtype": "F6_E2M3"}),
        header(a=PLAIN | {"data_offsets": [8, 0]}),
        header(a=PLAIN, b=PLAIN | {"shape": [0, 2**62], "data_offsets": [8, 8]}),
        header(a=PLAIN, __metadata__={"\x1b[2J": "\x1b[2J"}),
        header(__metadata__=3),
    ],
)
def test_a_hostile_header_is_refused(content: bytes, place: Path) -> None:
    vouch(place, content)
    refused(place, "model.safetensors (is no whole safetensors file|has no)|far more tensors")


def test_more_tensors_than_any_network_has_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MOST_TENSORS", 3)
    refused(place, r"model.safetensors has \d+ tensors, a model's has at most 3")


def test_any_truncation_and_any_foreign_file_is_noticed(place: Path) -> None:
    path = place / "model.safetensors"
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-1] ^= 1
    for other in (b"", content[:7], content[:500], content[:-1], content + b"\0", bytes(flipped)):
        path.write_bytes(other)
        refused(place, "truncated, damaged or another model's; copy the whole folder again")
        if len(other) < len(content):
            vouch(place, other)
            refused(place, "is no whole safetensors file")
    path.unlink()
    refused(place, "holds no model.safetensors")
    path.mkdir()
    refused(place, "holds no model.safetensors")


def test_a_file_of_weights_beyond_any_model_is_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "LARGEST_WEIGHTS", 100)
    monkeypatch.setattr(folder, "digest", lambda path: pytest.fail("it was read"))
    refused(place, "model.safetensors has more than 100 bytes")


def test_no_pickle_is_ever_read(place: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "boom"),)

    torch.save({"source.head.weight": Bomb()}, place / "model.safetensors")
    vouch(place, (place / "model.safetensors").read_bytes())
    refused(place, "is no whole safetensors file")
    assert not (tmp_path / "boom").exists()
