"""CIFAR-10 or CIFAR-100 on one GPU: members, then bridges with their control, from one npz of the data.

    python results/run_cifar.py members DATA.npz OUT --members 1 2 3 [--together]
    python results/run_cifar.py bridges DATA.npz OUT --weights FOLDER [--epochs 100]
    python results/run_cifar.py long DATA.npz OUT --weights FOLDER --run FOLDER [--epochs 300]
    python results/run_cifar.py job DATA.npz OUT --run FOLDER --seed 1 [--together]
    python results/run_cifar.py corrupted DATA.npz OUT --weights FOLDER --corrupted FOLDER

`long` trains KL bridges towards groups of members, and their control, from several seeds side by side;
killed, it goes on from the folder of --run. --held-out adds images that no member has seen, without labels.
`job` is all of it, members and then `bridges`, with its time.
The test set is looked at with --final only. `corrupted` measures the trained models on the corrupted test set
of `ensbridge data corrupt`.

DATA.npz holds train_images, train_labels, test_images, test_labels (uint8 NHWC). The first 40,960 training
images are trained on, the other 9,040 are for validation. Weights land in OUT as safetensors. Networks and
the members' training are those of --recipe; `corrupted` is for cifar10 alone.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from cifar import (
    CIFAR10,
    CONTROL,
    DEVICE,
    STUDENTS,
    add_recipe,
    add_training,
    bridge_config,
    info,
    load,
    load_control,
    load_members,
    load_network,
    measure,
    progress,
    save_weights,
)
from safetensors.torch import load_file

from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.data import ImageSet, Splits
from ensbridge.deploy.saving import load as load_model
from ensbridge.evaluation.evaluate import evaluate
from ensbridge.evaluation.predict import predict
from ensbridge.evaluation.robustness import add_corrupted
from ensbridge.experiments.plan import RECIPES
from ensbridge.experiments.recipe import Recipe, build
from ensbridge.methods import (
    Bridge,
    BridgeConfig,
    DeepEnsemble,
    DiffusionBridge,
    EnsembleDistillation,
    JointTraining,
    ProxyEnD2,
)
from ensbridge.methods.base import AbstractMethod
from ensbridge.metrics import accuracy, nll
from ensbridge.models.ensemble import Ensemble
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.training.config import FitConfig, PerMemberShuffle, derive_seed
from ensbridge.training.distill import distill_together
from ensbridge.training.fit import fit

TABLE_NAMES = {"ED": "ED", "EnD2": "EnD²"}


def train_members(data: Splits, out: Path, options: argparse.Namespace) -> None:
    """Members one after the other, or with --together side by side, with their own orders where asked."""
    seeds = {index: derive_seed(options.seed, "member", index) for index in options.members}
    recipe = RECIPES[options.recipe]("default")
    nets = {index: build(recipe.member, seed).to(DEVICE) for index, seed in seeds.items()}
    config = replace(
        recipe.member_fit,
        epochs=options.member_epochs,
        batch_size=options.member_batch or recipe.member_fit.batch_size,
        log_every=1600,
        checkpoint_every=options.checkpoint_every,
    )
    groups = [list(nets)] if options.together else [[index] for index in nets]
    for group in groups:
        begun, name = time.time(), "-".join(map(str, group))
        run = None if options.run is None else options.run / f"members-{name}"
        seeded = replace(config, seed=seeds[group[0]])
        methods = {str(index): DeepEnsemble([nets[index]]) for index in group}
        if options.own_orders:
            seeded = PerMemberShuffle.of(seeded, [seeds[index] for index in group])
            methods = {
                str(index): DeepEnsemble([nets[index]], part=(part, len(group)))
                for part, index in enumerate(group)
            }
        fit(JointTraining(methods), data.train, seeded, run, progress(f"members {name}"))
        for index in group:
            log_probs = predict(nets[index].eval(), data.val, 1000)
            figures = accuracy(log_probs, data.val.labels), nll(log_probs, data.val.labels)
            save_weights(out / f"member-{index}.safetensors", nets[index], options.half)
            print(f"member {index}: validation acc {figures[0]:.4f} nll {figures[1]:.4f}")
        print(f"{len(group)} members in {time.time() - begun:.0f} s", flush=True)


def save_bridges(out: Path, prefix: str, methods: dict[str, DiffusionBridge]) -> None:
    for name, each in methods.items():
        save_weights(out / f"{prefix}-{slug(name)}.safetensors", each.bridge)


def slug(name: str) -> str:
    """A row's name in file names: “+1 DBN (KL, T = 4)” is 1-dbn-kl-t-4."""
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def rivals(
    ensemble: Ensemble, names: list[str], seed: int, config: FitConfig, recipe: Recipe
) -> tuple[dict[str, AbstractMethod], dict[str, FitConfig]]:
    """Students of the whole ensemble with the bridges' inputs, and how they are trained."""
    methods: dict[str, AbstractMethod] = {}
    configs: dict[str, FitConfig] = {}
    for name in names:
        student = build(recipe.member, derive_seed(seed, "student")).to(DEVICE)
        kind, own = (EnsembleDistillation, recipe.ed_fit) if name == "ED" else (ProxyEnD2, recipe.end2_fit)
        methods[name] = kind(ensemble, student)
        configs[name] = replace(config, lr=own.lr, optimizer="sgd", weight_decay=own.weight_decay)
    return methods, configs


def save_rivals(out: Path, prefix: str, methods: Mapping[str, AbstractMethod]) -> dict[str, torch.nn.Module]:
    """Write the students' weights; the networks by the names that tables have for them."""
    found = {}
    for name, method in methods.items():
        assert isinstance(method, EnsembleDistillation | ProxyEnD2)
        save_weights(out / f"{prefix}-{name.lower()}.safetensors", method.model())
        found[TABLE_NAMES[name] + STUDENTS[len(method.ensemble)]] = method.model()
    return found


def kl_at(*bases: float) -> str:
    """How tables name training with KL; T is 2 where nothing is said of it.

    >>> kl_at(2), kl_at(4), kl_at(4, 2)
    ('KL', 'KL, T = 4', 'KL, T = 4 and 2')
    """
    each = " and ".join(f"{base:g}" for base in dict.fromkeys(bases))
    return "KL" if each == "2" else f"KL, T = {each}"


def kl_of(fast: FastEnsemble) -> str:
    """The same for the bridges of a model."""
    bridges = [bridge for bridge in fast.bridges if isinstance(bridge, Bridge)]
    return kl_at(*(bridge.config.temperature.base for bridge in bridges))


def train_bridges(data: Splits, out: Path, weights: Path, options: argparse.Namespace) -> None:
    recipe = RECIPES[options.recipe]("default")
    everything = load_members(weights, recipe)
    ensemble = everything.first(3)
    long = bridge_config(options, options.seed)
    short = replace(long, epochs=options.distill_epochs, lr=options.lr / 10)

    def method(temperature: float, **extra) -> DiffusionBridge:
        config = BridgeConfig(temperature=TemperatureLaw(base=temperature), ema=options.ema)
        score = build(lambda: recipe.score("none"), derive_seed(options.seed, "score")).to(DEVICE)
        return DiffusionBridge(ensemble, score, config=config, **extra)

    walked = {"bridge": method(2.0), "control": method(2.0, target=(0,))}
    straight: dict[str, DiffusionBridge] = {}
    for base in [*([] if options.no_kl else [2.0]), *options.temperatures]:
        straight[f"+1 DBN ({kl_at(base)})"] = method(base, loss="kl")
        straight[f"control ({kl_at(base)})"] = method(base, loss="kl", target=(0,))
    students, configs = rivals(ensemble, options.rivals, options.seed, long, recipe)
    methods: dict[str, AbstractMethod] = {**walked, **straight, **students}
    images = data.train.without_labels()
    folders = (None, None) if options.run is None else (options.run / "bridges", options.run / "distil")
    begun = time.time()
    fit(
        JointTraining(methods),
        images,
        dict.fromkeys(methods, long) | configs,
        folders[0],
        progress("bridges"),
    )
    distilled = distill_together(walked, images, short, folders[1], progress=progress("distil"))
    minutes = (time.time() - begun) / 60
    named = {
        "+1 DBN (5 steps)": walked["bridge"],
        "+1 DBN": distilled["bridge"],
        "control": distilled["control"],
        **straight,
    }
    save_bridges(out, options.name, named)
    models: dict[str, torch.nn.Module] = {name: each.model() for name, each in named.items()}
    models |= save_rivals(out, options.name, students)
    measure(out, options.name, everything, models, data, options.final, options.seed, recipe)
    print(f"bridges and distillation took {minutes:.1f} minutes; options {vars(options)}")


def train_long(data: Splits, out: Path, weights: Path, options: argparse.Namespace) -> None:
    """KL bridges towards each of --targets from each of --seeds, and rivals, side by side."""
    recipe = RECIPES[options.recipe]("default")
    ensemble = load_members(weights, recipe)
    config = bridge_config(options, options.seeds[0])
    law = TemperatureLaw(base=options.base)

    def method(seed: int, target: tuple[int, ...]) -> DiffusionBridge:
        bridge = BridgeConfig(temperature=law, ema=options.ema)
        score = build(lambda: recipe.score("none"), derive_seed(seed, "score", *target))
        return DiffusionBridge(ensemble, score.to(DEVICE), loss="kl", target=target, config=bridge)

    targets = [tuple(int(number) - 1 for number in text.split(",")) for text in options.targets]
    bridges = {(seed, target): method(seed, target) for seed in options.seeds for target in targets}
    names = {key: f"{'-'.join(str(i + 1) for i in key[1])} seed {key[0]}" for key in bridges}
    methods: dict[str, AbstractMethod] = {names[key]: each for key, each in bridges.items()}
    teachers = ensemble.first(options.rivals_of)
    students, own_configs = rivals(teachers, options.rivals, options.seeds[0], config, recipe)
    configs = dict.fromkeys(methods, config) | own_configs
    methods |= students
    images = with_held_out(data, options.held_out, options.held_out_times).without_labels()
    begun = time.time()
    fit(JointTraining(methods), images, configs, options.run, progress("bridges"))
    minutes = (time.time() - begun) / 60
    save_bridges(out, options.name, {names[key]: each for key, each in bridges.items()})
    held = data
    if options.held_out:
        held = data._replace(
            val=data.val.subset(torch.arange(options.held_out, len(data.val), device=DEVICE))
        )
    known = save_rivals(out, options.name, students)
    for seed in options.seeds:
        own = {target: bridges[seed, target] for target in targets}
        name = options.name if len(options.seeds) == 1 else f"{options.name}-seed{seed}"
        models = rows_of(own, kl_at(options.base)) | (known if seed == options.seeds[0] else {})
        measure(out, name, ensemble, models, held, options.final, seed, recipe)
    print(f"this call trained for {minutes:.1f} minutes; options {vars(options)}")


def rows_of(bridges: dict[tuple[int, ...], DiffusionBridge], kl: str) -> dict[str, torch.nn.Module]:
    """The models that bridges of one seed make, by what tables call them."""
    names = {(0,): f"control ({kl})", (0, 1, 2): f"+1 DBN ({kl})"}
    models: dict[str, torch.nn.Module] = {}
    for target, each in bridges.items():
        models[names.get(target, f"+1 DBN ({kl}) to {target}")] = each.model()
    several = [each for target, each in bridges.items() if len(target) > 1]
    if len(several) > 1:
        models[f"+{len(several)} DBN ({kl}, DE-5)"] = FastEnsemble.of(*several)
    return models


def measure_corrupted(data: Splits, out: Path, weights: Path, folder: Path) -> None:
    """Members, the zoo's models and, where their weights lie in the folder, control, ED and two BN medium."""
    ensemble = load_members(weights).first(3)
    models: dict[str, torch.nn.Module] = {**ensemble.by_size()}
    for name, what in (("zoo:cifar10", "+1 DBN ({})"), ("zoo:cifar10-2", "+2 DBN ({})")):
        fast = load_model(name).to(DEVICE)
        models[what.format(kl_of(fast))] = fast
    if (path := weights / CONTROL).exists():
        control = load_control(path)
        models[f"control ({kl_of(control)})"] = control
    if (path := weights / "ed.safetensors").exists():
        models["ED"] = student = CIFAR10.member().to(DEVICE).eval()
        student.load_state_dict(load_file(path, device=DEVICE))
    if len(paths := sorted(weights.glob("bn-medium-*.safetensors"))) == 2:
        models["+2 BN medium"] = FastEnsemble.of(*(load_network(ensemble.source, path) for path in paths))
    scores = evaluate(
        models,
        data.test,
        data.val,
        reference=ensemble,
        target=3,
        info=info(models),
        dataset="cifar10",
        class_names=CIFAR10.class_names,
        batch_size=1000,
    )
    begun = time.time()
    kept = out / "corrupted.jsonl"
    scores = add_corrupted(scores, models, folder, test=data.test, keep=kept, batch_size=1000)
    (out / "corrupted-test.json").write_text(scores.to_json())
    print(f"{scores.table()}\n{time.time() - begun:.0f} s for the corrupted images", flush=True)
    for severity in (1, 5):
        for name in models:
            rows = [row for row in scores.corrupted if (row.model, row.severity) == (name, severity)]
            figures = [sum(getattr(row, key) for row in rows) / len(rows) for key in ("acc", "nll", "ece")]
            print(f"severity {severity} {name:20s} " + " ".join(f"{figure:.4f}" for figure in figures))


def with_held_out(data: Splits, count: int, times: int) -> ImageSet:
    """The training images and, `times` over, the first `count` of validation, which no member has seen."""
    return ImageSet(torch.cat([data.train.images, *[data.val.images[:count]] * times]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=["members", "bridges", "long", "job", "corrupted"])
    add_training(parser, epochs=200, batch=256, lr=1e-3, checkpoint_every=1600, folders=False)
    add_recipe(parser)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--together", action="store_true", help="members side by side, in one order of images"
    )
    parser.add_argument("--own-orders", action="store_true", help="each of them in an order of its own")
    parser.add_argument("--member-epochs", type=float, default=200)
    parser.add_argument("--member-batch", type=int, help="the recipe's unless given")
    parser.add_argument("--half", action="store_true", help="keep members in half precision")
    parser.add_argument("--corrupted", type=Path, help="the folder of the corrupted test set")
    parser.add_argument("--name", default="bridges", help="of the files in OUT")
    parser.add_argument(
        "--targets", nargs="+", default=["1,2,3", "1,4,5", "1"], help="members of each bridge"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the bridges' weights")
    parser.add_argument(
        "--held-out", type=int, default=0, help="images of validation to train on, unlabelled"
    )
    parser.add_argument("--held-out-times", type=int, default=3)
    parser.add_argument(
        "--rivals", nargs="*", default=[], choices=["ED", "EnD2"], help="trained beside the bridges"
    )
    parser.add_argument("--rivals-of", type=int, default=3, choices=[3, 5], help="members: in a long run")
    parser.add_argument("--no-kl", action="store_true", help="only the bridges with a loss of their own")
    parser.add_argument("--final", action="store_true", help="look at the test set, once all is chosen")
    parser.add_argument("--base", type=float, default=2.0, help="T of the long run")
    parser.add_argument("--distill-epochs", type=float, default=10)
    parser.add_argument("--ema", type=float, default=0.9995)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[])
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    data = load(options.data, options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage == "members":
        train_members(data, options.out, options)
    elif options.stage == "job":
        begun = time.time()
        train_members(data, options.out, options)
        train_bridges(data, options.out, options.out, options)
        print(f"the whole job took {(time.time() - begun) / 60:.1f} minutes in this call")
    elif options.stage == "long":
        train_long(data, options.out, options.weights, options)
    elif options.stage == "corrupted":
        measure_corrupted(data, options.out, options.weights, options.corrupted)
    else:
        train_bridges(data, options.out, options.weights, options)


if __name__ == "__main__":
    main()
