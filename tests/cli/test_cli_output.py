"""What reaches a terminal, a file or a full disk: names are shown literally, errors stay one sentence."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import _report
import _runs
import ensbridge
from ensbridge import cli
from ensbridge.evaluation.scores import parse_scores
from ensbridge.utils.progress import progress_bars, say

HOSTILE = "a\x1b[31mb\x9bc\x7fd\u202ee\nf\rg\u2028h"


def shell(line: str, folder: Path, **more: str) -> subprocess.CompletedProcess[bytes]:
    """What a shell makes of a line in which $ENSBRIDGE is the program."""
    package = str(Path(ensbridge.__file__).parents[1])
    program = f"{sys.executable} -m ensbridge"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG"))}
    environment = {**clean, "PYTHONPATH": package, "ENSBRIDGE": program, "COLUMNS": "200", **more}
    return subprocess.run(["sh", "-c", line], cwd=folder, env=environment, capture_output=True, check=False)


def in_process(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    """The exit code of `main`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["ensbridge", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


def one_sentence(stderr: str) -> str:
    """The only line on standard error, in which nothing is hidden."""
    assert stderr.endswith("\n")
    line = stderr[:-1]
    assert line.startswith("ensbridge: ")
    assert line.isprintable(), repr(line)
    return line


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of an evaluated run."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "scores.json").write_text(json.dumps(_report.make_document()))
    return folder


# ------------------------------------------------------------------------------ what a terminal would obey


@pytest.mark.parametrize(
    "words",
    [
        ["report", HOSTILE],
        ["report", "run", HOSTILE],
        ["evaluate", HOSTILE],
        ["train", HOSTILE],
        ["train", "digits", f"{HOSTILE}=1"],
        ["train", "digits", f"feature={HOSTILE}"],
        ["train", "digits", "--stage", HOSTILE, "--dry-run"],
        ["predict", HOSTILE, "cat.png"],
        ["export", HOSTILE, "--to", "onnx"],
        ["data", "get", HOSTILE],
    ],
    ids=lambda words: " ".join(words)[:20],
)
def test_names_in_errors_are_shown_and_not_obeyed(
    words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(run.parent)
    assert in_process(monkeypatch, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert r"\x1b[31mb" in one_sentence(captured.err)


@pytest.mark.parametrize("words", [["report"], ["train", "digits", "--oven"], ["slowstart"]])
def test_usage_errors_are_shown_and_not_obeyed(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert in_process(monkeypatch, *words, f"--{HOSTILE}") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: " in captured.err
    assert all(line.isprintable() for line in captured.err.split("\n"))


def test_keys_of_a_configuration_are_shown_and_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plan = {"name": HOSTILE, "preset": "default", "changes": []}
    (tmp_path / "config.json").write_text(json.dumps({"plan": plan, "seed": 0}))
    assert in_process(monkeypatch, "evaluate", tmp_path) == 2
    assert r"\u001b[31mb" in one_sentence(capsys.readouterr().err)
    (tmp_path / "config.json").write_text(json.dumps([{HOSTILE: 1}])[:-2] + f', "{HOSTILE!s}')
    assert in_process(monkeypatch, "evaluate", tmp_path) == 2
    one_sentence(capsys.readouterr().err)


def test_warnings_and_progress_are_shown_and_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def evaluate_run(*_: Any, **__: Any) -> Any:
        warnings.warn(f"{HOSTILE} is damaged", stacklevel=1)
        return parse_scores(_report.make_document()), [HOSTILE]

    monkeypatch.setattr("ensbridge.experiments.evaluate_run", evaluate_run)
    monkeypatch.setattr("ensbridge.experiments.check_runs", lambda runs: None)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert in_process(monkeypatch, "evaluate", HOSTILE) == 0
    captured = capsys.readouterr()
    warned, missing = captured.err.splitlines()
    assert r"\x1b[31mb" in warned
    assert r"\x1b[31mb" in missing
    assert all(line.isprintable() for line in captured.out.split("\n"))
    say(HOSTILE)
    one_sentence(capsys.readouterr().err)


def test_markup_in_names_is_printed_literally(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    document = _report.make_document()
    name = "[red]<script>alert(1)</script>[/red] & \\[b]"
    for number, row in enumerate(document["rows"][:2]):
        row["model"] = f"{name}{number}"
    document |= {"dataset": name, "class_names": [f"{name}{i}" for i in range(10)]}
    document |= {"environment": {name: name}, "settings": {name: name}}
    document["curves"][0]["name"] = name
    (run / "scores.json").write_text(json.dumps(document))
    monkeypatch.setenv("COLUMNS", "300")
    assert in_process(monkeypatch, "report", run) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"{name}0" in captured.out
    assert "\x1b" not in captured.out
    page = (run / "report.html").read_text()
    assert "&lt;script&gt;" in page
    for written in (page, *(path.read_text() for path in (run / "figures").glob("*.svg"))):
        assert not re.search(r"<script|<b>", written)


def test_the_name_of_a_stage_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    error = Terminal()
    monkeypatch.setattr(sys, "stderr", error)
    with progress_bars(quiet=False) as bars:
        bars.stage("[red]members[/]", 3)(3)
    assert "[red]members[/]" in error.getvalue()


# ------------------------------------------------------------------------------ other encodings

ENCODINGS: list[dict[str, str]] = [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


@pytest.mark.parametrize(
    "encoding", ENCODINGS, ids=lambda each: next(iter(each)) + "=" + next(iter(each.values()))
)
def test_every_output_degrades_where_the_encoding_is_narrow(encoding: dict[str, str], run: Path) -> None:
    encoding = {"PYTHONUTF8": "0", **encoding}
    for words in ("report run", "train digits --dry-run", "quickstart --help", "data corrupt --help"):
        done = shell(f"$ENSBRIDGE {words}", run.parent, **encoding)
        assert (done.returncode, done.stderr) == (0, b""), words
        if "--help" not in words:  # which typer writes as UTF-8 in place of ASCII
            assert done.stdout.decode(encoding.get("PYTHONIOENCODING", "ascii"))
    assert (run / "report.html").exists()


def test_errors_keep_their_words_where_the_encoding_is_narrow(tmp_path: Path) -> None:
    done = shell("$ENSBRIDGE report 'nein, ä²'", tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert rb"ensbridge: nein, \xe4\xb2 does not exist" in done.stderr


# ------------------------------------------------------------------------------ a full disk


def raising(number: int) -> Any:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EROFS, "choose another folder"),
        (errno.EFBIG, "choose another folder"),
    ],
)
def test_a_disk_that_takes_nothing_is_one_sentence_with_file_and_remedy(
    number: int, words: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    before = _runs.contents(run)
    monkeypatch.setattr(os, "fsync", raising(number))
    assert in_process(monkeypatch, "report", run) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    sentence = one_sentence(captured.err)
    assert f"{run / 'figures'}{os.sep}" in sentence
    assert words in sentence
    assert _runs.contents(run) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", ["report run", "train digits --dry-run", "--help", "--version"])
def test_a_full_disk_behind_standard_output_is_one_sentence(words: str, buffered: str, run: Path) -> None:
    done = shell(f"$ENSBRIDGE {words} > /dev/full", run.parent, PYTHONUNBUFFERED=buffered)
    assert done.returncode == 2
    sentence = one_sentence(done.stderr.decode())
    assert "standard output" in sentence
    assert "free some space" in sentence


@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_output_that_nobody_reads_ends_without_a_traceback(buffered: str, run: Path) -> None:
    for words in ("report run", "--version"):
        # The other end of the pipe is closed before anything is printed.
        done = shell(f"($ENSBRIDGE {words}) | exec true", run.parent, PYTHONUNBUFFERED=buffered)
        assert done.stderr == b""
    done = shell("$ENSBRIDGE report run >&-", run.parent)
    assert (done.returncode, done.stderr) == (0, b"")


# ------------------------------------------------------------------------------ links that wait for a report


def test_a_report_follows_no_planted_link(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    victim = run.parent / "victim"
    victim.mkdir()
    (victim / "front.svg").write_text("precious")
    for name in (".report.html.tmp", "report.html", ".figures.json.tmp", "figures.json"):
        (run / name).symlink_to(victim / "front.svg")
    (run / "figures").symlink_to(victim)
    before = _runs.contents(victim)
    assert in_process(monkeypatch, "report", run) == 2
    assert "figures is a link" in one_sentence(capsys.readouterr().err)
    (run / "figures").unlink()
    assert in_process(monkeypatch, "report", run) == 0
    assert _runs.contents(victim) == before
    assert not (run / "report.html").is_symlink()
