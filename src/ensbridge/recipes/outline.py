"""What a recipe would train, in lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from ensbridge.recipes.experiment import grids, groups_for
from ensbridge.recipes.recipe import Recipe, rival_sizes
from ensbridge.train.config import FitConfig


def outline(recipe: Recipe, stages: Sequence[str]) -> list[str]:
    """One line for each thing that is trained: its stage, its networks, and how many images each sees.

    >>> from ensbridge.recipes import digits
    >>> print("\\n".join(outline(digits(), ["members", "bridge"])))
    members   5 × member                              30 epochs of 600 images, batches of 50: 360 steps
    bridge    4 × bridge (5 steps)                    64 epochs of 600 images, batches of 64: 600 steps
    bridge    4 × bridge (KL)                         72 epochs of 600 images, batches of 64: 675 steps
    """
    images, rounds = recipe.train_images or _images(recipe), len(grids(recipe))
    sizes, others, every = rival_sizes(recipe), recipe.target - 1, recipe.most_members - 1
    places = groups_for(recipe, recipe.members)
    walked = len({tuple(range(recipe.target)), *places}) + len(places)  # and as many controls
    walk, distill = recipe.bridge_fit, recipe.distill_fit
    steps = f"bridge ({recipe.bridge.num_steps} steps)"
    own = "" if recipe.kl_heat == 1 else f", T = {recipe.bridge.temperature.base * recipe.kl_heat:g}"
    bridge = [(walked, steps, walk), (2 * len(places), f"bridge (KL{own})", recipe.kl_fit)]
    dealt = {group for members in range(2, recipe.most_members + 1) for group in groups_for(recipe, members)}
    more = recipe.most_members - recipe.members
    together = min(recipe.members_together, recipe.members)
    member = "member" if together == 1 else f"member, {together} at a time"
    extra = [(more, member, recipe.member_fit)] if more else []
    parts: dict[str, list[tuple[int, str, FitConfig]]] = {
        "members": [(recipe.members, member, recipe.member_fit)],
        "bridge": bridge,
        "distill": [*bridge, *[(walked, "bridge, distilled", distill)] * rounds],
        "rivals": [
            (max(sizes) - 1, "Bezier curve", recipe.curve_fit),
            (len(sizes), "ED", recipe.ed_fit),
            (len(sizes), "EnD²", recipe.end2_fit),
            (max(sizes) - 1 + others, "bridge network, small and medium", recipe.bn_fit),
        ],
        "tradeoff": [
            *extra,
            (every, "Bezier curve", recipe.curve_fit),
            (len(dealt), steps, walk),
            *[(len(dealt), "bridge, distilled", distill)] * rounds,
            (every, "bridge network, medium", recipe.bn_fit),
        ],
        "capacity": [
            *extra,
            (every, "Bezier curve", recipe.curve_fit),
            (every, steps, walk),
            *[(every, "bridge, distilled", distill)] * rounds,
            (every, "ED", recipe.ed_fit),
            (every, "EnD²", recipe.end2_fit),
            (every, "bridge network, medium", recipe.bn_fit),
        ],
    }
    wanted = dict.fromkeys(["members", *stages])
    if "distill" in wanted:
        wanted.pop("bridge", None)  # it is a part of the other
    for stage in wanted:
        if stage not in parts:
            raise ValueError(f"{stage!r} is not a stage; there are: {', '.join(parts)}, all")
    return [_line(stage, *part, images) for stage in wanted for part in parts[stage]]


def _images(recipe: Recipe) -> int:
    """How many training images there are; networks that cannot read them say so."""
    data = recipe.load()
    recipe.try_networks(data)
    return len(data.train)


def _line(stage: str, count: int, what: str, config: FitConfig, images: int) -> str:
    length = f"{config.epochs:g} epochs of {images:,} images, batches of {config.batch_size}"
    return f"{stage:<9} {f'{count} × {what}':<39} {length}: {config.total_steps(images):,} steps"
