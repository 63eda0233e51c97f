"""Names of earlier versions, for files that they wrote: here and nowhere else. No torch here."""

from __future__ import annotations

import re
from typing import Any


def upgrade_scores(document: object) -> object:
    """A decoded `scores.json` with the names of today; what is no such document stays as it is."""
    if not isinstance(document, dict):
        return document
    found = dict(document)
    for part in ("rows", "tradeoff", "capacity", "curves"):
        if isinstance(found.get(part), list):
            found[part] = [upgrade_row(row, found.get("seed")) for row in found[part]]
    return found


def upgrade_row(document: object, seed: object = None) -> object:
    """A decoded row or curve, of which version 0.1 told by its name how a bridge was trained.

    >>> old = {"model": "control (KL, T = 4)", "method": "control", "owed": None}
    >>> upgrade_row(old, seed=1) == {
    ...     "model": "control (KL, T = 4)", "method": "DBN", "control": True, "loss": "kl",
    ...     "source_temperature": 4.0, "seed": 1, "nll_gain_over_control": None,
    ... }
    True
    """
    if not isinstance(document, dict) or "control" in document:
        return document
    found: dict[str, Any] = dict(document)
    for old, new in (("owed", "nll_gain_over_control"), ("owed_error", "nll_gain_over_control_se")):
        if old in found:
            found[new] = found.pop(old)
    method, name = found.get("method"), found.get("model")
    found["control"] = method == "control"
    if found["control"]:
        found["method"] = "DBN"
    if not isinstance(name, str):  # a curve has no more to tell
        return found
    if seed is not None:
        found["seed"] = seed
    if method in ("DBN", "control"):
        found["loss"] = "kl" if re.search(r"\(KL\b", name) else "bridge"
        if warm := re.search(r"\bT = ([0-9]{1,5}(?:\.[0-9]{1,5})?)\b(?! and)", name):
            found["source_temperature"] = float(warm[1])
    if method == "BN" and (width := re.search(r"\b(small|medium)\b", name)):
        found["width"] = width[1]
    return found
