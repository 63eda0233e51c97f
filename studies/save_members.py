"""The members of a run of `ensbridge train`, as weights in half precision that other studies start from.

python studies/save_members.py runs/cifar10 results/cifar10
"""

from __future__ import annotations

import sys

import ensbridge as eb


def main() -> None:
    """Write member-1.safetensors, member-2.safetensors, …."""
    folder, out = sys.argv[1:]
    run, recipe = eb.experiments.open_run(folder)
    eb.experiments.save_members(out, eb.experiments.trained_ensemble(run, recipe, recipe.members))
    print(f"{recipe.members} members of {recipe.name} in {out}")


if __name__ == "__main__":
    main()
