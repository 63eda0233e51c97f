"""Training speed on one GPU: the captured step beside the eager one, in one run, on made-up images.

    python benchmarks/train_throughput.py [--seconds 20]

Also checks that both give the same losses over 50 steps, to bf16's accuracy.
"""

from __future__ import annotations

import argparse
import time

import torch

from ensbridge.data import Augment, ImageSet
from ensbridge.ensemble import Ensemble
from ensbridge.methods import BridgeConfig, DeepEnsemble, DiffusionBridge, Together
from ensbridge.methods.method import AbstractMethod
from ensbridge.nets import ResNet, ScoreNet
from ensbridge.train.config import FitConfig
from ensbridge.train.ema import Average
from ensbridge.train.optimizers import Optimizers
from ensbridge.train.step import AbstractStep, CapturedStep, EagerStep


def member() -> AbstractMethod:
    torch.manual_seed(0)
    return DeepEnsemble([ResNet.resnet32x2(10).cuda()])


def bridge(copies: int = 1) -> AbstractMethod:
    torch.manual_seed(0)
    ensemble = Ensemble([ResNet.resnet32x2(10).cuda() for _ in range(3)]).eval()
    config = BridgeConfig()
    methods = {
        str(index): DiffusionBridge(ensemble, ScoreNet.cifar10(z_input="none").cuda(), config=config)
        for index in range(copies)
    }
    return Together(methods)


def stepper(method: AbstractMethod, data: ImageSet, config: FitConfig, captured: bool) -> AbstractStep:
    method.student.train()
    optimizers = Optimizers(method, config, config.total_steps(len(data)), captured)
    average = Average(method.student, method.averages())
    if not captured:
        return EagerStep(method, data, config, optimizers, average)
    step = CapturedStep(method, data, config, optimizers, average)
    step.capture()
    return step


def images_per_second(step: AbstractStep, batch: int, seconds: float) -> list[float]:
    """Rates of spans of 50 steps."""
    rates, first = [], 0
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds or len(rates) < 3:
        start = time.perf_counter()
        step.run(first, first + 50)
        torch.cuda.synchronize()
        rates.append(50 * batch / (time.perf_counter() - start))
        first += 50
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8)
    arguments = parser.parse_args()
    pixels = torch.randint(0, 256, (40_960, 3, 32, 32), dtype=torch.uint8, device="cuda")
    data = ImageSet(pixels, torch.randint(0, 10, (40_960,), device="cuda"))
    crop = Augment(crop=4, flip=True)
    mixed = Augment(crop=4, flip=True, mixup=0.4)
    cases = [
        ("member, batch 256", member, FitConfig(200, 256, 0.1, "sgd", weight_decay=1e-3, augment=crop)),
        ("bridge, 3 teachers, batch 128", bridge, FitConfig(800, 128, 2.5e-4, augment=mixed)),
        ("bridge, 3 teachers, batch 512", bridge, FitConfig(800, 512, 2.5e-4, augment=mixed)),
        ("4 bridges, 3 teachers, batch 512", lambda: bridge(4), FitConfig(800, 512, 2.5e-4, augment=mixed)),
    ]
    lines = []
    for name, make, config in cases:
        cells = []
        for captured in (True, False):
            begun = time.perf_counter()
            step = stepper(make(), data, config, captured)
            step.run(0, 10)
            torch.cuda.synchronize()
            ready = time.perf_counter() - begun
            rates = sorted(images_per_second(step, config.batch_size, arguments.seconds))
            middle = rates[len(rates) // 2]
            cells.append(f"{middle:9,.0f} ({rates[0]:,.0f} … {rates[-1]:,.0f}; ready in {ready:.0f} s)")
            print(name, "captured" if captured else "eager", cells[-1], flush=True)
            if isinstance(step, CapturedStep):
                step.close()
        lines.append(f"{name:34s} captured {cells[0]}   eager {cells[1]}")
    print("\nimages a second: median (slowest … fastest span of 50 steps)")
    print("\n".join(lines))
    agree(data)


def agree(data: ImageSet) -> None:
    """Losses of the captured and the eager step on the same 50 batches, without random draws."""
    config = FitConfig(200, 256, 0.02, "sgd", weight_decay=1e-3)
    losses = []
    for captured in (True, False):
        method = member()
        before = {name: tensor.clone() for name, tensor in method.student.state_dict().items()}
        step = stepper(method, data, config, captured)
        method.student.load_state_dict(before)
        for memory in step.optimizers.tensors().values():
            memory.zero_()
        losses.append([sum(step.run(index, index + 1).values()) for index in range(50)])
    difference = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    print(f"largest relative difference of the loss over 50 steps, captured to eager: {difference:.2e}")


if __name__ == "__main__":
    main()
