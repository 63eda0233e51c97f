"""Digits: which model tells what only the real ensemble tells? Samples that stand for members.

    python studies/member_distribution.py OUT [--seeds 0 1 2]

Beside bridges towards the members' mean (a regression), models whose samples stand for members, with five
members as the target and as many passes: bridges towards a random member with a live Z_t, at β of 1e-4, 1e-2
and 1 and with 1, 5 and 10 steps; flow matching; a Gaussian with a low-rank factor (DLF). Their prediction is
the mean of 16 samples' softmax. Compared with the five members on the test images: the rank correlation of
mutual information (MI), the variance over members of each class's probability, and how well MI tells other
images from test images. No setting was chosen on anything. Writes results/member_distribution.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch import Tensor

import ensbridge as eb
from ensbridge.evaluation import ModelInfo
from ensbridge.experiments import Experiment, Job, MethodSpec, Recipe, Run, TableModel
from ensbridge.methods import AbstractMethod, BridgeConfig, DiffusionBridge
from provenance import provenance

RESULTS = Path(__file__).parent.parent / "results"
COMMAND = "python studies/member_distribution.py OUT"
SAMPLES = 16
OOD = ("uniform", "textures")


def methods(recipe: Recipe) -> dict[str, Callable[[eb.Ensemble, Run], AbstractMethod]]:
    """Every method by its name, built beside five members."""
    law, ema, feature = recipe.bridge.temperature, recipe.bridge.ema, recipe.feature

    def score(run: Run, z_input: str, classes: int = 10) -> eb.models.ScoreNet:
        stages = [(1, 16, 1, 1), (3, 24, 1, 2), (3, 32, 1, 1)]
        net = run.build(lambda: eb.models.ScoreNet(classes, 16, stages, 64, z_input=z_input), "score")  # type: ignore[arg-type]
        assert isinstance(net, eb.models.ScoreNet)
        return net

    def mean(ensemble: eb.Ensemble, run: Run) -> AbstractMethod:
        return DiffusionBridge(ensemble, score(run, "none"), feature, loss="kl", config=recipe.bridge)

    def bridge(beta: float, steps: int) -> Callable[[eb.Ensemble, Run], AbstractMethod]:
        config = BridgeConfig(beta=beta, num_steps=steps, temperature=law, z_input="informative", ema=ema)
        return lambda ensemble, run: DiffusionBridge(
            ensemble, score(run, "informative"), feature, draw="member", config=config
        )

    def flow(steps: int) -> Callable[[eb.Ensemble, Run], AbstractMethod]:
        config = eb.methods.FlowConfig(num_steps=steps, ema=ema)
        return lambda ensemble, run: eb.methods.FlowMatching(
            ensemble, score(run, "informative"), feature, config
        )

    def factor(ensemble: eb.Ensemble, run: Run) -> AbstractMethod:
        config = eb.methods.LatentFactorConfig(rank=4, ema=ema)
        net = score(run, "none", 10 * 5)
        return eb.methods.LatentFactorDistillation(ensemble, net, feature, 10, config)

    bridges = {
        f"bridge β = {beta:g}, {steps} steps": bridge(beta, steps)
        for beta in (1e-4, 1e-2, 1.0)
        for steps in (1, 5, 10)
    }
    flows = {f"flow matching, {steps} steps": flow(steps) for steps in (5, 10)}
    return {"bridge to the mean (KL)": mean, **bridges, **flows, "DLF, rank 4": factor}


def experiment(recipe: Recipe, seed: int) -> Experiment:
    """Five members, and everything trained side by side on the same batches."""
    fit = eb.experiments.seeded(recipe.kl_fit, seed, "bridge")

    def spec(build: Callable[[eb.Ensemble, Run], AbstractMethod]) -> MethodSpec:
        make = lambda run: build(eb.experiments.trained_ensemble(run, recipe, 5), run)  # noqa: E731
        return MethodSpec("distribution", make, fit)

    names = {name: f"method-{number}" for number, name in enumerate(methods(recipe))}
    specs = {names[name]: spec(build) for name, build in methods(recipe).items()}
    job = Job("all", "all", specs, eb.experiments.member_folders(recipe, 5))
    models = tuple(
        TableModel(ModelInfo("other", 5), ("all",), lambda run, key=key: built(run, key), name=name)
        for name, key in names.items()
    )
    return Experiment((*eb.experiments.experiment_of(recipe, seed).only(["members"]).jobs, job), models, {})


def built(run: Run, key: str) -> torch.nn.Module:
    """A trained method's model, with the number of samples that all have."""
    model = run.methods("all")[key].model()
    if isinstance(model, eb.models.SampledEnsemble):
        model.samples = SAMPLES
    return model.eval()


@torch.no_grad()
def member_log_probs(model: torch.nn.Module, images: Tensor) -> Tensor:
    """Log-probabilities of members, or of what stands for them, (M, N, K)."""
    return torch.cat([model.member_logits(part).log_softmax(-1) for part in images.split(250)], 1)  # type: ignore[operator]


@torch.no_grad()
def entropy_row(
    name: str,
    seed: int,
    model: torch.nn.Module,
    images: Tensor,
    real: Tensor,
    other: dict[str, eb.data.ImageSet],
) -> dict[str, object]:
    """The same of a model without samples, by the entropy of its prediction."""
    entropy = eb.metrics.entropy(model(images).log_softmax(-1))
    truth = eb.metrics.decompose_entropy(real).mutual_information
    row: dict[str, object] = {"model": f"{name}, its entropy", "seed": seed}
    row |= {"mi_rank": float(spearmanr(entropy, truth)[0])}  # type: ignore[arg-type]
    for kind, unknown in other.items():
        theirs = eb.metrics.entropy(model(unknown.images).log_softmax(-1))
        row |= {f"auroc_{kind}": eb.metrics.auroc(entropy, theirs)}
    return row


def compare(run: Run, recipe: Recipe, data: eb.data.Splits, seed: int) -> list[dict[str, object]]:
    """How near each model's members are to the real ones."""
    ensemble, images = eb.experiments.trained_ensemble(run, recipe, 5), data.test.batch(torch.arange(997))[0]
    draws = torch.Generator().manual_seed(seed)
    other = {name: eb.data.ood_images(name, 500, (1, 8, 8), generator=draws) for name in OOD}
    real = member_log_probs(ensemble, images)
    rows: list[dict[str, object]] = []
    for name, model in {
        "five members": ensemble,
        **{model.name: model.build(run) for model in run.experiment.models},
    }.items():
        if not isinstance(model, eb.Ensemble | eb.models.SampledEnsemble):
            rows.append(entropy_row(name, seed, model, images, real, other))
            continue
        log_probs = member_log_probs(model, images)
        information = eb.metrics.decompose_entropy(log_probs).mutual_information
        truth = eb.metrics.decompose_entropy(real).mutual_information
        spread, wanted = (values.exp().var(0).sum(-1) for values in (log_probs, real))
        row: dict[str, object] = {"model": name, "seed": seed, "mi": information.mean().item()}
        row |= {"mi_rank": float(spearmanr(information, truth)[0])}  # type: ignore[arg-type]
        row |= {"variance_ratio": (spread.mean() / wanted.mean()).item()}
        for kind, unknown in other.items():
            theirs = eb.metrics.decompose_entropy(member_log_probs(model, unknown.images)).mutual_information
            row |= {f"auroc_{kind}": eb.metrics.auroc(information, theirs)}
        rows.append(row)
    return rows


def main() -> None:
    """Train, measure and compare."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("out", type=Path, help="the study's folder, in which a killed one resumes")
    asked.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = asked.parse_args()
    recipe, data = replace(eb.experiments.digits(), members=5), eb.data.load_digits()
    rows, distribution = [], []
    for seed in options.seeds:
        result = eb.experiments.run_study(
            experiment(recipe, seed),
            recipe,
            data,
            options.out / f"seed-{seed}",
            seed=seed,
            final=True,
            quiet=True,
        )
        print(result.scores["test"].table(), flush=True)
        rows += [
            provenance("digits", "DE" if row.method == "DE" else row.model, row.members, seed)
            | {key: getattr(row, key) for key in ("model", "macs_ratio", "acc", "nll")}
            for row in result.scores["test"].rows
        ]
        for row in compare(result.run, recipe, data, seed):
            method = str(row["model"]).removesuffix(", its entropy")
            distribution.append(
                provenance("digits", "DE" if method == "five members" else method, 5, seed) | row
            )
    for row in distribution:
        print(*(f"{value:.3f}" if isinstance(value, float) else value for value in row.values()), sep="  ")
    document = {"command": COMMAND, "samples": SAMPLES, "rows": rows, "distribution": distribution}
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (RESULTS / "member_distribution.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
