"""The switches of a bridge on CIFAR, one at a time, side by side; validation images alone.

    python studies/switches.py cifar10 OUT [--epochs 48] [--cutmix 1 --only KL control]

Every bridge reads member 1 and learns from members 1 to 3, from the same start, on the same batches. Mixup
and cutmix decide the batches, so another value is another study. NLLs are compared image by image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import ensbridge as eb
from common import Group, at_temperature, begin, bridge_spec, fit_config, parser
from ensbridge.experiments import Experiment, Job, TableModel

BASE = at_temperature(2.0)


class Switch(NamedTuple):
    """What one bridge has, and with which it is compared."""

    config: eb.methods.BridgeConfig = BASE
    rate: float = 1.0  # times that of the others
    loss: Literal["bridge", "kl"] = "kl"
    target: Group = (0, 1, 2)
    against: str = "KL"


SWITCHES = {
    "KL": Switch(),
    "T = 1": Switch(at_temperature(1.0)),
    "T = 4": Switch(at_temperature(4.0)),
    "T without spread": Switch(replace(BASE, temperature=eb.TemperatureLaw(base=2.0, spread=0.0))),
    "shorter average": Switch(replace(BASE, ema=0.99)),
    "sees Z_t": Switch(replace(BASE, z_input="informative")),
    "not centred": Switch(replace(BASE, centre=False)),
    "rate / 2": Switch(rate=0.5),
    "rate × 2": Switch(rate=2.0),
    "bridge's own loss": Switch(loss="bridge"),
    "control": Switch(target=(0,)),
    "control, T = 4": Switch(at_temperature(4.0), target=(0,), against="T = 4"),
}


def table_model(number: int, name: str, switch: Switch) -> TableModel:
    """The source with one bridge, under the switch's name."""
    steps = 1 if switch.loss == "kl" else switch.config.num_steps
    base, control = switch.config.temperature.base, switch.target == (0,)
    info = eb.evaluation.ModelInfo("DBN", len(switch.target), 1, steps, switch.loss, base, control)
    return replace(eb.experiments.bridge_model(info, "switches", [f"bridge-{number}"]), name=name)


def main() -> None:
    """Train, measure, compare."""
    asked = parser(__doc__, epochs=80)
    asked.add_argument("--only", nargs="+", default=[*SWITCHES], choices=[*SWITCHES], metavar="SWITCH")
    options, recipe, data, members = begin(asked)
    plain, chosen = fit_config(options), {name: SWITCHES[name] for name in options.only}
    specs = {
        f"bridge-{number}": bridge_spec(
            recipe,
            switch.config,
            replace(plain, lr=plain.lr * switch.rate),
            loss=switch.loss,
            target=switch.target,
        )
        for number, switch in enumerate(chosen.values())
    }
    models = tuple(table_model(number, *entry) for number, entry in enumerate(chosen.items()))
    experiment = Experiment((Job("switches", "switches", specs),), models, {})
    result = eb.experiments.run_study(experiment, recipe, data, options.out, members.first(3))
    print(result.scores["validation"].table())
    nlls = result.nlls("validation")
    print("\n| NLL higher by | than | |\n|---|---|---|")
    for name, switch in chosen.items():
        if name != switch.against and switch.against in nlls:
            more = nlls[name] - nlls[switch.against]
            print(
                f"| {name} | {switch.against} | {more.mean():.4f} ± {eb.metrics.standard_error(more):.4f} |"
            )


if __name__ == "__main__":
    main()
