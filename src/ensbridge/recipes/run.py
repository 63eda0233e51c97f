"""Stages of a recipe, each resumable: members, bridges, distillation, scores.

Members are independent of each other, so two are trained side by side, in threads of one process: nothing
is left behind when it is killed, and one thread for each network is faster on small networks than two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import nn

from ensbridge.data.digits import Splits
from ensbridge.data.loader import ImageSet
from ensbridge.ensemble import Ensemble
from ensbridge.evaluation import evaluate
from ensbridge.fast_ensemble import FastEnsemble
from ensbridge.files import write_atomically
from ensbridge.methods.deep_ensemble import DeepEnsemble
from ensbridge.methods.diffusion_bridge import BridgeConfig, DiffusionBridge
from ensbridge.methods.method import AbstractMethod, Together
from ensbridge.recipes.recipe import Recipe
from ensbridge.scores import Scores, read_scores
from ensbridge.train.checkpoint import RunFolder
from ensbridge.train.config import FitConfig, derive_seed
from ensbridge.train.distill import distill_together
from ensbridge.train.fit import Progress, fit

WORKERS = 2
Job = Callable[[Progress], None]  # work that reports its steps


class Reporter(Protocol):
    """Hears how far a run is."""

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        """A stage of so many steps begins; the answer is called with the number of steps just done."""
        ...


class Silent:
    """A reporter that says nothing."""

    def stage(self, name: str, total: int) -> Callable[[int], None]:
        """Begin a stage that nobody watches."""
        return lambda steps: None


def run_recipe(recipe: Recipe, out: Path | str, seed: int = 0, reporter: Reporter | None = None) -> Scores:
    """Run every stage of a recipe into the folder `out`, or what is left of it, and return the scores."""
    folder = RunFolder(out, {"recipe": describe(recipe), "seed": seed}).path
    if (folder / "scores.json").exists():
        return read_scores(folder)
    reporter = reporter or Silent()
    with one_thread():
        data = recipe.load()
        ensemble = train_members(recipe, data, folder, seed, reporter)
        models = train_bridges(recipe, ensemble, data, folder, seed, reporter)
        scores = score(recipe, ensemble, models, data, seed)
    write_atomically(folder / "scores.json", scores.to_json().encode())
    return scores


def train_members(recipe: Recipe, data: Splits, folder: Path, seed: int, reporter: Reporter) -> Ensemble:
    """Train every member in a folder of its own, two at a time."""
    steps = recipe.member_fit.total_steps(len(data.train))
    advance = reporter.stage("members", steps * recipe.members)
    members = [build(recipe.member, derive_seed(seed, "member", index)) for index in range(recipe.members)]

    def job(index: int) -> Job:
        config = replace(recipe.member_fit, seed=derive_seed(seed, "member", index))

        def run(progress: Progress) -> None:
            _fit(DeepEnsemble([members[index]]), data.train, config, folder / f"member-{index + 1}", progress)

        return run

    side_by_side([job(index) for index in range(recipe.members)], advance)
    return Ensemble(members).eval()


def train_bridges(
    recipe: Recipe, ensemble: Ensemble, data: Splits, folder: Path, seed: int, reporter: Reporter
) -> dict[str, FastEnsemble]:
    """Train the bridge, its control and the KL bridge on shared teachers, and distil the first two."""
    first = ensemble.first(recipe.target)

    def bridge(
        config: BridgeConfig, loss: Literal["bridge", "kl"] = "bridge", target: Sequence[int] | None = None
    ) -> DiffusionBridge:
        net = build(lambda: recipe.score(config.z_input), derive_seed(seed, "score"))
        return DiffusionBridge(first, net, recipe.feature, loss=loss, target=target, config=config)

    walked = {"bridge": bridge(recipe.bridge), "control": bridge(recipe.bridge, target=(0,))}
    straight = bridge(recipe.kl_bridge, loss="kl")
    long, short = (
        replace(each, seed=derive_seed(seed, "bridge")) for each in (recipe.bridge_fit, recipe.distill_fit)
    )
    images = data.train.without_labels()
    advance = reporter.stage("bridges", sum(each.total_steps(len(images)) for each in (long, short, long)))
    distilled: dict[str, DiffusionBridge] = {}

    def long_way(progress: Progress) -> None:
        _fit(Together(walked), images, long, folder / "bridges", progress)
        distilled.update(distill_together(walked, images, short, folder / "distilled", progress=progress))

    def short_way(progress: Progress) -> None:
        _fit(straight, images, long, folder / "bridge-kl", progress)

    side_by_side([long_way, short_way], advance)
    return {
        f"+1 DBN ({recipe.bridge.num_steps} steps)": FastEnsemble.of(walked["bridge"]),
        "+1 DBN": FastEnsemble.of(distilled["bridge"]),
        "+1 DBN (KL)": FastEnsemble.of(straight),
        "control": FastEnsemble.of(distilled["control"]),
    }


def score(
    recipe: Recipe, ensemble: Ensemble, models: dict[str, FastEnsemble], data: Splits, seed: int
) -> Scores:
    """Measure DE-1 … DE-M and the bridges on the test split."""
    ladder = {f"DE-{count}": ensemble.first(count) for count in range(1, len(ensemble) + 1)}
    return evaluate(
        {**ladder, **models},
        data.test,
        data.val,
        reference=ensemble,
        target=recipe.target,
        dataset=recipe.name,
        seed=seed,
    )


def build(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network whose starting weights depend on the seed alone; the global randomness is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def describe(recipe: Recipe) -> dict[str, object]:
    """What decides a recipe's numbers, in JSON's types."""
    configs = {
        key: {k: v for k, v in asdict(value).items() if k not in ("checkpoint_every", "log_every")}
        for key, value in vars(recipe).items()
        if isinstance(value, FitConfig | BridgeConfig)
    }
    return {
        "name": recipe.name,
        "members": recipe.members,
        "target": recipe.target,
        "feature": recipe.feature,
        "member": str(build(recipe.member, 0)),
        "score": str(build(lambda: recipe.score(recipe.bridge.z_input), 0)),
        **configs,
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread each, so that numbers do not depend on the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(jobs: Sequence[Job], advance: Callable[[int], None]) -> None:
    """Run jobs, WORKERS at a time; the first error, or an interrupt, stops them all."""
    stop = threading.Event()

    def run(job: Job) -> None:
        torch.set_num_threads(1)  # OpenMP counts threads for each calling thread
        job(_counted(advance, stop))

    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            futures = [pool.submit(run, job) for job in jobs]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _fit(method: AbstractMethod, data: ImageSet, config: FitConfig, where: Path, progress: Progress) -> None:
    """Fit, and count the steps of a part that an earlier run had finished as done."""
    result = fit(method, data, config, where, progress)
    if result.resumed_from == result.steps:
        progress(result.steps, result.steps, result.loss)


def _counted(advance: Callable[[int], None], stop: threading.Event) -> Progress:
    """A progress callback that reports steps as they come, also after a resumed start."""
    last = 0

    def progress(step: int, total: int, loss: float) -> None:
        nonlocal last
        if stop.is_set():
            raise InterruptedError("another part of the run stopped")
        advance(step - last if step > last else step)
        last = step

    return progress
