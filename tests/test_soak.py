"""The soak itself: files are made again from their seed, and every defect that is planted is counted."""

from __future__ import annotations

import errno
import os
import pickle
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ensbridge.utils.extras import missing

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

EXTRAS = ("serve", "timm", "transformers", "corruptions", "parquet", "digits", "report")
if missing(*EXTRAS) or not sys.platform.startswith("linux"):
    pytest.skip(f"needs Linux, and {missing(*EXTRAS)}", allow_module_level=True)

import soak  # noqa: E402
from faults import kills, kinds_models  # noqa: E402
from faults.commands import lost_since, snapshot  # noqa: E402
from faults.disks import TmpfsDisk, open_disk  # noqa: E402
from faults.kinds import KINDS  # noqa: E402
from faults.mutate import mutate_bytes, mutate_json  # noqa: E402
from faults.processes import in_parallel  # noqa: E402
from faults.sandbox import AbstractKind, run_files  # noqa: E402
from faults.storage import is_sentence  # noqa: E402
from faults.trainings import Training  # noqa: E402

import _runs  # noqa: E402
from ensbridge.training import fit  # noqa: E402

# ------------------------------------------------------------------------------ mutated files


def test_a_file_is_made_again_from_its_seed() -> None:
    document = {"a": [1, 2.5, "x"], "b": {"c": None, "d": True}}
    for make in (
        lambda draws: mutate_bytes(bytes(range(200)), draws),
        lambda draws: mutate_json(document, draws),
    ):
        first, again = ([make(random.Random(f"0:{n}")) for n in range(200)] for _ in range(2))
        assert first == again
        assert len(set(first)) > 120
    assert document == {"a": [1, 2.5, "x"], "b": {"c": None, "d": True}}


class Planted(AbstractKind):
    """Files of one byte, the way in which they are read wrongly."""

    name = "planted"

    def valid(self) -> list[bytes]:
        return [b"A"]

    def mutated(self, draws: random.Random) -> bytes:
        return b"ARUMESWXPCH"[(number := draws.randrange(11)) : number + 1]

    def read(self, content: bytes) -> None:
        match content:
            case b"R":
                raise ValueError("a clear sentence")
            case b"U":
                raise KeyError("key")
            case b"M":
                raise ValueError("two\nlines")
            case b"E":
                bytearray(2**31)
            case b"S":
                os.system("true")
            case b"W":
                open(self.folder.parent / "elsewhere", "w").close()
            case b"X":
                exec("1 + 1")
            case b"P":
                pickle.loads(pickle.dumps(kinds_models.Program(self.canary)))
            case b"C":
                os._exit(7)
            case b"H":
                time.sleep(60)


def test_every_planted_defect_is_counted(tmp_path: Path) -> None:
    ways = [chr(Planted.mutated(None, random.Random(f"0:planted:{n}"))[0]) for n in range(60)]  # type: ignore[arg-type]
    assert set(ways) == set("ARUMESWXPCH")
    numbers = [n for n in range(60) if ways[n] not in "H"] + [ways.index("H")]
    counts = [ways[n] for n in numbers]
    outcome = run_files(Planted, numbers, 0, tmp_path / "scratch", seconds=2)
    assert outcome["files"] == len(numbers)
    assert outcome["accepted"] == sum(map(counts.count, "ASWXP"))
    assert outcome["refused"] == counts.count("R")
    assert len(outcome["undocumented"]) == sum(map(counts.count, "UME"))
    assert len(outcome["crashes"]) == counts.count("C")
    assert outcome["hangs"] == [f"seed 0, file {ways.index('H')}"]
    ran = {int(sentence.split("file ")[1].split(":")[0]) for sentence in outcome["code_run"]}
    assert ran == {n for n in numbers if ways[n] in "SWXP"}
    assert any("canary" in sentence for sentence in outcome["code_run"])
    assert soak.wrong_in("files", {"rows": [{"kind": "planted", **outcome}]})


def test_memory_is_measured(tmp_path: Path) -> None:
    class Large(Planted):
        def read(self, content: bytes) -> None:
            torch.ones(10**8, dtype=torch.uint8)

    assert 90 < run_files(Large, [0, 1], 0, tmp_path / "scratch")["peak_memory_mb"] < 200


# ------------------------------------------------------------------------------ kills and disks


def fit_bridge(folder: Path) -> None:
    fit(_runs.method("bridge"), _runs.data(), _runs.config("bridge", checkpoint_every=2), folder / "run")


def test_a_training_is_killed_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "TRAININGS", (Training("fit", fit_bridge),))
    (row,) = kills.killed_trainings(4, 0, tmp_path, lambda _: None)
    assert row["kills"] == row["by_clock"] + row["at_file_operations"] == 4
    assert soak.wrong_in("kills", {"rows": [row]}) == []


def test_a_training_that_ends_with_other_weights_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path) -> None:
        """Counts how often it was started, as one that loses its random state would."""
        (folder / f"began-{time.monotonic_ns()}").touch()
        for step in range(6):
            path = folder / "run" / f"checkpoint-{step}.safetensors"
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                count = len([*folder.glob("began-*")])
                open(path.with_suffix(".tmp"), "w").close()
                save_file({"weight": torch.full((2,), float(count * step))}, path.with_suffix(".tmp"))
                os.replace(path.with_suffix(".tmp"), path)
                time.sleep(0.01)
        (folder / "run" / "scores.json").write_text("1")

    monkeypatch.setattr(kills, "TRAININGS", (Training("counts", run),))
    (row,) = kills.killed_trainings(6, 0, tmp_path, lambda _: None)
    assert row["kills"] == 6
    assert row["other_ends"] == []
    assert row["weights_differ"] > 0
    assert row["scores_differ"] == 0
    assert len(soak.wrong_in("kills", {"rows": [row]})) == 1


def test_a_disk_is_full_or_read_only_on_demand(tmp_path: Path) -> None:
    def trial() -> list[Any]:
        disk = open_disk(tmp_path / "disk")
        if not isinstance(disk, TmpfsDisk):
            return []
        (disk.folder / "old").write_bytes(b"x" * 5000)
        codes = []
        for fault in (lambda: disk.fill(8192), disk.make_read_only):
            fault()
            try:
                (disk.folder / "new").write_bytes(b"x" * 50_000)
            except OSError as error:
                codes.append(error.errno)
            disk.mend()
            (disk.folder / "new").write_bytes(b"x" * 50_000)
            (disk.folder / "new").unlink()
        return [*codes, (disk.folder / "old").stat().st_size]

    (found,) = in_parallel([trial], tmp_path / "lanes")
    if not found:
        pytest.skip("no namespace may be made here")
    assert found == [errno.ENOSPC, errno.EROFS, 5000]
    assert not [*(tmp_path / "disk").iterdir()]  # mounted in the child alone


def test_what_is_lost_is_named(tmp_path: Path) -> None:
    def checkpoint(step: int) -> Path:
        path = tmp_path / "run" / f"checkpoint-{step}.safetensors"
        save_file({"weight": torch.full((2,), float(step))}, path)
        return path

    (tmp_path / "run").mkdir()
    old = checkpoint(1)
    (tmp_path / "scores.json").write_text("old")
    before = snapshot(tmp_path)
    assert lost_since(before, tmp_path, {}) == []
    checkpoint(2)
    old.unlink()
    assert lost_since(before, tmp_path, {}) == []  # a newer one is there
    (tmp_path / "scores.json").write_text("half")
    assert lost_since(before, tmp_path, {}) == ["scores.json"]
    assert lost_since(before, tmp_path, snapshot(tmp_path)) == []  # it is what the command makes
    checkpoint(2).write_bytes(b"half")
    assert len(lost_since(before, tmp_path, {})) == 1
    (tmp_path / "run" / "checkpoint-2.safetensors").unlink()
    assert lost_since(before, tmp_path, {}) == ["run/checkpoint-1.safetensors", "scores.json"]


def test_a_sentence_is_one_line() -> None:
    assert is_sentence("ensbridge: x is in use by another process; wait until it ends\n")
    for said in ("", "Traceback\nValueError: x\n", "ensbridge: a\nensbridge: b\n"):
        assert not is_sentence(said)


# ------------------------------------------------------------------------------ the whole


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_few_files_of_every_kind_are_read_or_refused(kind: type[AbstractKind], tmp_path: Path) -> None:
    outcome = run_files(kind, range(3), 0, tmp_path / "scratch")
    assert outcome["files"] == outcome["accepted"] + outcome["refused"] == 3
    assert soak.wrong_in("files", {"rows": [{"kind": kind.name, **outcome}]}) == []


def test_shares_are_of_a_hundred() -> None:
    assert sum(soak.SHARES.values()) == 100
    assert list(soak.SHARES) == [kind.name for kind in KINDS]
    assert set(soak.BAD) == set(soak.RUN) == set(soak.PARTS)


def test_a_fault_that_nobody_noticed_is_wrong() -> None:
    row = {"fault": "two at once", "command": "train", "trials": 4, "refused": 1, "not_met": 3}
    row |= {"lost": [], "left_behind": 0, "other_ends": [], "results_differ": []}
    assert soak.wrong_in("storage", {"rows": [row]}) == []
    assert len(soak.wrong_in("storage", {"rows": [row | {"refused": 0, "not_met": 4}]})) == 1
