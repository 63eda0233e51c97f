"""Studies: experiments beside the recipes' own, on members that are given or trained, in a folder each."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from ensbridge.data.digits import Splits
from ensbridge.data.loader import ImageSet
from ensbridge.evaluation.evaluate import Evaluator, environment
from ensbridge.evaluation.predict import predict_each
from ensbridge.evaluation.scores import Scores
from ensbridge.experiments.jobs import Experiment
from ensbridge.experiments.parts import trained_ensemble
from ensbridge.experiments.recipe import Recipe
from ensbridge.experiments.run import NamedModels, build_models, choose_device, read_plan
from ensbridge.experiments.runner import Run, one_thread
from ensbridge.experiments.table import experiment_of
from ensbridge.metrics import nll_per_image
from ensbridge.models.ensemble import Ensemble
from ensbridge.utils.files import locked, open_folder, write_atomically
from ensbridge.utils.progress import progress_bars, silent


@dataclass(frozen=True)
class StudyResult:
    """What came of a study: the run with its trained methods and, by part of the data, what was measured."""

    run: Run
    scores: dict[str, Scores]
    log_probs: dict[str, dict[str, Tensor]]  # by part, then by model; those of DE-1 … DE-M come first

    def nlls(self, part: str) -> dict[str, Tensor]:
        """Each model's NLL on every image of a part."""
        labels = (self.run.data.test if part == "test" else self.run.data.val).labels
        assert labels is not None
        return {name: nll_per_image(values, labels.cpu()) for name, values in self.log_probs[part].items()}


def run_study(
    experiment: Experiment,
    recipe: Recipe,
    data: Splits,
    out: Path | str,
    members: Ensemble | None = None,
    *,
    seed: int = 0,
    final: bool = False,
    device: str = "auto",
    quiet: bool = False,
) -> StudyResult:
    """Train an experiment in the folder `out`, or what is left of it, and measure its models.

    `recipe` says what the networks read, how many members there are and which size of ensemble is the target.
    Where `members` are given, no job trains them. Models are measured on the validation images, and on the
    test images only with `final`, once everything is chosen; each part's scores and log-probabilities, in
    half precision, are written as `validation.json` and `validation.npz`, or `test.…`, in `out`.
    """
    folder, chosen = open_folder(out), choose_device(device, recipe)
    data = data.to(chosen)
    members = None if members is None else members.to(chosen).eval()
    with one_thread(), locked(folder), progress_bars(quiet) as bars:
        run = Run(experiment, folder, seed, data, bars.stage, chosen, members=members)
        run.train(experiment.jobs)
        reference = trained_ensemble(run, recipe, recipe.members) if members is None else members
        models = build_models(run, experiment.models, "rows", recipe.target)
        scores: dict[str, Scores] = {}
        log_probs: dict[str, dict[str, Tensor]] = {}
        for part, held in (("validation", data.val), ("test", data.test))[: 2 if final else 1]:
            scores[part], log_probs[part] = _measure(run, recipe, reference, models, part, held)
            write_atomically(folder / f"{part}.json", scores[part].to_json().encode())
            arrays: dict[str, Any] = {name: values.half().numpy() for name, values in log_probs[part].items()}
            np.savez_compressed(compressed := BytesIO(), **arrays)
            write_atomically(folder / f"{part}.npz", compressed.getvalue())
    return StudyResult(run, scores, log_probs)


def _measure(
    run: Run, recipe: Recipe, reference: Ensemble, models: NamedModels, part: str, held: ImageSet
) -> tuple[Scores, dict[str, Tensor]]:
    """Scores and log-probabilities of the ensembles and of the models on a part of the data."""
    evaluator = Evaluator(reference, held, run.data.val, recipe.target, batch_size=500, seed=run.seed)
    predictions = predict_each(models.models, held, 500)
    ensembles = reference.by_size()
    scores = Scores(
        dataset=recipe.name if part == "test" else f"{recipe.name} {part}",
        seed=run.seed,
        class_names=recipe.class_names,
        environment=environment(run.device),
        rows=evaluator.measure(ensembles) + evaluator.measure(models.models, models.info, predictions),
        target=recipe.target,
        curves=run.curves(),
    )
    log_probs = dict(zip(ensembles, evaluator.by_size, strict=True)) | predictions
    return scores, {name: values.cpu() for name, values in log_probs.items()}


def load_members(folder: Path | str, recipe: Recipe) -> Ensemble:
    """The members whose weights lie in a folder as member-1.safetensors, member-2.safetensors, …."""
    folder = Path(folder)
    count = sum(1 for _ in folder.glob("member-*.safetensors"))
    paths = [folder / f"member-{number}.safetensors" for number in range(1, max(count, 1) + 1)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ValueError(f"{folder} holds no {missing[0]}; give a folder with the weights of every member")
    members = [recipe.member() for _ in paths]
    for net, path in zip(members, paths, strict=True):
        net.load_state_dict(load_file(path))
    return Ensemble(members).eval()


def save_members(folder: Path | str, members: Ensemble) -> None:
    """Write members' weights in half precision, as `load_members` reads them."""
    folder = open_folder(folder)
    for number, net in enumerate(members.members, 1):
        state = {name: tensor.cpu().contiguous() for name, tensor in net.state_dict().items()}
        halves = {
            name: values.half() if values.is_floating_point() else values for name, values in state.items()
        }
        write_atomically(folder / f"member-{number}.safetensors", save(halves))


def open_run(folder: Path | str, device: str = "auto") -> tuple[Run, Recipe]:
    """The run that `train` left in a folder, to load its trained methods from, and its recipe."""
    folder = Path(folder)
    plan, seed = read_plan(folder)
    recipe = plan.recipe()
    chosen = choose_device(device, recipe)
    data = recipe.load().to(chosen)
    return Run(experiment_of(recipe, seed), folder, seed, data, silent, chosen), recipe


def limit_images(data: Splits, limit: int | None) -> Splits:
    """Only the first so many images of each part, to rehearse; all of them where there is no limit."""
    if limit is None:
        return data
    return Splits(*(part.subset(torch.arange(min(limit, len(part)))) for part in data))
