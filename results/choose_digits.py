"""How the quick start's settings were chosen: cross-validation on its training and validation images alone.

    python results/choose_digits.py task       noise, weight decay and length of the members
    python results/choose_digits.py bridge     temperature, mixup, noise and length of the bridge
    python results/choose_digits.py rivals     rate and weight decay of ED, EnD² and the bridge networks
    python results/choose_digits.py dealing    two bridges that share the members, or each towards all of them

The 800 images that are not the test split are cut into four folds; members and bridges are trained on three
and measured on the fourth, for one seed (dealing: two), all folds' predictions pooled. The test split is
never loaded.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from ensbridge.bridge.schedule import TemperatureLaw
from ensbridge.data import Augment, ImageSet, load_digits
from ensbridge.data.digits import NOISE
from ensbridge.evaluation.predict import predict
from ensbridge.experiments.digits import digits
from ensbridge.experiments.recipe import build
from ensbridge.methods import (
    BezierCurve,
    BridgeNetwork,
    DeepEnsemble,
    DiffusionBridge,
    EnsembleDistillation,
    JointTraining,
    ProxyEnD2,
)
from ensbridge.metrics import nll_per_image, standard_error
from ensbridge.models.ensemble import Ensemble, ensemble_logit
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.training.config import derive_seed
from ensbridge.training.distill import distill_together
from ensbridge.training.fit import fit

FOLDS, SEEDS, MEMBERS = 4, 1, 3
TASK = [
    {"sensor": noise, "weight_decay": decay, "epochs": epochs}
    for noise in (0.2, 0.3)
    for decay in (0.0, 5e-4, 1e-3)
    for epochs in (20, 30)
]
BRIDGE = [
    {"T": 2.0, "noise": 0.1, "lr": 8e-3, "distil_lr": 1e-3},
    {"T": 2.0, "noise": 0.1, "lr": 4e-3},
    {"T": 2.0, "noise": 0.1, "lr": 2e-3},
    {"T": 2.0, "noise": 0.1, "lr": 2e-3, "distil_lr": 1e-3},
    {"T": 2.0, "noise": 0.1, "lr": 2e-3, "epochs": 96},
    {"T": 2.0, "noise": 0.1, "lr": 2e-3, "ema": 0.997},
    {"T": 2.0, "noise": 0.1, "lr": 2e-3, "mixup": 1.0},
    {"T": 2.0, "noise": 0.2, "lr": 2e-3},
    {"T": 2.5, "noise": 0.1, "lr": 2e-3},
    {"T": 2.0, "lr": 2e-3},
    {"T": 1.5, "lr": 2e-3},
    {"T": 3.0, "lr": 2e-3},
    {"T": 4.0, "lr": 2e-3},
]
RIVALS = {
    "ed": [(0.1, 1e-3), (0.1, 1e-4), (0.2, 1e-3), (0.03, 1e-3), (0.03, 1e-4)],  # rate, weight decay
    "end2": [
        (0.1, 1e-3),
        (0.1, 1e-4),
        (0.2, 1e-3),
        (0.2, 1e-4),
        (0.4, 1e-3),
        (0.05, 1e-3),
        (0.05, 1e-4),
        (0.02, 1e-4),
    ],
    "bn": [(0.1, 1e-5), (0.2, 1e-5), (0.03, 1e-5), (0.01, 1e-5)],
}


# Pairs of bridges, each by the members that it learns from and the number of its start.
DEALING = {
    (((0, 1), 0), ((0, 2), 0)): "{1, 2} and {1, 3}",
    (((0, 1, 2), 0), ((0, 1, 2), 1)): "{1, 2, 3} twice",
    (((0, 1, 2), 0), ((0, 3, 4), 0)): "{1, 2, 3} and {1, 4, 5}",
    (((0, 1, 2, 3, 4), 0), ((0, 1, 2, 3, 4), 1)): "{1, 2, 3, 4, 5} twice",
}


def folds(noise: float, fold: int) -> tuple[ImageSet, ImageSet]:
    """The training and the held-out part of a fold."""
    train, val, _ = load_digits(noise)
    images, labels = torch.cat([train.images, val.images]), torch.cat([train.labels, val.labels])
    held = torch.arange(len(images)) % FOLDS == fold
    return ImageSet(images[~held], labels[~held]), ImageSet(images[held], labels[held])


def member_job(job: tuple[dict, int, int, int]) -> tuple[torch.Tensor, dict]:
    """Train one member; its held-out logits and its weights."""
    variant, fold, seed, index = job
    torch.set_num_threads(1)
    recipe = digits()
    train, held = folds(variant.get("sensor", NOISE), fold)
    net = build(recipe.member, derive_seed(seed, "member", index))
    config = replace(
        recipe.member_fit,
        seed=derive_seed(seed, "member", index),
        epochs=variant.get("epochs", recipe.member_fit.epochs),
        weight_decay=variant.get("weight_decay", recipe.member_fit.weight_decay),
    )
    fit(DeepEnsemble([net]), train, config)
    return predict(net, held), net.state_dict()


def restored(weights: list[dict]) -> Ensemble:
    """The ensemble of members with these weights."""
    nets = [digits().member() for _ in weights]
    for net, state in zip(nets, weights, strict=True):
        net.load_state_dict(state)
    return Ensemble(nets).eval()


def bridge_job(job: tuple[dict, int, int, list[dict]]) -> dict[str, torch.Tensor]:
    """Train bridge, control and KL bridge of a variant; each one's held-out NLL for each image."""
    variant, fold, seed, weights = job
    torch.set_num_threads(1)
    recipe = digits()
    train, held = folds(NOISE, fold)
    ensemble = restored(weights)
    config = replace(
        recipe.bridge,
        temperature=TemperatureLaw(base=variant["T"]),
        ema=variant.get("ema", recipe.bridge.ema),
    )
    augment = Augment(mixup=variant.get("mixup", 0.4), noise=variant.get("noise", 0.0))
    long = replace(
        recipe.bridge_fit,
        augment=augment,
        seed=derive_seed(seed, "bridge"),
        lr=variant.get("lr", recipe.bridge_fit.lr),
        epochs=variant.get("epochs", recipe.bridge_fit.epochs),
    )
    short = replace(
        recipe.distill_fit,
        augment=augment,
        seed=derive_seed(seed, "bridge"),
        lr=variant.get("distil_lr", long.lr / 10),
    )

    def method(**options) -> DiffusionBridge:
        net = build(lambda: recipe.score(config.z_input), derive_seed(seed, "score"))
        return DiffusionBridge(ensemble, net, recipe.feature, config=config, **options)

    walked = {"bridge": method(), "control": method(target=(0,))}
    straight = {"kl": method(loss="kl")}
    images = train.without_labels()
    fit(JointTraining({**walked, **straight}), images, long)
    one = distill_together(walked, images, short)
    models = {"5 steps": walked["bridge"], "1 step": one["bridge"], "control": one["control"], **straight}
    return {name: nll_per_image(predict(model.model(), held), held.labels) for name, model in models.items()}


def rivals_job(job: tuple[int, int, list[dict], bool]) -> dict[str, torch.Tensor]:
    """Train every variant of every rival on shared teachers; each one's held-out NLL for each image."""
    fold, seed, weights, mixed = job
    torch.set_num_threads(1)
    recipe = digits()
    train, held = folds(NOISE, fold)
    ensemble = restored(weights)
    augment = recipe.bridge_fit.augment if mixed else Augment(noise=0.1)
    common = replace(recipe.ed_fit, augment=augment, seed=derive_seed(seed, "bridge"))
    methods: dict = {}
    for kind, options in RIVALS.items():
        if kind == "bn" and not mixed:
            continue
        for rate, decay in options:
            base = replace(recipe.bn_fit, warmup_lr=rate / 100, seed=common.seed) if kind == "bn" else common
            config = replace(base, lr=rate, weight_decay=decay)
            if kind == "bn":
                for method in bridge_networks(recipe, ensemble, train, seed):
                    methods[f"bn {rate} {decay} {len(methods)}"] = method, config
                continue
            net = build(recipe.member, derive_seed(seed, "student"))
            method = EnsembleDistillation(ensemble, net) if kind == "ed" else ProxyEnD2(ensemble, net)
            methods[f"{kind} {rate} {decay}"] = method, config
    named = {name.replace(".", "_"): each for name, each in methods.items()}
    fit(
        JointTraining({name: method for name, (method, _) in named.items()}),
        train.without_labels(),
        {name: config for name, (_, config) in named.items()},
    )
    models = {name: method.model() for name, (method, _) in methods.items() if not name.startswith("bn")}
    for rate, decay in RIVALS["bn"] if mixed else []:
        own = [method for name, (method, _) in methods.items() if name.startswith(f"bn {rate} ")]
        models[f"+2 bn medium {rate} {decay}"] = FastEnsemble.of(*own)
    return {name: nll_per_image(predict(model, held), held.labels) for name, model in models.items()}


def dealing_job(job: tuple[int, int, list[dict]]) -> dict[str, torch.Tensor]:
    """Train bridges with KL towards groups of five members; each pair's held-out NLL for each image."""
    fold, seed, weights = job
    torch.set_num_threads(1)
    recipe = digits()
    train, held = folds(NOISE, fold)
    ensemble = restored(weights)

    def method(group: tuple[int, ...], number: int) -> DiffusionBridge:
        net = build(lambda: recipe.score("none"), derive_seed(seed, "score", *group, number))
        return DiffusionBridge(ensemble, net, recipe.feature, loss="kl", target=group, config=recipe.bridge)

    bridges = {(group, number): method(group, number) for pair in DEALING for group, number in pair}
    methods = {f"{'-'.join(map(str, group))} {number}": each for (group, number), each in bridges.items()}
    fit(
        JointTraining(methods),
        train.without_labels(),
        replace(recipe.kl_fit, seed=derive_seed(seed, "bridge")),
    )
    return {
        words: nll_per_image(predict(FastEnsemble.of(*(bridges[each] for each in pair)), held), held.labels)
        for pair, words in DEALING.items()
    }


def study_dealing(pool) -> None:
    runs = list(itertools.product(range(FOLDS), range(2)))
    weights = trained_members(pool, digits().member_fit.weight_decay, runs, 5)[0]
    parts = pool.map(dealing_job, [(*run, weights[run]) for run in runs], chunksize=1)
    nlls = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for name, each in nlls.items():
        print(f"{name:<28} {each.mean().item():.4f}")
    names = list(nlls)
    for one, other in zip(names[::2], names[1::2], strict=True):
        more = nlls[one] - nlls[other]
        print(f"{one} above {other} by {more.mean().item():.4f} ± {standard_error(more):.4f}", flush=True)


def bridge_networks(recipe, ensemble: Ensemble, train: ImageSet, seed: int) -> list[BridgeNetwork]:
    """Two bridge networks, medium, towards the centres of two curves."""
    found = []
    for index in (1, 2):
        curve = BezierCurve(ensemble.source, ensemble.members[index])
        fit(curve, train, replace(recipe.curve_fit, seed=derive_seed(seed, "curve", index)))
        tail = build(
            lambda: recipe.tail(ensemble.source, recipe.tail_feature, 1.0), derive_seed(seed, "tail", index)
        )
        found.append(BridgeNetwork(ensemble.source, [curve.at(0.5)], tail, recipe.tail_feature))
    return found


def study_rivals(pool, runs: list[tuple[int, int]]) -> None:
    weights, nll_one, nll_three = trained_members(pool, digits().member_fit.weight_decay, runs)
    print(f"members: DE-1 {nll_one:.4f}  DE-3 {nll_three:.4f}", flush=True)
    for mixed in (True, False):
        parts = pool.map(rivals_job, [(*run, weights[run], mixed) for run in runs], chunksize=1)
        print("with mixup" if mixed else "without mixup")
        for name in parts[0]:
            value = torch.cat([part[name] for part in parts]).mean().item()
            share = (nll_one - value) / (nll_one - nll_three)
            print(f"{name:<24} {value:.4f} ({share:+.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=["task", "bridge", "rivals", "dealing"])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--variants", type=int, default=None, help="only the first so many")
    arguments = parser.parse_args()
    variants = (TASK if arguments.study == "task" else BRIDGE)[: arguments.variants]
    runs = list(itertools.product(range(FOLDS), range(SEEDS)))
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        if arguments.study == "task":
            study_task(pool, variants, runs)
        elif arguments.study == "rivals":
            study_rivals(pool, runs)
        elif arguments.study == "dealing":
            study_dealing(pool)
        else:
            study_bridge(pool, variants, runs)


def study_task(pool, variants: list[dict], runs: list[tuple[int, int]]) -> None:
    jobs = [(v, fold, seed, index) for v in variants for fold, seed in runs for index in range(MEMBERS)]
    results = iter(pool.map(member_job, jobs, chunksize=1))
    print("noise  decay  epochs   DE-1   DE-2   DE-3   DE-1's distance to DE-3")
    for variant in variants:
        ladder = torch.zeros(MEMBERS)
        for fold, _ in runs:
            logits = torch.stack([next(results)[0] for _ in range(MEMBERS)])
            labels = folds(variant["sensor"], fold)[1].labels
            for count in range(1, MEMBERS + 1):
                log_probs = ensemble_logit(logits[:count]).log_softmax(-1)
                ladder[count - 1] += nll_per_image(log_probs, labels).mean() / len(runs)
        one, two, three = ladder.tolist()
        share = f"{(one - three) / one:6.1%}"
        print(f"{variant['sensor']:5.2f} {variant['weight_decay']:6.4f} {variant['epochs']:6d}", end="  ")
        print(f" {one:.3f}  {two:.3f}  {three:.3f}  {share}", flush=True)


def study_bridge(pool, variants: list[dict], runs: list[tuple[int, int]]) -> None:
    print("held-out NLL, and in brackets the share of the distance from DE-1 to DE-3 that is closed")
    ready: dict[float, tuple[dict, float, float]] = {}
    for variant in variants:
        decay = variant.get("weight_decay", digits().member_fit.weight_decay)
        if decay not in ready:
            ready[decay] = trained_members(pool, decay, runs)
            print(
                f"members with decay {decay:g}: DE-1 {ready[decay][1]:.4f}  DE-3 {ready[decay][2]:.4f}",
                flush=True,
            )
        weights, nll_one, nll_three = ready[decay]
        parts = pool.map(bridge_job, [(variant, *run, weights[run]) for run in runs], chunksize=1)
        cells = []
        for name in parts[0]:
            value = torch.cat([part[name] for part in parts]).mean().item()
            cells.append(f"{name} {value:.4f} ({(nll_one - value) / (nll_one - nll_three):+.2f})")
        print(", ".join(f"{k}={v}" for k, v in variant.items()).ljust(20), "  ".join(cells), flush=True)


def trained_members(
    pool, decay: float, runs: list[tuple[int, int]], count: int = MEMBERS
) -> tuple[dict, float, float]:
    """Members' weights for each run, and the pooled NLL of the first and of all."""
    jobs = [({"weight_decay": decay}, fold, seed, index) for fold, seed in runs for index in range(count)]
    trained = iter(pool.map(member_job, jobs, chunksize=1))
    weights, one, three = {}, [], []
    for fold, seed in runs:
        members = [next(trained) for _ in range(count)]
        weights[fold, seed] = [state for _, state in members]
        labels = folds(NOISE, fold)[1].labels
        logits = torch.stack([each for each, _ in members])
        one.append(nll_per_image(logits[0], labels))
        three.append(nll_per_image(ensemble_logit(logits).log_softmax(-1), labels))
    return weights, torch.cat(one).mean().item(), torch.cat(three).mean().item()


if __name__ == "__main__":
    sys.exit(main())
