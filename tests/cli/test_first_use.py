"""The command line on its first day: what is missing is said before any work, and nothing is left behind."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import _recipe
from ensbridge import cli
from ensbridge.cli.base import app
from ensbridge.cli.runs import next_steps
from ensbridge.experiments import Plan, evaluate_run, train_recipe
from ensbridge.utils.extras import DISTRIBUTIONS, EXTRAS, missing, need
from ensbridge.utils.files import opened_folder

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def main(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    """The exit code of `main`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["ensbridge", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


# ------------------------------------------------------------------------------ extras


def test_every_extra_is_what_pyproject_says() -> None:
    declared = dict(re.findall(r"^(\w+) = \[(.*)\]$", PYPROJECT.read_text(), re.MULTILINE))
    for extra, packages in EXTRAS.items():
        names = set(re.findall(r'"([\w-]+)(?:\[\w+\])?>=', declared[extra]))
        assert names == {DISTRIBUTIONS.get(package, package).lower() for package in packages}, extra


def test_only_what_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing("digits", "report") == ""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"^matplotlib .*\[report\]'$"):
        need("digits", "report")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match=r"^scikit-learn, matplotlib .*\[digits,report\]'$"):
        need("digits", "report")


@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        ("matplotlib", "report", "quickstart --out run"),
        ("sklearn", "digits", "quickstart --out run"),
        ("sklearn", "digits", "train digits --out run"),
        ("jinja2", "report", "report run"),
        ("scipy", "corruptions", "data corrupt cifar10"),
        ("onnxscript", "export", "export zoo:cifar10 --to onnx --out model.onnx"),
        ("onnxruntime", "export", "bench zoo:cifar10 --runtime onnxruntime"),
    ],
)
def test_a_command_names_its_missing_extra_before_any_work(
    package: str, extra: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work was begun")

    import ensbridge.deploy.benchmark.bench
    import ensbridge.deploy.export  # before what they import by name is replaced  # noqa: F401

    for name in (
        "experiments.run_recipe",
        "experiments.runner.fit",
        "evaluation.scores.read_scores",
        "deploy.saving.load",
        "deploy.export.load",
        "deploy.benchmark.bench_folder",
        "data.open_splits",
    ):
        monkeypatch.setattr(f"ensbridge.{name}", work)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, *words.split()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.endswith(f"pip install 'ensbridge[{extra}]'\n")
    assert DISTRIBUTIONS.get(package, package) in said.err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ help and completion


def commands(group: Any = None, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and group."""
    group = group or typer.main.get_command(app)
    yield above
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*above, name))


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
@pytest.mark.parametrize("columns", ["80", "100"])
def test_help_has_a_short_flag_and_no_summary_is_cut(
    words: tuple[str, ...], columns: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(monkeypatch, *words, "--help") == 0
    whole = capsys.readouterr().out
    assert "..." not in whole.partition("Commands:")[2]
    assert max(map(len, whole.splitlines())) <= int(columns)
    assert main(monkeypatch, *words, "-h") == 0
    assert capsys.readouterr().out == whole


@pytest.mark.parametrize(
    ("typed", "found"), [("ensbridge quick", "quickstart"), ("ensbridge train --ro", "--root")]
)
def test_a_shell_completes_commands_and_options(
    typed: str, found: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("_ENSBRIDGE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert main(monkeypatch) == 0
    assert capsys.readouterr().out.split() == [found]


# ------------------------------------------------------------------------------ data


def test_every_command_that_reads_data_takes_a_root() -> None:
    group = typer.main.get_command(app)
    readers = [group.commands["train"], group.commands["evaluate"], *group.commands["data"].commands.values()]  # type: ignore[attr-defined]
    for command in readers:
        (root,) = [parameter for parameter in command.params if parameter.name == "root"]
        assert (root.opts, root.envvar) == (["--root"], "ENSBRIDGE_DATA")


@pytest.mark.parametrize("out", [["--out", "deep/run"], []])
def test_training_without_data_names_both_ways_and_leaves_no_folder(
    out: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENSBRIDGE_DATA", raising=False)
    for words, folder in (([], "data"), (["--root", "elsewhere"], "elsewhere")):
        assert main(monkeypatch, "train", "cifar10", *out, *words) == 2
        said = capsys.readouterr().err
        for part in (f"cifar10 is not in {folder} ", "--root", "ENSBRIDGE_DATA", f"--root {folder}\n"):
            assert part in said
    monkeypatch.setenv("ENSBRIDGE_DATA", "named")
    assert main(monkeypatch, "train", "cifar10", *out) == 2
    assert "cifar10 is not in named " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_or_is_not_empty_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for folder in ("mine", "mine/new/run"):
        with pytest.raises(ZeroDivisionError), opened_folder(tmp_path / folder):
            raise ZeroDivisionError
    with pytest.raises(FileExistsError), opened_folder(tmp_path / "full") as full:
        [(full / "file").touch(exist_ok=False) for _ in range(2)]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine"]


def test_a_plan_reads_its_set_in_its_root_and_a_run_does_not_remember_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENSBRIDGE_DATA", "/variable")
    for root, named in ((None, "/variable"), (tmp_path, str(tmp_path))):
        plan = Plan("cifar100", root=root)
        assert "root" not in plan.to_json()
        assert plan == Plan("cifar100")
        with pytest.raises(ValueError, match=f"cifar100 is not in {named} "):
            plan.recipe().load()


def test_evaluation_reads_the_set_in_its_root(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"plan": {"name": "cifar10", "preset": "default", "changes": []}, "seed": 0}'
    )
    with pytest.raises(ValueError, match="cifar10 is not in elsewhere "):
        evaluate_run(tmp_path, root=Path("elsewhere"))


# ------------------------------------------------------------------------------ what is said of a run


def test_evaluation_counts_images(tmp_path: Path) -> None:
    recipe, recorded = _recipe.tiny(), _recipe.RecordedProgress()
    train_recipe(recipe, tmp_path, stages=["members"], progress=recorded)
    evaluate_run(tmp_path, recipe, recorded)
    assert recorded.units == {"members": "steps", "evaluate": "images"}


# ------------------------------------------------------------------------------ after the quick start


def environment(folder: Path) -> Path:
    """A virtual environment's folder of commands, as far as it matters."""
    place = folder / "bin"
    place.mkdir(parents=True)
    (place / "activate").touch()
    (place / "ensbridge").touch(0o755)
    return place


@pytest.mark.parametrize("inside", [True, False])
def test_an_environment_that_no_shell_finds_is_activated_first(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    place = environment(tmp_path / "work" / ".venv" if inside else tmp_path / "my venv")
    monkeypatch.setattr(sys, "prefix", str(place.parent))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    activate = ". .venv/bin/activate" if inside else f". '{place}/activate'"
    assert next_steps(Path("runs/quickstart"), 0).split("\n  ")[1].startswith(f"{activate} ")
    monkeypatch.setenv("PATH", f"{place}:/usr/bin")
    assert "activate" not in next_steps(Path("runs/quickstart"), 0)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert "activate" not in next_steps(Path("runs/quickstart"), 0)


def test_what_to_try_next_uses_what_is_there_by_then() -> None:
    """Every path in a line is the run's, ships with the package, or was the --out of an earlier line."""
    parser = typer.main.get_command(app)
    there = {"runs/quickstart", "zoo:cifar10"}
    lines = [line.strip() for line in next_steps(Path("runs/quickstart"), 0).splitlines()]
    tried = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("ensbridge ")]
    assert len(tried) >= 2
    assert max(len(line) for line in lines if line.startswith("ensbridge ")) <= 78
    for name, *words in tried:
        command = parser.commands[name]  # type: ignore[attr-defined]
        given = command.make_context(name, list(words)).params
        used = [*map(str, given.get("runs") or []), *([given["model"]] if "model" in given else [])]
        assert set(used) <= there
        there |= {str(given["out"])} if given.get("out") else set()
