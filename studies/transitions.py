"""CIFAR-10: how predictions go along the bridge for test images on which source and ensemble disagree.

    python studies/transitions.py cifar10

As the paper's Figures 2 and 6, for a bridge (KL, T = 4) on its schedule's five steps; its network does not
see Z_t, so that five steps end where one does. Puts them into results/cifar10/seed0-test.json, with the
images' numbers and without their pixels; then `make_summaries.py` draws the report page. It takes about five
minutes of one CPU core.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

import ensbridge as eb
from common import RESULTS, frozen_with, members_of
from ensbridge.methods import Bridge

SCORES, TEACHERS = RESULTS / "cifar10" / "seed0-test.json", 3


def main() -> None:
    """Predict, and write the examples."""
    test, fast = eb.data.open_splits(sys.argv[1]).test, frozen_with("1")
    members = list(members_of(None, eb.experiments.cifar10()).members)[:TEACHERS]
    nets = {"source": members[0], "ensemble": eb.Ensemble(members)}
    predictions = eb.evaluation.predict_each(nets, test, 250)
    (bridge,) = fast.each_bridge()
    assert isinstance(bridge, Bridge)
    fast.bridges[0] = bridge.on_times(bridge.schedule.times().tolist())
    transitions = eb.experiments.find_transitions(
        fast, predictions["source"].exp(), predictions["ensemble"].exp(), test
    )
    document = json.loads(SCORES.read_text(encoding="utf-8"))
    document["transitions"] = [asdict(replace(transition, image=None)) for transition in transitions]
    SCORES.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
