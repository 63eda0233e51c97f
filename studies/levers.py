"""CIFAR-10: a distilled source with bridges beside it, trained at the same time; what helps, on validation.

    python studies/levers.py cifar10 OUT --inputs 0.4,0 1,0
    python studies/levers.py cifar10 OUT --inputs 1,0 --joint

The targets are the predictions of five members on the augmented images; labels are not used. For each of
--inputs (mixup's alpha, cutmix's alpha) these are trained side by side on the same batches:

    ed3, ed5   a fresh network distilled from three or from five members at τ = 1 (ed3 with the first inputs)
    ed5 + …    bridges that read its feature and logits and send no gradient back into it: at T = 2, at T = ∞,
               of plain residual blocks at T = 2, and two of half the cost at T = 2
    joint      a fresh network and a bridge at T = 2, each loss with a gradient into both; --joint instead
               trains such pairs at T = 1 and at T = 4, and a network with two bridges at T = 2

A bridge's prediction is given alone and averaged with that of its source. The test images are not used.
`make_levers.py` compares what this leaves in OUT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import ensbridge as eb
from common import EMA, at_temperature, begin, by_sgd, fit_config, fresh_network, parser
from ensbridge.experiments import Experiment, Job, MethodSpec, Recipe, Run, TableModel
from ensbridge.methods import JointDistillation

HALF_STAGES = [(1, 32, 1, 2), (3, 48, 1, 2), (3, 64, 2, 1), (3, 96, 1, 1), (3, 128, 1, 1)]
PAIRS = {"two halves": ("half-a", "half-b"), "two": ("T2", "T2b")}
INFINITE = 1e6  # a temperature at which nothing is left of the source's logits
BASES = {"T1": 1.0, "T4": 4.0, "Tinf": INFINITE}  # of bridges; others have 2


class PlainScore(nn.Module):
    """Three residual blocks of the source's own kind on its feature; no time and no Z_t go in."""

    def __init__(self, classes: int = 10, channels: int = 32, widths: Sequence[int] = (64, 112, 112)) -> None:
        super().__init__()
        strides, inputs = (2, 2, 1), (channels, *widths)
        parts = zip(inputs, widths, strides, strict=False)
        self.blocks = nn.Sequential(*(eb.models.BasicBlock(*part, bias=True) for part in parts))
        self.head = nn.Linear(widths[-1], classes)
        self.apply(eb.models.initialise)
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, h: Tensor, z_t: Tensor, t: Tensor) -> Tensor:
        """What a score network gives, from the feature alone."""
        return self.head(self.blocks(h).mean((2, 3)))


SCORES: dict[str, Callable[[], nn.Module]] = {  # of bridges that do not have the paper's network
    "plain": PlainScore,
    **dict.fromkeys(
        ("half-a", "half-b"), lambda: eb.models.ScoreNet(10, 32, HALF_STAGES, 128, z_input="none")
    ),
}
BESIDE = {"ed5": ("T2", "Tinf", "plain", "half-a", "half-b"), "joint": ("T2",)}
JOINT = {"joint-T1": ("T1",), "joint-T4": ("T4",), "joint-two": ("T2", "T2b")}


def source_spec(recipe: Recipe, name: str, bridges: tuple[str, ...], fit: eb.FitConfig) -> MethodSpec:
    """A network by SGD with bridges by Adam."""

    def bridge(run: Run, label: str) -> eb.methods.Bridge:
        score = run.build(SCORES.get(label, lambda: recipe.score("none")), "score", label)
        return eb.methods.Bridge(score, at_temperature(BASES.get(label, 2.0), EMA), (0.0, 1.0))

    def make(run: Run) -> JointDistillation:
        assert run.members is not None
        beside = {label: bridge(run, label) for label in bridges}
        source, ema = fresh_network(run, recipe), eb.methods.EmaRule(EMA)
        return JointDistillation(
            run.members, source, beside, recipe.feature, end_to_end=name != "ed5", ema=ema
        )

    return MethodSpec(name, make, fit, {"source": by_sgd(fit), "bridges": fit})


def student_spec(recipe: Recipe, fit: eb.FitConfig) -> MethodSpec:
    """A network distilled from three members."""

    def make(run: Run) -> eb.methods.EnsembleDistillation:
        assert run.members is not None
        ema = eb.methods.EmaRule(EMA)
        return eb.methods.EnsembleDistillation(
            run.members.first(3), fresh_network(run, recipe), tau=1.0, ema=ema
        )

    return MethodSpec("ed3", make, by_sgd(fit))


def models_of(name: str, bridges: tuple[str, ...]) -> list[TableModel]:
    """What can be made of a method: the source, each bridge, each averaged with the source."""
    info = eb.evaluation.ModelInfo("other", 5)

    def alone(run: Run) -> nn.Module:
        method = run.methods("all")[name]
        return method.source if isinstance(method, JointDistillation) else method.model()

    models = [TableModel(info, ("all",), alone, name=name)]
    several = {label: pair for label, pair in PAIRS.items() if {*pair} <= {*bridges}}
    for label, chosen in ({label: (label,) for label in bridges} | several).items():
        for average, words in ((False, ""), (True, f", mean with {name}")):

            def make(run: Run, chosen: tuple[str, ...] = chosen, average: bool = average) -> nn.Module:
                method = run.methods("all")[name]
                assert isinstance(method, JointDistillation)
                fast = method.with_bridges(*chosen)
                fast.average_source = average
                return fast

            models.append(TableModel(info, ("all",), make, name=f"{name} + {label}{words}"))
    return models


def main() -> None:
    """Train and measure, one kind of inputs after the other."""
    asked = parser(__doc__, epochs=100)
    asked.add_argument("--inputs", nargs="+", default=["0.4,0"], help="alpha of mixup and of cutmix")
    asked.add_argument("--joint", action="store_true", help="only networks trained jointly, at other T")
    asked.add_argument("--seed", type=int, default=0)
    options, recipe, data, members = begin(asked)
    for number, inputs in enumerate(options.inputs):
        options.mixup, options.cutmix = (float(alpha) for alpha in inputs.split(","))
        name = f"mixup{options.mixup:g}-cutmix{options.cutmix:g}{'-joint' if options.joint else ''}"
        fit, methods = fit_config(options, options.seed), JOINT if options.joint else BESIDE
        specs = {method: source_spec(recipe, method, bridges, fit) for method, bridges in methods.items()}
        models = [model for method, bridges in methods.items() for model in models_of(method, bridges)]
        if number == 0 and not options.joint:
            specs["ed3"] = student_spec(recipe, fit)
            models += models_of("ed3", ())
        experiment, folder = Experiment((Job("all", "all", specs),), tuple(models), {}), options.out / name
        result = eb.experiments.run_study(experiment, recipe, data, folder, members, seed=options.seed)
        print(f"{name}\n{result.scores['validation'].table()}", flush=True)


if __name__ == "__main__":
    main()
