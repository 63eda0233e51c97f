"""Folders that a stranger made, or a disk damaged: refused in one sentence, before memory is taken."""

from __future__ import annotations

import json
import os
import re
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


def tail(source: Any) -> dict[str, Any]:
    """The description of a bridge network that is the rest of a source."""
    arguments = {"source": source, "feature": "stages.0.0", "width": 1e-9}
    return {"name": "Tail", "build": "ensbridge.nets:Tail", "arguments": arguments}


NETWORK, SOURCE, CONFIG = "bridges.0.network", "source.arguments", "bridges.0.config"
VALUES: dict[str, list[Any]] = {  # values that are refused by the name of their field
    "version": [2, True, "1"],
    "feature": [["stem"], "x" * 5000],
    "temperature": [0, -1, 1e-320, 9e-4, 1001, 1e300, "1", float("nan"), float("inf"), 10**400, None],
    "source_logit_weight": [-1e7, float("inf")],
    "members": [0, 10**9, 10**20, 2.0],
    "average_source": [1],
    "source": [None, "ensbridge.nets:ResNet"],
    "source.build": ["ensbridge.nets:ResNet.resnet34", "../../evil:net", "evil"],
    "source.name": [3],
    f"{SOURCE}.blocks": ["11", [0, 1]],
    f"{SOURCE}.widths": [[-8, 16]],
    f"{SOURCE}.strides": [[0, 1]],
    f"{SOURCE}.classes": [1, "3"],
    f"{SOURCE}.bias": ["no"],
    "bridges": [{}],
    "bridges.0.kind": ["pickle"],
    "bridges.0.times": [[1.0, 0.0], [0.0, 0.5, 0.5, 1.0]],
    f"{CONFIG}.beta": [-1, 1e-320, 1e300],
    f"{CONFIG}.num_steps": [0, 300_000_000, 10**30],
    f"{CONFIG}.z_input": ["all"],
    f"{CONFIG}.variance": [["exact"]],
    f"{CONFIG}.temperature": [2.0],
    f"{CONFIG}.temperature.base": [-2, 1e-320, 1e300],
    f"{CONFIG}.temperature.spread": [1e300],
    f"{CONFIG}.temperature.concentration": [1e-320],
    f"{CONFIG}.centre": ["yes"],
    "sha256": [5],
    "tied": [[]],
    "facts.image_shape": [
        [3, 4096, 5461],
        [2**12, 2**12, 2],
        [2**40] * 3,
        [1] * 9,
        [],
        [3, 0, 32],
        [3, -32, -32],
    ],
    "facts.input_specs": [3],
}
IDS = {"shape": [4], "dtype": "int64", "high": 9}
OTHERS: list[tuple[str, Any, str]] = [
    ("format", "pickle", "no FastEnsemble"),
    ("colour", "red", 'unknown key "colour"'),
    ("colour\x1b[2J", 1, r'unknown key "colour\\u001b\[2J"'),
    ("source.colour", "red", 'source has an unknown key "colour"'),
    (f"{CONFIG}.colour", "red", 'config has an unknown key "colour"'),
    (f"{CONFIG}.temperature.colour", "red", 'temperature has an unknown key "colour"'),
    ("feature", "layer9", r"config\.json: feature 'layer9'"),
    ("feature", "", "feature ''"),
    ("source.arguments", None, "build and arguments"),
    ("source.build", None, "build and arguments"),
    ("source.build", "os:system", "source.*os:system.*not allowed"),
    ("source.build", "ensbridge.deploy.saving.folder:load", "not allowed"),
    ("source.build", "ensbridge.models.resnet:BasicBlock", "not allowed"),
    ("source.build", "ensbridge.nets:ScoreNet", '"blocks" that ScoreNet has not'),
    (f"{SOURCE}.self", 3, '"self" that ResNet has not'),
    (f"{SOURCE}.return", 3, '"return" that ResNet has not'),
    (f"{SOURCE}.blocks", [10**9, 1], "far more tensors"),
    (f"{SOURCE}.blocks", [2**41, 1], r"blocks\[0\] is 2199023255552"),
    (f"{SOURCE}.blocks", [1] * 100_000, "blocks.* 100000, 2 and 2"),
    (f"{SOURCE}.blocks", [], "blocks.* 0, 2 and 2"),
    (f"{SOURCE}.blocks", [True, 1], r"blocks\[0\] is true"),
    (f"{SOURCE}.blocks", [2, 1], r"model\.safetensors has no .*stages\.0\.1"),
    (f"{SOURCE}.widths", [8, 10**6], r"\(16, 8, 3, 3\).*\(1000000, 8, 3, 3\)"),
    (f"{SOURCE}.widths", [2**40, 2**40], "cannot be built"),
    (f"{SOURCE}.widths", [8, 17], r"source.stages.1.0.conv1.weight.*\(17, 8, 3, 3\)"),
    (f"{SOURCE}.classes", 2**39, r"\(549755813888, 16\)"),
    (f"{SOURCE}.bias", False, r"conv1\.bias.*the model has not"),
    (f"{SOURCE}.mean", [0.5], "mean has 1 channels and std 3"),
    (f"{SOURCE}.mean", ["a", 0, 0], r'mean\[0\] is "a"'),
    ("bridges", [], "which the model has not"),
    ("bridges.0", 1, r"bridges\[0\] is 1,"),
    ("bridges.0.kind", "feature", "times and config"),
    ("bridges.0.times", [0.0, 0.5], r"times are \(0\.0, 0\.5\)"),
    ("bridges.0.times", [], r"times are \(\)"),
    ("bridges.0.times", None, "times and config"),
    ("bridges.0.times", ["0", "1"], r'times\[0\] is "0"'),
    ("bridges.0.times", [0, 1e-320, 1], r"times are \[0\.0, 1e-320, 1\.0\]"),
    ("bridges.0.times", [each / 100_000 for each in range(100_001)], "times are 100001"),
    (f"{NETWORK}.build", "torch.nn:Linear", '"torch.nn:Linear".*not allowed'),
    (f"{NETWORK}.build", None, "build and arguments"),
    (f"{NETWORK}.arguments.stages", [[1, 8, 1]], r"stages\[0\] is \[1, 8, 1\].* 4"),
    (f"{NETWORK}.arguments.stages", [[1, 8, 10**9, 1]], "far more tensors"),
    (f"{NETWORK}.arguments.stages", [[10**6, 8, 1, 1], [2, 8, 2, 2]], "shape|has no"),
    (f"{NETWORK}.arguments.channels", 9, "9 channels.*multiple of 8"),
    (f"{NETWORK}.arguments.z_input", "informative", "has no .*z_embedding"),
    (f"{NETWORK}.arguments.last", 10**9, r"\(1000000000, 8, 1, 1\)"),
    (NETWORK, {"name": "ScoreNet"}, r"bridges\[0\].network has no 'build'"),
    (NETWORK, tail({"blocks": [1, 1], "widths": [10**6, 10**6], "classes": 3}), "has no .*score.blocks"),
    (NETWORK, tail([]), r"source is \[\]"),
    (NETWORK, tail({"blocks": "x"}), r'arguments\.source\.blocks is "x"'),
    ("sha256", "0" * 64, r"model\.safetensors is not the file.*config\.json"),
    ("sha256", "../other", r"model\.safetensors is not the file.*config\.json"),
    ("tied", {"source.head.weight": "source.head.weight"}, "cannot be the tensor"),
    ("tied", {"source.more": "source.head.weight"}, '"source.more" cannot be the tensor'),
    ("tied", {"source.head.weight": 1}, r"tied\.source\.head\.weight is 1"),
    ("facts.pixel_range", [1.0, 0.0], r"pixel_range is \(1.0, 0.0\)"),
    ("facts.input_specs", [], "input_specs are 0"),
    ("facts.input_specs", [IDS] * 65, "input_specs are 65"),
    ("facts.input_specs", [IDS, {**IDS, "name": "ids"}], "2 with 1 names"),
    ("facts.input_specs", [{**IDS, "name": "ids"}] * 2, "2 with 1 names"),
    ("facts.input_specs", [{**IDS, "dtype": "object"}], 'dtype is "object"'),
    ("facts.input_specs", [{**IDS, "shape": [0]}], r"\(0,\)"),
    ("facts.input_specs", [{**IDS, "shape": [1] * 9}], "at most 8 sizes"),
    ("facts.input_specs", [{**IDS, "shape": [2**12, 2**12]}] * 2, "33,554,432"),
    ("facts.input_specs", [{**IDS, "low": 10}], "from 10 to 9"),
    ("facts.input_specs", [{**IDS, "high": 2**41}], "high is 2199023255552"),
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


def refused(place: Path, named: str, **arguments: Any) -> None:
    """Loading is refused in one printable sentence, before memory is taken for weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "on_cpu", lambda build: pytest.fail("memory was taken before all was checked"))
        with pytest.raises(ValueError, match=named) as caught:
            eb.load(place, **arguments)
    assert torch.is_grad_enabled()  # a construction that was stopped half-way leaves nothing behind
    assert str(place) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(("path", "value"), [(path, value) for path in VALUES for value in VALUES[path]])
def test_a_value_out_of_its_range_is_named_with_its_field(path: str, value: Any, place: Path) -> None:
    change(place, put(path, value))
    refused(place, rf"{path.split('.')[-1]}( is| are)? {re.escape(json.dumps(value)[:50])}")


@pytest.mark.parametrize(("path", "value", "named"), OTHERS)
def test_a_hostile_description_is_refused(path: str, value: Any, named: str, place: Path) -> None:
    change(place, put(path, value))
    refused(place, named)


@pytest.mark.parametrize("key", ["version", "feature", "members", "source", "bridges", "sha256"])
def test_a_description_with_a_hole_is_refused(key: str, place: Path) -> None:
    change(place, lambda config: config.pop(key))
    refused(place, "version null" if key == "version" else f"'{key}'")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"format": ' + b"9" * 10_000 + b"}", "not JSON|digits"),
        (b"\xff\xfe\x00", "not (JSON|UTF-8)"),
        (b"[1]", "no FastEnsemble"),
        (b'{"beta": 1}', "no FastEnsemble"),
        (b" " * (2**20 + 1), "a model's has under"),
    ],
)
def test_what_is_no_description_is_refused(text: bytes, named: str, place: Path) -> None:
    (place / "config.json").write_bytes(text)
    refused(place, named)


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
    refused(place, "65.* 64")


def test_the_steps_of_all_bridges_are_counted_together(place: Path) -> None:
    times = [each / 400 for each in range(401)]
    change(place, put("bridges.0.times", times))
    change(place, lambda config: config.update(bridges=config["bridges"] * 3))
    refused(place, "1200 steps.* 1000")


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
    ("edit", "named"),
    [
        (lambda tensors: tensors.pop(HEAD), f'no "{HEAD}"'),
        (lambda tensors: tensors.clear(), "far more tensors|has no"),
        (lambda tensors: tensors.update(more=torch.ones(1)), '"more", which the model has not'),
        (lambda tensors: tensors.update({"\x1b[2J": torch.ones(1)}), r'has "\\u001b\[2J"'),
        (
            lambda tensors: tensors.update({HEAD: torch.ones(16, 3)}),
            r"\(16, 3\).*\(3, 16\)",
        ),
        (lambda tensors: tensors.update({HEAD: torch.ones(0)}), r"\(0,\)"),
        (lambda tensors: tensors.update({HEAD: torch.ones(3, 16).int()}), "int32"),
        (lambda tensors: tensors.update({HEAD: torch.ones(3, 16) > 0}), "bool"),
        (lambda tensors: tensors.update({HEAD: torch.ones(3, 16).to(torch.float8_e5m2)}), "unknown type"),
        (
            lambda tensors: tensors.update({"bridges.0.score.stem.1.num_batches_tracked": torch.tensor(1.0)}),
            "float32.*int64",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(edit: Callable[..., Any], named: str, place: Path) -> None:
    reweigh(place, edit)
    refused(place, named)


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
    refused(place, "model.safetensors (is no whole|has no)")


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
    refused(place, "model.safetensors (is no whole|has no)|far more tensors")


def test_more_tensors_than_any_network_has_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MOST_TENSORS", 3)
    refused(place, r"model\.safetensors has \d+ tensors.* 3")


def test_any_truncation_and_any_foreign_file_is_noticed(place: Path) -> None:
    path = place / "model.safetensors"
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-1] ^= 1
    for other in (b"", content[:7], content[:500], content[:-1], content + b"\0", bytes(flipped)):
        path.write_bytes(other)
        refused(place, r"model\.safetensors.*damaged")
        if len(other) < len(content):
            vouch(place, other)
            refused(place, r"model\.safetensors.*no whole")
    path.unlink()
    refused(place, "holds no model.safetensors")
    path.mkdir()
    refused(place, "holds no model.safetensors")


def test_a_file_of_weights_beyond_any_model_is_not_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "LARGEST_WEIGHTS", 100)
    monkeypatch.setattr(folder, "digest", lambda path: pytest.fail("it was read"))
    refused(place, "model.safetensors.*100 bytes")


def test_no_pickle_is_ever_read(place: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "boom"),)

    torch.save({"source.head.weight": Bomb()}, place / "model.safetensors")
    vouch(place, (place / "model.safetensors").read_bytes())
    refused(place, r"model\.safetensors.*no whole")
    assert not (tmp_path / "boom").exists()
