"""`ensbridge export --to triton`: a folder that Triton's own schema accepts, with the checked ONNX file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import text_format

import _tiny
import ensbridge as eb
from _named import run
from _saving import runner, small
from ensbridge.methods import BridgeConfig


def parse(text: str) -> Any:
    """Triton's configuration by its own schema, of which the client has a copy."""
    package = importlib.util.find_spec("tritonclient")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return text_format.Parse(text, module.ModelConfig()), module


def test_the_folder_is_what_triton_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, out = tmp_path / "saved", tmp_path / "repository" / "tiny"
    small(BridgeConfig()).save(saved, image_shape=(3, 8, 8), class_names=("cat", "dog", "bird"))
    for _ in range(2):  # ours is replaced
        assert run(monkeypatch, "export", saved, "--to", "triton", "--out", out) == 0
    assert str(out.parent) in capsys.readouterr().out
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("[!.]*") if path.is_file())
    assert files == ["1/model.onnx", "config.pbtxt", "labels.txt"]
    config, schema = parse((out / "config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == ("tiny", "onnxruntime", 64)
    (images,), (logits, source_logits) = config.input, config.output
    assert (images.name, images.data_type, list(images.dims)) == ("images", schema.TYPE_FP32, [3, 8, 8])
    assert (logits.name, logits.data_type, list(logits.dims)) == ("logits", schema.TYPE_FP32, [3])
    assert (source_logits.name, list(source_logits.dims)) == ("source_logits", [3])
    assert config.HasField("dynamic_batching")
    assert (out / logits.label_filename).read_text().splitlines() == ["cat", "dog", "bird"]
    batch = _tiny.images(4)
    with torch.no_grad():
        torch.testing.assert_close(
            runner(out / "1" / "model.onnx")(batch), eb.load(saved)(batch), rtol=1e-5, atol=1e-5
        )


def test_anothers_configuration_and_a_missing_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(BridgeConfig()).save(tmp_path / "saved", image_shape=(3, 8, 8))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.pbtxt").write_text('name: "other"\n')
    assert run(monkeypatch, "export", tmp_path / "saved", "--to", "triton", "--out", other) == 2
    assert str(other) in capsys.readouterr().err
    assert sorted(path.name for path in other.iterdir()) == ["config.pbtxt"]
    assert run(monkeypatch, "export", tmp_path / "saved", "--to", "triton") == 2
