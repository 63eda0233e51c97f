"""Digits: what the ensemble gives beyond regularisation, and baselines of the same cost.

    python studies/controls.py OUT [--seeds 40 41 42 43 44]

The quick start's headline (a distilled copy of the first member with a bridge, as `compress` makes it) with
other teachers, without the source's logits, towards an entropy-matched member and on mixed labels; students
of its cost; and the same pair of members that were themselves trained with mixup. All but the last row have
the headline's passes and optimisers; every seed is another set of members. Differences from the headline are
image by image, with a standard error over sets and one over images. Writes results/controls.json.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ensbridge as eb
from ensbridge.evaluation import ModelInfo
from ensbridge.experiments import Experiment, Job, MethodSpec, Recipe, Run, TableModel
from ensbridge.methods import (
    AbstractMethod,
    Bridge,
    EmaRule,
    EnsembleDistillation,
    JointDistillation,
    ProxyEnD2,
)
from provenance import provenance

RESULTS = Path(__file__).parent.parent / "results"
PAIR = "taught by members 1 to 3"  # the headline
WIDER = (18, 36, 71)  # channels with which a network alone has the pair's MACs
LONG_EPOCHS = 162  # three members' 30 each and the pair's 72
TARGETS = {  # a pair's teachers, by the indices of members
    "taught by member 1 (the control)": (0,),
    "taught by member 2": (1,),
    "taught by members 1 and 2": (0, 1),
    PAIR: (0, 1, 2),
    "taught by members 1 to 5": (0, 1, 2, 3, 4),
}


class Entry(NamedTuple):
    """A model of the table: how it is made of a run, and how its networks are trained."""

    make: Callable[[Run], AbstractMethod]
    bridged: bool = False  # whether it is a pair, whose bridge Adam trains with the recipe's rate
    teachers: int = 3  # none for labels
    rate: float = 0.05  # of Muon
    epochs: float | None = None  # the headline's unless given


class Tempered(nn.Module):
    """A network whose logits are divided by a temperature."""

    def __init__(self, net: nn.Module, temperature: float) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("temperature", torch.tensor(temperature))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K)."""
        return self.net(images) / self.temperature


@torch.no_grad()
def entropy_matched(images: Tensor, members: eb.Ensemble) -> Tempered:
    """The first member at the T at which its mean entropy on these images is that of all members."""
    logits, wanted = members.source(images), eb.metrics.entropy(members(images).log_softmax(-1)).mean()
    low, high = 0.01, 100.0
    for _ in range(50):
        middle = (low * high) ** 0.5
        below = eb.metrics.entropy((logits / middle).log_softmax(-1)).mean() < wanted
        low, high = (middle, high) if below else (low, middle)
    return Tempered(members.source, low).eval()


def wider_network() -> nn.Module:
    """A network of the members' kind that costs what the pair does."""
    strides = (1, 2, 1)
    return eb.nets.ResNet((1, 1, 1), WIDER, 10, stem=WIDER[0], strides=strides, mean=(0.3,), std=(0.4,))


class Study:
    """The experiment of a seed: members with and without mixup, and all that learns from them or labels."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        assert recipe.headline_fit is not None
        self.recipe, self.seed, self.ema = recipe, seed, EmaRule(recipe.bridge.ema)
        self.distil = eb.experiments.seeded(recipe.headline_fit, seed, "bridge")

    def members(self, run: Run, *chosen: int, mixup: bool = False) -> eb.Ensemble:
        """Some of the members, by index, of those that were trained with mixup or without."""
        nets = list(eb.experiments.trained_ensemble(run, self.recipe, self.recipe.members).members)
        if mixup:
            trained = [run.methods(f"mixup-{index + 1}")["member"].model() for index in range(len(nets))]
            nets = [net for ensemble in trained for net in ensemble.members]  # type: ignore[union-attr]
        return eb.Ensemble([nets[index] for index in chosen]).eval()

    def pair(
        self,
        run: Run,
        teachers: eb.Ensemble,
        source: nn.Module,
        base: float | None = None,
        label_weight: float = 0.0,
    ) -> AbstractMethod:
        """A copy of a source that is distilled, and a bridge beside it at temperature `base`."""
        base = self.recipe.headline_temperature if base is None else base
        config = replace(self.recipe.bridge, temperature=eb.TemperatureLaw(base=base))
        score = run.build(lambda: self.recipe.score("none"), "score")
        bridges = {"bridge": Bridge(score, config, (0.0, 1.0))}  # type: ignore[arg-type]
        source = copy.deepcopy(source).requires_grad_()
        return JointDistillation(
            teachers, source, bridges, self.recipe.feature, label_weight=label_weight, ema=self.ema
        )

    def taught_by(self, *chosen: int, mixup: bool = False, base: float | None = None) -> Entry:
        """The pair of the first member, taught by these."""
        return Entry(
            lambda run: self.pair(
                run, self.members(run, *chosen, mixup=mixup), self.members(run, 0, mixup=mixup).source, base
            ),
            bridged=True,
            teachers=len(chosen),
        )

    def matched(self, run: Run) -> AbstractMethod:
        """The pair, taught by the first member with the ensemble's entropy on validation images."""
        assert isinstance(run.data.val.images, Tensor)
        tempered = entropy_matched(run.data.val.images, self.members(run, 0, 1, 2))
        return self.pair(run, eb.Ensemble([tempered]), self.members(run, 0).source)

    def distilled(self, student: Callable[[], nn.Module], rate: float) -> Entry:
        """New weights, distilled from three members at τ = 1."""
        return Entry(
            lambda run: EnsembleDistillation(
                self.members(run, 0, 1, 2), run.build(student, "student"), tau=1.0, ema=self.ema
            ),
            rate=rate,
        )

    def end2(self, run: Run) -> AbstractMethod:
        """EnD² at τ = 1, its weights averaged."""
        method = ProxyEnD2(self.members(run, 0, 1, 2), run.build(self.recipe.member, "student"), tau=1.0)
        method.ema = self.ema
        return method

    def on_labels(self, student: Callable[[], nn.Module], epochs: float | None = None) -> Entry:
        """New weights that learn mixed labels."""
        return Entry(
            lambda run: EnsembleDistillation(
                self.members(run, 0),
                run.build(student, "student"),
                tau=1.0,
                label_weight=1.0,
                ema=self.ema,
            ),
            teachers=0,
            epochs=epochs,
        )

    def groups(self) -> dict[str, dict[str, Entry]]:
        """The jobs, each with its models by name: taught by networks, by labels, and by labels for longer."""
        member, mixed = self.recipe.member, "members trained with mixup: "
        pair_on_labels = lambda run: self.pair(  # noqa: E731
            run, self.members(run, 0), self.members(run, 0).source, label_weight=1.0
        )
        taught = {
            **{name: self.taught_by(*chosen) for name, chosen in TARGETS.items()},
            "taught by member 1 with the ensemble's entropy": Entry(self.matched, bridged=True, teachers=1),
            "T = ∞": self.taught_by(0, 1, 2, base=1e6),
            f"{mixed}taught by member 1": self.taught_by(0, mixup=True),
            f"{mixed}taught by members 1 to 3": self.taught_by(0, 1, 2, mixup=True),
            f"{mixed}taught by members 1 to 5": self.taught_by(0, 1, 2, 3, 4, mixup=True),
        }
        for rate in (0.05, 0.1):
            taught |= {
                f"ED, new weights, rate {rate:g}": self.distilled(member, rate),
                f"EnD², τ = 1, rate {rate:g}": Entry(self.end2, rate=rate),
                f"wider student, rate {rate:g}": self.distilled(wider_network, rate),
            }
        labelled = {
            "mixed labels": Entry(pair_on_labels, bridged=True, teachers=0),
            "wider network on mixed labels": self.on_labels(wider_network),
        }
        name = f"one network on mixed labels, {LONG_EPOCHS} passes"
        return {"taught": taught, "labelled": labelled, "long": {name: self.on_labels(member, LONG_EPOCHS)}}

    def spec(self, entry: Entry) -> MethodSpec:
        """Muon for networks, the recipe's Adam for bridges."""
        network = replace(self.distil, lr=entry.rate, epochs=entry.epochs or self.distil.epochs)
        bridge = replace(network, optimizer="adam", lr=self.recipe.kl_fit.lr, weight_decay=0.0)
        parts = {"source": network, "bridges": bridge} if entry.bridged else {}
        return MethodSpec("control", entry.make, network, parts)

    def mixup_member(self, index: int) -> Job:
        """A member that is trained on mixed labels."""
        seed = eb.experiments.derive_seed(self.seed, "mixup member", index)
        net = lambda: eb.experiments.build(self.recipe.member, seed)  # noqa: E731
        make = lambda run: eb.methods.DeepEnsemble([net().to(run.device)])  # noqa: E731
        fit = replace(self.recipe.member_fit, seed=seed, augment=self.distil.augment)
        methods = {"member": MethodSpec("member", make, fit)}
        return Job(f"mixup-{index + 1}", "members", methods, labelled=True)

    def experiment(self) -> Experiment:
        """The jobs and the models that come of them."""
        members = eb.experiments.experiment_of(self.recipe, self.seed).only(["members"])
        mixed = [self.mixup_member(index) for index in range(self.recipe.members)]
        folders = (*eb.experiments.member_folders(self.recipe, len(mixed)), *(job.folder for job in mixed))
        models = [self.mixup_ensemble(size, folders) for size in (1, 3, 5)]
        jobs = [*members.jobs, *mixed]
        for folder, entries in self.groups().items():
            labelled = folder != "taught"
            keys = {f"{number:02}": name for number, name in enumerate(entries)}
            specs = {key: self.spec(entries[name]) for key, name in keys.items()}
            jobs.append(Job(folder, folder, specs, folders, labelled=labelled))
            models += [trained_model(folder, key, name, entries[name].teachers) for key, name in keys.items()]
        return replace(members, jobs=tuple(jobs), models=tuple(models))

    def mixup_ensemble(self, size: int, folders: tuple[str, ...]) -> TableModel:
        """The first members that were trained with mixup, as an ensemble."""
        name = f"members trained with mixup: DE-{size}"
        build = lambda run: self.members(run, *range(size), mixup=True)  # noqa: E731
        return TableModel(ModelInfo("DE", size), folders, build, name=name)


def trained_model(folder: str, key: str, name: str, teachers: int) -> TableModel:
    """A row of the table."""
    return TableModel(
        ModelInfo("other", teachers), (folder,), lambda run: run.methods(folder)[key].model(), name=name
    )


def differences(nlls: list[dict[str, Tensor]], name: str, than: str) -> dict[str, Any]:
    """By how much one model's NLL is above another's: by set, with standard errors over sets and images."""
    above = torch.stack([of_set[name] - of_set[than] for of_set in nlls])
    sets = above.mean(1)
    return {
        "of": name,
        "than": than,
        "nll": above.mean().item(),
        "se_sets": sets.std().item() / len(sets) ** 0.5 if len(sets) > 1 else None,
        "se_images": eb.metrics.standard_error(above.mean(0)),
        "sets": sets.tolist(),
    }


def main() -> None:
    """Train, measure, and compare image by image."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("out", type=Path, help="the study's folder, in which a killed one resumes")
    asked.add_argument("--seeds", type=int, nargs="+", default=[40, 41, 42, 43, 44])
    asked.add_argument("--epochs", type=float, help="of everything but members, to rehearse")
    asked.add_argument("--json", type=Path, default=RESULTS / "controls.json", help="where the figures go")
    options = asked.parse_args()
    recipe, data = eb.experiments.digits(), eb.data.load_digits()
    if options.epochs:
        assert recipe.headline_fit is not None
        recipe = replace(recipe, headline_fit=replace(recipe.headline_fit, epochs=options.epochs))
    labels = data.test.labels
    assert labels is not None
    rows: list[dict[str, Any]] = []
    nlls: list[dict[str, Tensor]] = []
    for seed in options.seeds:
        experiment, folder = Study(recipe, seed).experiment(), options.out / f"seed-{seed}"
        result = eb.experiments.run_study(experiment, recipe, data, folder, seed=seed, final=True, quiet=True)
        for row in result.scores["test"].rows:
            trained = provenance(
                "digits", row.method, row.members, seed, LONG_EPOCHS if "passes" in row.model else None
            )
            scores = {key: getattr(row, key) for key in ("model", "macs_ratio", "acc", "nll", "ece", "cnll")}
            rows.append(trained | scores)
        predicted = result.log_probs["test"].items()
        nlls.append({name: eb.metrics.nll_per_image(values, labels) for name, values in predicted})
        print(
            f"seed {seed}: " + ", ".join(f"{name} {nll.mean():.3f}" for name, nll in nlls[-1].items()),
            flush=True,
        )
    above = [differences(nlls, name, PAIR) for name in nlls[0] if name != PAIR]
    for line in above:
        print(
            f"{line['of']:<50} {line['nll']:+.4f}, sets ± {line['se_sets']}, images ± {line['se_images']:.4f}"
        )
    document = {"command": "python studies/controls.py OUT", "rows": rows, "above": above}
    options.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
