"""Pickles as data: what the official ones hold is read, what a stranger could put there is refused."""

from __future__ import annotations

import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import _sets
from _limits import outcome
from ensbridge.data import unpickling
from ensbridge.data.unpickling import read_pickle

BATCH: dict[Any, Any] = {
    "batch_label": "training batch 1 of 5",
    "labels": [6, 9, 300, 70_000],
    "data": np.arange(12, dtype=np.uint8).reshape(4, 3),
    "filenames": ["a.png", "b" * 300],
}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[key], value)
            assert found[key].dtype == value.dtype
        else:
            assert found[key] == value


# ------------------------------------------------------------------------------ what is read


def test_a_pickle_of_python_2_is_read() -> None:
    content = _sets.python2(BATCH)
    same(pickle.loads(content, encoding="latin1"), BATCH)  # the helper writes what Python reads
    same(read_pickle(content, "batch"), BATCH)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_is_read(protocol: int) -> None:
    more = {
        "mean": np.linspace(0, 1, 5),
        "big": np.arange(4, dtype=">i4"),
        "columns": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "none": np.zeros((0, 3), np.uint8),
        "meta": {"count": 3, "share": 0.5, "whole": True, "no": None},
    }
    same(read_pickle(pickle.dumps({**BATCH, **more}, protocol), "batch"), {**BATCH, **more})


def test_keys_of_bytes_become_strings_and_numbers_of_numpy_plain_ones() -> None:
    found = read_pickle(pickle.dumps({b"n": np.int64(-3), b"x": np.float32(0.5), b"b": b"raw"}), "batch")
    assert found == {"n": -3, "x": 0.5, "b": b"raw"}
    assert type(found["n"]) is int


# ------------------------------------------------------------------------------ what is refused


class Calls:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        function, *arguments = self.call
        return function, tuple(arguments)


def hostile() -> dict[str, tuple[bytes, str]]:
    import builtins
    import codecs
    import os

    raw = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(t R".replace(b" ", b"")
    return {
        "system": (pickle.dumps(Calls(os.system, "touch gone")), "'posix.system'"),
        "old system": (b"cos\nsystem\n(U\x0atouch gonetR.", "'os.system'"),
        "eval": (pickle.dumps({"data": Calls(builtins.eval, "1")}), "'builtins.eval'"),
        "old eval": (b"c__builtin__\neval\n(U\x011tR.", "'__builtin__.eval'"),
        "bytes": (b"c__builtin__\nbytes\n(J\xff\xff\xff\x7ftR.", "damaged"),
        "getattr": (pickle.dumps({"x": getattr}, 4), "'builtins.getattr'"),
        "inside numpy": (b"cnumpy.testing\nrundocs\n(tR.", "'numpy.testing.rundocs'"),
        "load": (b"cnumpy\nload\n(U\x01xtR.", "'numpy.load'"),
        "control": (b"cos\n\x1b[2J\n.", "'os.\\x1b[2J'"),
        "inst": (b"(U\x011ios\nsystem\n.", "INST"),
        "object": (pickle.dumps({"x": Path("x")}), "'pathlib."),
        "set": (pickle.dumps({"x": {1}}, 4), "EMPTY_SET"),
        "complex": (pickle.dumps({"x": np.zeros(2, complex)}), "'c16'"),
        "objects": (pickle.dumps({"data": np.array([{}], object)}), "array of objects"),
        "objects 2": (pickle.dumps({"data": np.array([{}], object)}, 2), "array of objects"),
        "codec": (pickle.dumps({"x": Calls(codecs.encode, "a", "rot13")}), "encodes text"),
        "function": (b"}U\x01xcnumpy\ndtype\n}bs.", "changes a function"),
        "names": (b"}U\x01xcnumpy\ndtype\ns.", "no array"),
        "ndarray": (b"cnumpy\nndarray\n(I9\ntR.", "makes an array"),
        "unfinished": (b"}U\x01x" + array + b"s.", "no array"),
        "too long": (b"}U\x01x" + array + b"(K\x01(J\xff\xff\xff\x7ft" + raw + b"\x89U\x01atbs.", "1 bytes"),
        "negative": (
            b"}U\x01x" + array + b"(K\x01(J\xff\xff\xff\xfft" + raw + b"\x89U\x01atbs.",
            "impossible shape",
        ),
        "no type": (b"}U\x01x" + array + b"(K\x01(K\x01tN\x89U\x01atbs.", "without a type"),
        "persistent": (b"Pdisk\n.", "PERSID"),
        "extension": (b"\x82\x01.", "EXT1"),
        "claims": (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"ab.", "damaged"),
        "a list": (pickle.dumps([1]), "a list"),
        "numbered": (pickle.dumps({1: 2}), "key that is no string"),
        "text": (b"hello", "damaged"),
        "nothing": (b"", "damaged"),
    }


@pytest.mark.parametrize("name", hostile())
def test_a_hostile_pickle_is_refused_in_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, words = hostile()[name]
    with pytest.raises(ValueError) as refused:
        read_pickle(content, "data_batch_1")
    sentence = str(refused.value)
    assert sentence.startswith("data_batch_1 ")
    assert words in sentence
    assert len(sentence.splitlines()) == 1
    assert len(sentence) < 250
    assert list(tmp_path.iterdir()) == []


def nested(opening: bytes, closing: bytes, deep: int) -> bytes:
    return b"}U\x01x" + opening * deep + closing * (deep - 1) + b"s."


@pytest.mark.parametrize(
    "content",
    [
        nested(b"]", b"a", 100_000),  # lists in lists
        b"}U\x01x)" + b"\x85" * 100_000 + b"s.",  # tuples in tuples
        b"}q\x00U\x01xh\x00s.",  # a dictionary in itself
        b"}U\x01x]q\x00(" + b"h\x00" * 1000 + b"es.",  # a list of itself
    ],
)
def test_deep_and_endless_nesting_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"deeper than 4|damaged"):
        read_pickle(content, "data_batch_1")


TEXT = b"X\xe8\x03\x00\x00" + b"a" * 1000 + b"q\x00"  # a thousand characters, remembered


def test_what_memory_takes_is_in_proportion_to_the_file() -> None:
    """A text is not encoded again and again, neither as bytes nor as an array."""
    encode = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87Rq\x01"
    array = b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01M\xe8\x03h\x01\x89h\x00tb"
    start = b"}(U\x01t" + TEXT + b"U\x01k" + b"](cnumpy.core.multiarray\nscalar\n" + kind + b"U\x01a\x86Re"
    for again in (encode, array):
        found = read_pickle(start + b"U\x01x](" + again + b"eu.", "batch")
        assert len(found["x"][0]) == 1000
        with pytest.raises(ValueError, match="batch encodes"):
            read_pickle(start + b"U\x01x](" + again * 50 + b"eu.", "batch")


def test_instructions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    content = pickle.dumps(BATCH)
    count = len(list(pickletools.genops(content)))
    monkeypatch.setattr(unpickling, "MOST_INSTRUCTIONS", count)
    same(read_pickle(content, "batch"), BATCH)
    monkeypatch.setattr(unpickling, "MOST_INSTRUCTIONS", count - 1)
    with pytest.raises(ValueError, match=rf"batch.*\b{count - 1} instructions"):
        read_pickle(content, "batch")


def test_a_number_that_is_remembered_takes_no_memory() -> None:
    assert read_pickle(b"}r\xff\xff\xff\x7f.", "batch") == {}


@pytest.mark.parametrize(
    "key",
    [
        b")" + b"\x85" * 10**6 + b"q\x00",  # tuples in tuples, which would overflow the stack
        b")q\x00" + b"h\x00h\x00\x86q\x00" * 100,  # tuples of two that are one, 2^100 in all
    ],
)
def test_a_key_that_is_no_string_is_not_looked_up(key: bytes, tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(key + b"}h\x00K\x00s.")
    found = outcome(f"unpickling.read_pickle(Path({str(tmp_path / 'batch')!r}).read_bytes(), 'batch')")
    assert found.startswith("ValueError: batch has a key")


def test_a_list_that_occurs_everywhere_is_looked_at_once() -> None:
    """Ten thousand times ten thousand times ten thousand zeros from a file of 60 kB."""
    again = 10_000
    inner = b"]q\x01(" + b"K\x00" * again + b"e"
    middle = b"]q\x02(" + b"h\x01" * again + b"e"
    outer = b"](" + b"h\x02" * again + b"e"
    content = b"}(U\x01a" + inner + b"U\x01b" + middle + b"U\x01c" + outer + b"u."
    found = read_pickle(content, "data_batch_1")
    assert found["c"][7][5] is found["a"]
    assert len(found["a"]) == len(found["b"]) == len(found["c"]) == again


@pytest.mark.parametrize("content", [_sets.python2(BATCH), pickle.dumps(BATCH, 5)], ids=["2", "5"])
def test_a_pickle_that_is_cut_anywhere_is_refused(content: bytes) -> None:
    for end in range(len(content)):
        with pytest.raises(ValueError, match=r"^data_batch_1 .*damaged"):
            read_pickle(content[:end], "data_batch_1")
