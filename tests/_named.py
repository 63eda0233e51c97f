"""Tiny classifiers of other libraries as files, and small sets of images in the layouts that are read."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from ensbridge import cli
from ensbridge.models.libraries import build_network

CLASSES = ("ant", "bee", "cat")
TIMM = "test_resnet"  # timm's own for tests: 0.5 M weights
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
}


def network(library: str, name: str, seed: int = 0, **options: object) -> nn.Module:
    arguments = {"classes": 3, "channels": 3, "size": (32, 32), "settings": {}, **options}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_network(library, name, **arguments).eval()  # type: ignore[arg-type]


def weights(path: Path, seed: int = 0, library: str = "timm", name: str = TIMM, **options: object) -> Path:
    """A file of the weights of a network."""
    state = network(library, name, seed, **options).state_dict()
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


def hugging_face(folder: Path, seed: int = 0, labels: tuple[str, ...] = CLASSES) -> Path:
    """A classifier of transformers, as it saves one, with its preprocessing."""
    net = network("transformers", "vit", seed, settings=VIT)
    net.config.id2label = dict(enumerate(labels))  # type: ignore[union-attr]
    net.save_pretrained(folder)  # type: ignore[operator]
    said = {"do_resize": True, "size": {"height": 32, "width": 32}, "resample": 2, "do_normalize": True}
    said |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.25]}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    return folder


def pixels(seed: int, size: tuple[int, int] = (32, 32)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def png(seed: int, size: tuple[int, int] = (32, 32)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(seed, size)).save(file, "PNG")
    return file.getvalue()


def class_folders(folder: Path, count: int = 4, names: tuple[str, ...] = CLASSES) -> Path:
    for label, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.png").write_bytes(png(100 * label + number))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The exit code of a command."""
    monkeypatch.setattr(sys, "argv", ["ensbridge", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code
