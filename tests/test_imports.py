"""The house's order: imports go down only, what needs no torch starts without it, names are explained."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import ensbridge

PACKAGE = Path(ensbridge.__file__).parent

# From the top down. A room may import those of lower floors; on its own floor only where neighbours may talk.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("benching",),
    ("recipes", "report", "capturing", "exporting", "predicting", "serve", "compression", "zoo"),
    ("answers", "evaluation", "fast_ensemble", "fidelity", "inference", "robustness", "saving", "train"),
    ("methods",),
    ("ensemble", "calibration", "sampler", "nets", "data"),
    ("schedule", "metrics", "agreement", "cost", "devices", "scores", "progress"),
    ("words", "files"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
NEIGHBOURS_TALK = (FLOOR["train"], FLOOR["nets"])
ONLY = {"report": {"scores", "files"}}  # rooms that may import these and nothing else


class Import(NamedTuple):
    where: str  # "train/fit.py:12"
    room: str  # that imports
    target: str  # the room that is imported


def room_of(module: str) -> str:
    """The room of a dotted name inside the package."""
    return module.split(".")[0]


def homes(package: Path) -> dict[str, str]:
    """The room of each public name that `from ensbridge import name` may bring."""
    tree = ast.parse((package / "__init__.py").read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ensbridge."):
            found |= {alias.name: room_of(node.module.removeprefix("ensbridge.")) for alias in node.names}
    return found


def imports(package: Path) -> Iterator[Import]:
    """Every import of the package by itself, inside functions too, but for those of its root."""
    public = homes(package)
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        if relative == Path("__init__.py"):
            continue
        module = ".".join(relative.with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            for name in imported_names(node, ("ensbridge." + module).split(".")[:-1]):
                inside = name.removeprefix("ensbridge.")
                target = public.get(inside, room_of(inside))
                if not target.startswith("__"):  # __version__
                    yield Import(f"{relative}:{getattr(node, 'lineno', 0)}", room_of(module), target)


def imported_names(node: ast.AST, parents: list[str]) -> Iterator[str]:
    """The dotted names under `ensbridge` that a node imports; relative ones are resolved in `parents`."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
        names = [f"ensbridge.{alias.name}" for alias in node.names] if base == "ensbridge" else [base]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
        "import_module",
        "__import__",
    ):
        names = [
            each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
    return (name for name in names if name.startswith("ensbridge."))


def problems(package: Path) -> list[str]:
    """What is against the order of the house, in sentences."""
    found = []
    for entry in sorted(package.iterdir()):
        is_room = (entry.is_dir() and any(entry.rglob("*.py"))) or entry.suffix == ".py"
        if is_room and entry.stem != "__init__" and entry.stem not in FLOOR:
            found.append(f"{entry.name} has no floor; give it one in FLOORS of tests/test_imports.py")
    for each in imports(package):
        if each.room not in FLOOR or each.room == each.target:
            continue
        if each.target not in FLOOR:
            found.append(f"{each.where} imports {each.target}, which has no floor in tests/test_imports.py")
        elif each.room in ONLY and each.target not in ONLY[each.room]:
            found.append(f"{each.where} imports {each.target}; {each.room} may import {ONLY[each.room]} only")
        elif FLOOR[each.target] < FLOOR[each.room]:
            found.append(f"{each.where} imports {each.target}, which is above {each.room}")
        elif FLOOR[each.target] == FLOOR[each.room] and FLOOR[each.room] not in NEIGHBOURS_TALK:
            found.append(f"{each.where} imports {each.target}, which is beside {each.room}")
    return found


# ------------------------------------------------------------------------------ the order


def test_imports_go_down_only() -> None:
    assert problems(PACKAGE) == []


def test_the_walk_sees_the_package() -> None:
    seen = {(each.room, each.target) for each in imports(PACKAGE)}
    for pair in (("cli", "recipes"), ("recipes", "train"), ("evaluation", "metrics"), ("train", "methods")):
        assert pair in seen


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        (
            "schedule.py",
            "from ensbridge.nets import ResNet",
            "schedule.py:1 imports nets, which is above schedule",
        ),
        (
            "nets/resnet.py",
            "import ensbridge.methods.method",
            "nets/resnet.py:1 imports methods, which is above",
        ),
        ("methods/method.py", "from ensbridge import fit", "imports train, which is above methods"),
        (
            "methods/method.py",
            "from ensbridge import evaluation",
            "imports evaluation, which is above methods",
        ),
        ("methods/method.py", "from ..train.fit import fit", "imports train, which is above methods"),
        ("methods/method.py", "def f():\n    from ensbridge.cli import main", "imports cli, which is above"),
        ("methods/method.py", 'importlib.import_module("ensbridge.train")', "imports train, which is above"),
        ("scores/rows.py", "from ensbridge.progress import say", "imports progress, which is beside scores"),
        ("cost.py", "from ensbridge.metrics import nll", "imports metrics, which is beside cost"),
        (
            "recipes/run.py",
            "from ensbridge.report import headline",
            "imports report, which is beside recipes",
        ),
        ("report/page.py", "from ensbridge.recipes import digits", "report may import"),
        ("report/page.py", "from ensbridge.metrics import nll", "report may import"),
        ("data/loader.py", "from ensbridge.oven import bake", "imports oven, which has no floor"),
        ("oven.py", "import json", "oven.py has no floor; give it one in FLOORS of tests/test_imports.py"),
        ("oven/bread.py", "import json", "oven has no floor; give it one in FLOORS of tests/test_imports.py"),
    ],
)
def test_what_is_against_the_order_is_named(file: str, line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text((PACKAGE / "__init__.py").read_text())
    assert problems(tmp_path) == []
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line + "\n")
    (found,) = problems(tmp_path)
    assert words in found


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("train/fit.py", "from ensbridge.fast_ensemble import FastEnsemble"),
        ("ensemble.py", "from ensbridge.nets.features import forward_with_features"),
        ("report/page.py", "from ensbridge.scores import Scores"),
        ("report/page.py", "from . import figures"),
        ("cli.py", "from ensbridge import __version__"),
        ("cli.py", "def f():\n    from ensbridge.recipes import digits"),
    ],
)
def test_what_is_in_order_is_let_through(file: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text((PACKAGE / "__init__.py").read_text())
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line + "\n")
    assert problems(tmp_path) == []


# ------------------------------------------------------------------------------ what is loaded


def fresh(code: str) -> str:
    """What a new process prints."""
    path = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); "
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_reports_and_the_command_line_start_without_torch() -> None:
    code = "import ensbridge, ensbridge.cli, ensbridge.report, ensbridge.scores, ensbridge.files; "
    code += "print([name for name in ('torch', 'numpy', 'sklearn', 'scipy') if name in sys.modules])"
    assert fresh(code) == "[]"


def test_loading_a_public_name_draws_no_random_number() -> None:
    code = "import random, ensbridge as eb; before = random.getstate(); "
    code += "[getattr(eb, name) for name in dir(eb)]; print(random.getstate() == before)"
    assert fresh(code) == "True"


def test_functions_are_not_hidden_by_modules_of_their_name() -> None:
    code = "import ensbridge, ensbridge.recipes, ensbridge.train.fit, ensbridge.evaluation; "
    code += (
        "print(*(type(getattr(ensbridge, name)).__name__ for name in ('evaluate', 'fit', 'distill_steps')))"
    )
    assert fresh(code) == "function function function"


# ------------------------------------------------------------------------------ public names


def public_names() -> list[str]:
    """What the root of the package offers to a type checker, which is also what it must load."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    checking = [node for node in tree.body if isinstance(node, ast.If)]
    return [alias.name for block in checking for each in block.body for alias in each.names]  # type: ignore[attr-defined]


def test_the_root_offers_what_its_types_promise() -> None:
    assert set(dir(ensbridge)) - {"__version__"} == set(public_names())
    assert {"fit", "evaluate", "Ensemble", "FastEnsemble", "methods"} <= set(public_names())
    for name in public_names():
        value = getattr(ensbridge, name)
        home = homes(PACKAGE).get(name)
        own = value.__name__ if isinstance(value, ModuleType) else value.__module__
        assert own.startswith(f"ensbridge.{home or name}"), name


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        _ = ensbridge.fitt  # type: ignore[attr-defined]


def explained() -> Iterator[tuple[str, object]]:
    """The functions and classes that must show how they are used."""
    for name in public_names():
        if not isinstance(value := getattr(ensbridge, name), ModuleType):
            yield name, value
    for module in ("metrics", "cost"):
        home = importlib.import_module(f"ensbridge.{module}")
        for name, value in vars(home).items():
            public = inspect.isfunction(value) or inspect.isclass(value)
            if public and not name.startswith("_") and value.__module__.startswith(home.__name__):
                yield f"{module}.{name}", value
    for place in ("nets.ResNet", "nets.ScoreNet", "methods.DiffusionBridge", "methods.DeepEnsemble"):
        module, name = place.split(".")
        yield place, getattr(getattr(ensbridge, module), name)


def test_the_public_names_are_found() -> None:
    names = dict(explained())
    assert {"fit", "evaluate", "metrics.nll", "metrics.MetricStream", "cost.count_macs", "nets.ResNet"} <= {
        *names
    }


@pytest.mark.parametrize(("name", "value"), [pytest.param(*each, id=each[0]) for each in explained()])
def test_a_public_name_has_a_sentence_and_an_example(name: str, value: object) -> None:
    text = inspect.getdoc(value) or ""
    first = text.split("\n\n")[0]
    assert first.endswith((".", ":", "…")), f"{name} does not begin with a sentence: {first!r}"
    assert ">>> " in text, f"{name} has no example in its docstring"
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own, f"{name} inherits its docstring"
