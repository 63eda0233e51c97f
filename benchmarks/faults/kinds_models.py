"""Files of models and of runs: weights, descriptions, checkpoints, configurations, scores."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

import _named
import _report
import _runs
import _saving
import _tiny
import ensbridge as eb
from ensbridge.bridge.bridge import FeatureBridge
from ensbridge.deploy.batch import predict_images
from ensbridge.deploy.members import open_member
from ensbridge.deploy.saving.weights import digest
from ensbridge.evaluation.scores import read_scores, summarise
from ensbridge.experiments import Plan, check_runs
from ensbridge.models.stored_network import load_weights
from ensbridge.report import headline, rich_table
from ensbridge.report.figures import PLOTS
from ensbridge.training import fit
from ensbridge.training.checkpoint import RunFolder, load_checkpoint, save_checkpoint
from faults.mutate import mutate_bytes, mutate_json
from faults.sandbox import AbstractKind


class Program:
    """An object whose pickle runs a program that leaves the canary."""

    def __init__(self, canary: Path, way: int = 0) -> None:
        self.canary, self.way = str(canary), way

    def __reduce__(self) -> tuple[Any, ...]:
        """What an unpickler calls."""
        code = f"open({self.canary!r}, 'w').close()"
        return ((os.system, (f"touch '{self.canary}'",)), (exec, (code,)), (eval, (code,)))[self.way % 3]


class Models(AbstractKind):
    """`model.safetensors` of a saved model, whose description vouches for it in two of three cases."""

    name = "models"

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        fast = _saving.model(_saving.bridge(1), FeatureBridge(_tiny.tail(_tiny.member())), temperature=1.3)
        fast.pixel_range = (0.0, 1.0)
        self.model = folder / "model"
        fast.save(self.model, image_shape=(3, 8, 8), class_names=["cat", "dog", "bird"])
        self.files = _saving.contents(self.model)
        self.config = json.loads(self.files["config.json"])
        self.vouched = True

    def valid(self) -> list[bytes]:
        return [self.files["model.safetensors"]]

    def mutated(self, draws: random.Random) -> bytes:
        content = self.files["model.safetensors"]
        self.vouched = draws.random() < 0.67
        if draws.random() < 0.5:
            return mutate_bytes(content, draws)
        size = int.from_bytes(content[:8], "little")
        header = mutate_json(json.loads(content[8 : 8 + size]), draws)
        return len(header).to_bytes(8, "little") + header + content[8 + size :]

    def read(self, content: bytes) -> None:
        (self.model / "model.safetensors").write_bytes(content)
        said = {"sha256": digest(self.model / "model.safetensors")} if self.vouched else {}
        (self.model / "config.json").write_text(json.dumps(self.config | said))
        use(eb.load(self.model))


class ModelConfigs(Models):
    """`config.json` of a saved model, loaded without and with trust in torch's and our own networks."""

    name = "model configs"

    def valid(self) -> list[bytes]:
        return [self.files["config.json"]]

    def mutated(self, draws: random.Random) -> bytes:
        return mutate_json(self.config, draws)

    def read(self, content: bytes) -> None:
        (self.model / "config.json").write_bytes(content)
        fast = eb.load(self.model)
        with suppress(ValueError):
            eb.load(self.model, allow=["torch", "ensbridge"])
        use(fast)


def use(fast: nn.Module) -> None:
    """Predict with a model that was loaded; a network that cannot take these images may say so."""
    for weight in fast.parameters():
        assert weight.isfinite().all()
    with suppress(ValueError, RuntimeError):
        predict_images(fast, _tiny.images(2).to(next(fast.parameters()).dtype))  # type: ignore[arg-type]


class Weights(AbstractKind):
    """Weights of a member, by torch and by safetensors; one in six is a program."""

    name = "weights of members"

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        self.state = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}
        self.originals = [self._saved(self.state, zipped) for zipped in (True, False)]
        self.originals += [self._saved({"epoch": 3, "state_dict": self.state}, True)]
        self.originals += [_safetensors(self.state)]

    def _saved(self, value: Any, zipped: bool) -> bytes:
        made = io.BytesIO()
        torch.save(value, made, _use_new_zipfile_serialization=zipped)
        return made.getvalue()

    def valid(self) -> list[bytes]:
        return self.originals

    def mutated(self, draws: random.Random) -> bytes:
        if draws.random() < 1 / 6:
            program = {**self.state, "extra": Program(self.canary, draws.randrange(3))}
            content = self._saved(program, draws.random() < 0.5)
            return content if draws.random() < 0.5 else mutate_bytes(content, draws)
        content = draws.choice(self.originals)
        if content[:2] == b"PK" and draws.random() < 0.5:
            return _with_inner(content, draws)
        return mutate_bytes(content, draws, self.originals)

    def read(self, content: bytes) -> None:
        kind = "safetensors" if content[8:9] == b"{" else "pt"
        path = self.folder / f"weights.{kind}"
        path.write_bytes(content)
        load_weights(nn.Linear(3, 2), path)


def _safetensors(state: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    return save(state)


def _with_inner(content: bytes, draws: random.Random) -> bytes:
    """A zip archive with one of its members changed and everything around it right."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        chosen = draws.choice(old.namelist())
        for entry in old.infolist():
            inside = old.read(entry)
            new.writestr(entry, mutate_bytes(inside, draws) if entry.filename == chosen else inside)
    return made.getvalue()


class Checkpoints(AbstractKind):
    """The newest checkpoint of a run that was stopped, from which `fit` then resumes."""

    name = "checkpoints"
    documented = (ValueError, FloatingPointError)  # a loss that is not finite
    allowed = ("os.remove",)  # of older checkpoints

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        with suppress(_runs.Stopped):
            fit(
                _runs.method("bridge"),
                _runs.data(),
                _runs.config("bridge"),
                folder / "begun",
                _runs.stop_at(9),
            )
        self.newest = _runs.checkpoints(folder / "begun")[-1].name

    def valid(self) -> list[bytes]:
        return [(self.folder / "begun" / self.newest).read_bytes()]

    def mutated(self, draws: random.Random) -> bytes:
        if draws.random() < 0.4:
            return mutate_bytes(self.valid()[0], draws)
        path = self.folder / self.newest
        tensors, metadata = load_checkpoint(self.folder / "begun" / self.newest)
        for _ in range(draws.choice((1, 1, 2))):
            _forge(tensors, metadata, draws)
        save_checkpoint(path, tensors, metadata)  # with the checksum of what it holds
        return path.read_bytes()

    def read(self, content: bytes) -> None:
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.folder / "begun", run)
        (run / self.newest).write_bytes(content)
        with suppress(_runs.Stopped):
            fit(_runs.method("bridge"), _runs.data(), _runs.config("bridge"), run, _runs.stop_at(10))


def _forge(tensors: dict[str, torch.Tensor], metadata: dict[str, str], draws: random.Random) -> None:
    """Change a value of a checkpoint."""
    name = draws.choice(sorted(tensors)) if tensors else ""
    way = (
        draws.choice(("metadata", "metadata", "delete", "rename", "shape", "type", "value"))
        if name
        else "metadata"
    )
    if way == "metadata":
        key = draws.choice([*sorted(metadata), "more"])
        document: Any = 1
        with suppress(ValueError, RecursionError):  # of one that was changed before
            document = json.loads(metadata[key]) if key in metadata else 1
        metadata[key] = mutate_json(document, draws).decode(errors="replace")
    elif way == "delete":
        del tensors[name]
    elif way == "rename":
        old = draws.choice(("student", "average", "optimizer", "0", "/"))
        tensors[name.replace(old, draws.choice(("", "oven", "99", "-1", "//"))) or "x"] = tensors.pop(name)
    elif way == "shape":
        tensors[name] = tensors[name].reshape(-1)[: draws.randrange(3)]
    elif way == "type":
        kinds = (torch.int64, torch.bool, torch.float16, torch.float64, torch.uint8, torch.bfloat16)
        tensors[name] = tensors[name].to(draws.choice(kinds))
    else:
        number = draws.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
        tensors[name] = torch.full_like(tensors[name], number if tensors[name].is_floating_point() else 7)


FIELDS = (
    *("members", "target", "figure_members", "members_together", "kl_temperature", "feature", "end2_predict"),
    *(
        "bridge.num_steps",
        "bridge.beta",
        "bridge.ema",
        "bridge.temperature.base",
        "bridge.z_input",
        "name",
        "load",
    ),
    *(
        "member_fit.epochs",
        "bridge_fit.batch_size",
        "kl_fit.lr",
        "ed_fit.augment.crop",
        "bn_fit.warmup_steps",
    ),
)


class RunConfigs(AbstractKind):
    """`config.json` of a run, as `evaluate` and `train` read it before anything else."""

    name = "run configs"
    seen: ClassVar[dict[str, Any]] = {"recipe": {"members": 5}, "seed": 0}

    def valid(self) -> list[bytes]:
        plan = Plan("digits", changes=("members=2", "target=2")).to_json()
        return [json.dumps({"plan": plan, **self.seen}).encode()]

    def mutated(self, draws: random.Random) -> bytes:
        words = ("-1", "0", "1e400", "nan", "9" * 40, "None", "[1, 2]", "2", "x", "", "__import__('os')")
        changes = tuple(f"{draws.choice(FIELDS)}={draws.choice(words)}" for _ in range(draws.randrange(3)))
        return mutate_json({"plan": Plan("digits", changes=changes).to_json(), **self.seen}, draws)

    def read(self, content: bytes) -> None:
        (self.folder / "config.json").write_bytes(content)
        check_runs([self.folder])
        with suppress(ValueError):
            RunFolder(self.folder, {"plan": Plan("digits").to_json(), "seed": 0})


class ScoreFiles(AbstractKind):
    """`scores.json` of a run, through table, headline and the data of every figure."""

    name = "scores.json"

    def valid(self) -> list[bytes]:
        return [json.dumps(_report.make_document()).encode()]

    def mutated(self, draws: random.Random) -> bytes:
        return mutate_json(_report.make_document(), draws)

    def read(self, content: bytes) -> None:
        (self.folder / "scores.json").write_bytes(content)
        summary = summarise([read_scores(self.folder / "scores.json")])
        summary.table()
        headline(summary)
        rich_table(summary)
        for plot in PLOTS:
            with suppress(ValueError):
                plot.data(summary)


class HubClassifiers(AbstractKind):
    """`config.json` and `preprocessor_config.json` of a classifier as the Hugging Face hub has them."""

    name = "hub classifiers"

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        self.model = _named.hugging_face(folder / "classifier")
        names = ("config.json", "preprocessor_config.json")
        self.documents = [json.loads((self.model / name).read_text()) for name in names]

    def valid(self) -> list[bytes]:
        return [json.dumps(document).encode() for document in self.documents]

    def mutated(self, draws: random.Random) -> bytes:
        return mutate_json(draws.choice(self.documents), draws)

    def read(self, content: bytes) -> None:
        for name, document in zip(("config.json", "preprocessor_config.json"), self.documents, strict=True):
            (self.model / name).write_text(json.dumps(document))
        name = "preprocessor_config.json" if b"image_mean" in content else "config.json"
        (self.model / name).write_bytes(content)
        open_member(f"hf:{self.model}")


KINDS: tuple[type[AbstractKind], ...] = (
    *(Models, ModelConfigs, Weights, HubClassifiers, Checkpoints, RunConfigs, ScoreFiles),
)
