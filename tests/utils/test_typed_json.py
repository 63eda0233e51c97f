"""Decoded JSON against types: what is read, and that whatever else is refused by its path and value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from ensbridge.utils.typed_json import JsonReader, Range

READER = JsonReader("make it again")


@dataclass(frozen=True)
class Inner:
    share: Annotated[float, Range(0, 1)]
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.kind == "b" and self.share == 0:
            raise ValueError("share is 0, expected more for kind b")


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, Range(1, 5)]
    parts: tuple[Inner, ...]
    bound: Annotated[int, Range(1, 9)] | str | None = None
    notes: dict[str, str] = field(default_factory=dict)


def document(**changes: Any) -> dict[str, Any]:
    return {"name": "one", "parts": [{"share": 0.5}, {"share": 1, "kind": "b"}], **changes}


def test_values_become_what_their_types_say() -> None:
    outer = READER.read(Outer, document(bound=3, notes={"a": ""}), "file")
    assert outer == Outer("one", (Inner(0.5), Inner(1.0, "b")), 3, {"a": ""})
    assert type(outer.parts[1].share) is float
    assert READER.read(Outer, document(bound=">9"), "file").bound == ">9"
    assert READER.read(Outer, document(bound=None), "file").bound is None


@pytest.mark.parametrize(
    ("changes", "path", "shown"),
    [
        ({"name": ""}, "name", '""'),
        ({"name": "longer"}, "name", '"longer"'),
        ({"name": "\x1b[2J"}, "name", '"\\u001b[2J"'),
        ({"parts": {}}, "parts", "{}"),
        ({"parts": [{"share": 1.5}]}, "parts[0].share", "1.5"),
        ({"parts": [{"share": math.nan}]}, "parts[0].share", "NaN"),
        ({"parts": [{"share": True}]}, "parts[0].share", "true"),
        ({"parts": [{"share": 10**400}]}, "parts[0].share", "1000"),
        ({"parts": [{"share": 1, "kind": "c"}]}, "parts[0].kind", '"c"'),
        ({"bound": 10}, "bound", "10"),
        ({"bound": 2.0}, "bound", "2.0"),
        ({"notes": {"a": 1}}, "notes.a", "1"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(changes: dict[str, Any], path: str, shown: str) -> None:
    with pytest.raises(ValueError) as caught:
        READER.read(Outer, document(**changes), "file")
    assert str(caught.value).startswith(f"file: {path} is {shown}")
    assert str(caught.value).endswith("; make it again")
    assert str(caught.value).isprintable()


def test_missing_and_unknown_keys_and_a_classes_own_checks_are_named() -> None:
    with pytest.raises(ValueError, match=r"^file .*'parts'"):
        READER.read(Outer, {"name": "one"}, "file")
    with pytest.raises(ValueError, match=r'^file .*"more"'):
        READER.read(Outer, document(more=1), "file")
    assert JsonReader("", ignore_unknown=True).read(Outer, document(more=1), "file").name == "one"
    with pytest.raises(ValueError, match=r"^file: parts\[0\]: share is 0,"):
        READER.read(Outer, document(parts=[{"share": 0, "kind": "b"}]), "file")
