"""The command line as a user meets it: help, one sentence for bad input, nothing left when it is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import _runs
import ensbridge
from ensbridge import cli
from ensbridge.evaluation.scores import Method, Row, Scores, read_scores
from ensbridge.experiments import digits

TOKEN = "ENSBRIDGE_TEST_TOKEN"


def environment(**more: str) -> dict[str, str]:
    """This process's environment, in which the package is found from any folder."""
    package = str(Path(ensbridge.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": package, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **more}


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "ensbridge", *map(str, words)]


def run(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )


def one_sentence(stderr: str) -> str:
    """The only line on standard error."""
    (line,) = stderr.splitlines()
    assert line.startswith("ensbridge: ")
    return line


# ------------------------------------------------------------------------------ help


COMMANDS = {
    "quickstart": ["--out", "--seed", "--quiet"],
    "train": ["--stage", "--preset", "--out", "--seed", "--dry-run", "--quiet"],
    "evaluate": ["--quiet"],
    "report": ["--out"],
    "predict": ["--image-shape", "--mean", "--std", "--allow", "--device"],
    "export": ["--to", "--out", "--image-shape", "--allow"],
    "bench": [
        "--runtime",
        "--batch-size",
        "--threads",
        "--rounds",
        "--seconds",
        "--allow",
        "--json",
        "--quiet",
    ],
}


def test_help_lists_the_commands(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name in (*COMMANDS, "--version"):
        assert name in done.stdout
    listed = re.findall(r"^  (\w+)  ", done.stdout.partition("Commands:")[2], re.MULTILINE)
    assert listed[:4] == ["quickstart", "compress", "fidelity", "predict"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_an_example_and_every_option(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    example = re.search(r"Example: ensbridge (.*)", done.stdout)
    assert example
    assert example[1].split()[0] == name
    for option in (*COMMANDS[name], *re.findall(r"--\w+", example[1])):
        assert re.search(rf"^ +{option}\b", done.stdout, re.MULTILINE), option
    assert list(tmp_path.iterdir()) == []


def test_version(tmp_path: Path) -> None:
    done = run(tmp_path, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ensbridge {ensbridge.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["quickstart", "--colour", "red"], "--colour"),
        (["quickstart", "--seed", "many"], "--seed"),
        (["quickstart", "--seed", "-1"], "--seed"),
        (["quickstart", "--seed", str(2**63)], "--seed"),
        (["slowstart"], "slowstart"),
        (["train"], "RECIPE"),
        (["report"], "RUN"),
    ],
)
def test_what_it_does_not_know_is_named(words: list[str], named: str, tmp_path: Path) -> None:
    done = run(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ bad input


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    done = run(tmp_path, "quickstart", "--out", "taken")
    assert (done.returncode, done.stdout) == (2, "")
    assert "taken is a file" in one_sentence(done.stderr)
    assert _runs.contents(tmp_path) == {"taken": b"mine"}


def row(model: str, method: Method, members: int, nll: float, **values: Any) -> Row:
    common: dict[str, Any] = {"bridges": 0, "steps": 0, "macs": 10, "macs_ratio": 1.0, "params": 10}
    common |= {"params_ratio": 1.0, "acc": 90.0, "brier": 0.1, "ece": 0.01, "cnll": nll, "temperature": 1.1}
    common |= {"dee": float(members), "gap": None, "gap_error": None}
    return Row(model=model, method=method, members=members, nll=nll, **{**common, **values})


SCORES = Scores(
    "digits",
    3,
    ("a", "b"),
    {"python": "3"},
    (
        row("DE-1", "DE", 1, 0.4),
        row("DE-2", "DE", 2, 0.3, macs_ratio=2.0),
        row("+1 DBN", "DBN", 2, 0.32, bridges=1, steps=1, dee=1.8, gap=0.8, gap_error=0.1),
        row("control", "DBN", 1, 0.35, control=True, bridges=1, steps=1, dee=1.5, gap=0.5, gap_error=0.1),
    ),
)


def write(folder: Path, scores: Scores) -> Path:
    folder.mkdir(parents=True)
    (folder / "scores.json").write_text(scores.to_json())
    return folder


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "digitz"], "'digitz' is not a recipe; there are: digits"),
        (["train", "digits", "--stage", "all", "--stage", "nope"], "'nope'.*members"),
        (["train", "digits", "--preset", "mine"], "preset.*'mine'.*default, paper"),
        (["train", "digits", "members=many"], "members.*'many'"),
        (["train", "digits", "oven=hot"], "oven"),
        (["evaluate", "nothing", "--quiet"], "nothing is not the folder of a run: it holds no config.json"),
        (["report", "nothing"], "nothing does not exist; give a scores.json or the run folder"),
        (["report", "empty"], r"empty.*scores\.json"),
        (["report", "broken"], r"scores\.json.*JSON"),
        (["report", "foreign"], r"scores\.json.*'dataset'"),
        (["report", "one", "other"], "one.*digits.*other.*cifar10"),
        (["report", "one", "one"], "seed 3"),
        (["report", "one", "--out", "taken"], "taken is a file"),
    ],
)
def test_bad_input_is_one_sentence_and_loses_nothing(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write(tmp_path / "one", SCORES)
    write(tmp_path / "other", replace(SCORES, dataset="cifar10", seed=4))
    for name, content in (("broken", "{"), ("foreign", '{"accuracy": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text(content)
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").write_text("mine")
    before = _runs.contents(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert in_process(monkeypatch, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(named, one_sentence(captured.err))
    assert _runs.contents(tmp_path) == before


def in_process(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    """The exit code of `main`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["ensbridge", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


def raising(error: BaseException) -> Callable[..., Any]:
    def run_recipe(*_: object) -> None:
        raise error

    return run_recipe


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("lr is 0; it must be above 0"), 2, "lr is 0; it must be above 0"),
        (PermissionError(13, "Permission denied", "/a/run"), 2, "Permission denied: '/a/run'"),
        (FloatingPointError("the loss is nan at step 7"), 1, "the loss is nan at step 7"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 80 GiB.\nMore"),
            2,
            "--device cpu",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_one_sentence_and_an_exit_code(
    error: BaseException,
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("ensbridge.experiments.run_recipe", raising(error))
    assert in_process(monkeypatch, "quickstart", "--out", tmp_path) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in one_sentence(captured.err)


@pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError])
def test_a_mistake_of_the_program_is_not_hidden(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensbridge.experiments.run_recipe", raising(error("a bug")))
    monkeypatch.setattr(sys, "argv", ["ensbridge", "quickstart", "--out", str(tmp_path)])
    with pytest.raises(error, match="a bug"):
        cli.main()


# ------------------------------------------------------------------------------ a whole command


def test_quickstart_prints_the_table_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def run_recipe(plan: Any, out: Path, seed: int, progress: Any) -> Scores:
        asked.extend([plan.recipe().name, out, seed])
        advance = progress("members", 10)
        advance(4)
        return SCORES

    monkeypatch.setattr("ensbridge.experiments.run_recipe", run_recipe)
    monkeypatch.setenv("COLUMNS", "60")
    assert in_process(monkeypatch, "quickstart", "--out", tmp_path, "--seed", "3") == 0
    captured = capsys.readouterr()
    assert asked == ["digits", tmp_path, 3]
    for each in SCORES.rows:
        assert each.model in captured.out
    lines = captured.out.splitlines()
    assert {str(tmp_path / "scores.json"), str(tmp_path / "report.html")} <= set(lines)
    assert "digits" in (tmp_path / "report.html").read_text()
    assert captured.err == "ensbridge: members, 10 steps\n"  # in place of a bar, which needs a terminal
    assert in_process(monkeypatch, "quickstart", "--out", tmp_path, "--seed", "3", "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_several_runs_are_reported_as_mean_and_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    better = tuple(replace(each, nll=each.nll - 0.02) for each in SCORES.rows)
    write(tmp_path / "one", SCORES)
    write(tmp_path / "two", replace(SCORES, seed=4, rows=better))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    assert in_process(monkeypatch, "report", "one", "two/scores.json") == 0
    captured = capsys.readouterr()
    assert "0.390 ± 0.014" in captured.out  # DE-1: the mean of 0.40 and 0.38, and their deviation
    assert captured.out.splitlines()[-1] == "report/report.html"
    page = re.sub(r"<[^>]*>", "", (tmp_path / "report" / "report.html").read_text())
    assert "0.390±0.014" in re.sub(r"\s", "", page)
    assert not (tmp_path / "one" / "report.html").exists()


def test_a_recipe_is_trained_and_evaluated_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fits = [f"{name}_fit.epochs=0.2" for name in ("member", "bridge", "kl")]
    words = ["train", "digits", "members=2", "target=2", *fits, "--stage", "bridge", "--out", "run"]
    assert in_process(monkeypatch, *words, "--dry-run") == 0
    assert "2 × member " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert in_process(monkeypatch, *words) == 0
    captured = capsys.readouterr()
    assert "ensbridge evaluate run" in captured.out
    assert all(re.search(r"^ensbridge: .*, \d+ steps?", line) for line in captured.err.splitlines())
    assert in_process(monkeypatch, "evaluate", "run", "--quiet") == 0
    captured = capsys.readouterr()
    assert re.search(r"run .*without distill.*distilled/5-to-1", one_sentence(captured.err))
    assert captured.out.splitlines()[-1] == "run/scores.json"
    scores = read_scores(tmp_path / "run")
    assert [each.model for each in scores.rows][:2] == ["DE-1", "DE-2"]
    (tmp_path / "run" / "scores.json").write_text("as it was")
    for other, words in (("run", "seed 0"), ("no", "no is not the folder")):
        assert in_process(monkeypatch, "evaluate", "run", other, "--quiet") == 2
        assert words in one_sentence(capsys.readouterr().err)
    assert (tmp_path / "run" / "scores.json").read_text() == "as it was"  # all is checked first
    assert scores.settings is not None
    assert len(scores.settings.pop("digest")) == 12
    assert scores.settings == {
        "recipe": "digits",
        "preset": "default",
        "schedule": "published",
        "changes": ", ".join(["members=2", "target=2", *fits]),
    }


def test_a_report_starts_without_torch(tmp_path: Path) -> None:
    write(tmp_path / "one", SCORES)
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['ensbridge', 'report', 'one']; "
    code += "from ensbridge.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "one" / "report.html").exists()


# ------------------------------------------------------------------------------ killed and interrupted


def marked(token: str) -> set[int]:
    """The running processes that inherited a token in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and token.encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue  # it has ended, or is another user's
    return found


class Started:
    """A quick start in the middle of its training."""

    def __init__(self, out: Path) -> None:
        self.out, self.token = out, uuid.uuid4().hex
        self.output, self.errors = out.with_suffix(".out"), out.with_suffix(".err")
        # Where the tests run in the background, interrupts are ignored, and a child would inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        # Into files: a pipe would be open for as long as a child that was left behind runs.
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command("quickstart", "--out", out, "--quiet"),
                env=environment(**{TOKEN: self.token}),
                stdout=output,
                stderr=errors,
            )
        signal.signal(signal.SIGINT, before)
        while not (out / "member-1" / "config.json").exists():
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.05)

    def end(self, how: signal.Signals) -> tuple[int, str, str]:
        """Exit code, standard output and standard error after a signal."""
        self.process.send_signal(how)
        code = self.process.wait()
        return code, self.output.read_text(), self.errors.read_text()

    def left_behind(self) -> set[int]:
        """What still runs, after a while in which children may notice that they are orphans."""
        for _ in range(40):
            if not (left := marked(self.token)):
                break
            time.sleep(0.05)
        return left


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("quickstart") / "run")
    try:
        if Path("/proc/self/environ").exists():
            assert started.process.pid in marked(started.token)
        started.end(signal.SIGKILL)
        yield started
    finally:
        started.process.kill()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_a_killed_run_leaves_no_process_behind(killed: Started) -> None:
    assert killed.process.returncode == -signal.SIGKILL
    assert not killed.left_behind()
    assert not (killed.out / "scores.json").exists()


def test_a_folder_made_with_another_seed_is_refused_and_left_alone(killed: Started) -> None:
    before = _runs.contents(killed.out)
    done = run(killed.out.parent, "quickstart", "--out", killed.out.name, "--seed", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"seed is 0 .*1 ", one_sentence(done.stderr))
    assert _runs.contents(killed.out) == before
    assert {path.stem for path in killed.out.parent.iterdir()} == {killed.out.name}


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    started = Started(tmp_path / "run")
    try:
        code, output, errors = started.end(signal.SIGINT)
    finally:
        started.process.kill()
    assert (code, output) == (130, "")
    assert (
        one_sentence(errors)
        == "ensbridge: interrupted; run the same command again, what it has saved is kept"
    )
    recipe = digits()
    last = recipe.member_fit.total_steps(len(recipe.load().train))
    assert not list(started.out.glob(f"*/checkpoint-*{last}.safetensors"))  # no member was trained to its end
    if Path("/proc/self/environ").exists():
        assert not started.left_behind()
