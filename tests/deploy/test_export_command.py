"""`ensbridge export`: a file beside the model or where it is told, or one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import _tiny
import ensbridge as eb
import ensbridge.deploy.export as room
from _named import run
from _saving import contents, foreign, runner, small
from ensbridge.methods import BridgeConfig

IMAGES = _tiny.images(4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model whose card has its image shape."""
    folder = tmp_path_factory.mktemp("export") / "model"
    small(BridgeConfig()).save(folder, image_shape=(3, 8, 8))
    return folder


def test_the_command_writes_onnx_beside_the_model_and_says_what_it_checked(saved: Path) -> None:
    before = contents(saved)
    done = subprocess.run(
        [sys.executable, "-m", "ensbridge", "export", str(saved), "--to", "onnx"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    path = saved / "model.onnx"
    assert first.startswith(f"{path}: ")
    assert "opset" in first
    assert "logits differ by at most" in second
    after = contents(saved)
    after.pop(path.name)
    assert after == before
    fast = eb.load(saved)
    with torch.no_grad():
        torch.testing.assert_close(runner(path)(IMAGES), fast(IMAGES), rtol=1e-5, atol=1e-5)
    path.unlink()


def test_the_command_writes_pt2_where_it_is_told(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "small.pt2"
    before = contents(saved)
    assert run(monkeypatch, "export", saved, "--to", "pt2", "--out", out, "--image-shape", "3,16,16") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith(f"{out}: ")
    assert contents(saved) == before
    assert runner(out)(torch.rand(3, 3, 16, 16)).shape == (3, 3)


def test_a_source_from_elsewhere_is_built_only_where_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = foreign(0)
    fast.save(tmp_path, build="_tiny:batch_norm_member", arguments={"seed": 0}, image_shape=(3, 8, 8))
    assert run(monkeypatch, "export", tmp_path, "--to", "pt2") == 2
    assert "--allow _tiny:batch_norm_member" in capsys.readouterr().err
    allow = ("--allow", "_tiny:batch_norm_member")
    assert run(monkeypatch, "export", tmp_path, "--to", "pt2", *allow) == 0
    torch.testing.assert_close(runner(tmp_path / "model.pt2")(IMAGES), fast(IMAGES).detach())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nothing", "--to", "onnx"], "nothing.*not exist"),
        (["zoo:cifar10", "--to", "tflite"], "to is 'tflite'; it must be one of onnx, pt2, triton"),
        (["plain", "--to", "onnx"], "plain.*--image-shape"),
        (["plain", "--to", "tflite", "--image-shape", "3,8,8"], "to is 'tflite'"),
        (["plain", "--to", "pt2", "--image-shape", "3x8x8"], "'3x8x8'"),
        (["plain", "--to", "pt2", "--image-shape", "3,0,8"], r"\(3, 0, 8\)"),
        (["plain", "--to", "pt2", "--image-shape", "3,99999,99999"], r"\(3, 99999, 99999\)"),
        (["plain", "--to", "pt2", "--image-shape", "1,8,8"], r"\(1, 8, 8\)"),
        (["plain", "--to", "pt2", "--image-shape", "3,8,8", "--out", "x.onnx"], r"model\.pt2"),
        (["noisy", "--to", "pt2", "--image-shape", "3,8,8"], "random"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    small(BridgeConfig()).save(tmp_path / "plain")
    small(BridgeConfig.preset("released")).save(tmp_path / "noisy")
    monkeypatch.chdir(tmp_path)
    before = {folder: contents(tmp_path / folder) for folder in ("plain", "noisy")}
    assert run(monkeypatch, "export", *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("ensbridge: ")
    assert re.search(named, line)
    assert {folder: contents(tmp_path / folder) for folder in ("plain", "noisy")} == before
    assert not (tmp_path / "x.onnx").exists()


def test_a_mismatch_is_one_sentence_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(BridgeConfig()).save(tmp_path, image_shape=(3, 8, 8))
    (tmp_path / "model.pt2").write_bytes(b"earlier")
    before = contents(tmp_path)
    monkeypatch.setattr(room, "difference", lambda *_: 1.0)
    assert run(monkeypatch, "export", tmp_path, "--to", "pt2") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"ensbridge: model\.pt2 .*1\.0e\+00", line)
    assert contents(tmp_path) == before


def test_a_disk_without_room_is_one_sentence_with_the_file(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    program = (
        "import resource, sys; from ensbridge import cli\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))\n"
        f"sys.argv = ['ensbridge', 'export', {str(saved)!r}, '--to', 'pt2', '--out', {str(out)!r}]\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith("ensbridge: ")
    assert str(out) in line
    assert list(tmp_path.iterdir()) == []
