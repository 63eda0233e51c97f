"""Made-up runs that look like a recipe's, for the tests of scores and reports."""

from __future__ import annotations

import atexit
import base64
import math
import shutil
import struct
import tempfile
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ensbridge.evaluation.scores import Scores, Summary, parse_scores, summarise
from ensbridge.report import write_report

# model, method, members, bridges, steps, cost, ACC, NLL, DEE, gap
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("DE-1", "DE", 1, 0, 0, 1.0, 90.0, 0.346, 1.0, None),
    ("DE-2", "DE", 2, 0, 0, 2.0, 91.9, 0.243, 2.0, None),
    ("DE-3", "DE", 3, 0, 0, 3.0, 92.2, 0.229, 3.0, None),
    ("DE-4", "DE", 4, 0, 0, 4.0, 92.5, 0.222, 4.0, None),
    ("DE-5", "DE", 5, 0, 0, 5.0, 92.8, 0.218, 5.0, None),
    ("ED", "ED", 3, 0, 0, 1.0, 90.9, 0.352, 0.94, -0.05),
    ("EnD²", "EnD2", 3, 0, 0, 1.0, 90.8, 0.331, 1.15, 0.13),
    ("+2 BN small", "BN", 3, 2, 1, 1.13, 91.2, 0.262, 1.82, 0.72),
    ("+2 BN medium", "BN", 3, 2, 1, 1.41, 91.5, 0.254, 1.9, 0.79),
    ("+1 DBN (5 steps)", "DBN", 3, 1, 5, 1.8, 91.8, 0.238, 2.36, 0.92),
    ("+1 DBN", "DBN", 3, 1, 1, 1.16, 91.9, 0.237, 2.43, 0.93),
    ("+1 DBN (KL)", "DBN", 3, 1, 1, 1.16, 92.3, 0.217, ">5", 1.16),
    ("+2 DBN (DE-5)", "DBN", 5, 2, 1, 1.32, 92.4, 0.225, 3.5, 1.03),
    ("control", "control", 1, 1, 1, 1.16, 91.2, 0.268, 1.8, 0.66),
    ("control (KL)", "control", 1, 1, 1, 1.16, 91.3, 0.266, 1.83, 0.68),
)


def make_row(values: tuple[Any, ...], shift: float = 0.0) -> dict[str, Any]:
    """A row of the file; `shift` moves what depends on the seed."""
    model, kind, members, bridges, steps, cost, acc, nll, dee, gap = values
    moved = dee if isinstance(dee, str) or kind == "DE" else dee + 10 * shift
    diffusion = kind in ("DBN", "control")
    row = {"model": model, "method": "DBN" if diffusion else kind, "members": members, "bridges": bridges}
    row |= {"steps": steps, "control": kind == "control", "seed": round(7 + 250 * shift)}
    row |= {"loss": ("kl" if "KL" in model else "bridge") if diffusion else None}
    row |= {"source_temperature": 2.0 if diffusion else None}
    row |= {"width": next((width for width in ("small", "medium") if width in model), None)}
    row |= {"macs": int(1000 * cost), "macs_ratio": cost, "params": int(100 * cost), "params_ratio": cost}
    row |= {"acc": acc + 20 * shift, "nll": nll + shift, "brier": 0.15, "ece": 0.04 + shift / 2}
    row |= {"cnll": 0.3, "temperature": 1.2, "dee": moved, "gap": None if gap is None else gap + shift}
    return row | {
        "gap_error": None if gap is None else 0.05,
        "reliability": make_bins(shift),
        "nll_gain_over_control": None,
        "nll_gain_over_control_se": None,
        "uncertainty": None,
        "source": "member",
        "tau": None,
        "headline": False,
    }


def make_bins(shift: float) -> dict[str, Any]:
    """Five bins, the first of them empty."""
    empty = {"count": 0, "confidence": None, "accuracy": None}
    full = [{"count": 10 * i, "confidence": 0.2 * i + 0.1, "accuracy": 0.2 * i + shift} for i in range(1, 5)]
    after = [{"count": 10 * i, "confidence": 0.2 * i + 0.1, "accuracy": 0.2 * i + 0.09} for i in range(1, 5)]
    return {"before": [empty, *full], "after": [empty, *after]}


def make_png(shade: int, side: int = 8) -> str:
    """A grey PNG in base64, written without any library."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)

    lines = b"".join(b"\0" + bytes((shade + 9 * (x + y)) % 256 for x in range(side)) for y in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


def make_transition(label: int) -> dict[str, Any]:
    """An image on which the source is wrong and the ensemble right."""

    def probabilities(share: float) -> list[float]:
        rest = [0.1 / 8] * 10
        rest[label], rest[(label + 1) % 10] = 0.9 * share, 0.9 * (1 - share)
        return rest

    times = [1.0, 0.5, 0.0]
    path = [probabilities(0.9 - 0.7 * time) for time in times]
    ends = {"source": probabilities(0.1), "ensemble": probabilities(0.95)}
    return {
        "image": make_png(30 * label),
        "label": label,
        "times": times,
        "path": path,
        **ends,
        "index": label,
    }


def make_document(seed: int = 7, dataset: str = "digits") -> dict[str, Any]:
    """A whole `scores.json`."""
    shift = 0.004 * (seed - 7)
    towards = [(k, 1 + 0.16 * math.ceil(k / 3), 91 + k / 3, 0.3 - k / 50) for k in (2, 3, 5)]
    tradeoff = [(f"DBN to {k}", "DBN", k, 1, 1, x, a, n, k - 0.5, 0.9) for k, x, a, n in towards]
    tradeoff += [(f"BN to {k}", "BN", k, 1, 1, x + 0.2, a - 1, n, 1.8, 0.7) for k, x, a, n in towards]
    capacity = [
        (
            f"{name} of {k}",
            method,
            k,
            1,
            1,
            1.16,
            91 + k / 9,
            0.25,
            ">5" if name == "DBN" and k == 5 else dee,
            0.8,
        )
        for name, method, dee in (
            ("DBN", "DBN", 2.2),
            ("BN", "BN", 1.7),
            ("ED", "ED", 0.4),
            ("EnD²", "EnD2", 1.1),
        )
        for k in (2, 3, 5)
    ]
    curves = [
        {
            "name": name,
            "method": method,
            "control": False,
            "images": [1000 * i for i in range(1, 9)],
            "loss": [start / i**2 + low + shift for i in range(1, 9)],
        }
        for name, method, start, low in (
            ("member 1", "DE", 2.0, 0.1),
            ("bridge", "DBN", 90.0, 0.1),
            ("EnD²", "EnD2", 3, -2),
        )
    ]
    return {
        "dataset": dataset,
        "seed": seed,
        "class_names": [str(k) for k in range(10)],
        "environment": {"python": "3.12.3", "device": "cpu"},
        "rows": [make_row(values, shift) for values in _ROWS],
        "settings": {"recipe": dataset, "preset": "default"},
        "target": 3,
        "transitions": [make_transition(label) for label in range(2)],
        "curves": curves,
        "tradeoff": [make_row(values, shift) for values in tradeoff],
        "capacity": [make_row(values, shift) for values in capacity],
        "corrupted": [],
        "corrupted_set": None,
    }


MAIN = "+1 DBN"  # the bridge that the headlines of these runs are about


def one_run(dataset: str = "digits") -> Summary:
    return summarise([parse_scores(make_document(dataset=dataset))], main=MAIN)


def three_runs(dataset: str = "digits") -> Summary:
    return summarise([parse_scores(make_document(seed, dataset)) for seed in (6, 7, 8)], main=MAIN)


@cache
def report_of_three_runs() -> Path:
    """The folder of a report of three runs, written once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="ensbridge-report-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_report(three_runs(), folder).parent


def changed(model: str, /, **values: Any) -> Summary:
    """One run with one row's values changed."""
    scores = one_run().first
    rows = tuple(replace(row, **values) if row.model == model else row for row in scores.rows)
    assert rows != scores.rows
    return Summary((replace(scores, rows=rows),), MAIN)


def without(*models: str) -> Summary:
    scores = one_run().first
    rows = tuple(row for row in scores.rows if row.model not in models)
    return Summary((replace(scores, rows=rows),), None if MAIN in models else MAIN)


def bare(scores: Scores) -> Scores:
    """The same rows without anything that a plain evaluation does not know."""
    rows = tuple(replace(row, reliability=None) for row in scores.rows)
    return replace(
        scores, rows=rows, settings=None, target=None, transitions=(), curves=(), tradeoff=(), capacity=()
    )
