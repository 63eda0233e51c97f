"""Faults and bad input, counted: what the suite checks in small, at length and at random.

    python benchmarks/soak.py [--only kills,storage,files,load,openapi] [--seed 0] [--out FILE]

Trainings are killed, disks run full, ten thousand files are mutated, a server is loaded with malformed
requests among the good ones, and its description is tried by schemathesis, in a few minutes on two cores.
Every count goes to a file of JSON, of which `studies/make_pages.py` makes results/reliability.md; `make soak`
does both. It exits with 1 if anything was wrong. `--kind NAME --file NUMBER` reads a file that failed again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faults  # noqa: F401 - puts the helpers of the tests on the path

PARTS = ("kills", "storage", "files", "load", "openapi")
SHARES = {  # of the mutated files, in per cent; those that take longer to read are fewer
    "models": 9,
    "model configs": 9,
    "weights of members": 6,
    "hub classifiers": 3,
    "checkpoints": 6,
    "run configs": 7,
    "scores.json": 9,
    "images": 12,
    "pickles": 12,
    "npz and npy": 9,
    "MATLAB files": 3,
    "tables of images": 5,
    "caches of outputs": 2,
    "requests": 8,
}
PIECES = 2  # in which the files of a kind are read side by side
Document = dict[str, Any]
Say = Callable[[str], None]


def main() -> None:
    chosen = parse()
    if chosen.file is not None:
        read_one(chosen.kind, chosen.seed, chosen.file)
        return
    document: Document = {"commands": [asked()], "seed": chosen.seed, "machine": machine(), "wrong": []}
    with tempfile.TemporaryDirectory(prefix="ensbridge-soak-") as scratch:
        for part in chosen.only:
            begun = time.monotonic()
            say = partial(tell, part, begun)
            say("begins")
            document[part] = RUN[part](chosen, Path(scratch) / part, say)
            document["wrong"] += [f"{part}: {sentence}" for sentence in wrong_in(part, document[part])]
            document[part]["seconds"] = round(time.monotonic() - begun, 1)
            say("ends")
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for sentence in document["wrong"]:
        print(sentence, file=sys.stderr)
    seconds = sum(document[part]["seconds"] for part in chosen.only)
    print(f"{len(document['wrong'])} things were wrong in {seconds:.0f} s")
    raise SystemExit(1 if document["wrong"] else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, help="some parts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the counts go, as JSON; nowhere unless given")
    parser.add_argument("--kills", type=int, default=50, help="of trainings, by SIGKILL (50)")
    parser.add_argument("--trials", type=int, default=4, help="of each fault with each command (4)")
    parser.add_argument("--files", type=int, default=10_000, help="mutated, of all kinds together (10,000)")
    parser.add_argument("--kind", choices=SHARES, help="only files of this kind")
    parser.add_argument("--file", type=int, help="read this one file of --kind, with its error")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load (60)")
    parser.add_argument("--clients", type=int, default=32, help="of the load (32)")
    parser.add_argument("--malformed", type=float, default=0.05, help="share of the load's requests (0.05)")
    parser.add_argument("--examples", type=int, default=100, help="of requests for each operation (100)")
    chosen = parser.parse_args()
    if unknown := set(chosen.only) - set(PARTS):
        parser.error(f"{', '.join(unknown)} is no part; there are {', '.join(PARTS)}")
    if chosen.file is not None and chosen.kind is None:
        parser.error("--file needs --kind")
    return chosen


def tell(part: str, begun: float, text: str) -> None:
    print(f"[{part:8s}{time.monotonic() - begun:6.1f} s] {text}", flush=True)


def asked() -> str:
    """The command, without where its counts go."""
    words = sys.argv[1:]
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    return " ".join(["python benchmarks/soak.py", *words])


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} on {platform.machine()}"
    return f"{cores} cores, no GPU, {system}, Python {platform.python_version()}"


# ------------------------------------------------------------------------------ the parts


def run_kills(chosen: argparse.Namespace, folder: Path, say: Say) -> Document:
    from faults.kills import killed_trainings

    return {"rows": killed_trainings(chosen.kills, chosen.seed, folder, say)}


def run_storage(chosen: argparse.Namespace, folder: Path, say: Say) -> Document:
    from faults.storage import storage_faults

    rows, way = storage_faults(chosen.trials, chosen.seed, folder, say)
    return {"rows": rows, "way": way}


def run_files(chosen: argparse.Namespace, folder: Path, say: Say) -> Document:
    from faults.kinds import KINDS
    from faults.processes import in_parallel
    from faults.sandbox import MEMORY, SECONDS, Outcome, run_files

    rows = []
    for kind in KINDS:
        if chosen.kind not in (None, kind.name):
            continue
        files = chosen.files if chosen.kind else round(chosen.files * SHARES[kind.name] / 100)
        place = folder / kind.__name__
        works = [
            partial(run_files, kind, range(files)[piece::PIECES], chosen.seed, place / str(piece))
            for piece in range(PIECES)
        ]
        whole = Outcome()
        for outcome in in_parallel(works, place / "lanes"):
            whole.add(outcome)
        say(f"{kind.name}: {whole.files} files, {whole.accepted} accepted, {whole.refused} refused")
        rows.append({"kind": kind.name, **vars(whole)})
    return {"rows": rows, "seconds_for_a_file": SECONDS, "memory_limit_mb": MEMORY // 2**20}


def run_load(chosen: argparse.Namespace, folder: Path, say: Say) -> Document:
    from faults.load import serve_under_load

    return {"rows": [serve_under_load(chosen.seconds, chosen.clients, chosen.malformed)]}


def run_openapi(chosen: argparse.Namespace, folder: Path, say: Say) -> Document:
    from faults.openapi import described_requests

    return {"rows": described_requests(chosen.examples, chosen.seed, folder, say)}


RUN: dict[str, Callable[[argparse.Namespace, Path, Say], Document]] = {
    "kills": run_kills,
    "storage": run_storage,
    "files": run_files,
    "load": run_load,
    "openapi": run_openapi,
}
BAD = {  # counts, or lists of sentences, that must be empty in every row
    "kills": ("other_ends", "weights_differ", "scores_differ"),
    "storage": ("lost", "left_behind", "other_ends", "results_differ"),
    "files": ("undocumented", "crashes", "hangs", "code_run"),
    "load": ("wrong", "failed"),
    "openapi": ("5xx", "not_as_described"),
}


def wrong_in(part: str, counts: Document) -> list[str]:
    """Everything in a part's counts that should not be, a sentence each."""
    sentences = []
    for row in counts["rows"]:
        title = next((str(value) for value in row.values() if isinstance(value, str)), part)
        for name in BAD[part]:
            value = row[name]
            sentences += [f"{title}: {name}: {item}" for item in (value if isinstance(value, list) else [])]
            sentences += [f"{title}: {name} is {value}"] if isinstance(value, int) and value else []
        if part == "storage" and not row["refused"]:
            sentences.append(f"{title}: {row['command']} never met the fault, or did not notice it")
        if row.get("passed") is False:
            sentences.append(f"{title}: not passed: {row}")
    return sentences


def read_one(name: str, seed: int, number: int) -> None:
    """Read one mutated file in this process, so that its error is seen whole."""
    from faults.kinds import KINDS
    from faults.sandbox import draws_of

    kind = next(kind for kind in KINDS if kind.name == name)
    with tempfile.TemporaryDirectory(prefix="ensbridge-soak-") as scratch:
        files = kind(Path(scratch), Path(scratch) / "canary")
        try:
            content = files.mutated(draws_of(kind, seed, number))
            print(f"{len(content)} bytes: {content[:200]!r}")
            files.read(content)
            print("accepted")
        finally:
            files.close()


if __name__ == "__main__":
    main()
