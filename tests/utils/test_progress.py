"""Progress: bars on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from ensbridge.utils.progress import progress_bars, stage_lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def table() -> Table:
    """A table that is wider than the 80 columns that rich takes a file to have."""
    made = Table("first", "last")
    made.add_row("x" * 90, "the end")
    return made


def test_lines_say_how_far_a_stage_is_and_come_at_most_every_20_seconds() -> None:
    now, lines = 0.0, []
    advance = stage_lines("bridges", 1000, say=lines.append, clock=lambda: now)
    assert lines == ["bridges, 1000 steps"]
    for _ in range(1000):
        now += 0.1
        advance(1)
    done = [int(line.split()[1]) for line in lines[1:]]
    assert lines[1:] == [f"bridges, {count} of 1000 steps after {count / 10:.0f} s" for count in done]
    assert 4 <= len(done) <= 5
    assert all(second - first >= 200 for first, second in zip([0, *done], done, strict=False))


def test_lines_have_the_unit_that_is_counted() -> None:
    lines: list[str] = []
    for total in (21546, 1):
        stage_lines("evaluate", total, "images", lines.append)
    assert lines == ["evaluate, 21546 images", "evaluate, 1 image"]


def test_a_stage_of_unknown_length_has_lines_too() -> None:
    now, lines = 0.0, []
    advance = stage_lines("download", 0, say=lines.append, clock=lambda: now)
    now = 30.0
    advance(1)
    assert lines == ["download", "download, 1 step after 30 s"]


@pytest.mark.parametrize("quiet", [False, True])
def test_without_a_terminal_stages_are_lines_unless_quiet(quiet: bool, capsys: Any) -> None:
    with progress_bars(quiet) as bars:
        bars.stage("members", 3)(3)
        bars.show("a result")
    captured = capsys.readouterr()
    assert captured.out == "a result\n"
    assert captured.err == ("" if quiet else "ensbridge: members, 3 steps\n")


def test_on_a_terminal_stages_are_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    error = Terminal()
    monkeypatch.setattr(sys, "stderr", error)
    with progress_bars(quiet=False) as bars:
        bars.stage("evaluate", 3, "images")(3)
    assert "evaluate" in error.getvalue()
    assert "3/3" in error.getvalue()
    assert "images" in error.getvalue()
    assert "ensbridge: " not in error.getvalue()


@pytest.mark.parametrize("output", [Terminal, io.StringIO])
def test_a_result_goes_to_standard_output_and_above_the_bars_of_the_same_terminal(
    output: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, error = output(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    with progress_bars(quiet=False) as bars:
        bars.stage("members", 3)
        bars.show("a result")
    assert ("a result" in out.getvalue()) == (output is io.StringIO)
    assert ("a result" in error.getvalue()) == (output is Terminal)  # which are one and the same


def test_a_table_in_a_file_is_whole(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert Console().width == 80
    with progress_bars(quiet=True) as bars:
        bars.show(table())
    printed = capsys.readouterr().out
    assert "x" * 90 in printed
    assert "the end" in printed
