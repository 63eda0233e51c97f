"""What the scripts beside it share: the data of one npz, members and their weights, scores, options.

The npz holds train_images, train_labels, test_images, test_labels (uint8 NHWC). The first 40,960 training
images are trained on, the other 9,040 are for validation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ensbridge.data import Augment, ImageSet, Splits
from ensbridge.deploy.saving import load as load_model
from ensbridge.evaluation.evaluate import evaluate, infer_info
from ensbridge.evaluation.predict import predict_each
from ensbridge.evaluation.scores import ModelInfo
from ensbridge.experiments.plan import RECIPES
from ensbridge.experiments.recipe import Recipe
from ensbridge.methods import BridgeNetwork
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.training.config import FitConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CROP = Augment(crop=4, flip=True)
CONTROL = "bridge-kl-control.safetensors"
STUDENTS = {3: "", 5: " (DE-5)"}  # what names say of the members that a student learnt from
CIFAR10 = RECIPES["cifar10"]("default")


def load(path: Path, limit: int | None) -> Splits:
    with np.load(path) as arrays:
        images = {
            part: torch.from_numpy(arrays[f"{part}_images"]).permute(0, 3, 1, 2) for part in ("train", "test")
        }
        labels = {part: torch.from_numpy(arrays[f"{part}_labels"]).long() for part in ("train", "test")}
    cut = 40_960
    parts = (
        (images["train"][:cut], labels["train"][:cut]),
        (images["train"][cut:], labels["train"][cut:]),
        (images["test"], labels["test"]),
    )
    return Splits(*(ImageSet(x[:limit].contiguous(), y[:limit].contiguous()).to(DEVICE) for x, y in parts))


def progress(name: str):
    begun, said = time.time(), [time.time()]

    def report(step: int, total: int, loss: float) -> None:
        if time.time() - said[0] > 20 or step == total:
            said[0] = time.time()
            print(f"{name} {step}/{total} loss {loss:.4f} {time.time() - begun:.0f} s", flush=True)

    return report


def load_members(weights: Path, recipe: Recipe = CIFAR10) -> Ensemble:
    """The members of a folder; one without the first has it from the zoo, whose source it is."""
    paths = sorted(weights.glob("member-*.safetensors"))
    members = [] if (weights / "member-1.safetensors") in paths else [load_model("zoo:cifar10").source]
    for path in paths:
        members.append(recipe.member())
        members[-1].load_state_dict(load_file(path))
    return Ensemble(members).to(DEVICE).eval()


def load_control(path: Path) -> FastEnsemble:
    """The bridge that learnt from its source alone, beside that source."""
    control = load_model("zoo:cifar10").to(DEVICE)
    control.bridges[0].load_state_dict(load_file(path, device=DEVICE))
    return control


def load_network(source: torch.nn.Module, path: Path) -> BridgeNetwork:
    """A bridge network of medium size beside the source, as `bn_cifar10.py` left it."""
    feature = CIFAR10.tail_feature
    network = BridgeNetwork(source, [source], CIFAR10.tail(source, feature, 1.0), feature)
    network.bridge.load_state_dict(load_file(path))
    network.bridge.to(DEVICE)
    return network


def save_weights(path: Path, net: torch.nn.Module, half: bool = False) -> None:
    """Write a network's weights, in half precision where asked."""
    state = {name: tensor.cpu().contiguous() for name, tensor in net.state_dict().items()}
    save_file({name: tensor.half() if half else tensor for name, tensor in state.items()}, path)


def info(models: Mapping[str, torch.nn.Module]) -> dict[str, ModelInfo]:
    """What networks are that do not show it, or would show it wrongly as they are put together here."""
    known = {f"ED{of}": ModelInfo("ED", members) for members, of in STUDENTS.items()}
    known |= {f"EnD²{of}": ModelInfo("EnD2", members) for members, of in STUDENTS.items()}
    known["+2 BN medium"] = ModelInfo("BN", 3, 2, 1, width="medium")
    found = {name: each for name, each in known.items() if name in models}
    for name, model in models.items():
        if isinstance(model, FastEnsemble) and name not in known:
            shown = replace(infer_info(model), loss="kl" if "(KL" in name else "bridge")
            found[name] = shown.as_control() if "control" in name else shown
    return found


def measure(
    out: Path,
    prefix: str,
    ensemble: Ensemble,
    models: dict[str, torch.nn.Module],
    data: Splits,
    final: bool = True,
    seed: int = 0,
    recipe: Recipe = CIFAR10,
) -> None:
    """Scores on validation and, where all is chosen, on the test set; log-probabilities beside them."""
    for part, held in (("validation", data.val), ("test", data.test))[: 2 if final else 1]:
        scores = evaluate(
            {**ensemble.by_size(), **models},
            held,
            data.val,
            reference=ensemble,
            target=3,
            info=info(models),
            dataset=recipe.name if part == "test" else f"{recipe.name} validation",
            class_names=recipe.class_names,
            seed=seed,
            batch_size=1000,
        )
        print(f"\n{part}\n{scores.table()}", flush=True)
        (out / f"{prefix}-{part}.json").write_text(scores.to_json())
        answers = predict_each(models, held, 1000)
        log_probs = {name: each.half().cpu().numpy() for name, each in answers.items()}
        np.savez_compressed(out / f"{prefix}-{part}.npz", **log_probs)


def bridge_config(options: argparse.Namespace, seed: int) -> FitConfig:
    """How bridges are trained, as the command line says."""
    return FitConfig(
        options.epochs,
        options.batch,
        options.lr,
        augment=replace(CROP, mixup=options.mixup, cutmix=options.cutmix),
        log_every=800,
        checkpoint_every=options.checkpoint_every,
        seed=seed,
    )


def add_training(
    parser: argparse.ArgumentParser,
    *,
    epochs: float,
    batch: int,
    lr: float,
    checkpoint_every: int,
    folders: bool = True,
) -> None:
    """What every script here asks for, with its own lengths; `folders` says whether it needs both of them."""
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", type=Path, required=folders, help="the folder of the members")
    parser.add_argument(
        "--run", type=Path, required=folders, help="of checkpoints, from which a killed run goes on"
    )
    parser.add_argument("--epochs", type=float, default=epochs)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--mixup", type=float, default=0.4)
    parser.add_argument("--cutmix", type=float, default=0.0)
    parser.add_argument("--checkpoint-every", type=int, default=checkpoint_every)
    parser.add_argument("--limit", type=int, help="only so many images of each part, to rehearse")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Which set the data is of."""
    parser.add_argument("--recipe", choices=["cifar10", "cifar100"], default="cifar10")
