"""Runs that ship with the package, for figures that a short run cannot draw from its own scores."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files

from ensbridge.evaluation.scores import Summary, parse_scores, summarise


@cache
def shipped(dataset: str) -> Summary | None:
    """Return the runs on a data set that ship with the package, None where there are none.

    >>> shipped("no-such-data") is None
    True
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", dataset):  # a name from a file must not lead elsewhere
        return None
    path = files("ensbridge.report").joinpath(f"shipped-{dataset}.json")
    if not path.is_file():
        return None
    runs = json.loads(path.read_text(encoding="utf-8"))
    return summarise([parse_scores(run, where=f"{path.name}[{i}]") for i, run in enumerate(runs)])
