"""The quick start's headline beside distillation and real ensembles, on seeds that nothing was chosen on.

    python studies/headline_seeds.py OUT [--seeds 50 51 52 53 54]

Every model has as many passes. The headline has `compress`'s own settings; distillation and a bridge beside
the frozen source each have the best of 24 settings by cross-validation (`choose_headline.py`), and the best
of the pair's 24 stands beside them. Differences are of the NLL, image by image on the test images, with their
standard errors; the mean's is over seeds. Writes results/headline.json.
"""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import mean, stdev

import ensbridge as eb
from choose_headline import one_variant
from ensbridge.experiments import Experiment, Job
from provenance import RESULTS, provenance, study_parser, write_json

OUT, CHOICE = RESULTS / "headline.json", RESULTS / "headline-choice.json"
HEADLINE, CONTROL = "+1 DBN (distilled source)", "control (distilled source)"
BEST = {
    "ED": "ED, best of 24",
    "frozen": "frozen source + bridge, best of 24",
    "pair": "distilled source + bridge, best of 24",
}
OTHERS = ("ED", "ED (τ = 1)", "DE-3", CONTROL, *BEST.values())


def best_settings() -> dict[str, str]:
    """The setting of each method that cross-validation preferred, by its name there."""
    rows = json.loads(CHOICE.read_text(encoding="utf-8"))["rows"]
    methods = {
        "ED": [row for row in rows if row["method"] == "ED"],
        "frozen": [row for row in rows if row["method"] == "DBN" and row["source"] == "member"],
        "pair": [row for row in rows if row["method"] == "DBN" and row["source"] == "distilled"],
    }
    return {method: min(rows, key=lambda row: row["nll"])["model"] for method, rows in methods.items()}


def experiment(recipe: eb.experiments.Recipe, seed: int) -> Experiment:
    """Members, the headline with its control, the recipe's own distillation, and each method's best."""
    whole = eb.experiments.experiment_of(recipe, seed).only(["members", "headline"])
    needs = eb.experiments.member_folders(recipe, recipe.target)
    students = eb.experiments.student_specs(recipe, seed, recipe.target, "")
    job = Job("baselines", "baselines", {"ed": students["ed"]}, needs)
    model = eb.experiments.student_model(eb.evaluation.ModelInfo("ED", recipe.target), job.folder, "ed")
    named = [replace(entry, name=HEADLINE) if entry.headline else entry for entry in whole.models]
    jobs, models = {job.folder: job for job in (*whole.jobs, job)}, [*named, model]
    for method, setting in best_settings().items():
        job, model = one_variant(recipe, seed, setting)
        beside = jobs.get(job.folder, job)  # two of them may be trained side by side
        jobs[job.folder] = replace(job, methods={**beside.methods, **job.methods})
        models.append(replace(model, name=BEST[method]))
    return replace(whole, jobs=tuple(jobs.values()), models=tuple(models))


def main() -> None:
    """Train, measure and compare."""
    options = study_parser(__doc__, seeds=range(50, 55)).parse_args()
    recipe, data = eb.experiments.digits(), eb.data.load_digits()
    rows, paired = [], {name: [] for name in OTHERS}
    for seed in options.seeds:
        folder = options.out / f"seed-{seed}"
        result = eb.experiments.run_study(
            experiment(recipe, seed), recipe, data, folder, seed=seed, final=True, quiet=True
        )
        rows += [
            provenance("digits", row.method, 1 if row.control else row.members, seed)
            | {key: getattr(row, key) for key in ("model", "macs_ratio", "acc", "nll", "ece", "cnll", "dee")}
            for row in result.scores["test"].rows
        ]
        nlls = result.nlls("test")
        for name in OTHERS:
            below = nlls[name] - nlls[HEADLINE]
            paired[name].append([below.mean().item(), eb.metrics.standard_error(below)])
    for name, differences in paired.items():
        means = [difference for difference, _ in differences]
        error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("nan")
        by_seed = "  ".join(f"{difference:+.4f} ± {error:.4f}" for difference, error in differences)
        print(f"below {name:<32} {mean(means):+.4f} ± {error:.4f} over seeds:  {by_seed}")
    document = {"command": "python studies/headline_seeds.py OUT", "rows": rows, "below": paired}
    write_json(OUT, document)


if __name__ == "__main__":
    main()
