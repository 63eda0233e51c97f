"""`ensbridge serve` as a process: its signals, its end, its back ends, and its words on wrong options."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import _serving
import _tiny
import ensbridge
import ensbridge as eb
from _named import run
from _saving import model, small
from _serving import infer, request_for
from ensbridge.deploy.serve.served import ModelSpec, ServedModel, Settings, parse_specs
from ensbridge.methods import BridgeConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("process") / "model"
    small(BridgeConfig()).save(place, image_shape=(3, 8, 8), class_names=_serving.NAMES)
    return place


def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one sentence that the command ends with."""
    assert run(monkeypatch, "serve", *words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ensbridge: ")
    assert captured.err.count("\n") == 1
    return captured.err


# ------------------------------------------------------------------------------ the process


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A running server, its address, and the folder of its model."""
    place = tmp_path / "model"
    model(source=_tiny.member(0), image_shape=(3, 8, 8)).save(place)
    environment = os.environ | {"PYTHONPATH": str(Path(ensbridge.__file__).parents[1])}
    command = [sys.executable, "-m", "ensbridge", "serve", str(place), "--port", "0", "--wait-ms", "300"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=environment, **pipes)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.fullmatch(r"serving model on (http://127\.0\.0\.1:\d+) \(backend eager\)\n", line)
        assert found is not None, server.communicate()
        assert _serving.send(found[1], "GET", "/v2/health/ready").status == 200
        yield server, found[1], place
    finally:
        server.kill()
        server.wait()


def test_hang_up_reloads_and_terminate_answers_what_was_accepted(
    process: tuple[subprocess.Popen[str], str, Path],
) -> None:
    server, base, place = process
    images = _tiny.images(1).numpy()
    new = model(source=_tiny.member(1), image_shape=(3, 8, 8))
    new.save(place)
    server.send_signal(signal.SIGHUP)
    assert server.stderr is not None
    assert server.stderr.readline() == "ensbridge: model was loaded again\n"

    answers: list[_serving.Answer] = []
    asking = threading.Thread(target=lambda: answers.append(infer(base, "model", request_for(images))))
    asking.start()
    time.sleep(0.1)  # it waits for others in its batch
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=10) == 0
    asking.join()
    (answer,) = answers
    assert answer.status == 200
    with torch.no_grad():
        expected = new(torch.from_numpy(images))[0]
    np.testing.assert_allclose(answer.json()["outputs"][0]["data"], expected, atol=1e-5)
    with pytest.raises(OSError):
        _serving.send(base, "GET", "/healthz")
    assert server.stderr.read() == ""


# ------------------------------------------------------------------------------ back ends


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_back_end_gives_the_models_logits(folder: Path, backend: Any) -> None:
    (served,) = _serving.registry(folder, backend=backend).models.values()
    fast, images = eb.load(folder), _tiny.images(3)
    outputs = served._predict(images)
    with torch.no_grad():
        for name, logits in zip(("logits", "source_logits"), fast.with_source(images), strict=True):
            torch.testing.assert_close(outputs[name], logits, atol=1e-5, rtol=0)


def test_the_compiled_back_end_gives_the_models_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile = torch.compile
    # Traced as for any compiler, without the minute that writing C++ takes.
    monkeypatch.setattr(torch, "compile", lambda net, **options: compile(net, backend="eager", **options))
    (served,) = _serving.registry(folder, backend="compiled").models.values()
    fast = eb.load(folder)
    for count in (1, 2, 5):
        images = _tiny.images(count, seed=count)
        with torch.no_grad():
            torch.testing.assert_close(served._predict(images)["logits"], fast(images), atol=1e-5, rtol=0)


def test_a_model_that_draws_is_served_request_by_request(tmp_path: Path) -> None:
    small(BridgeConfig(test_temperature="drawn")).save(tmp_path, image_shape=(3, 8, 8))
    models = _serving.registry(f"drawn={tmp_path}")
    fast, images = eb.load(tmp_path), _tiny.images(4)
    with _serving.serving(models) as base:
        threads = [
            threading.Thread(target=infer, args=(base, "drawn", request_for(images.numpy())))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        answer = infer(base, "drawn", request_for(images.numpy())).json()
        for thread in threads:
            thread.join()
    with torch.no_grad():
        np.testing.assert_allclose(answer["outputs"][0]["data"], fast(images).flatten(), atol=1e-5)
    with pytest.raises(ValueError, match="--backend eager"):
        _serving.registry(f"drawn={tmp_path}", backend="onnxruntime")


# ------------------------------------------------------------------------------ wrong options


def test_models_are_named_by_their_folder_or_as_they_are_told() -> None:
    assert [
        spec.name for spec in parse_specs(["zoo:cifar10", "runs/best/", "hf:me/net@v1", "x=zoo:cifar10"])
    ] == [
        "cifar10",
        "best",
        "net",
        "x",
    ]
    assert parse_specs(["a=m", "b=n"], ["one.pt", "b=two.pt"]) == [
        ModelSpec("a", "m", ("one.pt",)),
        ModelSpec("b", "n", ("two.pt",)),
    ]
    for models, members in ((["a", "x/a"], []), (["a b"], []), (["a"], ["b=c"]), ([], [])):
        with pytest.raises(ValueError):
            parse_specs(models, members)


def test_wrong_options_end_with_one_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in fails(monkeypatch, capsys, folder, "--port", port)
    assert "nothing" in fails(monkeypatch, capsys, tmp_path / "nothing", "--port", "0")
    assert "fast" in fails(monkeypatch, capsys, folder, "--backend", "fast")
    assert "cuda-graph" in fails(monkeypatch, capsys, folder, "--backend", "cuda-graph")
    assert "9" in fails(monkeypatch, capsys, folder, "--seconds", "9")
    assert "token" in fails(monkeypatch, capsys, folder, "--token", "")
    for option in ("--mean", "--std"):
        assert "2 numbers for 3 channels" in fails(monkeypatch, capsys, folder, "--port", "0", option, "1,2")
    assert "member.pt" in fails(monkeypatch, capsys, folder, "--port", "0", "--members", "member.pt")
    assert str(folder) in fails(monkeypatch, capsys, folder, "--port", "0", "--members", folder)
    assert "nonsense" in fails(monkeypatch, capsys, folder, "--port", "0", "--members", "nonsense")
    assert "3, 9, 9, 9" in fails(monkeypatch, capsys, folder, "--port", "0", "--image-shape", "3,9,9,9")
    monkeypatch.setenv("ENSBRIDGE_TOKEN", "")
    assert "ENSBRIDGE_TOKEN" in fails(monkeypatch, capsys, folder, "--port", "0")


def test_what_is_not_installed_is_named_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "pip install 'ensbridge[serve]'" in fails(monkeypatch, capsys, "nothing")


def test_pixels_other_than_of_files_need_to_be_said(tmp_path: Path) -> None:
    small(BridgeConfig()).save(tmp_path / "model", image_shape=(3, 8, 8))
    models = _serving.registry(tmp_path / "model", mean=(0.5,), std=(0.25,))
    served: ServedModel = models.find()
    assert served.pixels(torch.ones(1, 3, 8, 8)).unique().tolist() == [2.0]
    assert Settings().backend == "eager"
