"""Saved models whose files were changed at random: a clear refusal or a correct model, nothing else.

ENSBRIDGE_FUZZ=2000 tries that many examples a test, other ones at each run.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import _tiny
import ensbridge as eb
from _saving import bridge, contents, foreign, model
from ensbridge.bridge.bridge import FeatureBridge
from ensbridge.deploy.batch import predict_images
from ensbridge.deploy.saving.weights import digest
from ensbridge.models.fast_ensemble import FastEnsemble

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

ASKED = os.environ.get("ENSBRIDGE_FUZZ")
fuzzed: Callable[..., Any] = hypothesis.settings(
    max_examples=int(ASKED or 30),
    derandomize=ASKED is None,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
given: Callable[..., Any] = hypothesis.given

# ------------------------------------------------------------------------------ what is changed

WORDS = (
    *(
        "",
        "\x1b[2J",
        "a\nb",
        "\u202e",
        "é",
        "\ud800",
        "0",
        "true",
        "None",
        "__class__",
        "../../etc",
        "x" * 2000,
    ),
    *(
        "stem",
        "stages.0",
        "head",
        "source.head.weight",
        "source",
        "diffusion",
        "feature",
        "F32",
        "I64",
        "BOOL",
    ),
    *(
        "ensbridge.nets:ResNet",
        "ensbridge.nets:Tail",
        "ensbridge.deploy.saving:load",
        "os:system",
        "__main__:main",
    ),
    *(
        "torch.nn:Linear",
        "torch.nn:ParameterDict",
        "torch.nn:Transformer",
        "torch.fx:GraphModule",
        "torch:load",
    ),
)
NUMBERS = (
    *(
        0,
        -1,
        1,
        2,
        3,
        255,
        10**6,
        2**31,
        2**40,
        2**63,
        2**64,
        10**30,
        10**400,
        -(10**400),
        0.0,
        -0.0,
        0.5,
        1.0,
    ),
    *(1e-320, 1e-9, 1e9, 1e300, math.inf, -math.inf, math.nan),
)
numbers = st.sampled_from(NUMBERS) | st.integers() | st.floats()
texts = st.sampled_from(WORDS) | st.text(max_size=20)
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


SAME = {
    bool: st.booleans(),
    int: st.sampled_from([each for each in NUMBERS if isinstance(each, int)]) | st.integers(0, 20),
    float: st.sampled_from([each for each in NUMBERS if isinstance(each, float)]) | st.floats(0, 2),
    str: texts,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something lies inside decoded JSON."""
    if path:
        yield path
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, each in entries:
        yield from places(each, (*path, key))


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@st.composite
def changes(draw: Any, start: Any) -> Any:
    """Decoded JSON with one to three changes in it."""
    changed = copy.deepcopy(start)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(places(changed), key=str)))
        inside = changed
        for key in path[:-1]:
            inside = inside[key]
        old = inside[path[-1]]
        how = draw(st.sampled_from(["same", "value", "remove", "add", "other", "scale", "repeat", "nest"]))
        if how == "same" and type(old) in SAME:  # which comes further than another type does
            inside[path[-1]] = draw(SAME[type(old)])
        elif how == "remove":
            del inside[path[-1]]
        elif how == "add":
            inside.update({draw(texts): draw(values)}) if isinstance(inside, dict) else inside.append(
                draw(values)
            )
        elif how == "other":  # a value from elsewhere in the same file
            whole: Any = start
            for key in draw(st.sampled_from(sorted(places(start), key=str))):
                whole = whole[key]
            inside[path[-1]] = copy.deepcopy(whole)
        elif how == "scale" and isinstance(old, int | float):
            inside[path[-1]] = old * draw(st.sampled_from([-1, 0, 2, 0.5, 1000, 10**9, 10**18]))
        elif how == "repeat" and isinstance(old, list):
            inside[path[-1]] = old * draw(st.sampled_from([0, 2, 70, 5000]))
        elif how == "nest":
            inside[path[-1]] = nested(draw(st.sampled_from([1, 3, 200])))
        else:
            inside[path[-1]] = draw(values)
        if not changed:
            break
    return changed


@st.composite
def damages(draw: Any, start: bytes) -> bytes:
    """Bytes of which some were replaced, removed, doubled or cut off."""
    content = bytearray(start)
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, max(0, len(content) - 1)))
        last = first + draw(st.sampled_from([0, 1, 2, 8, 64]))
        how = draw(st.sampled_from(["replace", "remove", "double", "cut", "flip"]))
        if how == "replace":
            content[first:last] = draw(st.binary(max_size=8))
        elif how == "remove":
            del content[first:last]
        elif how == "double":
            content[first:first] = content[first:last]
        elif how == "cut":
            del content[first:]
        elif content:
            content[first] ^= 1 << draw(st.integers(0, 7))
    return bytes(content)


# ------------------------------------------------------------------------------ what it starts from


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of tiny models: one of our networks, and one that is built by another's function."""
    place = tmp_path_factory.mktemp("saved")
    ours = model(bridge(1), FeatureBridge(_tiny.tail(_tiny.member())), temperature=1.3)
    ours.pixel_range = (0.0, 1.0)
    ours.save(place / "ours", image_shape=(3, 8, 8), class_names=["cat", "dog", "bird"])
    foreign().save(place / "foreign", build="_tiny:batch_norm_member", arguments={"seed": 1, "classes": 3})
    return {name: contents(place / name) for name in ("ours", "foreign")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed")


def written(place: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (place / name).write_bytes(content)
    return place


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def check(place: Path, **arguments: Any) -> FastEnsemble | None:
    """Load: one printable sentence, or a model that is what the files say."""
    state, fast, said = torch.get_rng_state(), None, ""
    try:
        fast = eb.load(place, **arguments)
    except ValueError as error:
        said = str(error)
    assert said.isprintable()
    assert len(said) < 1500
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    if fast is None:
        return None
    config = json.loads((place / "config.json").read_bytes())
    assert fast.temperature == config["temperature"]
    assert len(fast.bridges) == len(config["bridges"])
    for weight in fast.parameters():
        assert weight.isfinite().all()
    # A feature that the bridges are not for, and such, may be noticed as late as here.
    with suppress(ValueError, RuntimeError):
        found = predict_images(fast, _tiny.images(2).to(next(fast.parameters()).dtype))
        assert [json.loads(each.to_json("a.png"))["probability"] > 0.3 for each in found] == [True, True]
    return fast


# ------------------------------------------------------------------------------ tests


@pytest.mark.parametrize("kind", ["ours", "foreign"])
@fuzzed
@given(data=st.data())
def test_changed_descriptions(kind: str, data: Any, saved: Any, place: Path) -> None:
    config = data.draw(changes(json.loads(saved[kind]["config.json"])))
    written(place, saved[kind] | {"config.json": encoded(config)})
    check(place)
    check(place, allow=["_tiny:batch_norm_member"])
    check(place, allow=["torch", "ensbridge", "_tiny"])
    check(place, source=_tiny.batch_norm_member(2) if kind == "foreign" else _tiny.member(2))


@fuzzed
@given(data=st.data())
def test_damaged_descriptions(data: Any, saved: Any, place: Path) -> None:
    text = data.draw(damages(saved["ours"]["config.json"]))
    check(written(place, saved["ours"] | {"config.json": text}))


def vouched(files: dict[str, bytes], weights: bytes, place: Path) -> Path:
    """A folder whose description has the digest of the changed weights."""
    written(place, files | {"model.safetensors": weights})
    config = json.loads(files["config.json"])
    config["sha256"] = digest(place / "model.safetensors")
    (place / "config.json").write_bytes(encoded(config))
    return place


@fuzzed
@given(data=st.data())
def test_changed_headers_of_weights(data: Any, saved: Any, place: Path) -> None:
    content = saved["ours"]["model.safetensors"]
    size = int.from_bytes(content[:8], "little")
    header = data.draw(changes(json.loads(content[8 : 8 + size])))
    text = encoded(header)
    check(vouched(saved["ours"], len(text).to_bytes(8, "little") + text + content[8 + size :], place))


@fuzzed
@given(data=st.data())
def test_damaged_weights(data: Any, saved: Any, place: Path) -> None:
    check(vouched(saved["ours"], data.draw(damages(saved["ours"]["model.safetensors"])), place))


LAYERS = sorted(name for name, each in vars(torch.nn).items() if isinstance(each, type))
sizes = st.sampled_from([0, 1, 2, 3, 8, -1, 10**6, 10**9, 2**40])


@fuzzed
@given(data=st.data())
def test_layers_of_torch_with_any_arguments(data: Any, saved: Any, place: Path) -> None:
    layer = data.draw(st.sampled_from(LAYERS))
    names = [
        name for name in inspect.signature(getattr(torch.nn, layer).__init__).parameters if name != "self"
    ]
    each = sizes | st.lists(sizes, max_size=4) | values
    arguments = {name: data.draw(each) for name in names if data.draw(st.booleans())}
    config = json.loads(saved["foreign"]["config.json"])
    config["source"].update(build=f"torch.nn:{layer}", arguments=arguments)
    written(place, saved["foreign"] | {"config.json": encoded(config)})
    assert check(place, allow=["torch"]) is None
