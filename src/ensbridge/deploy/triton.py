"""A model as a folder of a Triton model repository: `config.pbtxt`, `labels.txt` and `1/model.onnx`.

`tritonserver --model-repository` takes the folder that this one lies in. The file is the one that `export`
writes and checks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ensbridge.deploy.export import Exported, Images, export
from ensbridge.models.ensemble import at_least_float32
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.files import MOST_JSON, open_folder, read_file, write_atomically
from ensbridge.utils.text import visible

CONFIG, LABELS = "config.pbtxt", "labels.txt"
MARK = "# Written by ensbridge export --to triton.\n"  # by which a configuration of ours is known
MAX_BATCH, QUEUE_DELAY = 64, 2000  # images, microseconds
_TYPES = {
    torch.float64: "TYPE_FP64",
    torch.float32: "TYPE_FP32",
    torch.float16: "TYPE_FP16",
    torch.bfloat16: "TYPE_BF16",
}


@dataclass(frozen=True)
class ExportedRepository:
    """What was written, and how the ONNX file compared with the model."""

    folder: Path
    onnx: Exported

    def __str__(self) -> str:
        return (
            f"{self.onnx}\n{self.folder / CONFIG}: model {self.folder.name} for tritonserver "
            f"--model-repository={self.folder.absolute().parent}"
        )


def export_triton(fast: FastEnsemble, folder: Path | str, example: Images) -> ExportedRepository:
    """Write a model into `folder`, a model's folder in a Triton repository; its name is the model's.

    What of ours is there is replaced; a folder with another's configuration is refused.
    """
    folder = Path(folder)
    _check_ours(folder)
    open_folder(folder)
    open_folder(folder / "1")
    done = export(fast, folder / "1" / "model.onnx", "onnx", example)
    images = torch.as_tensor(example)
    with torch.no_grad():
        logits = at_least_float32(fast(images[:1].to(next(fast.parameters(), images).device)))
    if fast.class_names is not None:
        labels = "".join(f"{visible(name)}\n" for name in fast.class_names)
        write_atomically(folder / LABELS, labels.encode())
    text = configuration(folder.absolute().name, images, logits, labels=fast.class_names is not None)
    write_atomically(folder / CONFIG, text.encode())
    return ExportedRepository(folder, done)


def configuration(name: str, images: Tensor, logits: Tensor, *, labels: bool) -> str:
    """Triton's description of a model that takes `images` (B, …) and gives `logits` (B, K).

    >>> print(configuration("net", torch.zeros(1, 3, 8, 8), torch.zeros(1, 10), labels=False).splitlines()[4])
    input [{ name: "images" data_type: TYPE_FP32 dims: [3, 8, 8] }]
    """
    label_file = f' label_filename: "{LABELS}"' if labels else ""
    return (
        f"{MARK}name: {json.dumps(name)}\n"
        'backend: "onnxruntime"\n'
        f"max_batch_size: {MAX_BATCH}\n"
        f'input [{{ name: "images" {_tensor(images)} }}]\n'
        f'output [{{ name: "logits" {_tensor(logits)}{label_file} }}, '
        f'{{ name: "source_logits" {_tensor(logits)} }}]\n'
        f"dynamic_batching {{ max_queue_delay_microseconds: {QUEUE_DELAY} }}\n"
    )


def _tensor(rows: Tensor) -> str:
    return f"data_type: {_TYPES[rows.dtype]} dims: {list(rows.shape[1:])}"


def _check_ours(folder: Path) -> None:
    name = folder.absolute().name
    if not name or not (name.isascii() and name.isprintable()):
        raise ValueError(
            f"{visible(str(folder))} is no name for a model; give a folder such as repository/cifar10"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder such as repository/cifar10")
    config = folder / CONFIG
    if config.exists() and not read_file(config, MOST_JSON).startswith(MARK.encode()):
        raise ValueError(f"{config} is not ours; choose another folder")
