"""Which model tells what only the real ensemble tells? Samples that stand for members.

    python studies/member_distribution.py OUT [--seeds 0 1 2]
    python studies/member_distribution.py OUT --cifar10 cifar10 --seeds 0

Beside bridges towards the members' mean (a regression), models whose samples stand for members, with five
members as the target and as many passes: bridges towards a random member with a live Z_t, at β of 1e-4, 1e-2
and 1 and with 1, 5 and 10 steps; flow matching; a Gaussian with a low-rank factor (DLF). Their prediction is
the mean of 16 samples' softmax. Compared with the five members on the test images: the rank correlation of
mutual information (MI), the variance over members of each class's probability, and how well MI tells other
images from test images. No setting was chosen on anything. On the digits members are trained, on CIFAR-10
they are those of results/. Writes results/member_distribution.json, or …-cifar10.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import ensbridge as eb
from common import members_of
from ensbridge.evaluation import ModelInfo
from ensbridge.experiments import Experiment, Job, MethodSpec, Recipe, Run, TableModel
from ensbridge.methods import AbstractMethod, BridgeConfig, DiffusionBridge
from provenance import RESULTS, provenance, study_parser, write_json

COMMAND = "python studies/member_distribution.py OUT"
SAMPLES = 16
OOD, OTHERS = ("uniform", "textures"), 500


def methods(recipe: Recipe) -> dict[str, Callable[[eb.Ensemble, Run], AbstractMethod]]:
    """Every method by its name, built beside five members."""
    law, ema, feature = recipe.bridge.temperature, recipe.bridge.ema, recipe.feature

    def score(run: Run, z_input: str, classes: int = 10) -> eb.models.ScoreNet:
        arguments = recipe.score("none").arguments | {"z_input": z_input, "classes": classes}  # type: ignore[operator]
        net = run.build(lambda: eb.models.ScoreNet(**arguments), "score")
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


def experiment(recipe: Recipe, seed: int, train_members: bool) -> Experiment:
    """Five members, and everything trained side by side on the same batches."""
    fit = eb.experiments.seeded(recipe.kl_fit, seed, "bridge")

    def spec(build: Callable[[eb.Ensemble, Run], AbstractMethod]) -> MethodSpec:
        make = lambda run: build(eb.experiments.trained_ensemble(run, recipe, 5), run)  # noqa: E731
        return MethodSpec("distribution", make, fit)

    names = {name: f"method-{number}" for number, name in enumerate(methods(recipe))}
    specs = {names[name]: spec(build) for name, build in methods(recipe).items()}
    needs = eb.experiments.member_folders(recipe, 5) if train_members else ()
    job = Job("all", "all", specs, needs)
    models = tuple(
        TableModel(ModelInfo("other", 5), ("all",), lambda run, key=key: built(run, key), name=name)
        for name, key in names.items()
    )
    needed = eb.experiments.experiment_of(recipe, seed).only(["members"]).jobs if train_members else ()
    return Experiment((*needed, job), models, {})


def built(run: Run, key: str) -> torch.nn.Module:
    """A trained method's model, with the number of samples that all have."""
    model = run.methods("all")[key].model()
    if isinstance(model, eb.models.SampledEnsemble):
        model.samples = SAMPLES
    return model.eval()


@torch.no_grad()
def uncertainty(model: torch.nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mutual information (N,) and the members' log-probabilities (M, N, K), or entropy without members."""
    if not isinstance(model, eb.Ensemble | eb.models.SampledEnsemble):
        return eb.metrics.entropy(model(images).log_softmax(-1)), None
    log_probs = torch.cat([model.member_logits(part).log_softmax(-1) for part in images.split(250)], 1)
    return eb.metrics.decompose_entropy(log_probs).mutual_information, log_probs


def compare(run: Run, recipe: Recipe, data: eb.data.Splits, seed: int) -> list[dict[str, object]]:
    """How near each model's members are to the real ones; a model without samples by its entropy."""
    device = data.test.images.device
    images = data.test.batch(torch.arange(len(data.test), device=device))[0]
    draws, shape = torch.Generator().manual_seed(seed), tuple(images.shape[1:])
    other = {
        name: eb.data.ood_images(name, min(OTHERS, len(images)), shape, generator=draws).to(device).images
        for name in OOD
    }
    ensemble = eb.experiments.trained_ensemble(run, recipe, 5)
    truth, real = uncertainty(ensemble, images)
    assert real is not None
    models = {"five members": ensemble, **{model.name: model.build(run) for model in run.experiment.models}}
    rows: list[dict[str, object]] = []
    for name, model in models.items():
        score, log_probs = uncertainty(model, images)
        label = f"{name}, its entropy" if log_probs is None else name
        row: dict[str, object] = {"model": label, "seed": seed}
        row |= {} if log_probs is None else {"mi": score.mean().item()}
        row["mi_rank"] = eb.metrics.rank_correlation(score, truth)
        if log_probs is not None:
            spread, wanted = (values.exp().var(0).sum(-1).mean() for values in (log_probs, real))
            row["variance_ratio"] = (spread / wanted).item()
        for kind, unknown in other.items():
            row[f"auroc_{kind}"] = eb.metrics.auroc(score, uncertainty(model, unknown)[0])
        rows.append(row)
    return rows


def main() -> None:
    """Train, measure and compare."""
    asked = study_parser(__doc__, seeds=[0, 1, 2])
    asked.add_argument("--cifar10", help="an npz or a folder of it, or cifar10; the digits unless given")
    asked.add_argument("--epochs", type=int, help="another length, to rehearse")
    asked.add_argument("--limit", type=int, help="only so many images of each part, to rehearse")
    options = asked.parse_args()
    name = "digits" if options.cifar10 is None else "cifar10"
    recipe = replace(eb.experiments.RECIPES[name]("default", "published"), members=5)
    if options.epochs is not None:
        batch = options.limit or recipe.kl_fit.batch_size
        recipe = replace(recipe, kl_fit=replace(recipe.kl_fit, epochs=options.epochs, batch_size=batch))
    data = eb.data.load_digits() if options.cifar10 is None else eb.data.open_splits(options.cifar10)
    data = eb.experiments.limit_images(data, options.limit)
    members = None if options.cifar10 is None else members_of(None, recipe)
    rows, distribution = [], []
    for seed in options.seeds:
        trained, folder = experiment(recipe, seed, members is None), options.out / f"seed-{seed}"
        result = eb.experiments.run_study(
            trained, recipe, data, folder, members, seed=seed, final=True, quiet=True
        )
        print(result.scores["test"].table(), flush=True)
        rows += [
            provenance(name, "DE" if row.method == "DE" else row.model, row.members, seed)
            | {key: getattr(row, key) for key in ("model", "macs_ratio", "acc", "nll")}
            for row in result.scores["test"].rows
        ]
        for row in compare(result.run, recipe, result.run.data, seed):
            method = str(row["model"]).removesuffix(", its entropy")
            distribution.append(provenance(name, "DE" if method == "five members" else method, 5, seed) | row)
    for row in distribution:
        print(*(f"{value:.3f}" if isinstance(value, float) else value for value in row.values()), sep="  ")
    suffix, more = ("", "") if options.cifar10 is None else ("-cifar10", " --cifar10 cifar10")
    document = {"command": f"{COMMAND}{more}", "samples": SAMPLES, "rows": rows, "distribution": distribution}
    if options.limit is None and options.epochs is None:
        write_json(RESULTS / f"member_distribution{suffix}.json", document)


if __name__ == "__main__":
    main()
