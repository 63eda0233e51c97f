"""Training speed on one GPU: captured steps beside eager ones, in one run, on made-up images.

    python benchmarks/train_throughput.py [--seconds 2] [--only "batch 128"]

Also checks that both give the same losses over 50 steps, to bf16's accuracy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from ensbridge.data import Augment, ImageSet
from ensbridge.methods import BridgeConfig, DeepEnsemble, DiffusionBridge, JointTraining
from ensbridge.methods.base import AbstractTrainable
from ensbridge.models import ResNet, ScoreNet
from ensbridge.models.ensemble import Ensemble
from ensbridge.training.compiled import STEPS, StepKind
from ensbridge.training.config import FitConfig
from ensbridge.training.optimizers import Average, Optimizers
from ensbridge.training.step import AbstractStep

KINDS: tuple[StepKind, ...] = ("captured", "eager")
SPANS: dict[StepKind, int] = {"captured": 50, "eager": 10}  # steps that are timed together


def members(count: int) -> AbstractTrainable:
    torch.manual_seed(0)
    return JointTraining({str(index): DeepEnsemble([ResNet.resnet32x2(10).cuda()]) for index in range(count)})


def bridges(count: int, teachers: int) -> AbstractTrainable:
    torch.manual_seed(0)
    ensemble = Ensemble([ResNet.resnet32x2(10).cuda() for _ in range(teachers)]).eval()
    config = BridgeConfig()
    return JointTraining(
        {
            str(index): DiffusionBridge(ensemble, ScoreNet.cifar10(z_input="none").cuda(), config=config)
            for index in range(count)
        }
    )


def prepared(kind: StepKind, method: AbstractTrainable, data: ImageSet, config: FitConfig) -> AbstractStep:
    """Steps of a kind, ready to run, with weights and memory as they were before that."""
    student = method.student.train()
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    optimizers = Optimizers(method, config, config.total_steps(len(data)), captured=True)
    average = Average(student, method.averages())
    steps = STEPS[kind](method, data, config, optimizers, average)
    steps.prepare()
    student.load_state_dict(before)
    for name in average.tensors:
        average.tensors[name].copy_(before[name])
    for memory in optimizers.tensors().values():
        memory.zero_()
    return steps


def images_per_second(steps: AbstractStep, span: int, batch: int, seconds: float) -> list[float]:
    """Rates of spans of steps, the first left out."""
    rates, begun = [], time.perf_counter()
    while time.perf_counter() - begun < seconds or len(rates) < 4:
        start = time.perf_counter()
        steps.run(len(rates) * span, (len(rates) + 1) * span)
        torch.cuda.synchronize()
        rates.append(span * batch / (time.perf_counter() - start))
    return sorted(rates[1:])


def difference(make: Callable[[], AbstractTrainable], data: ImageSet, config: FitConfig) -> float:
    """The largest relative difference of the loss of captured to eager steps, over 50 steps."""
    losses = []
    for kind in KINDS:
        steps = prepared(kind, make(), data, config)
        losses.append([sum(steps.run(index, index + 1).values()) for index in range(50)])
        steps.close()
    return max(abs(one - other) / other for one, other in zip(*losses, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2, help="how long each case is timed (2)")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    arguments = parser.parse_args()
    pixels = torch.randint(0, 256, (40_960, 3, 32, 32), dtype=torch.uint8, device="cuda")
    data = ImageSet(pixels, torch.randint(0, 10, (40_960,), device="cuda"))
    crop, mixed = Augment(crop=4, flip=True), Augment(crop=4, flip=True, mixup=0.4)
    sgd = FitConfig(200, 256, 0.02, "sgd", weight_decay=1e-3, augment=crop)
    adam = FitConfig(800, 128, 2.5e-4, augment=mixed)
    large = FitConfig(800, 512, 2.5e-4, augment=mixed)
    cases: dict[str, tuple[Callable[[], AbstractTrainable], FitConfig]] = {
        "member, batch 256": (lambda: members(1), sgd),
        "3 members side by side, batch 256": (lambda: members(3), sgd),
        "bridge, 3 teachers, batch 128": (lambda: bridges(1, 3), adam),
        "bridge, 3 teachers, batch 512": (lambda: bridges(1, 3), large),
        "4 bridges, 5 teachers, batch 512": (lambda: bridges(4, 5), large),
    }
    print("images a second: median (slowest … fastest span of steps; seconds until the first step)")
    print("(of what is trained side by side, each sees that many)")
    for name, (make, config) in cases.items():
        if arguments.only not in name:
            continue
        print(f"{name:34s}", end="", flush=True)
        for kind in KINDS:
            begun = time.perf_counter()
            steps = prepared(kind, make(), data, config)
            ready = time.perf_counter() - begun
            rates = images_per_second(steps, SPANS[kind], config.batch_size, arguments.seconds)
            steps.close()
            middle, spread = rates[len(rates) // 2], f"{rates[0]:,.0f} … {rates[-1]:,.0f}"
            print(f"  {kind} {middle:,.0f} ({spread}; {ready:.0f} s)", end="", flush=True)
        print()
        if config.batch_size < 512 and "side by side" not in name:  # the same step, and eager ones take long
            print(f"    losses over 50 steps differ by at most {difference(make, data, config):.1e}")


if __name__ == "__main__":
    main()
